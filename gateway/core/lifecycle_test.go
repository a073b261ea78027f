// SPDX-License-Identifier: Apache-2.0

package core_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	rpcstatus "google.golang.org/grpc/status"

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/broker"
	"github.com/ringbatch/ringbatch/gateway/core"
	"github.com/ringbatch/ringbatch/gateway/oip"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/worker"
)

// held is a worker that waits before it answers.
type held struct {
	began chan int // rows of a batch
	goOn  chan struct{}
}

func (h *held) run(ctx context.Context, b *worker.Batch) error {
	h.began <- b.Rows()
	<-h.goOn
	return double(ctx, b)
}

// holds starts such a worker; release lets it answer.
func (r *rig) holds(m broker.ModelConfig) (h *held, release func()) {
	h = &held{began: make(chan int, 1000), goOn: make(chan struct{})}
	r.worker(m, h.run)
	return h, sync.OnceFunc(func() { close(h.goOn) })
}

func doubleMessage() *oip.ModelInferRequest {
	return &oip.ModelInferRequest{ModelName: "double", Inputs: []*oip.ModelInferRequest_InferInputTensor{rpcInput("x", "FP32", 1, 4)},
		RawInputContents: [][]byte{floats(1, 2, 3, 4)}}
}

// canceled waits until the broker has counted requests as canceled.
func (r *rig) canceled(n uint64) {
	r.t.Helper()
	r.until("the request has ended in the ring", func() bool { return r.stats("double").Ended["Canceled"] == n })
}

func TestACallerWhoHangsUpEndsItsRequestInTheRing(t *testing.T) {
	m := doubler(t)
	r := newRig(t, nil, m) // no worker: requests wait
	waitsInTheRing := func() {
		t.Helper()
		r.until("it waits in the ring", func() bool { return r.stats("double").QueueLength == 1 })
	}
	for i, send := range []string{plainDouble(),
		fmt.Sprintf(inferDouble+"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n", len(goodBody), goodBody)} {
		c := r.connect()
		_, err := io.WriteString(c, send)
		must.Do(t, err)
		waitsInTheRing()
		c.Close()
		r.canceled(uint64(i + 1))
	}
	ctx, cancel := context.WithCancel(soon(t))
	called := make(chan error, 1)
	go func() {
		_, err := r.client().ModelInfer(ctx, doubleMessage())
		called <- err
	}()
	waitsInTheRing()
	cancel()
	if err := <-called; rpcstatus.Code(err) != codes.Canceled {
		t.Errorf("gRPC: %v", err)
	}
	r.canceled(3)
	ctx, cancel = context.WithCancel(soon(t))
	stream, err := r.client().ModelStreamInfer(ctx)
	must.Do(t, err)
	cancel()
	if _, err := stream.Recv(); rpcstatus.Code(err) != codes.Canceled {
		t.Errorf("a stream: %v", err)
	}
	r.idle()
}

func TestADeadlineEndsTheRequestInTheRing(t *testing.T) {
	m := doubler(t)
	r := newRig(t, nil, m)
	a := r.infer("double", `{"parameters":{"timeout":50000},"inputs":[`+goodInput+`]}`)
	if a.status != 504 {
		t.Errorf("HTTP: %d %q", a.status, a.Error)
	}
	req := doubleMessage()
	req.Parameters = map[string]*oip.InferParameter{"timeout": {ParameterChoice: &oip.InferParameter_Int64Param{Int64Param: 50_000}}}
	if _, err := r.client().ModelInfer(soon(t), req); rpcstatus.Code(err) != codes.DeadlineExceeded {
		t.Errorf("gRPC parameter: %v", err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	if _, err := r.client().ModelInfer(ctx, doubleMessage()); rpcstatus.Code(err) != codes.DeadlineExceeded {
		t.Errorf("gRPC deadline: %v", err)
	}
	r.until("nothing waits in the ring", func() bool { return r.stats("double").QueueLength == 0 })
	r.idle()
}

func TestACallIsToldOfItsDeadlineBeforeTheTransportResetsIt(t *testing.T) {
	m := doubler(t)
	r := newRig(t, func(c *core.Config) {
		watchful(c)
		c.Pace.Early, c.Pace.EarlyShare = 2*patience-50*time.Millisecond, 1 // the transport's turn comes minutes later
	}, m) // no worker
	conn, err := grpc.NewClient(r.grpc, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithUserAgent("a stranger"))
	must.Do(t, err)
	defer conn.Close()
	rpc := oip.NewGRPCInferenceServiceClient(conn)
	for what, call := range map[string]func(ctx context.Context) error{
		"a call": func(ctx context.Context) error {
			_, err := rpc.ModelInfer(ctx, doubleMessage())
			return err
		},
		"a stream": func(ctx context.Context) error {
			s, err := rpc.ModelStreamInfer(ctx)
			if err == nil {
				_, err = s.Recv()
			}
			return err
		},
		"a stream that sends no more": func(ctx context.Context) error {
			s, err := rpc.ModelStreamInfer(ctx)
			if err == nil {
				err = errors.Join(s.Send(doubleMessage()), s.CloseSend())
			}
			for err == nil {
				_, err = s.Recv()
			}
			return err
		},
		"one who watches": func(ctx context.Context) error {
			s, err := healthpb.NewHealthClient(conn).Watch(ctx, &healthpb.HealthCheckRequest{})
			for err == nil {
				_, err = s.Recv()
			}
			return err
		},
	} {
		ctx, cancel := context.WithTimeout(context.Background(), 2*patience)
		if err := call(ctx); rpcstatus.Code(err) != codes.DeadlineExceeded || ctx.Err() != nil {
			t.Errorf("%s: %v, %v", what, err, ctx.Err())
		}
		cancel()
	}
	r.idle()
}

func TestAPriorityReachesTheRing(t *testing.T) {
	m := doubler(t)
	for key, value := range policy.New(policy.Priorities(2), policy.MaxQueue(1).At(1)) {
		m.Policy[key] = value
	}
	r := newRig(t, nil, m) // no worker: the second of level 1 finds its queue full
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, r.http+"/v2/models/double/infer",
		strings.NewReader(`{"parameters":{"priority":2},"inputs":[`+goodInput+`]}`))
	must.Do(t, err)
	go func() { _, _ = http.DefaultClient.Do(req) }()
	r.until("it waits", func() bool { return r.stats("double").QueueLength == 1 })
	a := r.infer("double", `{"parameters":{"priority":2},"inputs":[`+goodInput+`]}`)
	if a.status != 429 || a.header.Get("Retry-After") == "" {
		t.Errorf("%d %q, Retry-After %q", a.status, a.Error, a.header.Get("Retry-After"))
	}
	r.infer("double", `{"parameters":{"priority":3},"inputs":[`+goodInput+`]}`).is(t, "no such level", 400)
}

func TestAFullWindowIsToldAsBackPressure(t *testing.T) {
	m := doubler(t)
	r := newRig(t, func(c *core.Config) { c.Window, c.ClaimWait = 32, 50*time.Millisecond }, m) // no worker
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	c := r.client()
	for range 8 {
		go func() {
			for ctx.Err() == nil { // a slow machine may take longer than that for its first slot
				_, _ = c.ModelInfer(ctx, doubleMessage())
			}
		}()
	}
	r.until("the caller's share of the window is full", func() bool { return r.stats("double").QueueLength == 8 })
	if a := r.infer("double", goodBody); a.status != 429 || a.header.Get("Retry-After") == "" {
		t.Errorf("%d %q", a.status, a.Error)
	}
	if _, err := c.ModelInfer(soon(t), doubleMessage()); rpcstatus.Code(err) != codes.ResourceExhausted {
		t.Error(err)
	}
	cancel()
	r.idle()
}

func TestModelsComeAndGoWhileTheGatewayRuns(t *testing.T) {
	r := newRig(t, nil)
	r.infer("double", "{}").is(t, "before", 404)
	if rep, err := r.client().ModelReady(soon(t), &oip.ModelReadyRequest{Name: "double"}); err != nil || rep.Ready {
		t.Errorf("before: %v %v", rep, err)
	}
	m := doubler(t)
	leave := r.worker(m, double) // declares it
	r.served(goodBody)
	r.until("it is ready", func() bool { return r.get("/v2/models/double/ready") == 200 })
	leave()
	r.until("it is not ready without a worker", func() bool { return r.get("/v2/models/double/ready") >= 400 })
}

func TestABrokerThatComesBackIsServedAgainAndOneThatHasChangedToo(t *testing.T) {
	m := doubler(t)
	r := newRig(t, func(c *core.Config) { c.ClaimWait = 100 * time.Millisecond }, m)
	r.worker(m, double)
	r.served(goodBody)
	r.broker()
	if a := r.infer("double", goodBody); a.status != 503 || a.header.Get("Retry-After") == "" {
		t.Errorf("without a broker: %d %q", a.status, a.Error)
	}
	r.until("it is not ready", func() bool { return r.get("/v2/health/ready") == 503 })
	r.startBroker(m)
	r.served(goodBody)
	r.broker()
	other := modelConfig(t, "double", []string{"x:f32[2]"}, []string{"y:f32[2]"})
	r.startBroker(other)
	r.worker(other, double)
	r.served(`{"inputs":[{"name":"x","shape":[1,2],"datatype":"FP32","data":[1,2]}]}`)
	r.idle()
}

func TestBothLanesHaveSlotsOfASmallRing(t *testing.T) {
	m := doubler(t)
	m.Policy["slots"] = "16"
	r := newRig(t, func(c *core.Config) { c.ClaimWait = time.Second }, m)
	r.worker(m, double)
	r.served(goodBody)
	r.infer("double", `{"inputs":[{"name":"x","shape":[2,4],"datatype":"FP32","data":[1,2,3,4,5,6,7,8]}]}`).is(t, "two rows", 200)
	r.idle()
}

// Each lane attaches again by itself. A lane that kept asking for its old window
// would answer 503 for good, beside the other lane's 200.
func TestEveryLaneServesAgainWhenTheRestartedBrokerHasFewerSlots(t *testing.T) {
	m := doubler(t)
	m.Policy["slots"] = "1024"
	r := newRig(t, nil, m)
	r.worker(m, double)
	twoRows := `{"inputs":[{"name":"x","shape":[2,4],"datatype":"FP32","data":[1,2,3,4,5,6,7,8]}]}`
	served := func() {
		t.Helper()
		r.served(goodBody)
		r.served(twoRows)
		for _, body := range []string{goodBody, twoRows} {
			r.infer("double", body).is(t, body, 200)
		}
	}
	served()
	for _, slots := range []string{"64", "1024"} {
		r.broker()
		m.Policy["slots"] = slots
		r.startBroker(m)
		served()
	}
	r.idle()
}

func TestModelsThatWorkersDeclareAreAwaitedAfterARestartOfTheBroker(t *testing.T) {
	r := newRig(t, func(c *core.Config) { c.Pace.Workers = 24 * time.Hour })
	m := doubler(t)
	r.infer("nothing", "{}").is(t, "a model that was never there", 404)
	leave := r.worker(m, double)
	r.served(goodBody)
	known := callOf(t, r.formerly("double", "4", true))
	defer known.Done()
	old := r.g.Epoch()
	r.broker()
	leave() // or it would be back at once
	r.startBroker()
	r.until("the new broker is known", func() bool { return r.g.Epoch() != old })
	for _, path := range []string{"/v2/models/double/infer", "/v2/models/double/versions/1/infer"} {
		if a := r.post(path, nil, []byte(goodBody)); a.status != 503 || a.header.Get("Retry-After") == "" ||
			!strings.Contains(a.Error, "not back yet") {
			t.Errorf("%s: %d %q", path, a.status, a.Error)
		}
	}
	if _, err := r.client().ModelInfer(soon(t), doubleMessage()); rpcstatus.Code(err) != codes.Unavailable {
		t.Errorf("gRPC: %v", err)
	}
	if err := known.Run(soon(t)); core.MeaningOf(err).HTTP != 503 {
		t.Errorf("a call that had found it: %v", err)
	}
	r.worker(m, double)
	r.served(goodBody)
	r.idle()
}

func TestDrainingTurnsNotReadyFirstAndFinishesWhatWasAccepted(t *testing.T) {
	t.Parallel()
	m := doubler(t)
	endDelay := make(chan struct{})
	r := newRig(t, func(c *core.Config) { c.DrainDelay = time.Hour; c.SetEndDelay(endDelay) }, m)
	_, release := r.holds(m)
	c := r.client()
	var wg sync.WaitGroup
	results := make(chan error, 3)
	post := func() {
		if a := r.infer("double", goodBody); a.status != 200 {
			results <- fmt.Errorf("HTTP: %d %s", a.status, a.Error)
		}
	}
	wg.Go(post)
	wg.Go(func() {
		if _, err := c.ModelInfer(soon(t), doubleMessage()); err != nil {
			results <- err
		}
	})
	r.underWay(2)
	r.connect() // a connection without a request must not hold it up
	stopped := make(chan error, 1)
	go func() { stopped <- r.stop() }()
	r.eventually("readiness is false", func() error {
		rep, err := http.Get(r.http + "/v2/health/ready")
		if err != nil {
			return err
		}
		rep.Body.Close()
		if rep.StatusCode != 503 || !rep.Close { // no caller may go on using its connection
			return fmt.Errorf("%d, its connection ends: %t", rep.StatusCode, rep.Close)
		}
		return nil
	})
	if rep, err := http.Head(r.http + "/v2"); err != nil || !rep.Close { // net/http's
		t.Errorf("%v %v", rep, err)
	}
	wg.Go(post)
	r.underWay(3) // it was still taken
	close(endDelay)
	r.until("past the delay it waits for the three", func() bool { return r.g.Draining.Load() == core.Refusing })
	select {
	case err := <-stopped:
		t.Fatalf("it ended with requests under way: %v", err)
	default:
	}
	release()
	wg.Wait()
	close(results)
	for err := range results {
		t.Error(err)
	}
	must.Check(t, <-stopped)
}

func TestDrainingEndsStreamsThatNothingIsUnderWayIn(t *testing.T) {
	m := doubler(t)
	r := newRig(t, nil, m)
	h, release := r.holds(m)
	conn, err := grpc.NewClient(r.grpc, grpc.WithTransportCredentials(insecure.NewCredentials()))
	must.Do(t, err)
	defer conn.Close()
	watch, err := healthpb.NewHealthClient(conn).Watch(soon(t), &healthpb.HealthCheckRequest{})
	must.Do(t, err)
	if _, err := watch.Recv(); err != nil {
		t.Fatal(err)
	}
	stream, err := oip.NewGRPCInferenceServiceClient(conn).ModelStreamInfer(soon(t))
	must.Do(t, err)
	must.Do(t, stream.Send(doubleMessage()))
	<-h.began
	stopped := make(chan error, 1)
	go func() { stopped <- r.stop() }()
	for err == nil { // NOT_SERVING may come first
		_, err = watch.Recv()
	}
	if rpcstatus.Code(err) != codes.Unavailable {
		t.Errorf("watching: %v", err)
	}
	release()
	if rep, err := stream.Recv(); err != nil || rep.ErrorMessage != "" {
		t.Errorf("what was accepted: %v %v", rep, err)
	}
	if _, err := stream.Recv(); rpcstatus.Code(err) != codes.Unavailable {
		t.Errorf("a stream: %v", err)
	}
	must.Check(t, <-stopped)
}

func TestAStreamIsAnsweredInOrderAndAtOnce(t *testing.T) {
	r := doublingRig(t, nil)
	s, err := r.client().ModelStreamInfer(soon(t))
	must.Do(t, err)
	const n = 200
	go func() {
		for i := range n {
			req := doubleMessage()
			req.Id = fmt.Sprint(i)
			if i%10 == 3 {
				req.Inputs[0].Shape[1] = 5
			}
			if err := s.Send(req); err != nil {
				t.Error(err)
				return
			}
		}
		_ = s.CloseSend()
	}()
	for i := range n {
		rep, err := s.Recv()
		must.Do(t, err)
		if got := rep.InferResponse.GetId(); got != fmt.Sprint(i) {
			t.Fatalf("answer %d is of request %s", i, got)
		}
		if (i%10 == 3) != (rep.ErrorMessage != "") {
			t.Errorf("%d: %q", i, rep.ErrorMessage)
		} else if rep.ErrorMessage == "" && !bytes.Equal(rep.InferResponse.RawOutputContents[0], floats(2, 4, 6, 8)) {
			t.Errorf("%d: %v", i, rep)
		}
	}
	if _, err := s.Recv(); !errors.Is(err, io.EOF) {
		t.Errorf("after the last: %v", err)
	}
	r.idle()
}

func TestLargeAnswersComeFromTheSlotsAndGiveThemBack(t *testing.T) {
	t.Parallel()
	m := modelConfig(t, "big", []string{"x:u8[300000]"}, []string{"y:u8[300000]"})
	r := newRig(t, nil, m)
	r.worker(m, echo)
	x := make([]byte, 3*300_000)
	for i := range x {
		x[i] = byte(i * 7)
	}
	c := r.client()
	ask := &oip.ModelInferRequest{ModelName: "big", Inputs: []*oip.ModelInferRequest_InferInputTensor{rpcInput("x", "UINT8", 3, 300_000)},
		RawInputContents: [][]byte{x}}
	for range 10 {
		rep, err := c.ModelInfer(soon(t), ask)
		must.Do(t, err)
		if !bytes.Equal(rep.RawOutputContents[0], x) {
			t.Fatal("other bytes")
		}
		a := r.inferBinary("big", `{"inputs":[{"name":"x","shape":[3,300000],"datatype":"UINT8",`+
			`"parameters":{"binary_data_size":900000}}],"parameters":{"binary_data_output":true}}`, x)
		if a.status != 200 || !bytes.Equal(a.raw, x) {
			t.Fatalf("%d %s", a.status, a.Error)
		}
	}
	s, err := c.ModelStreamInfer(soon(t))
	must.Do(t, err)
	for range 5 {
		must.Do(t, s.Send(ask))
		rep, err := s.Recv()
		must.Do(t, err)
		if !bytes.Equal(rep.InferResponse.GetRawOutputContents()[0], x) {
			t.Fatal("other bytes in a stream")
		}
	}
	_ = s.CloseSend()
	// Callers that leave while the answer is on its way.
	for i := range 50 {
		ctx, cancel := context.WithCancel(soon(t))
		time.AfterFunc(time.Duration(i)*100*time.Microsecond, cancel)
		_, _ = c.ModelInfer(ctx, ask)
		cancel()
	}
	r.idle()
}

// formerly returns a model as the gateway knew it before: with tensors of that size,
// and with closed lanes if it went.
func (r *rig) formerly(name string, size string, went bool) *core.Model {
	r.t.Helper()
	k := core.NewModel(r.g, &admin.Model{Name: name, Signature: signature(r.t, []string{"x:f32[" + size + "]"},
		[]string{"y:f32[" + size + "]"})})
	if went {
		k.Close()
	}
	r.t.Cleanup(k.Close)
	return k
}

// callOf is a checked call of a model: one row of ones.
func callOf(t *testing.T, k *core.Model) *core.Call {
	t.Helper()
	spec := &k.Sig.Inputs[0]
	c := core.NewCall(k, nil, &core.Caller{Use: &core.Usage{}})
	in := c.AddInput()
	in.Name, in.DType, in.Shape, in.Size = spec.Name, tensor.F32, append([]int{1}, spec.Shape...), spec.RowBytes()
	ones := core.BytesSource(bytes.Repeat(floats(1), in.Size/4))
	in.Src = &ones
	must.Do(t, c.Check())
	return c
}

// The broker was restarted while the call was on its way. A call of a model that
// has other tensors now would be cut to the new size, and answered.
func TestACallFollowsItsModelUnlessThatHasOtherTensorsOrIsGone(t *testing.T) {
	r := doublingRig(t, nil)
	for _, k := range []struct {
		name, size string
		went       bool
		want       error
	}{
		{"double", "4", true, nil},
		{"double", "2", false, status.ErrSignatureMismatch}, {"double", "2", true, status.ErrSignatureMismatch},
		{"double", "8", false, status.ErrSignatureMismatch}, {"double", "8", true, status.ErrSignatureMismatch},
		{"gone", "4", true, status.ErrUnknownModel},
	} {
		c := callOf(t, r.formerly(k.name, k.size, k.went))
		must.Fail(t, fmt.Sprint(k), c.Run(soon(t)), k.want)
		if k.want == nil && !bytes.Equal(bytes.Join(c.Outputs[0].Parts, nil), floats(2, 2, 2, 2)) {
			t.Errorf("it was answered %v", c.Outputs[0].Parts)
		}
		c.Done()
	}
	r.idle()
}
