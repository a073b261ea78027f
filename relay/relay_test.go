// SPDX-License-Identifier: Apache-2.0

package relay

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/gateway/oip"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/worker"
)

func TestABatchTravelsAsOneAndItsRequestsFailAlone(t *testing.T) {
	sig := signature(t, "x:i32[1]", "y:i32[1]")
	var batches, rows atomic.Int32
	busy, carryOn := make(chan struct{}), make(chan struct{})
	h := newHost(t, sig, func(ctx context.Context, b *worker.Batch) error {
		if worker.Row[int32](b.Input(0), 0)[0] == 1000 {
			close(busy)
			<-carryOn
			return nil
		}
		batches.Add(1)
		rows.Add(int32(b.Rows()))
		return double(ctx, b)
	}, nil)
	// A broker may read the first of several requests before the next is there. Here
	// it waits for all four, and there the worker is busy until they have come.
	l := newLocal(t, func(c *Config) {
		c.Policy = policy.New(policy.MaxBatchSize(4), policy.WaitTime(patience), policy.Slots(64))
	}, h.address)
	there, err := client.Dial(soon(t), "m", client.WithSocket(h.broker.Socket()))
	must.Do(t, err)
	defer there.Close()
	commit(t, there, 1000)
	<-busy
	list := commit(t, l.dial(), 2, 4, 5, 6)
	l.eventually("all four are there", func() bool {
		s, err := admin.New(h.broker.Socket()).Stats(soon(t))
		return err == nil && s.Model("m").QueueLength == 4
	})
	close(carryOn)
	for i, want := range []int32{4, 8, 0, 12} {
		err := list[i].Wait(soon(t))
		if i == 2 {
			if !errors.Is(err, status.ErrFailed) || !strings.Contains(err.Error(), "5 is odd") {
				t.Errorf("the request that fails there: %v", err)
			}
			continue
		}
		if err != nil || number(t, list[i]) != want {
			t.Errorf("request %d: %v", i, err)
		}
	}
	if batches.Load() != 1 || rows.Load() != 4 {
		t.Errorf("%d rows in %d batches there, want 4 in 1", rows.Load(), batches.Load())
	}
}

func TestPriorityDeadlineAndStatusTravelAndWhatKilledAWorkerThereIsNotSentAgain(t *testing.T) {
	sig := signature(t, "x:i32[1]", "y:i32[1]")
	seen := make(chan [2]int64, 16)
	deadly := func(_ context.Context, b *worker.Batch) error {
		seen <- [2]int64{int64(b.Level()), b.Request(0).Deadline}
		b.Fail(0, fmt.Errorf("%w: it killed two", status.ErrWorkerDied))
		return nil
	}
	l := newLocal(t, nil, newHost(t, sig, deadly, nil).address, newHost(t, sig, deadly, nil).address)
	q, err := l.dial().Claim(soon(t), 1)
	if err == nil {
		err = errors.Join(q.SetPriority(1), q.SetDeadline(time.Now().Add(patience)), q.Commit(soon(t)))
	}
	must.Do(t, err)
	if err := q.Wait(soon(t)); !errors.Is(err, status.ErrWorkerDied) || !strings.Contains(err.Error(), "it killed two") {
		t.Errorf("ended with %v", err)
	}
	if got := <-seen; got[0] != 1 || got[1] == 0 || len(seen) != 0 {
		t.Errorf("level %d, deadline %d, and %d runs more", got[0], got[1], len(seen))
	}
}

func TestCancellationTravels(t *testing.T) {
	sig := signature(t, "x:i32[1]", "y:i32[1]")
	gone, running := make(chan struct{}), make(chan struct{})
	begin, end := sync.OnceFunc(func() { close(running) }), sync.OnceFunc(func() { close(gone) }) // it may be sent again
	h := newHost(t, sig, func(_ context.Context, b *worker.Batch) error {
		begin()
		for until := time.Now().Add(patience); time.Now().Before(until); time.Sleep(time.Millisecond) {
			if !b.Waiting(0) {
				end()
				break
			}
		}
		return nil
	}, nil)
	l := newLocal(t, nil, h.address)
	q := commit(t, l.dial(), 2)[0]
	<-running
	must.Do(t, q.Cancel())
	select {
	case <-gone:
	case <-time.After(patience):
		t.Fatal("the far side never heard of it")
	}
	if err := q.Wait(soon(t)); !errors.Is(err, status.ErrCanceled) {
		t.Errorf("ended with %v", err)
	}
}

func TestLargeBatchesTravel(t *testing.T) {
	const row = 602112
	sig := signature(t, fmt.Sprintf("x:u8[%d]", row), fmt.Sprintf("y:u8[%d]", row))
	h := newHost(t, sig, func(_ context.Context, b *worker.Batch) error {
		for i := range b.Rows() {
			copy(b.Output(0).Bytes(i), b.Input(0).Bytes(i))
		}
		return nil
	}, nil)
	l := newLocal(t, func(c *Config) { c.Policy = policy.New(policy.MaxBatchSize(32), policy.Slots(64)) }, h.address)
	var requests [][]any
	for i := range 32 {
		x := make([]byte, row)
		for k := range x {
			x[k] = byte(k*7 + i)
		}
		requests = append(requests, []any{tensor.Of("x", x, 1, row)})
	}
	for i, q := range fill(t, l.dial(), requests...) {
		must.Do(t, q.Wait(soon(t)))
		if out, err := q.OutputBytes(0); err != nil || !bytes.Equal(out, requests[i][0].(tensor.Tensor).Data) {
			t.Fatalf("request %d: another answer of %d bytes, %v", i, len(out), err)
		}
	}
}

func TestTextsTravel(t *testing.T) {
	sig := signature(t, "x:str[2,<=12]", "y:str[<=24]")
	h := newHost(t, sig, func(_ context.Context, b *worker.Batch) error {
		for i := range b.Rows() {
			b.Output(0).SetTexts(i, strings.Join(b.Input(0).Texts(i), ""))
		}
		return nil
	}, nil)
	c := newLocal(t, nil, h.address).dial()
	outs, err := c.Infer(soon(t), []string{"grüße, ", "a\x00b", "", "", "123456789012", "123456789012"})
	must.Do(t, err)
	got, err := tensor.Texts(outs[0])
	if want := []string{"grüße, a\x00b", "", "123456789012123456789012"}; err != nil || !slices.Equal(got, want) {
		t.Errorf("%q, %v", got, err)
	}
	if _, err := c.Infer(soon(t), []int32{1}); !errors.Is(err, status.ErrDType) || !strings.Contains(err.Error(), "want a string") {
		t.Errorf("numbers for text: %v", err)
	}
}

func TestRequestsKeepTheirSizesOnTheWay(t *testing.T) {
	sig := signature(t, "x:u8[<=9,2]", "y:u8[<=9,2]")
	same := func(_ context.Context, b *worker.Batch) error {
		for i := range b.Len() {
			if err := b.SetOutputDims(i, int(b.Request(i).Dims()[0])); err != nil {
				return err
			}
			for row := b.Request(i).Row; row < b.Request(i).Row+b.Request(i).Rows; row++ {
				copy(b.Output(0).Bytes(row), b.Input(0).Bytes(row))
			}
		}
		return nil
	}
	h := newHost(t, sig, same, nil)
	for name, p := range map[string]policy.Policy{
		"exact": policy.New(), "buckets": {"buckets.x.0": "4,9"}, "ragged": policy.New(policy.Ragged(true)),
	} {
		t.Run(name, func(t *testing.T) {
			l := newLocal(t, func(c *Config) { c.Policy = p }, h.address)
			c := l.dial()
			var all sync.WaitGroup
			for n := range 9 {
				all.Go(func() {
					data := bytes.Repeat([]byte{byte('a' + n), byte('A' + n)}, n+1)
					outs, err := c.Infer(soon(t), tensor.Of("x", data, 1, n+1, 2))
					if err != nil || !bytes.Equal(outs[0].Data, data) {
						t.Errorf("size %d: %v, %v", n+1, outs, err)
					}
				})
			}
			all.Wait()
		})
	}
}

func TestAHostThatGoesAwayIsLeftAndComesBack(t *testing.T) {
	sig := signature(t, "x:i32[1]", "y:i32[1]")
	a, b := newHost(t, sig, double, nil), newHost(t, sig, double, nil)
	l := newLocal(t, nil, a.address, b.address)
	c := l.dial()
	stop := make(chan struct{})
	var all sync.WaitGroup
	for g := range 4 {
		all.Go(func() {
			for i := int32(0); ; i += 2 {
				select {
				case <-stop:
					return
				default:
				}
				q := commit(t, c, int32(g)*100000+i)[0]
				if err := q.Wait(soon(t)); err != nil {
					t.Errorf("a request was lost: %v", err)
				} else if got := number(t, q); got != 2*(int32(g)*100000+i) {
					t.Errorf("answer %d of %d", got, int32(g)*100000+i)
				}
				_ = q.Release()
			}
		})
	}
	said := func(what string) int {
		return strings.Count(l.log.String(), fmt.Sprintf("msg=%q host=%s", what, a.address))
	}
	for range 3 {
		left, back := said("host left"), said("host is back")
		a.stop()
		l.eventually("it is left", func() bool { return said("host left") > left })
		a.serve(nil)
		l.eventually("it is back", func() bool { return said("host is back") > back })
	}
	close(stop)
	all.Wait()
}

func TestABatchIsSentWhileTheOneBeforeIsNotAnswered(t *testing.T) {
	sig := signature(t, "x:i32[1]", "y:i32[1]")
	begun, goOn := make(chan struct{}, 3), make(chan struct{})
	fn := func(ctx context.Context, b *worker.Batch) error {
		begun <- struct{}{}
		<-goOn
		return double(ctx, b)
	}
	l := newLocal(t, nil, newHost(t, sig, fn, nil).address, newHost(t, sig, fn, nil).address)
	c := l.dial()
	list := commit(t, c, 2) // with its end the broker learns that two are welcome
	<-begun
	goOn <- struct{}{}
	must.Do(t, list[0].Wait(soon(t)))
	for _, v := range []int32{4, 6} {
		list = append(list, commit(t, c, v)...)
		<-begun
	}
	close(goOn)
	for i, q := range list {
		if err := q.Wait(soon(t)); err != nil || number(t, q) != 4*int32(i+1) {
			t.Errorf("request %d: %v", i, err)
		}
	}
}

func TestTheLocalBrokerMayBeRestarted(t *testing.T) {
	sig := signature(t, "x:i32[1]", "y:i32[1]")
	h := newHost(t, sig, double, nil)
	l := newLocal(t, nil, h.address)
	c := l.dial()
	for range 3 {
		l.eventually("it is answered", func() bool {
			q, err := c.Claim(soon(t), 1)
			if err != nil {
				return false
			}
			defer q.Release()
			return q.Commit(soon(t)) == nil && q.Wait(soon(t)) == nil
		})
		must.Do(t, errors.Join(l.broker.Stop(), l.broker.Start()))
	}
}

func TestAHostWithAnotherSignatureIsLeftOut(t *testing.T) {
	var wrong atomic.Int32
	a := newHost(t, signature(t, "x:i32[1]", "y:i32[1]"), double, nil)
	b := newHost(t, signature(t, "x:i32[2]", "y:i32[2]"), func(context.Context, *worker.Batch) error { wrong.Add(1); return nil }, nil)
	b.stop() // until the other has answered
	l := newLocal(t, nil, a.address, b.address)
	c := l.dial()
	b.serve(nil)
	l.eventually("it is said", func() bool { return l.log.Has("as the first host told") })
	for i := range int32(20) {
		q := commit(t, c, 2*i)[0]
		must.Check(t, q.Wait(soon(t)))
		_ = q.Release()
	}
	if wrong.Load() != 0 {
		t.Error("a batch went to the wrong model")
	}
}

func TestAnOlderGatewayIsServedWithWholeBatchesAndNamed(t *testing.T) {
	h := newHost(t, signature(t, "x:i32[1]", "y:i32[1]"), double, nil)
	l := newLocal(t, nil, standBefore(t, h, func(b before) oip.GRPCInferenceServiceServer { return older{b} }))
	c := l.dial()
	for i, q := range commit(t, c, 2, 4, 6) {
		if err := q.Wait(soon(t)); err != nil || number(t, q) != int32(4*(i+1)) {
			t.Errorf("request %d: %v", i, err)
		}
		_ = q.Release()
	}
	if q := commit(t, c, 5)[0]; !strings.Contains(fmt.Sprint(q.Wait(soon(t))), "5 is odd") {
		t.Error("its error does not travel")
	}
	if !l.log.Has("an older ringbatch") || !l.log.Has("0.0.1") {
		t.Error("nothing says that it is older")
	}
}

// liar is a host whose answers have the right number of bytes.
type liar struct {
	before
	change func(o *oip.ModelInferResponse)
}

func (l *liar) ModelInfer(ctx context.Context, r *oip.ModelInferRequest) (*oip.ModelInferResponse, error) {
	a, err := l.behind.ModelInfer(ctx, r)
	if err == nil {
		l.change(a)
	}
	return a, err
}

func TestAnAnswerOfAnotherShapeTypeOrNameFails(t *testing.T) {
	h := newHost(t, signature(t, "x:i32[4]", "y:i32[2,2] z:i32[]"), func(_ context.Context, b *worker.Batch) error {
		for i := range b.Rows() {
			copy(b.Output(0).Bytes(i), b.Input(0).Bytes(i))
			copy(b.Output(1).Bytes(i), b.Input(0).Bytes(i))
		}
		return nil
	}, nil)
	far := &liar{change: func(*oip.ModelInferResponse) {}}
	l := newLocal(t, func(c *Config) { c.Attempts = 1 }, standBefore(t, h,
		func(b before) oip.GRPCInferenceServiceServer { far.before = b; return far }))
	c := l.dial()
	ask := func() error {
		q := fill(t, c, []any{[]int32{1, 2, 3, 4, 5, 6, 7, 8}})[0]
		defer q.Release()
		return q.Wait(soon(t))
	}
	must.Do(t, ask())
	for what, change := range map[string]func(a *oip.ModelInferResponse){
		`"y" has shape`:      func(a *oip.ModelInferResponse) { a.Outputs[0].Shape = []int64{4, 2, 1} },
		`"z" has shape`:      func(a *oip.ModelInferResponse) { a.Outputs[1].Shape = []int64{1, 2} },
		`"y" is of type`:     func(a *oip.ModelInferResponse) { a.Outputs[0].Datatype = "FP32" },
		`"z" is missing`:     func(a *oip.ModelInferResponse) { a.Outputs[1].Name = "w" },
		`"y" is there twice`: func(a *oip.ModelInferResponse) { a.Outputs[1].Name = "y" },
	} {
		far.change = change
		if err := ask(); err == nil || !strings.Contains(err.Error(), what) {
			t.Errorf("%s: %v", what, err)
		}
	}
}

func TestEachProblemOfAHostIsOneClearSentence(t *testing.T) {
	old := httptest.NewServer(http.NotFoundHandler()) // a balancer that speaks HTTP/1
	defer old.Close()
	mute, err := net.Listen("tcp", "127.0.0.1:0") // accepts, and says nothing
	must.Do(t, err)
	defer mute.Close()
	good := newHost(t, signature(t, "x:i32[1]", "y:i32[1]"), double, nil)
	http1 := strings.TrimPrefix(old.URL, "http://")
	l := newLocal(t, nil, good.address, "no..such.host:8001", "127.0.0.1:1", http1, mute.Addr().String())
	if err := commit(t, l.dial(), 2)[0].Wait(soon(t)); err != nil {
		t.Errorf("the good host: %v", err)
	}
	for _, want := range []string{"there is no such host", "nothing listens there", "is that the gRPC port"} {
		l.eventually(want, func() bool { return l.log.Has(want) })
	}
}

// Whether the broker ends it or the relay, which has it. After a few of them the broker knows
// that the next will not be in time while the relay has one.
func TestWithoutAHostARequestExpires(t *testing.T) {
	h := newHost(t, signature(t, "x:i32[1]", "y:i32[1]"), double, nil)
	l := newLocal(t, nil, h.address)
	c := l.dial()
	h.stop()
	l.eventually("it is left", func() bool { return l.log.Has("host left") })
	for range 5 {
		q, err := c.Claim(soon(t), 1)
		if err == nil {
			err = q.SetDeadline(time.Now().Add(50 * time.Millisecond))
		}
		if err == nil {
			err = q.Commit(soon(t))
		}
		if err == nil {
			err = q.Wait(soon(t))
		}
		if !errors.Is(err, status.ErrExpired) && !errors.Is(err, status.ErrOverloaded) {
			t.Error(err)
		}
	}
}

func TestEveryKindOfTargetIsTaken(t *testing.T) {
	for target, addresses := range map[string]int{
		"x:1, y:2": 2, "[::1]:8001": 1, "dns:8001": 1, "unix:8001": 0, "dns:x:8001": 0, "dns://8.8.8.8/x:8001": 0, "unix:/run/g.sock": 0,
		"unix-abstract:g": 0, "UNIX:/run/g.sock": 0, "DNS:///x:8001": 0, "passthrough:x:1": 0, "passthrough:///x:1": 0,
	} {
		c := Config{Model: "m", Target: target}
		if n := len(c.list()); n != addresses || c.checkAddresses() != nil {
			t.Errorf("%s: %d addresses, want %d; %v", target, n, addresses, c.checkAddresses())
		}
	}
}

func TestARelayThatCannotBeIsRefusedInOneSentence(t *testing.T) {
	for _, c := range []struct {
		cfg  Config
		want string
	}{
		{Config{Model: "m"}, "a target"},
		{Config{Model: "m", Target: "x:1, localhost"}, "is it localhost:8001?"},
		{Config{Model: "m", Target: "https://x:8001/"}, "is it x:8001?"},
		{Config{Model: "m", Target: "x:"}, "is it x:8001?"},
		{Config{Model: "m", Target: "::1"}, "is it [::1]:8001?"},
		{Config{Model: "m", Target: "[::1]"}, "is it [::1]:8001?"},
		{Config{Model: "m", Target: "x:80001"}, "is it x:8001?"},
		{Config{Model: "m", Target: "dns:///gpus.example.com"}, "is it gpus.example.com:8001?"},
		{Config{Model: "m", Target: "DNS:///gpus.example.com"}, "is it gpus.example.com:8001?"},
		{Config{Model: "m", Target: "dns:///x:8001/"}, "is it x:8001?"},
		{Config{Model: "m", Target: "HTTPS://x:8001/v2/health"}, "is it x:8001?"},
		{Config{Model: "m", Target: "grpc://x:8001"}, "is it x:8001?"},
		{Config{Model: "m", Target: "ipv4:///x:8001"}, "is it x:8001?"},
		{Config{Model: "m", Target: "ipv4:10.0.0.1:8001"}, "which are HOST:PORT"},
		{Config{Model: "m", Target: "vsock:2:8001"}, "which are HOST:PORT"},
		{Config{Model: "m", Target: "::1:8001"}, "is it [::1:8001]:8001?"},
		{Config{Model: "m", Target: "x:1", InFlight: 257}, "1..256"},
		{Config{Model: "m", Target: "x:1", TokenFile: "t"}, "plain sight"},
		{Config{Model: "m", Target: "x:1", CertFile: "c"}, "its key"},
		{Config{Model: "m", Target: "x:1", CAFile: "/no/such/file"}, "no such file"},
	} {
		if err := Run(soon(t), c.cfg); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v: %v", c.cfg, err)
		}
	}
}
