// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	rpcstatus "google.golang.org/grpc/status"

	"github.com/ringbatch/ringbatch/gateway/core"
	"github.com/ringbatch/ringbatch/gateway/oip"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/worker"
)

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
		r.g.Models.RefreshSoon(soon(t)) // the look
		leave := r.worker(m, double)
		r.until("the broker has the worker", func() bool { return len(r.stats("double").Workers) != 0 })
		r.g.Models.RefreshSoon(soon(t)) // the change is told at once
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
		req, err := http.NewRequestWithContext(soon(t), http.MethodPost, r.http+"/v2/models/double/infer", io.MultiReader(strings.NewReader(body)))
		must.Do(t, err)
		return r.do(req)
	}
	if a := send(1 << 10); a.status != 200 {
		t.Errorf("little: %d %q", a.status, a.Error)
	}
	if a := send(128 << 10); a.status != http.StatusRequestEntityTooLarge || a.header.Get("Retry-After") != "" { // as if it had said its length
		t.Errorf("much: %d %q", a.status, a.Error)
	}
	r.idle()
	if n := r.bytesOfCallers(); n != 0 {
		t.Errorf("%d bytes are still the callers'", n)
	}
}

func (r *rig) bytesOfCallers() (n int64) {
	r.g.Limits.Mu.Lock()
	defer r.g.Limits.Mu.Unlock()
	for _, u := range r.g.Limits.ByName {
		n += u.Bytes.Load()
	}
	return n
}

func TestTypedContentsAreNeverLargerThanTheirShape(t *testing.T) {
	m := modelConfig(t, "wide", []string{"x:i64[65536]"}, []string{"y:i64[1]"})
	r := newRig(t, func(c *core.Config) { c.MaxBufferedBytes, c.CallerBytes = 6<<19, 3<<19 }, m)
	r.worker(m, func(_ context.Context, b *worker.Batch) error { b.Output(0); return nil })
	c := r.client()
	ask := func(shape []int64, contents *oip.InferTensorContents) error {
		_, err := c.ModelInfer(soon(t), &oip.ModelInferRequest{ModelName: "wide", Inputs: []*oip.ModelInferRequest_InferInputTensor{{Name: "x", Datatype: "INT64", Shape: shape, Contents: contents}}})
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
		{"more than the buffers have", []int64{4, 1 << 16}, &oip.InferTensorContents{Int64Contents: make([]int64, 4<<16)}, codes.ResourceExhausted},
		{"an endless shape", []int64{1 << 40, 1 << 40}, &oip.InferTensorContents{Int64Contents: zeros[:1]}, codes.InvalidArgument},
		{"a list of another type", []int64{1, 1 << 16}, &oip.InferTensorContents{IntContents: []int32{1}}, codes.InvalidArgument},
		{"two lists", []int64{1, 1 << 16}, &oip.InferTensorContents{Int64Contents: zeros, BytesContents: [][]byte{{}}}, codes.InvalidArgument},
	} {
		if s, _ := rpcstatus.FromError(ask(k.shape, k.contents)); s.Code() != k.code {
			t.Errorf("%s: %v %s", k.name, s.Code(), s.Message())
		}
	}
}

func TestACallerMayHangUpWhileItWaitsForASlot(t *testing.T) {
	m := doubler(t)
	r := newRig(t, func(c *core.Config) { c.Window, c.ClaimWait = 1, 2*patience }, m)
	begun, carryOn := make(chan struct{}, 8), make(chan struct{})
	r.worker(m, func(ctx context.Context, b *worker.Batch) error {
		begun <- struct{}{}
		<-carryOn
		return double(ctx, b)
	})
	body := goodBody
	ask := func() net.Conn {
		c := r.connect()
		fmt.Fprintf(c, "POST /v2/models/double/infer HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
		return c
	}
	inFlight := func(want int64) func() error {
		return func() error {
			if n := r.g.InFlight.Load(); n != want {
				return fmt.Errorf("%d are in flight", n)
			}
			return nil
		}
	}
	first := ask()
	<-begun
	second := ask()
	r.eventually("both are here", inFlight(2))
	second.Close()
	r.eventually("the second is gone", inFlight(1))
	close(carryOn)
	if rep, err := http.ReadResponse(bufio.NewReader(first), nil); err != nil || rep.StatusCode != 200 {
		t.Errorf("the first: %v, %v", rep, err)
	}
	r.idle()
}
