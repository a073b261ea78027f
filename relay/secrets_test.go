// SPDX-License-Identifier: Apache-2.0

package relay

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/gateway/core"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/test/certs"
)

// guarded is a host that wants a certificate and a token of its callers, and
// the files of both sides.
type guarded struct {
	t                                *testing.T
	servers, callers                 *certs.Authority
	cert, key, clientCA, tokens      string // the host's
	ourCert, ourKey, serverCA, token string // the relay's
}

func newGuarded(t *testing.T) *guarded {
	t.Helper()
	dir := t.TempDir()
	in := func(name string) string { return filepath.Join(dir, name) }
	g := &guarded{t: t, cert: in("cert"), key: in("key"), clientCA: in("client-ca"), tokens: in("tokens"), ourCert: in("our-cert"),
		ourKey: in("our-key"), serverCA: in("server-ca"), token: in("token")}
	g.servers, g.callers = g.authority(g.serverCA), g.authority(g.clientCA)
	g.writeServer(time.Hour)
	g.writeOurs(time.Hour)
	g.write(g.tokens, "relay token-of-the-relay-0123\n")
	g.write(g.token, "token-of-the-relay-0123\n")
	return g
}

func (g *guarded) authority(file string) *certs.Authority {
	g.t.Helper()
	a, err := certs.NewAuthority()
	if err == nil {
		err = a.WriteOwn(file)
	}
	must.Do(g.t, err)
	return a
}

func (g *guarded) write(file, text string) {
	g.t.Helper()
	must.Do(g.t, os.WriteFile(file, []byte(text), 0o600))
}

func (g *guarded) writeServer(valid time.Duration) {
	g.t.Helper()
	if _, err := g.servers.Write("host", time.Now().Add(valid), g.cert, g.key); err != nil {
		g.t.Fatal(err)
	}
}

func (g *guarded) writeOurs(valid time.Duration) {
	g.t.Helper()
	if _, err := g.callers.Write("relay", time.Now().Add(valid), g.ourCert, g.ourKey); err != nil {
		g.t.Fatal(err)
	}
}

func (g *guarded) host(c *core.Config) {
	c.CertFile, c.KeyFile, c.ClientCAFile, c.TokenFile = g.cert, g.key, g.clientCA, g.tokens
}

func (g *guarded) relay(c *Config) {
	c.CAFile, c.CertFile, c.KeyFile, c.TokenFile = g.serverCA, g.ourCert, g.ourKey, g.token
}

// Each reason why the sides stop to trust each other is one sentence in the log, and
// ends when the files are right again, without a restart.
func TestCertificatesAndTokensAreReplacedWhileTheRelayRuns(t *testing.T) {
	g := newGuarded(t)
	h := newHost(t, signature(t, "x:i32[1]", "y:i32[1]"), double, g.host)
	l := newLocal(t, g.relay, h.address)
	c := l.dial()
	works := func() {
		t.Helper()
		l.eventually("a request is answered", func() bool {
			q := commit(t, c, 4)[0]
			defer q.Release()
			return q.Wait(soon(t)) == nil && number(t, q) == 8
		})
	}
	works()
	for _, c := range []struct {
		name, says    string
		breaks, mends func()
	}{
		{"the host's certificate expires", "its certificate has expired", func() { g.writeServer(-time.Minute) },
			func() { g.writeServer(time.Hour) }},
		{"our certificate expires", "our certificate has expired", func() { g.writeOurs(-time.Minute) }, func() { g.writeOurs(time.Hour) }},
		{"the host has another authority", "of an authority that we don't know", func() {
			g.servers = g.authority(g.serverCA + ".new")
			g.writeServer(time.Hour)
		}, func() {
			must.Do(t, g.servers.WriteOwn(g.serverCA))
		}},
		{"the host has another token for us", "it refuses us", func() { g.write(g.tokens, "relay another-token-0123456\n") },
			func() { g.write(g.token, "another-token-0123456\n") }},
	} {
		t.Run(c.name, func(t *testing.T) {
			h.stop()
			c.breaks()
			h.serve(g.host)
			l.eventually(c.says, func() bool { return l.log.Has(c.says) })
			c.mends()
			works()
		})
	}
}
