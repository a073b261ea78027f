// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"crypto/sha256"
	"crypto/subtle"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net/http"
	"os"
	"strings"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/ringbatch/ringbatch/status"
)

// secrets are the gateway's certificate, the authorities of its callers'
// certificates, and the tokens; all of them from files, which are read again
// when they change.
type secrets struct {
	g      *Gateway
	now    atomic.Pointer[secretSet]
	states map[string]fileState // only reload's
	failed string               // why the last try did; only reload's
}

type secretSet struct {
	certificate *tls.Certificate
	clients     *x509.CertPool
	tokens      []token
}

// token is one line of the file: a name, and what its bearer shows. Only its
// digest is kept.
type token struct {
	name   string
	digest [sha256.Size]byte
}

type fileState struct {
	modified time.Time
	size     int64
}

func loadSecrets(g *Gateway) (*secrets, error) {
	s := &secrets{g: g, states: map[string]fileState{}}
	s.changed()
	set, err := s.load()
	if err != nil {
		return nil, err
	}
	s.now.Store(set)
	return s, nil
}

func (s *secrets) files() []string {
	c := &s.g.cfg
	return []string{c.CertFile, c.KeyFile, c.ClientCAFile, c.TokenFile}
}

// changed notes the files' states and tells whether they are others than before.
func (s *secrets) changed() bool {
	changed := false
	for _, file := range s.files() {
		if file == "" {
			continue
		}
		var state fileState
		if info, err := os.Stat(file); err == nil {
			state = fileState{info.ModTime(), info.Size()}
		}
		if state != s.states[file] {
			s.states[file], changed = state, true
		}
	}
	return changed
}

// reload reads the files again if one has changed; what cannot be read, in the
// middle of a change perhaps, leaves things as they are, and is tried again.
func (s *secrets) reload() {
	if changed := s.changed(); !changed && s.failed == "" {
		return
	}
	set, err := s.load()
	if err != nil {
		if text := err.Error(); text != s.failed { // once, not with every try
			s.failed = text
			s.g.log.Error("certificates or tokens have changed and cannot be read; the old ones stay", "error", err)
		}
		return
	}
	s.failed = ""
	s.now.Store(set)
	s.g.log.Info("certificates or tokens have changed")
}

func (s *secrets) load() (*secretSet, error) {
	c, set := &s.g.cfg, &secretSet{}
	if c.CertFile != "" {
		pair, err := tls.LoadX509KeyPair(c.CertFile, c.KeyFile)
		if err != nil {
			return nil, fmt.Errorf("TLS certificate: %w", err)
		}
		set.certificate = &pair
	}
	if c.ClientCAFile != "" {
		pem, err := os.ReadFile(c.ClientCAFile)
		if err != nil {
			return nil, fmt.Errorf("client certificates: %w", err)
		}
		set.clients = x509.NewCertPool()
		if !set.clients.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("%w: %s has no certificate", status.ErrInvalid, c.ClientCAFile)
		}
	}
	if c.TokenFile != "" {
		text, err := os.ReadFile(c.TokenFile)
		if err != nil {
			return nil, fmt.Errorf("tokens: %w", err)
		}
		if set.tokens, err = parseTokens(string(text)); err != nil {
			return nil, fmt.Errorf("tokens: %s: %w", c.TokenFile, err)
		}
	}
	return set, nil
}

// leastToken is what can be guessed too easily.
const leastToken = 16

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
			return nil, fmt.Errorf("%w: line %d: the token of %q has %d characters, that is too easy to guess; at least %d", status.ErrInvalid, i+1, fields[0], len(fields[1]), leastToken)
		}
		all = append(all, token{fields[0], sha256.Sum256([]byte(fields[1]))})
	}
	if len(all) == 0 {
		return nil, fmt.Errorf("%w: no token", status.ErrInvalid)
	}
	return all, nil
}

// bearer finds whose token that is. It compares with all of them, each in
// constant time.
func (s *secretSet) bearer(shown string) (name string, ok bool) {
	digest := sha256.Sum256([]byte(shown))
	for i := range s.tokens {
		if subtle.ConstantTimeCompare(digest[:], s.tokens[i].digest[:]) == 1 {
			name, ok = s.tokens[i].name, true
		}
	}
	return name, ok
}

var errNoToken = refuse(http.StatusUnauthorized, codes.Unauthenticated, "a bearer token is needed: Authorization: Bearer …")

// identify finds out who calls. The connection remembers what it was shown
// last, as callers show the same with every request.
func (g *Gateway) identify(c *conn, authorization string, state *tls.ConnectionState) (*caller, error) {
	if c == nil {
		return nil, errors.New("a connection that nobody accepted")
	}
	set := g.secrets.now.Load()
	if set.tokens == nil && set.clients == nil {
		return &c.who, nil
	}
	if shown := c.shown.Load(); shown != nil && shown.set == set && shown.authorization == authorization {
		return &shown.who, nil
	}
	who := caller{peer: &c.peer}
	if state != nil && len(state.PeerCertificates) > 0 { // the handshake has verified it
		if err := set.verify(state.PeerCertificates); err != nil { // perhaps by authorities of then
			return &c.who, refuse(http.StatusUnauthorized, codes.Unauthenticated, "the caller's certificate does not count any more: %v", err)
		}
		who.identity = "certificate " + state.PeerCertificates[0].Subject.String()
	}
	if set.tokens != nil {
		scheme, text, _ := strings.Cut(authorization, " ")
		if !strings.EqualFold(scheme, "Bearer") { // its case does not matter: RFC 9110, 11.1
			return &c.who, errNoToken
		}
		name, ok := set.bearer(strings.TrimLeft(text, " "))
		if !ok {
			return &c.who, refuse(http.StatusUnauthorized, codes.Unauthenticated, "unknown bearer token")
		}
		who.identity = "token " + name
	}
	return c.remember(set, authorization, who), nil
}

// verify tells whether a certificate is one of the authorities that count now.
func (s *secretSet) verify(chain []*x509.Certificate) error {
	if s.clients == nil {
		return nil
	}
	between := x509.NewCertPool()
	for _, c := range chain[1:] {
		between.AddCert(c)
	}
	_, err := chain[0].Verify(x509.VerifyOptions{Roots: s.clients, Intermediates: between, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}})
	return err
}

// shown is what a connection's caller has shown, and who that is.
type shown struct {
	set           *secretSet
	authorization string
	who           caller
}

// remember keeps the usage of each identity that a connection has shown for as
// long as the connection lives.
func (c *conn) remember(set *secretSet, authorization string, who caller) *caller {
	c.identities.Lock()
	defer c.identities.Unlock()
	if c.identities.gone { // the caller has hung up: whatever this is, it ends soon
		who.use = &usage{}
		return &who
	}
	if c.identities.use == nil {
		c.identities.use = map[string]*usage{}
	}
	u := c.identities.use[who.identity]
	if u == nil {
		u = c.l.g.callers.join(who.identity)
		c.identities.use[who.identity] = u
	}
	who.use = u
	s := &shown{set, authorization, who}
	c.shown.Store(s)
	return &s.who
}

// tlsConfig is nil without TLS.
func (g *Gateway) tlsConfig(protocols ...string) *tls.Config {
	if g.cfg.CertFile == "" {
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
