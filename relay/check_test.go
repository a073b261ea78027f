// SPDX-License-Identifier: Apache-2.0

package relay

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/balancer"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	rpcstatus "google.golang.org/grpc/status"

	"github.com/ringbatch/ringbatch/broker"
	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/gateway/core"
	"github.com/ringbatch/ringbatch/gateway/oip"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/test/testbed"
	"github.com/ringbatch/ringbatch/test/testlog"
	"github.com/ringbatch/ringbatch/worker"
)

// unheard is a host whose first answers come too late, because the relay did not run.
type unheard struct {
	oip.GRPCInferenceServiceClient
	left int
	most int32 // rows of its batches; 0: 8
}

func (u *unheard) ServerMetadata(context.Context, *oip.ServerMetadataRequest, ...grpc.CallOption) (*oip.ServerMetadataResponse, error) {
	if u.left > 0 {
		u.left--
		time.Sleep(2 * mostLate)
		return nil, rpcstatus.Error(codes.DeadlineExceeded, "")
	}
	return &oip.ServerMetadataResponse{}, nil
}

func (u *unheard) ModelMetadata(context.Context, *oip.ModelMetadataRequest, ...grpc.CallOption) (*oip.ModelMetadataResponse, error) {
	number := func(name string) []*oip.ModelMetadataResponse_TensorMetadata {
		return []*oip.ModelMetadataResponse_TensorMetadata{{Name: name, Datatype: "INT32", Shape: []int64{-1, 1}}}
	}
	return &oip.ModelMetadataResponse{Inputs: number("x"), Outputs: number("y")}, nil
}

func (u *unheard) ModelConfig(context.Context, *oip.ModelConfigRequest, ...grpc.CallOption) (*oip.ModelConfigResponse, error) {
	return &oip.ModelConfigResponse{Config: &oip.ModelConfig{MaxBatchSize: cmp.Or(u.most, 8)}}, nil
}

func (u *unheard) ModelReady(context.Context, *oip.ModelReadyRequest, ...grpc.CallOption) (*oip.ModelReadyResponse, error) {
	return &oip.ModelReadyResponse{Ready: true}, nil
}

func TestWhatTheUserSaysOfTensorsHasToAgreeWithTheFarSide(t *testing.T) {
	meta := func(name string, shape ...int64) []*oip.ModelMetadataResponse_TensorMetadata {
		return []*oip.ModelMetadataResponse_TensorMetadata{{Name: name, Datatype: "INT32", Shape: append([]int64{-1}, shape...)}}
	}
	there := &oip.ModelMetadataResponse{Inputs: meta("x", -1, 4), Outputs: meta("y", 4)} // x is open in one dimension
	ours := metadata.Pairs(oip.SignatureHeader, "x:i32[<=8,4] -> y:i32[4]")
	for _, c := range []struct {
		header metadata.MD
		input  string
		want   string // of the error
	}{
		{nil, "", "say how large it can be"},
		{nil, "x:i32[<=8,4]", ""},
		{nil, "x:i32[8,4]", ""},
		{nil, "x:i32[<=8,5]", "says x:i32[<=8,5]"},
		{nil, "x:i32[<=8,<=4]", "says x:i32[<=8,<=4]"},
		{nil, "x:i64[<=8,4]", "says x:i64[<=8,4]"},
		{ours, "", ""},
		{ours, "x:i32[<=8,4]", ""},
		{ours, "x:i32[<=9,4]", "says x:i32[<=9,4]"},
		{ours, "z:i32[<=8,4]", "says z:i32[<=8,4]"},
		{metadata.Pairs(oip.SignatureHeader, "x:i32[4] -> y:i32[4] state h:f32[2]"), "", "with state, which a relay cannot keep"},
	} {
		r := &relay{}
		if c.input != "" {
			spec, err := tensor.ParseSpec(c.input)
			must.Do(t, err)
			r.cfg.Inputs = []tensor.Spec{spec}
		}
		_, err := r.signatureOf(there, c.header)
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("--input %q, header %v: %v, want %q", c.input, c.header, err, c.want)
		}
	}
	r := &relay{cfg: Config{Outputs: []tensor.Spec{{Name: "z", DType: tensor.I32, Shape: []int{4}}}}}
	if _, err := r.signatureOf(there, ours); err == nil || !strings.Contains(err.Error(), "--output says z:i32[4]") {
		t.Errorf("an output that it does not have: %v", err)
	}
}

func TestAServerThatIsLoadedAnewWithSmallerBatchesGetsNoLargerOnes(t *testing.T) {
	p := newHosts(slog.New(slog.DiscardHandler), 1)
	h, far := p.add("h"), &unheard{}
	r := &relay{cfg: Config{CheckTimeout: patience}, log: slog.New(slog.DiscardHandler), hosts: p, known: make(chan struct{}), service: far}
	known := false
	for _, most := range []int32{8, 4, 16} {
		far.most = most
		if err := r.checkOnce(soon(t), h, &known); err != nil || h.maxBatch != int(most) {
			t.Errorf("%d rows there, %d here: %v", most, h.maxBatch, err)
		}
	}
	if far.most = -1; r.checkOnce(soon(t), h, &known) == nil {
		t.Error("it takes no batches, and nobody minds")
	}
}

func TestARelayThatStoodStillAsksAgainBeforeItLeavesAHost(t *testing.T) {
	for unheardAnswers, left := range map[int]bool{1: false, 2: true} {
		log := &testlog.Log{}
		p := newHosts(slog.New(slog.NewTextHandler(log, nil)), 1)
		h := p.add("h")
		h.sub = struct{ balancer.SubConn }{} // it needs no connection
		r := &relay{cfg: Config{CheckTimeout: time.Millisecond, CheckInterval: time.Millisecond}, hosts: p, known: make(chan struct{}),
			service: &unheard{left: unheardAnswers}}
		ctx, cancel := context.WithCancel(soon(t))
		go func() {
			defer cancel()
			for {
				changed := p.wait()
				if usable, _ := p.state(); usable > 0 {
					return
				}
				select {
				case <-changed:
				case <-ctx.Done():
					return
				}
			}
		}()
		r.checkHost(ctx, h)
		if log.Has("host left") != left {
			t.Errorf("%d answers were not heard: left is %v, want %v", unheardAnswers, !left, left)
		}
	}
}

// taken is a batch of one request that a worker has taken, for a trip without Run.
type taken struct {
	*local
	batch    *worker.Batch
	settings policy.Settings
	q        client.Request
}

func take(t *testing.T) *taken {
	t.Helper()
	b := &taken{local: &local{t: t, log: &testlog.Log{}}}
	b.broker = testbed.StartOnHeap(t, broker.Config{DrainTime: time.Millisecond})
	w, err := worker.Attach(soon(t), worker.Config{Model: "m", Signature: signature(t, "x:i32[1]", "y:i32[1]"), Socket: b.broker.Socket(), Policy: policy.New(policy.WaitTime(0))})
	must.Do(t, err)
	t.Cleanup(w.Close)
	b.q = commit(t, b.dial(), 2)[0]
	if b.batch, err = w.Next(soon(t)); err != nil {
		t.Fatal(err)
	}
	b.settings, err = policy.New(policy.WaitTime(0)).Resolve(nil)
	must.Do(t, err)
	return b
}

// trip is the batch's, with these hosts and no connection to them.
func (b *taken) trip(p *hosts) *trip {
	r := &relay{log: slog.New(slog.NewTextHandler(b.log, nil)), hosts: p, posted: map[*exchange]struct{}{}}
	return newTrip(r, b.batch, &b.settings)
}

func TestAFaultOfTheRelayFailsItsBatchAndNothingElse(t *testing.T) {
	b := take(t)
	hosts, byName := usableHosts("h")
	trip := b.trip(hosts) // sending panics
	trip.start()
	if h := byName["h"]; h.inFlight != 0 || len(h.calls) != 0 || len(trip.r.posted) != 0 {
		t.Errorf("the host still has %d calls of it (%d to cancel), %d are watched", h.inFlight, len(h.calls), len(trip.r.posted))
	}
	trip.finish()
	if err := b.q.Wait(soon(t)); !errors.Is(err, status.ErrFailed) || !strings.Contains(err.Error(), "the relay panicked: ") {
		t.Errorf("it ended with %v", err)
	}
	if n := strings.Count(b.log.String(), "the relay panicked"); n != 1 {
		t.Errorf("it was sent %d times", n)
	}
}

func TestARequestWithoutAnAnswerNeverEndsWell(t *testing.T) {
	t.Run("a fault of ours", func(t *testing.T) {
		b := take(t)
		b.trip(nil).failUnanswered()
		b.batch.Complete()
		if err := b.q.Wait(soon(t)); !errors.Is(err, status.ErrFailed) || !strings.Contains(err.Error(), errNoAnswer.Error()) {
			t.Errorf("it ended with %v", err)
		}
	})
	t.Run("the broker is gone", func(t *testing.T) {
		b := take(t)
		must.Do(t, b.broker.Stop())
		b.eventually("the worker learns it", func() bool { return !b.batch.Waiting(0) })
		trip := b.trip(newHosts(slog.New(slog.DiscardHandler), 8))
		trip.start()
		trip.finish()
		if err := b.q.Wait(soon(t)); !errors.Is(err, status.ErrBrokerGone) {
			t.Errorf("it ended with %v", err)
		}
	})
}

func TestAPartIsAnsweredAlsoWhenNobodyWaitsForTheOneBefore(t *testing.T) {
	const first, second, size = 77, 78, 2000
	running := make(chan struct{})
	begin := sync.OnceFunc(func() { close(running) })
	h := newHost(t, signature(t, "x:u8[2000]", "y:u8[2000]"), func(_ context.Context, b *worker.Batch) error {
		for i := range b.Len() {
			in := b.Input(0).Bytes(b.Request(i).Row)
			if in[0] == first {
				begin()
				for until := time.Now().Add(patience); b.Waiting(i) && time.Now().Before(until); time.Sleep(time.Millisecond) {
				}
			}
			copy(b.Output(0).Bytes(b.Request(i).Row), in)
		}
		return nil
	}, func(c *core.Config) { c.MaxMessageBytes = 3000 })
	l := newLocal(t, func(c *Config) {
		c.Policy = policy.New(policy.MaxBatchSize(2), policy.WaitTime(patience), policy.Slots(64))
	}, h.address)
	c := l.dial()
	send := func(one, other byte) []client.Request {
		of := func(v byte) []any { return []any{tensor.Of("x", bytes.Repeat([]byte{v}, size), 1, size)} }
		return fill(t, c, of(one), of(other))
	}
	for _, q := range send(1, 2) { // the relay learns how much the host takes
		must.Do(t, q.Wait(soon(t)))
	}
	list := send(first, second)
	<-running
	must.Do(t, list[0].Cancel())
	must.Do(t, list[1].Wait(soon(t)))
	if out, err := list[1].OutputBytes(0); err != nil || !bytes.Equal(out, bytes.Repeat([]byte{second}, size)) {
		t.Errorf("another answer, which begins with %d; %v", out[0], err)
	}
}
