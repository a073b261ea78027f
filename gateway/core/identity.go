// SPDX-License-Identifier: Apache-2.0

package core

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net/http"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
)

var errNoToken = Refuse(http.StatusUnauthorized, codes.Unauthenticated, "a bearer token is needed: Authorization: Bearer …")

// Identify finds out who calls. The connection remembers the last caller, as most
// requests of a connection show the same token and certificate.
func (g *Gateway) Identify(c *Conn, authorization string, state *tls.ConnectionState) (*Caller, error) {
	if c == nil {
		return nil, errors.New("a request without a connection")
	}
	set := g.secrets.now.Load()
	if set.tokens == nil && set.clients == nil {
		return &c.Who, nil
	}
	if shown := c.shown.Load(); shown != nil && shown.set == set && shown.authorization == authorization && !shown.expired() {
		return &shown.who, nil
	}
	who, until := Caller{Peer: &c.Peer}, time.Time{}
	if state != nil && len(state.PeerCertificates) > 0 { // the handshake has verified it
		end, err := set.verify(state.PeerCertificates)
		if err != nil { // the authorities may have changed since the handshake
			return &c.Who, Refuse(http.StatusUnauthorized, codes.Unauthenticated,
				"the caller's certificate does not count any more: %v", err)
		}
		who.identity, until = certificateName(state.PeerCertificates[0]), end
	}
	if set.tokens != nil {
		scheme, text, _ := strings.Cut(authorization, " ")
		if !strings.EqualFold(scheme, "Bearer") { // RFC 9110, 11.1: case does not matter
			return &c.Who, errNoToken
		}
		name, ok := set.bearer(strings.TrimLeft(text, " "))
		if !ok {
			return &c.Who, Refuse(http.StatusUnauthorized, codes.Unauthenticated, "unknown bearer token")
		}
		who.identity = "token " + name
	}
	return c.remember(set, authorization, until, who), nil
}

// certificateName names the owner of a certificate: its subject, and its URIs, by
// which a mesh (SPIFFE) distinguishes services without a subject.
func certificateName(c *x509.Certificate) string {
	name := "certificate " + c.Subject.String()
	for _, u := range c.URIs {
		name += " " + u.String()
	}
	if c.Subject.CommonName != "" {
		return name
	}
	for _, also := range slices.Concat(c.DNSNames, c.EmailAddresses) {
		name += " " + also
	}
	return name
}

// verify checks a certificate by the present authorities, and returns its end.
func (s *secretSet) verify(shown []*x509.Certificate) (until time.Time, err error) {
	if s.clients == nil {
		return time.Time{}, nil
	}
	between := x509.NewCertPool()
	for _, c := range shown[1:] {
		between.AddCert(c)
	}
	chains, err := shown[0].Verify(x509.VerifyOptions{Roots: s.clients, Intermediates: between,
		KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}})
	return lastEnd(chains), err
}

// lastEnd returns the end of the chain that is valid longest. Certificates outside
// the chains do not matter.
func lastEnd(chains [][]*x509.Certificate) (last time.Time) {
	for _, chain := range chains {
		end := chain[0].NotAfter
		for _, c := range chain[1:] {
			if c.NotAfter.Before(end) {
				end = c.NotAfter
			}
		}
		if end.After(last) {
			last = end
		}
	}
	return last
}

// shown is the last identified caller of a connection.
type shown struct {
	set           *secretSet
	authorization string
	until         time.Time // end of the certificate; zero: none
	who           Caller
}

func (s *shown) expired() bool { return !s.until.IsZero() && time.Now().After(s.until) }

func (c *Conn) remember(set *secretSet, authorization string, until time.Time, who Caller) *Caller {
	who.Use = c.L.G.Limits.of(who.identity)
	s := &shown{set, authorization, until, who}
	c.shown.Store(s)
	return &s.who
}
