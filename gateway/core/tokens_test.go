// SPDX-License-Identifier: Apache-2.0

package core_test

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net/http"
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

	"github.com/ringbatch/ringbatch/gateway/core"
	"github.com/ringbatch/ringbatch/gateway/oip"
	"github.com/ringbatch/ringbatch/internal/must"
)

func TestTokensAreAskedForAndReadAgainWhenTheyChange(t *testing.T) {
	tokens := filepath.Join(t.TempDir(), "tokens")
	write := func(text string) {
		must.Do(t, os.WriteFile(tokens, []byte(text), 0o600))
	}
	write("# callers\nfirst first-token-0123456789\n")
	r := doublingRig(t, func(c *core.Config) { watchful(c); c.TokenFile = tokens })
	c := r.client()
	try := func(token string) (int, codes.Code) {
		header := map[string]string{}
		ctx := soon(t)
		if token != "" {
			header["Authorization"] = "Bearer " + token
			ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+token)
		}
		_, err := c.ModelInfer(ctx, doubleMessage())
		return r.post("/v2/models/double/infer", header, []byte(goodBody)).status, rpcstatus.Code(err)
	}
	for _, k := range []struct {
		token string
		http  int
		grpc  codes.Code
	}{{"", 401, codes.Unauthenticated}, {"wrong", 401, codes.Unauthenticated}, {"first-token-0123456789", 200,
		codes.OK}, {"first-token-012345678", 401, codes.Unauthenticated}} {
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
		if a := r.post("/v2/models/double/infer", map[string]string{"Authorization": scheme + " first-token-0123456789"},
			[]byte(goodBody)); a.status != want {
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
	server, callers := core.NewAuthority(t), core.NewAuthority(t)
	server.Issue("first", cert, key)
	callers.File(ca)
	mine := callers.Issue("me", "", "")
	r := doublingRig(t, func(c *core.Config) { watchful(c); c.CertFile, c.KeyFile, c.ClientCAFile = cert, key, ca })
	url := "https" + strings.TrimPrefix(r.http, "http") + "/v2/models/double/infer"
	ask := func(certs ...tls.Certificate) (name string, err error) {
		transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: server.Pool(), Certificates: certs}, ForceAttemptHTTP2: true}
		defer transport.CloseIdleConnections()
		rep, err := (&http.Client{Transport: transport}).Post(url, "", strings.NewReader(goodBody))
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
	must.Check(t, rpc(mine))
	stranger := core.NewAuthority(t).Issue("stranger", "", "")
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
	server.Issue("second", cert, key)
	r.eventually("the new certificate is shown", func() error {
		name, err := ask(mine)
		if err == nil && name != "second" {
			err = errors.New(name)
		}
		return err
	})
	// Connections of callers whose authority is removed are served no more.
	transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: server.Pool(), Certificates: []tls.Certificate{mine}},
		ForceAttemptHTTP2: true}
	defer transport.CloseIdleConnections()
	web := func() int {
		rep, err := (&http.Client{Transport: transport}).Post(url, "", strings.NewReader(goodBody))
		must.Do(t, err)
		defer rep.Body.Close()
		_, _ = io.Copy(io.Discard, rep.Body)
		return rep.StatusCode
	}
	remote := r.client(grpc.WithTransportCredentials(credentials.NewTLS(&tls.Config{RootCAs: server.Pool(),
		Certificates: []tls.Certificate{mine}})))
	if _, err := remote.ModelInfer(soon(t), doubleMessage()); err != nil || web() != 200 {
		t.Fatal(err)
	}
	core.NewAuthority(t).File(ca)
	r.until("the old authority does not count", func() bool { return web() == http.StatusUnauthorized })
	if _, err := remote.ModelInfer(soon(t), doubleMessage()); rpcstatus.Code(err) != codes.Unauthenticated {
		t.Errorf("inference: %v", err)
	}
	if _, err := remote.ServerMetadata(soon(t), &oip.ServerMetadataRequest{}); rpcstatus.Code(err) != codes.Unauthenticated {
		t.Errorf("metadata: %v", err)
	}
	r.idle()
}

func TestOnlyListedModelsAreServed(t *testing.T) {
	m, other := doubler(t), modelConfig(t, "secret", []string{"x:f32[4]"}, []string{"y:f32[4]"})
	r := newRig(t, func(c *core.Config) { c.Models = []string{"double"} }, m)
	r.worker(m, double)
	r.worker(other, double)
	r.infer("secret", goodBody).is(t, "", 404)
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
