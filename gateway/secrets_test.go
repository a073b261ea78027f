// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	rpcstatus "google.golang.org/grpc/status"

	"github.com/ringbatch/ringbatch/gateway/oip"
	"github.com/ringbatch/ringbatch/internal/testbed"
	"github.com/ringbatch/ringbatch/status"
)

// authority makes certificates, or ends the test.
type authority struct {
	t *testing.T
	*testbed.Authority
}

func newAuthority(t *testing.T) *authority {
	a, err := testbed.NewAuthority()
	if err != nil {
		t.Fatal(err)
	}
	return &authority{t, a}
}

// write puts a new certificate and its key into files.
func (a *authority) write(name, certFile, keyFile string) tls.Certificate {
	pair, err := a.Write(name, time.Now().Add(time.Hour), certFile, keyFile)
	if err != nil {
		a.t.Fatal(err)
	}
	return pair
}

func (a *authority) file(path string) {
	if err := a.WriteOwn(path); err != nil {
		a.t.Fatal(err)
	}
}

func TestOtherHostsAreServedOnlyIfCallersShowWhoTheyAre(t *testing.T) {
	dir := t.TempDir()
	a := newAuthority(t)
	cert, key, ca, tokens := filepath.Join(dir, "c"), filepath.Join(dir, "k"), filepath.Join(dir, "a"), filepath.Join(dir, "t")
	a.write("gateway", cert, key)
	a.file(ca)
	if err := os.WriteFile(tokens, []byte("me 0123456789abcdef\n"), 0o600); err != nil {
		t.Fatal(err)
	}
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
		if err := os.WriteFile(tokens, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := newCore(Config{TokenFile: tokens}); !errors.Is(err, status.ErrInvalid) {
			t.Errorf("tokens %q: %v", text, err)
		}
	}
}

func TestTokensAreAskedForAndReadAgainWhenTheyChange(t *testing.T) {
	tokens := filepath.Join(t.TempDir(), "tokens")
	write := func(text string) {
		if err := os.WriteFile(tokens, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("# callers\nfirst first-token-0123456789\n")
	m := doubler(t)
	r := newRig(t, func(c *Config) { watchful(c); c.TokenFile = tokens }, m)
	r.worker(m, double)
	c := r.client()
	try := func(token string) (int, codes.Code) {
		header := map[string]string{}
		ctx := soon(t)
		if token != "" {
			header["Authorization"] = "Bearer " + token
			ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+token)
		}
		_, err := c.ModelInfer(ctx, doubleMessage())
		return r.post("/v2/models/double/infer", header, []byte(`{"inputs":[`+goodInput+`]}`)).status, rpcstatus.Code(err)
	}
	for _, k := range []struct {
		token string
		http  int
		grpc  codes.Code
	}{{"", 401, codes.Unauthenticated}, {"wrong", 401, codes.Unauthenticated}, {"first-token-0123456789", 200, codes.OK}, {"first-token-012345678", 401, codes.Unauthenticated}} {
		if h, g := try(k.token); h != k.http || g != k.grpc {
			t.Errorf("%q: %d %s", k.token, h, g)
		}
	}
	if rep, err := http.Get(r.http + "/v2/health/live"); err != nil || rep.StatusCode != 200 {
		t.Errorf("probes need no token: %v %v", rep, err)
	}
	if rep, err := http.Get(r.http + "/v2/models/double"); err != nil || rep.StatusCode != 401 {
		t.Errorf("metadata needs one: %v %v", rep, err)
	}
	if _, err := c.ServerLive(soon(t), nil); err != nil {
		t.Errorf("gRPC's probes need none either: %v", err)
	}
	if _, err := c.ServerReady(soon(t), nil); err != nil {
		t.Errorf("gRPC's probes need none either: %v", err)
	}
	if _, err := c.ServerMetadata(soon(t), nil); rpcstatus.Code(err) != codes.Unauthenticated {
		t.Errorf("metadata needs one: %v", err)
	}
	for scheme, want := range map[string]int{"bearer": 200, "BEARER": 200, "Basic": 401} {
		if a := r.post("/v2/models/double/infer", map[string]string{"Authorization": scheme + " first-token-0123456789"}, []byte(`{"inputs":[`+goodInput+`]}`)); a.status != want {
			t.Errorf("%s: %d", scheme, a.status)
		}
	}
	write("second second-token-0123456789\n")
	r.eventually("the second token counts", func() error {
		if h, g := try("second-token-0123456789"); h != 200 || g != codes.OK {
			return fmt.Errorf("%d %s", h, g)
		}
		return nil
	})
	if h, g := try("first-token-0123456789"); h != 401 || g != codes.Unauthenticated {
		t.Errorf("the first one still counts: %d %s", h, g)
	}
	write("broken\n") // cannot be read: things stay as they are
	time.Sleep(100 * time.Millisecond)
	if h, g := try("second-token-0123456789"); h != 200 || g != codes.OK {
		t.Errorf("after a broken file: %d %s", h, g)
	}
}

func TestTLSWithClientCertificatesAndANewCertificateWithoutARestart(t *testing.T) {
	dir := t.TempDir()
	cert, key, ca := filepath.Join(dir, "c"), filepath.Join(dir, "k"), filepath.Join(dir, "a")
	server, callers := newAuthority(t), newAuthority(t)
	server.write("first", cert, key)
	callers.file(ca)
	mine := callers.write("me", "", "")
	m := doubler(t)
	r := newRig(t, func(c *Config) { watchful(c); c.CertFile, c.KeyFile, c.ClientCAFile = cert, key, ca }, m)
	r.worker(m, double)
	url := "https" + strings.TrimPrefix(r.http, "http") + "/v2/models/double/infer"
	ask := func(certs ...tls.Certificate) (name string, err error) {
		transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: server.Pool(), Certificates: certs}, ForceAttemptHTTP2: true}
		defer transport.CloseIdleConnections()
		rep, err := (&http.Client{Transport: transport}).Post(url, "", strings.NewReader(`{"inputs":[`+goodInput+`]}`))
		if err != nil {
			return "", err
		}
		defer rep.Body.Close()
		text, _ := io.ReadAll(rep.Body)
		if rep.StatusCode != 200 {
			return "", fmt.Errorf("%d %s", rep.StatusCode, text)
		}
		return rep.TLS.PeerCertificates[0].Subject.CommonName, nil
	}
	rpc := func(certs ...tls.Certificate) error {
		c := r.client(grpc.WithTransportCredentials(credentials.NewTLS(&tls.Config{RootCAs: server.Pool(), Certificates: certs})))
		_, err := c.ModelInfer(soon(t), doubleMessage())
		return err
	}
	if name, err := ask(mine); err != nil || name != "first" {
		t.Errorf("%q %v", name, err)
	}
	if err := rpc(mine); err != nil {
		t.Error(err)
	}
	stranger := newAuthority(t).write("stranger", "", "")
	for _, certs := range [][]tls.Certificate{nil, {stranger}} {
		if _, err := ask(certs...); err == nil {
			t.Error("HTTP: a stranger was served")
		}
		if err := rpc(certs...); err == nil {
			t.Error("gRPC: a stranger was served")
		}
	}
	if _, err := http.Get(r.http + "/v2"); err == nil {
		if rep, _ := http.Get(r.http + "/v2"); rep.StatusCode == 200 {
			t.Error("it was served without TLS")
		}
	}
	server.write("second", cert, key)
	r.eventually("the new certificate is shown", func() error {
		name, err := ask(mine)
		if err == nil && name != "second" {
			err = errors.New(name)
		}
		return err
	})
	// Connections of callers whose authority is removed are served no more.
	transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: server.Pool(), Certificates: []tls.Certificate{mine}}, ForceAttemptHTTP2: true}
	defer transport.CloseIdleConnections()
	web := func() int {
		rep, err := (&http.Client{Transport: transport}).Post(url, "", strings.NewReader(`{"inputs":[`+goodInput+`]}`))
		if err != nil {
			t.Fatal(err)
		}
		defer rep.Body.Close()
		_, _ = io.Copy(io.Discard, rep.Body)
		return rep.StatusCode
	}
	remote := r.client(grpc.WithTransportCredentials(credentials.NewTLS(&tls.Config{RootCAs: server.Pool(), Certificates: []tls.Certificate{mine}})))
	if _, err := remote.ModelInfer(soon(t), doubleMessage()); err != nil || web() != 200 {
		t.Fatal(err)
	}
	newAuthority(t).file(ca)
	r.eventually("the old authority does not count", func() error {
		if code := web(); code != http.StatusUnauthorized {
			return fmt.Errorf("HTTP %d", code)
		}
		return nil
	})
	if _, err := remote.ModelInfer(soon(t), doubleMessage()); rpcstatus.Code(err) != codes.Unauthenticated {
		t.Errorf("inference: %v", err)
	}
	if _, err := remote.ServerMetadata(soon(t), &oip.ServerMetadataRequest{}); rpcstatus.Code(err) != codes.Unauthenticated {
		t.Errorf("metadata: %v", err)
	}
	r.idle()
}

// secretFiles are a certificate with its key, and a token.
func secretFiles(t *testing.T) (cert, key, tokens string, write func(file, text string)) {
	dir := t.TempDir()
	cert, key, tokens = filepath.Join(dir, "c"), filepath.Join(dir, "k"), filepath.Join(dir, "t")
	write = func(file, text string) {
		t.Helper()
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	newAuthority(t).write("gateway", cert, key)
	write(tokens, "first first-token-0123456789\n")
	return cert, key, tokens, write
}

// A removed token must not live on because of another file.
func TestABrokenCertificateDoesNotKeepRemovedTokensAlive(t *testing.T) {
	cert, key, tokens, write := secretFiles(t)
	g, err := newCore(Config{CertFile: cert, KeyFile: key, TokenFile: tokens, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
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
	newAuthority(t).write("gateway", cert, key)
	g.secrets.reload()
	if g.secrets.now.Load().certificate == before.certificate {
		t.Error("the new certificate was not read")
	}
}

// Its change was seen then, and is not seen again.
func TestTokensThatCouldNotBeReadOnceAreReadWhileTheCertificateIsBroken(t *testing.T) {
	cert, key, tokens, write := secretFiles(t)
	var logged bytes.Buffer
	g, err := newCore(Config{CertFile: cert, KeyFile: key, TokenFile: tokens, Logger: slog.New(slog.NewTextHandler(&logged, nil))})
	if err != nil {
		t.Fatal(err)
	}
	write(cert, "half of it")
	g.secrets.reload()
	write(tokens, "second second-token-0123456789\n")
	g.secrets.changed() // what a try does for which there were no descriptors
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
		if err := os.WriteFile(file, []byte("me token-0123456789-"+name+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(file, long, long); err != nil {
			t.Fatal(err)
		}
	}
	link := func(name string) {
		next := filepath.Join(dir, "next")
		if err := os.Symlink(name, next); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(next, tokens); err != nil {
			t.Fatal(err)
		}
	}
	link("1")
	g, err := newCore(Config{TokenFile: tokens, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"2", "3"} {
		link(name)
		g.secrets.reload()
		if _, ok := g.secrets.now.Load().bearer("token-0123456789-" + name); !ok {
			t.Errorf("%s was not read", name)
		}
	}
}

// doorOfCallers is a gateway that knows callers by certificates, and who signs those.
func doorOfCallers(t *testing.T) (*gateCore, *authority) {
	t.Helper()
	dir := t.TempDir()
	cert, key, ca := filepath.Join(dir, "c"), filepath.Join(dir, "k"), filepath.Join(dir, "a")
	callers := newAuthority(t)
	newAuthority(t).write("gateway", cert, key)
	callers.file(ca)
	g, err := newCore(Config{CertFile: cert, KeyFile: key, ClientCAFile: ca, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	return g, callers
}

func TestACertificateThatExpiresDoesNotCountOnItsConnectionEither(t *testing.T) {
	g, callers := doorOfCallers(t)
	now := time.Now()
	for until, counts := range map[time.Time]bool{now.Add(time.Hour): true, now.Add(-time.Minute): false} {
		pair, err := callers.Write("me", until, "", "")
		if err != nil {
			t.Fatal(err)
		}
		leaf, err := x509.ParseCertificate(pair.Certificate[0])
		if err != nil {
			t.Fatal(err)
		}
		chain := []*x509.Certificate{leaf}
		c := &conn{l: &listener{g: g}}
		c.remember(g.secrets.now.Load(), "", leaf.NotAfter, caller{peer: &c.peer, identity: certificateName(leaf)}) // when it was valid
		if _, err := g.identify(c, "", &tls.ConnectionState{PeerCertificates: chain}); (err == nil) != counts {
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
		if err != nil {
			t.Fatal(err)
		}
		c, err := x509.ParseCertificate(pair.Certificate[0])
		if err != nil {
			t.Fatal(err)
		}
		shown = append(shown, c)
	}
	c := &conn{l: &listener{g: g}}
	first, err := g.identify(c, "", &tls.ConnectionState{PeerCertificates: shown})
	if err != nil {
		t.Fatal(err)
	}
	if again, err := g.identify(c, "", &tls.ConnectionState{PeerCertificates: shown}); err != nil || again != first {
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
	if certificateName(&x509.Certificate{Subject: named, DNSNames: []string{"a"}}) != certificateName(&x509.Certificate{Subject: named, DNSNames: []string{"a", "b"}}) {
		t.Error("a renewed certificate with another host name is another caller's")
	}
}

func TestOnlyListedModelsAreServed(t *testing.T) {
	m, other := doubler(t), modelConfig(t, "secret", []string{"x:f32[4]"}, []string{"y:f32[4]"})
	r := newRig(t, func(c *Config) { c.Models = []string{"double"} }, m)
	r.worker(m, double)
	r.worker(other, double)
	if a := r.infer("secret", `{"inputs":[`+goodInput+`]}`); a.status != 404 {
		t.Errorf("%d %q", a.status, a.Error)
	}
	req := doubleMessage()
	req.ModelName = "secret"
	if _, err := r.client().ModelInfer(context.Background(), req); rpcstatus.Code(err) != codes.NotFound {
		t.Error(err)
	}
	for _, path := range []string{"/v2/models/secret", "/v2/models/secret/config", "/v2/models/secret/stats", "/v2/models/secret/ready"} {
		if rep, err := http.Get(r.http + path); err != nil || rep.StatusCode != 404 {
			t.Errorf("%s: %v %v", path, rep, err)
		}
	}
	a := r.post("/v2/repository/index", nil, nil)
	if a.status != 200 || strings.Contains(fmt.Sprint(a), "secret") {
		t.Errorf("%+v", a)
	}
}
