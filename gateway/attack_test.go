// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	rpcstatus "google.golang.org/grpc/status"

	"github.com/ringbatch/ringbatch/gateway/oip"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/worker"
)

// A socket that its owner has closed is listed as root's.
func TestACallerThatHungUpIsNobody(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	theirs, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	ours, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer ours.Close()
	local, remote := addrPort(ours.LocalAddr()), addrPort(ours.RemoteAddr())
	if _, err := socketUser(remote, local); err != nil {
		t.Fatalf("a caller that is there: %v", err)
	}
	theirs.Close()
	_, _ = io.ReadAll(ours) // it is closed when this ends
	if uid, err := socketUser(remote, local); err == nil {
		t.Errorf("a caller that has hung up is user %d", uid)
	}
}

func TestACallerOutOfTimeDoesNotMakeTheGatewayUnready(t *testing.T) {
	m := doubler(t)
	r := newRig(t, nil, m)
	r.worker(m, double)
	r.eventually("it is ready", r.g.ready)
	time.Sleep(2 * lookupInterval) // the broker may be asked again
	late, cancel := context.WithCancel(context.Background())
	cancel()
	if _, _, err := r.g.models.get(late, "nothing", ""); meaningOf(err).http != http.StatusNotFound {
		t.Errorf("an unknown model: %v", err)
	}
	if err := r.g.ready(); err != nil {
		t.Errorf("not ready: %v", err)
	}
}

func TestAChangeRightAfterALookIsNotMissed(t *testing.T) {
	m := doubler(t)
	r := newRig(t, nil, m)
	for range 5 {
		r.g.models.refreshSoon(soon(t)) // the look
		leave := r.worker(m, double)
		r.eventually("the broker has the worker", func() error {
			if len(r.stats("double").Workers) == 0 {
				return fmt.Errorf("no worker")
			}
			return nil
		})
		r.g.models.refreshSoon(soon(t)) // the change is told at once
		if err := r.g.modelReady(r.model("double")); err != nil {
			t.Fatal(err)
		}
		leave()
		r.eventually("it is seen to be gone", func() error {
			if r.g.modelReady(r.model("double")) == nil {
				return fmt.Errorf("still ready")
			}
			return nil
		})
	}
}

func (r *rig) model(name string) *model {
	r.t.Helper()
	k, _, err := r.g.models.get(soon(r.t), name, "")
	if err != nil {
		r.t.Fatal(err)
	}
	return k
}

func TestInferenceIsNeverCollectedHoweverItsPathIsSpelt(t *testing.T) {
	for _, path := range []string{"/v2/models/m/infer/", "/v2/models/m/infer?x=1", "/v2/models/m/%69nfer", "/v2/models/m/versions/1/infer/", "/v2/models/m/infer#x"} {
		head := "POST " + path + " HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\n"
		if new(simpleHead).parse([]byte(head)) || isPlain([]byte(head)) {
			t.Errorf("%s is taken for a small question", path)
		}
	}
	for _, path := range []string{"/v2", "/v2/health/ready", "/v2/models/m/ready", "/v2/models/m/stats"} {
		if !isPlain([]byte("GET " + path + " HTTP/1.1\r\nHost: h\r\n\r\n")) {
			t.Errorf("%s is no small question", path)
		}
	}
	m := doubler(t)
	r := newRig(t, nil, m)
	r.worker(m, double)
	for _, path := range []string{"/v2/models/double/infer/", "/v2/models/double/infer?x=1", "/v2/models/double/%69nfer"} {
		if a := r.post(path, nil, []byte(`{"inputs":[`+goodInput+`]}`)); a.status != 200 {
			t.Errorf("%s: %d %q", path, a.status, a.Error)
		}
	}
	r.idle()
}

func TestARequestWithTwoLengthsIsTheLastOfItsConnection(t *testing.T) {
	m := doubler(t)
	r := newRig(t, nil, m)
	r.worker(m, double)
	body := `{"inputs":[` + goodInput + `]}`
	const post = "POST /v2/models/double/infer HTTP/1.1\r\nHost: h\r\n"
	both := fmt.Sprintf(post+"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n", len(body), body)
	for name, before := range map[string]string{"its first": "", "a later one": askSpelt} { // net/http has had the connection before
		c := r.connect()
		if before != "" {
			if err := r.ask(c, before); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := io.WriteString(c, both+askLive); err != nil { // what a proxy takes for the body's rest
			t.Fatal(err)
		}
		all, err := io.ReadAll(c)
		if err != nil || bytes.Count(all, []byte("HTTP/1.1 ")) != 1 || !bytes.Contains(all, []byte("Connection: close")) {
			t.Errorf("%s: %q, %v", name, all, err)
		}
	}
}

func TestTLSAtADoorWithoutItIsAnsweredAtOnce(t *testing.T) {
	r := newRig(t, nil)
	c := r.connect()
	fmt.Fprint(c, "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03") // and the rest never comes
	if status, text := r.hear(c); status != http.StatusBadRequest || !strings.Contains(text, "without TLS") {
		t.Errorf("%d %s", status, text)
	}
}

func TestABodyThatCanNeverFitIsNotToldToTryAgain(t *testing.T) {
	m := doubler(t)
	r := newRig(t, func(c *Config) { c.MaxMessageBytes, c.CallerBytes = 1<<20, 2<<20 }, m)
	r.worker(m, double)
	for _, extra := range []string{"", "Accept: */*\r\nConnection: close\r\n"} { // ours, and net/http's
		for _, length := range []string{"1048577", "4194304", "9223372036854775807"} {
			c := r.connect()
			fmt.Fprintf(c, "POST /v2/models/double/infer HTTP/1.1\r\nHost: h\r\n%sContent-Length: %s\r\n\r\n", extra, length)
			rep, err := http.ReadResponse(bufio.NewReader(c), nil)
			if err != nil {
				t.Fatalf("%s: %v", length, err)
			}
			if rep.StatusCode != http.StatusRequestEntityTooLarge || rep.Header.Get("Retry-After") != "" {
				t.Errorf("%s bytes: %s %v", length, rep.Status, rep.Header)
			}
		}
	}
	r.idle()
}

func TestABodyInChunksCountsAsItsCallersToo(t *testing.T) {
	m := doubler(t)
	r := newRig(t, func(c *Config) { c.CallerBytes = 64 << 10 }, m)
	r.worker(m, double)
	send := func(n int) *httpAnswer {
		body := `{"x":"` + strings.Repeat("x", n) + `","inputs":[` + goodInput + `]}`
		req, err := http.NewRequestWithContext(soon(t), http.MethodPost, r.http+"/v2/models/double/infer", io.MultiReader(strings.NewReader(body)))
		if err != nil {
			t.Fatal(err)
		}
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
	r.g.callers.mu.Lock()
	defer r.g.callers.mu.Unlock()
	for _, u := range r.g.callers.byName {
		n += u.bytes.Load()
	}
	return n
}

func TestAnErrorsTextIsAlwaysText(t *testing.T) {
	m := doubler(t)
	r := newRig(t, nil, m)
	r.worker(m, func(context.Context, *worker.Batch) error {
		return fmt.Errorf("caf\xe9 %s", strings.Repeat("é", maxTextBytes))
	})
	s, err := r.client().ModelStreamInfer(soon(t))
	if err != nil {
		t.Fatal(err)
	}
	for range 2 { // the stream goes on
		if err := s.Send(&oip.ModelInferRequest{ModelName: "double", Inputs: []*oip.ModelInferRequest_InferInputTensor{rpcInput("x", "FP32", 1, 4)}, RawInputContents: [][]byte{floats(1, 2, 3, 4)}}); err != nil {
			t.Fatal(err)
		}
		a, err := s.Recv()
		if err != nil || !strings.Contains(a.ErrorMessage, "caf") {
			t.Fatalf("%v, %v", a, err)
		}
	}
	r.idle()
}

func TestAModelsTracebackStaysOnItsHost(t *testing.T) {
	m := doubler(t)
	r := newRig(t, nil, m)
	r.worker(m, func(context.Context, *worker.Batch) error {
		return errors.New("ValueError: no such row\nTraceback (most recent call last):\n  File \"/srv/model.py\", line 3")
	})
	_, err := r.client().ModelInfer(soon(t), &oip.ModelInferRequest{ModelName: "double", Inputs: []*oip.ModelInferRequest_InferInputTensor{rpcInput("x", "FP32", 1, 4)}, RawInputContents: [][]byte{floats(1, 2, 3, 4)}})
	if got := rpcstatus.Convert(err).Message(); got != "ValueError: no such row" {
		t.Errorf("gRPC says %q", got)
	}
	a, err := http.Post(r.http+"/v2/models/double/infer", "application/json", strings.NewReader(`{"inputs":[{"name":"x","shape":[1,4],"datatype":"FP32","data":[1,2,3,4]}]}`))
	if err != nil {
		t.Fatal(err)
	}
	defer a.Body.Close()
	if body, err := io.ReadAll(a.Body); err != nil || string(body) != `{"error":"ValueError: no such row"}` {
		t.Errorf("HTTP says %q, %v", body, err)
	}
	r.idle()
}

func TestALinkCannotUnregisterARegion(t *testing.T) {
	r := newRig(t, func(c *Config) { c.SystemSharedMemory = true })
	for _, path := range []string{"/v2/systemsharedmemory/unregister", "/v2/systemsharedmemory/region/r/register"} {
		rep, err := http.Get(r.http + path)
		if err != nil {
			t.Fatal(err)
		}
		rep.Body.Close()
		if rep.StatusCode != http.StatusMethodNotAllowed {
			t.Errorf("GET %s: %s", path, rep.Status)
		}
	}
}

func TestTypedContentsAreNeverLargerThanTheirShape(t *testing.T) {
	m := modelConfig(t, "wide", []string{"x:i64[65536]"}, []string{"y:i64[1]"})
	r := newRig(t, func(c *Config) { c.MaxBufferedBytes = 3 << 19 }, m)
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

func TestUnpackedContentsAreReadAsPackedOnes(t *testing.T) {
	c := &call{model: &model{g: &Gateway{cfg: Config{MaxMessageBytes: 1 << 20}}}}
	in := &input{name: "x", dtype: tensor.I16, shape: []int{1, 3}}
	// int_contents: 1 and then -2 by themselves, 3 in a packed list.
	encoded := []byte{0x10, 1, 0x10, 0xfe, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1, 0x12, 1, 3}
	if err := c.readContents(in, encoded); err != nil {
		t.Fatal(err)
	}
	if got := fmt.Sprint([]byte(*in.src.(*bytesSource))); got != "[1 0 254 255 3 0]" {
		t.Errorf("got %s", got)
	}
}

func TestACallerIsNotSlowWhileItsPartsAreComputed(t *testing.T) {
	m := modelConfig(t, "rows", []string{"x:f32[256]"}, []string{"y:f32[256]"})
	r := newRig(t, func(c *Config) {
		c.Window = 8 // one part at a time
		watchful(c)
	}, m)
	r.worker(m, func(ctx context.Context, b *worker.Batch) error { // eight times
		r.sweep() // it is not late after the last part
		r.eventually("nothing is expected of the caller", func() error {
			r.g.web.l.mu.Lock()
			defer r.g.web.l.mu.Unlock()
			for c := range r.g.web.l.conns {
				if c.bodySince.Load() != 0 {
					return fmt.Errorf("its body is")
				}
			}
			return nil
		})
		r.passes(time.Hour)
		return echo(ctx, b)
	})
	body := make([]byte, 64*1024)
	head := fmt.Sprintf(`{"inputs":[{"name":"x","shape":[64,256],"datatype":"FP32","parameters":{"binary_data_size":%d}}],"parameters":{"binary_data_output":true}}`, len(body))
	if a := r.inferBinary("rows", head, body); a.status != 200 || len(a.raw) != len(body) {
		t.Errorf("%d %q, %d bytes", a.status, a.Error, len(a.raw))
	}
	r.idle()
}

func TestACallerMayHangUpWhileItWaitsForASlot(t *testing.T) {
	m := doubler(t)
	r := newRig(t, func(c *Config) { c.Window, c.ClaimWait = 1, 2*patience }, m)
	begun, carryOn := make(chan struct{}, 8), make(chan struct{})
	r.worker(m, func(ctx context.Context, b *worker.Batch) error {
		begun <- struct{}{}
		<-carryOn
		return double(ctx, b)
	})
	body := `{"inputs":[` + goodInput + `]}`
	ask := func() net.Conn {
		c := r.connect()
		fmt.Fprintf(c, "POST /v2/models/double/infer HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
		return c
	}
	inFlight := func(want int64) func() error {
		return func() error {
			if n := r.g.inFlight.Load(); n != want {
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

func TestAnAnswerThatWaitsForTheOneBeforeItIsNotGivenUp(t *testing.T) {
	large := modelConfig(t, "large", []string{"x:f32[4]"}, []string{"y:f32[16384]"})
	slow := doubler(t)
	r := newRig(t, watchful, large, slow)
	r.worker(large, func(_ context.Context, b *worker.Batch) error { b.Output(0); return nil })
	r.worker(slow, func(ctx context.Context, b *worker.Batch) error {
		r.eventually("the answer after this one waits", func() error {
			if n := r.stats("large").Ended["OK"]; n != 1 {
				return fmt.Errorf("%d have ended", n)
			}
			return nil
		})
		r.passes(time.Hour)
		return double(ctx, b)
	})
	s, err := r.client().ModelStreamInfer(soon(t))
	if err != nil {
		t.Fatal(err)
	}
	for _, model := range []string{"double", "large"} {
		if err := s.Send(&oip.ModelInferRequest{ModelName: model, Inputs: []*oip.ModelInferRequest_InferInputTensor{rpcInput("x", "FP32", 1, 4)}, RawInputContents: [][]byte{floats(1, 2, 3, 4)}}); err != nil {
			t.Fatal(err)
		}
	}
	for _, model := range []string{"double", "large"} {
		if a, err := s.Recv(); err != nil || a.ErrorMessage != "" || a.InferResponse.ModelName != model {
			t.Fatalf("%s: %v, %v", model, a, err)
		}
	}
	r.idle()
}
