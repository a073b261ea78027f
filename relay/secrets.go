// SPDX-License-Identifier: Apache-2.0

package relay

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net"
	"os"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/ringbatch/ringbatch/status"
)

// relayCredentials name the relay of a connection for the balancer.
type relayCredentials struct {
	credentials.TransportCredentials
	hosts *hosts
}

func (c relayCredentials) Clone() credentials.TransportCredentials {
	return relayCredentials{c.TransportCredentials.Clone(), c.hosts}
}

func transport(cfg *Config, h *hosts) (credentials.TransportCredentials, error) {
	if !cfg.TLS {
		return relayCredentials{insecure.NewCredentials(), h}, nil
	}
	c, err := tlsConfig(cfg)
	if err != nil {
		return nil, err
	}
	return relayCredentials{fromFiles{credentials.NewTLS(c), cfg}, h}, nil
}

// fromFiles reads authorities and certificate for every connection, so that the
// files can be replaced while the relay runs.
type fromFiles struct {
	credentials.TransportCredentials // as the files were at the start
	cfg                              *Config
}

func (f fromFiles) ClientHandshake(ctx context.Context, authority string, conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	c, err := tlsConfig(f.cfg)
	if err != nil {
		return nil, nil, err
	}
	return credentials.NewTLS(c).ClientHandshake(ctx, authority, conn)
}

func (f fromFiles) Clone() credentials.TransportCredentials {
	return fromFiles{f.TransportCredentials.Clone(), f.cfg}
}

func tlsConfig(cfg *Config) (*tls.Config, error) {
	c := &tls.Config{MinVersion: tls.VersionTLS12, ServerName: cfg.ServerName}
	if cfg.CAFile != "" {
		pem, err := os.ReadFile(cfg.CAFile)
		if err != nil {
			return nil, fmt.Errorf("authorities: %w", err)
		}
		c.RootCAs = x509.NewCertPool()
		if !c.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("%w: %s has no certificate", status.ErrInvalid, cfg.CAFile)
		}
	}
	if cfg.CertFile != "" {
		pair, err := tls.LoadX509KeyPair(cfg.CertFile, cfg.KeyFile)
		if err != nil {
			return nil, fmt.Errorf("our certificate: %w", err)
		}
		c.Certificates = []tls.Certificate{pair}
	}
	return c, nil
}

// token is the token of every call. It is read again when its file changes.
type token struct {
	file   string
	secure bool

	mu       sync.Mutex
	shown    string
	looked   time.Time
	modified time.Time
}

// tokenInterval is the time between two looks at the file.
const tokenInterval = time.Second

func newToken(cfg *Config) (*token, error) {
	t := &token{file: cfg.TokenFile, secure: cfg.TLS}
	_, err := t.GetRequestMetadata(context.Background())
	if err == nil && t.shown == "" {
		err = fmt.Errorf("%w: %s has no token", status.ErrInvalid, t.file)
	}
	return t, err
}

// GetRequestMetadata returns the header of a call to gRPC.
func (t *token) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if now := time.Now(); now.Sub(t.looked) > tokenInterval {
		t.looked = now
		info, err := os.Stat(t.file)
		if err == nil && !info.ModTime().Equal(t.modified) {
			var text []byte
			if text, err = os.ReadFile(t.file); err == nil {
				t.modified = info.ModTime()
				if found := firstToken(string(text)); found != "" { // else the file is being written
					t.shown = found
				}
			}
		}
		if err != nil && t.shown == "" {
			return nil, fmt.Errorf("token: %w", err)
		}
	}
	return map[string]string{"authorization": "Bearer " + t.shown}, nil
}

// RequireTransportSecurity makes gRPC refuse a token without TLS.
func (t *token) RequireTransportSecurity() bool { return t.secure }

// firstToken reads lines of a name and a token, as the gateway's file has them, or
// of a token alone.
func firstToken(text string) string {
	for line := range strings.Lines(text) {
		fields := strings.Fields(line)
		if len(fields) > 0 && !strings.HasPrefix(fields[0], "#") {
			return fields[len(fields)-1]
		}
	}
	return ""
}
