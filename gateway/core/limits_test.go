// SPDX-License-Identifier: Apache-2.0

package core_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	rpcstatus "google.golang.org/grpc/status"

	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/gateway/core"
	"github.com/ringbatch/ringbatch/gateway/oip"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/test/testbed"
	"github.com/ringbatch/ringbatch/worker"
)

// hurried makes patience short.
func hurried(c *core.Config) {
	c.Pace = core.Pace{Body: 200 * time.Millisecond, Answer: 200 * time.Millisecond, Idle: 300 * time.Millisecond,
		Reload: 20 * time.Millisecond, Rate: 64 << 20}
}

// watchful looks often whether files have changed.
func watchful(c *core.Config) {
	c.Pace = core.Pace{Body: patience, Answer: patience, Idle: patience, Reload: 20 * time.Millisecond, Rate: core.LeastRate}
}

func TestASlowBodyIsCutWithItsReason(t *testing.T) {
	t.Parallel()
	r := doublingRig(t, func(c *core.Config) { hurried(c); c.Pace.Idle, c.Pace.Answer = patience, patience }) // only the body is hurried
	head := `{"inputs":[{"name":"x","shape":[1,4],"datatype":"FP32","parameters":{"binary_data_size":16}}]}`
	for name, start := range map[string]string{
		"a body that never comes": inferDouble + "Content-Length: 100\r\n\r\n",
		"tensors that never come": fmt.Sprintf(inferDouble+"%s: %d\r\nContent-Length: %d\r\n\r\n%s1234", headerLength, len(head),
			len(head)+16, head),
		"chunks that never come":     inferDouble + "Transfer-Encoding: chunked\r\n\r\n",
		"chunks that never end":      inferDouble + "Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n",
		"a question without its end": "POST /v2/repository/index HTTP/1.1\r\nHost: h\r\nContent-Length: 100\r\n\r\n",
	} {
		c := r.connect()
		if _, err := io.WriteString(c, start); err != nil {
			t.Fatal(err)
		}
		rep, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		text, _ := io.ReadAll(rep.Body)
		if strings.HasPrefix(name, "a question") {
			continue // it needs no body and is answered
		}
		if rep.StatusCode != http.StatusRequestTimeout || !strings.Contains(string(text), "slowly") {
			t.Errorf("%s: %d %s", name, rep.StatusCode, text)
		}
		if _, err := c.Read(make([]byte, 1)); err == nil || core.IsTimeout(err) {
			t.Errorf("%s: the connection lives on", name)
		}
	}
	r.idle()
}

func TestAnIdleConnectionIsClosed(t *testing.T) {
	r := newRig(t, hurried)
	c := r.connect()
	if _, err := c.Read(make([]byte, 1)); err != io.EOF {
		t.Errorf("%v", err)
	}
}

func TestACallerHasALimitOfRequestsAndOfBytes(t *testing.T) {
	m := doubler(t)
	r := newRig(t, func(c *core.Config) { c.CallerRequests, c.CallerBytes = 2, 128<<10 }, m) // no worker
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	c := r.client()
	if a := r.infer("double", strings.Repeat(" ", 256<<10)); a.status != 413 || !strings.Contains(a.Error, "in flight") ||
		a.header.Get("Retry-After") != "" {
		t.Errorf("bytes: %d %q", a.status, a.Error)
	}
	for range 2 {
		go func() { _, _ = c.ModelInfer(ctx, doubleMessage()) }()
	}
	r.until("two are under way", func() bool { return r.g.InFlight.Load() == 2 })
	if a := r.infer("double", goodBody); a.status != 429 || a.header.Get("Retry-After") == "" {
		t.Errorf("requests: %d %q", a.status, a.Error)
	}
	if _, err := c.ModelInfer(soon(t), doubleMessage()); rpcstatus.Code(err) != codes.ResourceExhausted {
		t.Errorf("requests: %v", err)
	}
	cancel()
	r.idle()
}

func TestAnAnswerThatNobodyReadsGivesItsSlotsBack(t *testing.T) {
	t.Parallel()
	m := modelConfig(t, "big", []string{"x:u8[8000000]"}, []string{"y:u8[8000000]"})
	r := newRig(t, func(c *core.Config) { hurried(c); c.Pace.Body, c.Pace.Idle, c.Window = patience, patience, 8 }, m)
	r.worker(m, echo)
	x := make([]byte, 8_000_000)
	// HTTP: sends, and never reads.
	head := `{"inputs":[{"name":"x","shape":[1,8000000],"datatype":"UINT8","parameters":{"binary_data_size":8000000}}],` +
		`"parameters":{"binary_data_output":true}}`
	c := r.connect()
	_ = c.(*net.TCPConn).SetReadBuffer(4 << 10)
	go func() {
		fmt.Fprintf(c, "POST /v2/models/big/infer HTTP/1.1\r\nHost: h\r\n%s: %d\r\nContent-Length: %d\r\n\r\n%s", headerLength, len(head),
			len(head)+len(x), head)
		_, _ = c.Write(x)
	}()
	// gRPC: a stream whose answers are not received fills its window.
	s, err := r.client().ModelStreamInfer(soon(t))
	must.Do(t, err)
	for i := range 2 {
		if err := s.Send(&oip.ModelInferRequest{ModelName: "big",
			Inputs:           []*oip.ModelInferRequest_InferInputTensor{rpcInput("x", "UINT8", 1, 8_000_000)},
			RawInputContents: [][]byte{x}}); err != nil && i == 0 {
			t.Fatal(err) // the second may find that the first one's answer was given up
		}
	}
	r.until("they were answered", func() bool { return r.stats("big").Ended["OK"] >= 2 })
	r.idle()
}

func TestALongHeadIsRefused(t *testing.T) {
	r := newRig(t, nil)
	c := r.connect()
	go func() {
		fmt.Fprint(c, "GET /v2 HTTP/1.1\r\nHost: h\r\n")
		for range 100 {
			fmt.Fprintf(c, "X-Y: %s\r\n", strings.Repeat("z", 4000))
		}
		fmt.Fprint(c, "\r\n")
	}()
	rep, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil || rep.StatusCode != http.StatusRequestHeaderFieldsTooLarge {
		t.Errorf("%v %v", rep, err)
	}
}

func TestTheBudgetOfBuffersIsKept(t *testing.T) {
	r := doublingRig(t, func(c *core.Config) { c.MaxBufferedBytes, c.CallerBytes = 1<<20, 8<<20 })
	r.infer("double", strings.Repeat(" ", 2<<20)).is(t, "", 429, "buffers")
	must.Check(t, r.ask(r.connect(), plainDouble()))
	r.idle()
}

func TestACallerOutOfTimeDoesNotMakeTheGatewayUnready(t *testing.T) {
	r := doublingRig(t, nil)
	r.eventually("it is ready", r.g.Ready)
	time.Sleep(2 * core.LookupInterval) // the broker may be asked again
	late, cancel := context.WithCancel(context.Background())
	cancel()
	if _, _, err := r.g.Models.Get(late, "nothing", ""); core.MeaningOf(err).HTTP != http.StatusNotFound {
		t.Errorf("an unknown model: %v", err)
	}
	if err := r.g.Ready(); err != nil {
		t.Errorf("not ready: %v", err)
	}
}

func TestAChangeRightAfterALookIsNotMissed(t *testing.T) {
	t.Parallel()
	m := doubler(t)
	r := newRig(t, nil, m)
	for range 5 {
		r.g.Refresh(soon(t)) // the look
		leave := r.worker(m, double)
		r.until("the broker has the worker", func() bool { return len(r.stats("double").Workers) != 0 })
		r.g.Refresh(soon(t)) // because of the change
		must.Do(t, r.g.ModelReady(r.model("double")))
		leave()
		r.until("it is seen to be gone", func() bool { return r.g.ModelReady(r.model("double")) != nil })
	}
}

func (r *rig) model(name string) *core.Model {
	r.t.Helper()
	k, _, err := r.g.Models.Get(soon(r.t), name, "")
	must.Do(r.t, err)
	return k
}

func TestABodyThatCanNeverFitIsNotToldToTryAgain(t *testing.T) {
	r := doublingRig(t, func(c *core.Config) { c.MaxMessageBytes, c.CallerBytes = 1<<20, 2<<20 })
	for _, length := range []string{"1048577", "4194304", "9223372036854775807"} {
		c := r.connect()
		fmt.Fprintf(c, inferDouble+"Content-Length: %s\r\n\r\n", length)
		rep, err := http.ReadResponse(bufio.NewReader(c), nil)
		must.Do(t, err)
		if rep.StatusCode != http.StatusRequestEntityTooLarge || rep.Header.Get("Retry-After") != "" {
			t.Errorf("%s bytes: %s %v", length, rep.Status, rep.Header)
		}
	}
	req := doubleMessage()
	req.Inputs[0].Shape[0], req.RawInputContents[0] = 1<<17, make([]byte, 2<<20)
	if _, err := r.client().ModelInfer(soon(t), req); rpcstatus.Code(err) != codes.ResourceExhausted {
		t.Error(err)
	}
	r.idle()
}

func TestABodyInChunksCountsAsItsCallersToo(t *testing.T) {
	r := doublingRig(t, func(c *core.Config) { c.CallerBytes = 64 << 10 })
	send := func(n int) *httpAnswer {
		body := `{"x":"` + strings.Repeat("x", n) + `","inputs":[` + goodInput + `]}`
		req, err := http.NewRequestWithContext(soon(t), http.MethodPost, r.http+"/v2/models/double/infer",
			io.MultiReader(strings.NewReader(body)))
		must.Do(t, err)
		return r.do(req)
	}
	send(1<<10).is(t, "little", 200)
	// as if it had said its length
	if a := send(128 << 10); a.status != http.StatusRequestEntityTooLarge || a.header.Get("Retry-After") != "" {
		t.Errorf("much: %d %q", a.status, a.Error)
	}
	r.idle()
	for name, n := range r.g.BytesOf() {
		if n != 0 {
			t.Errorf("%d bytes are still counted for %s", n, name)
		}
	}
}

func TestTypedContentsAreNeverLargerThanTheirShape(t *testing.T) {
	m := modelConfig(t, "wide", []string{"x:i64[65536]"}, []string{"y:i64[1]"})
	r := newRig(t, func(c *core.Config) { c.MaxBufferedBytes, c.CallerBytes = 6<<19, 3<<19 }, m)
	r.worker(m, func(_ context.Context, b *worker.Batch) error { testbed.Touch(b); return nil })
	c := r.client()
	ask := func(shape []int64, contents *oip.InferTensorContents) error {
		_, err := c.ModelInfer(soon(t), &oip.ModelInferRequest{ModelName: "wide",
			Inputs: []*oip.ModelInferRequest_InferInputTensor{{Name: "x", Datatype: "INT64", Shape: shape, Contents: contents}}})
		return err
	}
	zeros := make([]int64, 1<<16) // a byte each on the wire
	for _, k := range []struct {
		name     string
		shape    []int64
		contents *oip.InferTensorContents
		code     codes.Code
	}{
		{"as its shape", []int64{1, 1 << 16}, &oip.InferTensorContents{Int64Contents: zeros}, codes.OK},
		{"more than the shape", []int64{1, 1 << 16}, &oip.InferTensorContents{Int64Contents: append(zeros, 1)}, codes.InvalidArgument},
		{"fewer than the shape", []int64{1, 1 << 16}, &oip.InferTensorContents{Int64Contents: zeros[1:]}, codes.InvalidArgument},
		{"more than the buffers have", []int64{4, 1 << 16}, &oip.InferTensorContents{Int64Contents: make([]int64, 4<<16)},
			codes.ResourceExhausted},
		{"an endless shape", []int64{1 << 40, 1 << 40}, &oip.InferTensorContents{Int64Contents: zeros[:1]}, codes.InvalidArgument},
		{"a list of another type", []int64{1, 1 << 16}, &oip.InferTensorContents{IntContents: []int32{1}}, codes.InvalidArgument},
		{"two lists", []int64{1, 1 << 16}, &oip.InferTensorContents{Int64Contents: zeros, BytesContents: [][]byte{{}}},
			codes.InvalidArgument},
	} {
		if s, _ := rpcstatus.FromError(ask(k.shape, k.contents)); s.Code() != k.code {
			t.Errorf("%s: %v %s", k.name, s.Code(), s.Message())
		}
	}
}

func TestACallerMayHangUpWhileItWaitsForASlot(t *testing.T) {
	m := doubler(t)
	r := newRig(t, func(c *core.Config) { c.Window, c.ClaimWait = 1, 2*patience }, m)
	h, release := r.holds(m)
	first, second := r.connect(), r.connect()
	fmt.Fprint(first, plainDouble())
	<-h.began
	fmt.Fprint(second, plainDouble())
	r.underWay(2)
	second.Close()
	r.underWay(1)
	release()
	if rep, err := http.ReadResponse(bufio.NewReader(first), nil); err != nil || rep.StatusCode != 200 {
		t.Errorf("the first: %v, %v", rep, err)
	}
	r.idle()
}

// A proxy that goes by length takes the smuggled request for a body, and its answer for
// the answer of the next caller.
func TestARequestOfTwoLengthsEndsItsConnection(t *testing.T) {
	r := doublingRig(t, nil)
	const smuggled = "GET /v2/models/double HTTP/1.1\r\nHost: h\r\n\r\n"
	chunks := fmt.Sprintf("%x\r\n%s\r\n0\r\n\r\n", len(goodBody), goodBody)
	both := fmt.Sprintf("Content-Length: %d\r\nTransfer-Encoding: chunked\r\n", len(chunks)+len(smuggled))
	for name, k := range map[string]struct {
		first string
		ends  bool
	}{
		"both":               {inferDouble + both + "\r\n" + chunks, true},
		"both, HTTP/1.0":     {strings.Replace(plainDouble(), "1.1\r\n", "1.0\r\nConnection: keep-alive\r\nTransfer-Encoding: chunked\r\n", 1), true},
		"both, for metadata": {"GET /v2 HTTP/1.1\r\nHost: h\r\n" + both + "\r\n0\r\n\r\n", true},
		"a length":           {plainDouble(), false},
	} {
		c := r.connect()
		fmt.Fprint(c, k.first+smuggled)
		in := bufio.NewReader(c)
		first, err := http.ReadResponse(in, nil)
		must.Do(t, err)
		if _, err := io.Copy(io.Discard, first.Body); err != nil || first.StatusCode != 200 || first.Close != k.ends {
			t.Errorf("%s: %s, close is %v, %v", name, first.Status, first.Close, err)
		}
		if second, err := http.ReadResponse(in, nil); (err != nil) != k.ends || err != nil && core.IsTimeout(err) {
			t.Errorf("%s: what follows gets %v, %v", name, second, err)
		}
	}
}

// The broker charges failures to the ring client that sent them.
func TestACallerWhoseRequestsKeepFailingHasItsOwnRingClient(t *testing.T) {
	tokens := filepath.Join(t.TempDir(), "tokens")
	must.Do(t, os.WriteFile(tokens, []byte("good good-token-0123456789\nbad bad-token-0123456789\n"), 0o600))
	m := doubler(t)
	r := newRig(t, func(c *core.Config) { c.TokenFile = tokens }, m)
	r.worker(m, func(ctx context.Context, b *worker.Batch) error {
		for i := range b.Rows() {
			if worker.Row[float32](b.Input(0), i)[0] == 13 {
				return errors.New("unlucky")
			}
		}
		return double(ctx, b)
	})
	poison := strings.Replace(goodBody, "[1,2,3,4]", "[13,2,3,4]", 1)
	send := func(token, body string, want int) {
		t.Helper()
		r.post("/v2/models/double/infer", map[string]string{"Authorization": "Bearer " + token + "-token-0123456789"}, []byte(body)).
			is(t, token, want)
	}
	clients := func(what string, want int) {
		t.Helper()
		r.until(fmt.Sprint(what, ": clients of the ring: ", want), func() bool { return r.stats("double").Clients == want })
	}
	send("good", goodBody, 200)
	send("bad", poison, 500)
	send("bad", goodBody, 200)
	clients("after one failure", 1)
	k := r.model("double")
	shared := k.SingleClient() // it will be charged with the first failures
	var both sync.WaitGroup
	both.Go(func() {
		for range 20 {
			send("bad", poison, 500)
		}
	})
	both.Go(func() {
		for range 20 {
			send("good", goodBody, 200)
		}
	})
	both.Wait()
	send("bad", goodBody, 200)
	r.until("the others have a new client", func() bool { return k.SingleClient() != shared })
	clients("after many", 2)
	ring, err := client.Dial(soon(t), "double", client.WithSocket(r.socket))
	must.Do(t, err)
	defer ring.Close()
	clients("with one on the ring", 3)
	both.Go(func() { send("bad", poison, 500) })
	out, err := ring.Infer(soon(t), []float32{1, 2, 3, 4})
	if err != nil {
		t.Errorf("on the ring: %v, %v", out, err)
	}
	both.Wait()
	r.idle()
}
