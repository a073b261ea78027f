// SPDX-License-Identifier: Apache-2.0

package core

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"log/slog"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/test/certs"
)

func TestOtherHostsAreServedOnlyIfCallersShowWhoTheyAre(t *testing.T) {
	dir := t.TempDir()
	a := newAuthority(t)
	cert, key, ca, tokens := filepath.Join(dir, "c"), filepath.Join(dir, "k"), filepath.Join(dir, "a"), filepath.Join(dir, "t")
	a.Issue("gateway", cert, key)
	a.File(ca)
	must.Do(t, os.WriteFile(tokens, []byte("me 0123456789abcdef\n"), 0o600))
	for _, c := range []struct {
		cfg Config
		ok  bool
	}{
		{Config{HTTP: "127.0.0.1:0", GRPC: "[::1]:0"}, true},
		{Config{HTTP: "localhost:0", GRPC: Off}, true},
		{Config{HTTP: "8000", GRPC: "8001"}, true},
		{Config{HTTP: "0.0.0.0:0"}, false},
		{Config{HTTP: ":0"}, false},
		{Config{GRPC: "[::]:0"}, false},
		{Config{HTTP: "example.com:0"}, false},
		{Config{HTTP: "0.0.0.0:0", TokenFile: tokens}, false}, // tokens in plain sight
		{Config{HTTP: "0.0.0.0:0", CertFile: cert, KeyFile: key}, false},
		{Config{HTTP: "0.0.0.0:0", CertFile: cert, KeyFile: key, TokenFile: tokens}, true},
		{Config{HTTP: "0.0.0.0:0", CertFile: cert, KeyFile: key, ClientCAFile: ca}, true},
		{Config{HTTP: "0.0.0.0:0", Insecure: true}, true},
		{Config{CertFile: cert}, false},
		{Config{ClientCAFile: ca}, false},
		{Config{HTTP: Off, GRPC: Off}, false},
		{Config{HTTP: "nonsense"}, false},
		{Config{MaxConnections: -1}, false},
	} {
		_, err := New(c.cfg)
		if (err == nil) != c.ok || err != nil && !errors.Is(err, status.ErrInvalid) {
			t.Errorf("%+v: %v", c.cfg, err)
		}
	}
	for _, text := range []string{"", "justoneword\n", "me short\n", "me 0123456789abcdef extra\n"} {
		must.Do(t, os.WriteFile(tokens, []byte(text), 0o600))
		if _, err := New(Config{TokenFile: tokens}); !errors.Is(err, status.ErrInvalid) {
			t.Errorf("tokens %q: %v", text, err)
		}
	}
}

// A removed token must not live on because of another file.
func TestABrokenCertificateDoesNotKeepRemovedTokensAlive(t *testing.T) {
	cert, key, tokens, write := secretFiles(t)
	g, err := New(Config{CertFile: cert, KeyFile: key, TokenFile: tokens, Logger: slog.New(slog.DiscardHandler)})
	must.Do(t, err)
	before := g.secrets.now.Load()
	write(cert, "half of it")
	write(tokens, "second second-token-0123456789\n")
	g.secrets.reload()
	now := g.secrets.now.Load()
	if now.certificate != before.certificate {
		t.Error("the certificate that cannot be read has replaced the old one")
	}
	if _, ok := now.bearer("first-token-0123456789"); ok {
		t.Error("the removed token counts")
	}
	if _, ok := now.bearer("second-token-0123456789"); !ok {
		t.Error("the new token does not count")
	}
	newAuthority(t).Issue("gateway", cert, key)
	g.secrets.reload()
	if g.secrets.now.Load().certificate == before.certificate {
		t.Error("the new certificate was not read")
	}
}

// Its change was seen then, and is not seen again.
func TestTokensThatCouldNotBeReadOnceAreReadWhileTheCertificateIsBroken(t *testing.T) {
	cert, key, tokens, write := secretFiles(t)
	var logged bytes.Buffer
	g, err := New(Config{CertFile: cert, KeyFile: key, TokenFile: tokens, Logger: slog.New(slog.NewTextHandler(&logged, nil))})
	must.Do(t, err)
	write(cert, "half of it")
	g.secrets.reload()
	write(tokens, "second second-token-0123456789\n")
	g.secrets.noteChanges() // as a try without descriptors
	g.secrets.failed += "\ntokens: too many open files"
	logged.Reset()
	g.secrets.reload()
	now := g.secrets.now.Load()
	if _, ok := now.bearer("first-token-0123456789"); ok {
		t.Error("the removed token counts")
	}
	if !strings.Contains(logged.String(), `msg="tokens have changed"`) {
		t.Errorf("logged: %s", logged.String())
	}
	if g.secrets.reload(); g.secrets.now.Load() != now {
		t.Error("what was read again though nothing has changed is taken for something new")
	}
}

// As tools do that copy files, and Kubernetes where a volume is a link.
func TestAFileIsReadAgainAlsoIfTheOtherHasItsSizeAndTime(t *testing.T) {
	dir := t.TempDir()
	tokens := filepath.Join(dir, "tokens")
	long := time.Now().Add(-time.Hour)
	for _, name := range []string{"1", "2", "3"} {
		file := filepath.Join(dir, name)
		must.Do(t, os.WriteFile(file, []byte("me token-0123456789-"+name+"\n"), 0o600))
		must.Do(t, os.Chtimes(file, long, long))
	}
	link := func(name string) {
		next := filepath.Join(dir, "next")
		must.Do(t, os.Symlink(name, next))
		must.Do(t, os.Rename(next, tokens))
	}
	link("1")
	g, err := New(Config{TokenFile: tokens, Logger: slog.New(slog.DiscardHandler)})
	must.Do(t, err)
	for _, name := range []string{"2", "3"} {
		link(name)
		g.secrets.reload()
		if _, ok := g.secrets.now.Load().bearer("token-0123456789-" + name); !ok {
			t.Errorf("%s was not read", name)
		}
	}
}

// doorOfCallers is a gateway that knows callers by certificates, and who signs those.
func doorOfCallers(t *testing.T) (*Gateway, *authority) {
	t.Helper()
	dir := t.TempDir()
	cert, key, ca := filepath.Join(dir, "c"), filepath.Join(dir, "k"), filepath.Join(dir, "a")
	callers := newAuthority(t)
	newAuthority(t).Issue("gateway", cert, key)
	callers.File(ca)
	g, err := New(Config{CertFile: cert, KeyFile: key, ClientCAFile: ca, Logger: slog.New(slog.DiscardHandler)})
	must.Do(t, err)
	return g, callers
}

func TestACertificateThatExpiresDoesNotCountOnItsConnectionEither(t *testing.T) {
	g, callers := doorOfCallers(t)
	now := time.Now()
	for until, counts := range map[time.Time]bool{now.Add(time.Hour): true, now.Add(-time.Minute): false} {
		pair, err := callers.Write("me", until, "", "")
		must.Do(t, err)
		leaf, err := x509.ParseCertificate(pair.Certificate[0])
		must.Do(t, err)
		chain := []*x509.Certificate{leaf}
		c := &Conn{L: &Listener{G: g}}
		c.remember(g.secrets.now.Load(), "", leaf.NotAfter, Caller{Peer: &c.Peer, identity: certificateName(leaf)}) // when it was valid
		if _, err := g.Identify(c, "", &tls.ConnectionState{PeerCertificates: chain}); (err == nil) != counts {
			t.Errorf("valid until %v: %v", until, err)
		}
	}
}

// An intermediate of former times, which the chain that counts does not need.
func TestAnExpiredCertificateBesideTheChainDoesNotMatter(t *testing.T) {
	g, callers := doorOfCallers(t)
	var shown []*x509.Certificate
	for _, until := range []time.Duration{time.Hour, -time.Minute} {
		pair, err := callers.Write("me", time.Now().Add(until), "", "")
		must.Do(t, err)
		c, err := x509.ParseCertificate(pair.Certificate[0])
		must.Do(t, err)
		shown = append(shown, c)
	}
	c := &Conn{L: &Listener{G: g}}
	first, err := g.Identify(c, "", &tls.ConnectionState{PeerCertificates: shown})
	must.Do(t, err)
	if again, err := g.Identify(c, "", &tls.ConnectionState{PeerCertificates: shown}); err != nil || again != first {
		t.Errorf("it is verified with every request, or %v", err)
	}
}

func TestACertificateCountsUntilTheLastOfItsChainsEnds(t *testing.T) {
	now := time.Now()
	until := func(hours ...int) (chain []*x509.Certificate) {
		for _, h := range hours {
			chain = append(chain, &x509.Certificate{NotAfter: now.Add(time.Duration(h) * time.Hour)})
		}
		return chain
	}
	if got := lastEnd([][]*x509.Certificate{until(5, 1, 9), until(5, 3, 4), until(5, 2)}); !got.Equal(now.Add(3 * time.Hour)) {
		t.Errorf("in %v", got.Sub(now))
	}
}

// Services of a mesh have certificates without a name, or with that of the mesh.
func TestCertificatesAreToldApartByWhatNamesTheirOwner(t *testing.T) {
	spiffe := func(path string) []*url.URL { return []*url.URL{{Scheme: "spiffe", Host: "mesh", Path: path}} }
	mesh := pkix.Name{Organization: []string{"mesh"}}
	one := certificateName(&x509.Certificate{Subject: mesh, URIs: spiffe("/one")})
	for name, other := range map[string]*x509.Certificate{
		"another URI":   {Subject: mesh, URIs: spiffe("/two")},
		"no URI":        {Subject: mesh},
		"another host":  {Subject: mesh, DNSNames: []string{"one"}},
		"another name":  {Subject: pkix.Name{CommonName: "one"}},
		"no name":       {URIs: spiffe("/one")},
		"another maker": {Subject: pkix.Name{Organization: []string{"other"}}, URIs: spiffe("/one")},
	} {
		if certificateName(other) == one {
			t.Errorf("%s: both are %q", name, one)
		}
	}
	named := pkix.Name{CommonName: "me"}
	if certificateName(&x509.Certificate{Subject: named, DNSNames: []string{"a"}}) != certificateName(&x509.Certificate{Subject: named,
		DNSNames: []string{"a", "b"}}) {
		t.Error("a renewed certificate with another host name is another caller's")
	}
}

// authority makes certificates, or ends the test.
type authority struct {
	t *testing.T
	*certs.Authority
}

func newAuthority(t *testing.T) *authority {
	a, err := certs.NewAuthority()
	must.Do(t, err)
	return &authority{t, a}
}

// Issue puts a new certificate and its key into files.
func (a *authority) Issue(name, certFile, keyFile string) tls.Certificate {
	pair, err := a.Write(name, time.Now().Add(time.Hour), certFile, keyFile)
	must.Do(a.t, err)
	return pair
}

func (a *authority) File(path string) {
	must.Do(a.t, a.WriteOwn(path))
}

// secretFiles are a certificate with its key, and a token.
func secretFiles(t *testing.T) (cert, key, tokens string, write func(file, text string)) {
	dir := t.TempDir()
	cert, key, tokens = filepath.Join(dir, "c"), filepath.Join(dir, "k"), filepath.Join(dir, "t")
	write = func(file, text string) {
		t.Helper()
		must.Do(t, os.WriteFile(file, []byte(text), 0o600))
	}
	newAuthority(t).Issue("gateway", cert, key)
	write(tokens, "first first-token-0123456789\n")
	return cert, key, tokens, write
}
