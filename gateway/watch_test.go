// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/broker"
	"github.com/ringbatch/ringbatch/worker"
)

// What is answered without its body leaves the rest of it to net/http.
func TestABodyThatNobodyReadsIsNotWaitedForForEver(t *testing.T) {
	m := doubler(t)
	r := newRig(t, func(c *Config) { hurried(c); c.pace.idle, c.pace.answer = patience, patience }, m)
	for _, ask := range []string{
		"POST /v2/models/nobody/infer", "POST /v2/repository/index", "GET /v2", "POST /elsewhere", "HEAD /v2/models/double/infer",
		"POST /v2/systemsharedmemory/region/a/register",
	} {
		c := r.connect()
		if _, err := fmt.Fprintf(c, "%s HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{\"ke", ask); err != nil {
			t.Fatal(err)
		}
		in := bufio.NewReader(c)
		rep, err := http.ReadResponse(in, &http.Request{Method: strings.Fields(ask)[0]})
		if err != nil {
			t.Errorf("%s: no answer: %v", ask, err)
			continue
		}
		_, _ = io.Copy(io.Discard, rep.Body)
		if _, err := in.ReadByte(); err == nil || isTimeout(err) {
			t.Errorf("%s: the connection lives on", ask)
		}
	}
	r.idle()
}

// Who waits for a word before it sends its body gets the last one.
func TestABodyThatIsNotWantedIsNotWaitedFor(t *testing.T) {
	r := newRig(t, func(c *Config) { hurried(c); c.pace.idle, c.pace.answer, c.pace.body = patience, patience, patience }, doubler(t))
	for _, head := range []string{"Expect: 100-continue\r\nContent-Length: 16", "Content-Length: 1000000"} {
		c := r.connect()
		if _, err := fmt.Fprintf(c, "POST /v2/models/nobody/infer HTTP/1.1\r\nHost: h\r\n%s\r\n\r\n", head); err != nil {
			t.Fatal(err)
		}
		rep, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err != nil || rep.StatusCode != http.StatusNotFound {
			t.Errorf("%s: %v, %v", head, rep, err)
		}
	}
}

// secure is a rig that is called by HTTP/2, over one connection.
func secure(t *testing.T, change func(*Config), models ...broker.ModelConfig) (r *rig, post func(model string, body io.Reader, length int64) (*http.Response, error)) {
	dir := t.TempDir()
	a := newAuthority(t)
	cert, key := filepath.Join(dir, "c"), filepath.Join(dir, "k")
	a.write("gateway", cert, key)
	r = newRig(t, func(c *Config) { c.CertFile, c.KeyFile = cert, key; change(c) }, models...)
	transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: a.Pool()}, ForceAttemptHTTP2: true}
	t.Cleanup(transport.CloseIdleConnections)
	return r, func(model string, body io.Reader, length int64) (*http.Response, error) {
		url := "https" + strings.TrimPrefix(r.http, "http") + "/v2/models/" + model + "/infer"
		ask, err := http.NewRequestWithContext(soon(t), http.MethodPost, url, body)
		if err != nil {
			return nil, err
		}
		ask.ContentLength = length
		ask.Header.Set(headerLength, "0")
		rep, err := transport.RoundTrip(ask)
		if err == nil && rep.ProtoMajor != 2 {
			err = fmt.Errorf("by %s", rep.Proto)
		}
		return rep, err
	}
}

func TestASlowBodyIsCutBesideOthersOfItsConnection(t *testing.T) {
	m := doubler(t)
	r, post := secure(t, func(c *Config) { hurried(c); c.pace.idle, c.pace.answer = patience, patience }, m)
	r.worker(m, double)
	body, never := io.Pipe()
	end := make(chan error, 1)
	go func() {
		rep, err := post("double", io.MultiReader(strings.NewReader("1234"), body), 16)
		never.Close() // or the client would wait for it
		if err == nil {
			text, _ := io.ReadAll(rep.Body)
			rep.Body.Close()
			if rep.StatusCode != http.StatusRequestTimeout || !strings.Contains(string(text), "slowly") {
				err = fmt.Errorf("%d %s", rep.StatusCode, text)
			}
		}
		end <- err
	}()
	r.eventually("it has begun", func() error {
		if r.g.inFlight.Load() == 0 && len(end) == 0 {
			return errors.New("not yet")
		}
		return nil
	})
	if rep, err := post("double", bytes.NewReader(floats(1, 2, 3, 4)), 16); err != nil { // its end is not the other's
		t.Error(err)
	} else {
		rep.Body.Close()
	}
	if err := <-end; err != nil {
		t.Error(err)
	}
	r.idle()
}

func TestAnAnswerThatNobodyReadsIsGivenUpBesideOthersOfItsConnection(t *testing.T) {
	m, big := doubler(t), modelConfig(t, "big", []string{"x:u8[1]"}, []string{"y:u8[8000000]"})
	r, post := secure(t, func(c *Config) { hurried(c); c.pace.body, c.pace.idle, c.Window = patience, patience, 8 }, m, big)
	r.worker(m, double)
	r.worker(big, func(_ context.Context, b *worker.Batch) error { b.Output(0); return nil })
	slow, err := post("big", strings.NewReader("1"), 1)
	if err != nil || slow.StatusCode != 200 {
		t.Fatal(slow, err)
	}
	defer slow.Body.Close() // which lets the rest come
	if rep, err := post("double", bytes.NewReader(floats(1, 2, 3, 4)), 16); err != nil {
		t.Error(err)
	} else {
		rep.Body.Close()
	}
	r.idle()
}

// The http.Server may have begun a request before the session's goroutine goes on.
func TestASessionThatGivesItsConnectionAwayLeavesTheWatchAlone(t *testing.T) {
	r := newRig(t, nil)
	for range 100 {
		near, far := net.Pipe()
		given := &webServer{g: r.g, given: make(chan net.Conn), closed: make(chan struct{})}
		c := &conn{Conn: near, l: r.g.doors[0], http: given}
		c.watch.init(r.g)
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			(&session{door: httpDoor{r.g}, conn: c}).serve()
		}()
		if _, err := io.WriteString(far, "POST /v2 HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"); err != nil {
			t.Fatal(err)
		}
		for taken := false; !taken; { // who finds the session waiting goes on before it does
			select {
			case <-given.given:
				c.beginBody(time.Now())
				taken = true
			default:
				runtime.Gosched()
			}
		}
		<-ended
		if c.bodySince.Load() == 0 {
			t.Fatal("nobody watches over the body")
		}
		near.Close()
		far.Close()
	}
}
