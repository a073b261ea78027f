// SPDX-License-Identifier: Apache-2.0

package core

import (
	"crypto/sha256"
	"crypto/subtle"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/ringbatch/ringbatch/status"
)

// secrets are the gateway's certificate, the authorities of its callers'
// certificates, and the tokens. Their files are read again when they change.
type secrets struct {
	g      *Gateway
	now    atomic.Pointer[secretSet]
	states map[string]fileState // used by reload only
	failed string               // the last error; used by reload only
}

type secretSet struct {
	certificate *tls.Certificate
	clients     *x509.CertPool
	tokens      []token
}

// token is a line of the file: a name, and the digest of a token.
type token struct {
	name   string
	digest [sha256.Size]byte
}

// fileState changes whenever a file is written or replaced. Tools that copy files
// keep the time of modification.
type fileState struct {
	device, inode uint64
	changed       unix.Timespec
	size          int64
}

func loadSecrets(g *Gateway) (*secrets, error) {
	s := &secrets{g: g, states: map[string]fileState{}}
	s.noteChanges()
	set, err := s.load(&secretSet{})
	if err != nil {
		return nil, err
	}
	s.now.Store(set)
	return s, nil
}

// noteChanges notes the files' states, and reports whether one has changed.
func (s *secrets) noteChanges() bool {
	changed := false
	c := &s.g.Cfg
	for _, file := range []string{c.CertFile, c.KeyFile, c.ClientCAFile, c.TokenFile} {
		if file == "" {
			continue
		}
		var state fileState
		var stat unix.Stat_t
		if unix.Stat(file, &stat) == nil {
			state = fileState{stat.Dev, stat.Ino, stat.Ctim, stat.Size}
		}
		if state != s.states[file] {
			s.states[file], changed = state, true
		}
	}
	return changed
}

// reload reads the files again if one has changed. A file that cannot be read keeps
// its old contents, and is tried again. The others count at once: a bad certificate
// must not keep a removed token alive.
func (s *secrets) reload() {
	changed := s.noteChanges()
	if !changed && s.failed == "" {
		return
	}
	old := s.now.Load()
	set, err := s.load(old)
	if changed || err == nil || err.Error() != s.failed { // another file may be readable now
		s.now.Store(set)
	}
	if err != nil {
		if !slices.Equal(set.tokens, old.tokens) {
			s.g.Log.Info("tokens have changed")
		}
		if text := err.Error(); text != s.failed { // log it once
			s.failed = text
			s.g.Log.Error("certificates or tokens have changed; what cannot be read stays as it was", "error", err)
		}
		return
	}
	s.failed = ""
	s.g.Log.Info("certificates or tokens have changed")
}

// load reads the files. For a file that cannot be read, it keeps old's contents.
func (s *secrets) load(old *secretSet) (*secretSet, error) {
	c, set := &s.g.Cfg, *old
	var failed []error
	if c.CertFile != "" {
		if pair, err := tls.LoadX509KeyPair(c.CertFile, c.KeyFile); err != nil {
			failed = append(failed, fmt.Errorf("TLS certificate: %w", err))
		} else {
			set.certificate = &pair
		}
	}
	if c.ClientCAFile != "" {
		if pool, err := readAuthorities(c.ClientCAFile); err != nil {
			failed = append(failed, fmt.Errorf("client certificates: %w", err))
		} else {
			set.clients = pool
		}
	}
	if c.TokenFile != "" {
		if tokens, err := readTokens(c.TokenFile); err != nil {
			failed = append(failed, fmt.Errorf("tokens: %w", err))
		} else {
			set.tokens = tokens
		}
	}
	return &set, errors.Join(failed...)
}

func readAuthorities(file string) (*x509.CertPool, error) {
	pem, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("%w: %s has no certificate", status.ErrInvalid, file)
	}
	return pool, nil
}

func readTokens(file string) ([]token, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	tokens, err := parseTokens(string(text))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	return tokens, nil
}

const leastToken = 16 // characters; shorter tokens are too easy to guess

// parseTokens reads lines of a name and a token.
func parseTokens(text string) ([]token, error) {
	var all []token
	for i, line := range strings.Split(text, "\n") {
		fields := strings.Fields(line)
		switch {
		case len(fields) == 0 || strings.HasPrefix(fields[0], "#"):
			continue
		case len(fields) != 2:
			return nil, fmt.Errorf("%w: line %d: want a name and a token", status.ErrInvalid, i+1)
		case len(fields[1]) < leastToken:
			return nil, fmt.Errorf("%w: line %d: the token of %q has %d characters, that is too easy to guess; at least %d",
				status.ErrInvalid, i+1, fields[0], len(fields[1]), leastToken)
		}
		all = append(all, token{fields[0], sha256.Sum256([]byte(fields[1]))})
	}
	if len(all) == 0 {
		return nil, fmt.Errorf("%w: no token", status.ErrInvalid)
	}
	return all, nil
}

// bearer finds the name of a token. It compares all tokens in constant time.
func (s *secretSet) bearer(shown string) (name string, ok bool) {
	digest := sha256.Sum256([]byte(shown))
	for i := range s.tokens {
		if subtle.ConstantTimeCompare(digest[:], s.tokens[i].digest[:]) == 1 {
			name, ok = s.tokens[i].name, true
		}
	}
	return name, ok
}

// TLSConfig returns nil without TLS.
func (g *Gateway) TLSConfig(protocols ...string) *tls.Config {
	if g.Cfg.CertFile == "" {
		return nil
	}
	return &tls.Config{
		MinVersion: tls.VersionTLS12,
		NextProtos: protocols,
		GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) {
			set := g.secrets.now.Load()
			c := &tls.Config{MinVersion: tls.VersionTLS12, NextProtos: protocols, Certificates: []tls.Certificate{*set.certificate}}
			if set.clients != nil {
				c.ClientAuth, c.ClientCAs = tls.RequireAndVerifyClientCert, set.clients
			}
			return c, nil
		},
	}
}
