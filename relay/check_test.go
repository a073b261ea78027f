// SPDX-License-Identifier: Apache-2.0

package relay

import (
	"cmp"
	"context"
	"log/slog"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/balancer"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	rpcstatus "google.golang.org/grpc/status"

	"github.com/ringbatch/ringbatch/gateway/oip"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/internal/testlog"
	"github.com/ringbatch/ringbatch/tensor"
)

// unheard is a host whose first answers are not heard in time, because the one who
// asks did not run.
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
