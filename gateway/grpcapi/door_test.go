// SPDX-License-Identifier: Apache-2.0

package grpcapi

import (
	"context"
	"fmt"
	"log/slog"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	rpcstatus "google.golang.org/grpc/status"

	"github.com/ringbatch/ringbatch/gateway/core"
	"github.com/ringbatch/ringbatch/gateway/oip"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/tensor"
)

func TestUnpackedContentsAreReadAsPackedOnes(t *testing.T) {
	c := &core.Call{Model: &core.Model{G: &core.Gateway{Cfg: core.Config{MaxMessageBytes: 1 << 20}}}}
	in := &core.Input{Name: "x", DType: tensor.I16, Shape: []int{1, 3}}
	// int_contents: 1 and then -2 by themselves, 3 in a packed list.
	encoded := []byte{0x10, 1, 0x10, 0xfe, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1, 0x12, 1, 3}
	must.Do(t, (rpcCall{c}).readContents(in, encoded))
	if got := fmt.Sprint([]byte(*in.Src.(*core.BytesSource))); got != "[1 0 254 255 3 0]" {
		t.Errorf("got %s", got)
	}
}

func TestARelayHasItsCallsWholeTime(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Hour)
	defer cancel()
	whole, _ := ctx.Deadline()
	p := core.Pace{Early: time.Second, EarlyShare: 10}
	for agent, early := range map[string]time.Duration{"grpc-go/1.85.0": 0, "grpc-python/1.76.0 grpc-c/51.0.0": time.Second} {
		if got, _ := endEarly(ctx, &p, metadata.Pairs("user-agent", agent)).Deadline(); whole.Sub(got) != early {
			t.Errorf("%s: %v early", agent, whole.Sub(got))
		}
	}
}

func TestAFaultEndsOneCallNotTheGateway(t *testing.T) {
	g, err := core.New(core.Config{Logger: slog.New(slog.DiscardHandler)})
	must.Do(t, err)
	door := &rpcDoor{g: g}
	if _, err := door.infer(t.Context(), func(any) error { panic("a fault of gRPC") }); rpcstatus.Code(err) != codes.Internal {
		t.Error(err)
	}
}

func rpcInput(name, datatype string, shape ...int64) *oip.ModelInferRequest_InferInputTensor {
	return &oip.ModelInferRequest_InferInputTensor{Name: name, Datatype: datatype, Shape: shape}
}
