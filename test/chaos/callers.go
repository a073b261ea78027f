// SPDX-License-Identifier: Apache-2.0

package chaos

import (
	"context"
	"encoding/binary"
	"log/slog"
	"net"
	"os"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"

	"github.com/ringbatch/ringbatch/gateway"
	"github.com/ringbatch/ringbatch/gateway/core"
	"github.com/ringbatch/ringbatch/gateway/oip"
	"github.com/ringbatch/ringbatch/test/testbed"
)

// Tokens of a gateway's callers.
const (
	goodToken = "good-token-0123456789"
	badToken  = "bad-token-0123456789"
)

type gatewayJob struct{ Socket, Tokens string }

// startGateway starts a gateway that knows both tokens.
func (h *host) startGateway() (p *testbed.Process, address string) {
	tokens := h.socket() + ".tokens"
	h.r.must(os.WriteFile(tokens, []byte("good "+goodToken+"\nbad "+badToken+"\n"), 0o600))
	p = h.r.start(testbed.Spec{Role: "gateway", Job: gatewayJob{h.socket(), tokens}, Procs: 2})
	h.r.must(p.Expect("serves", &address, enoughTime))
	return p, address
}

func playGateway(child *testbed.Child, job gatewayJob) error {
	g, err := core.New(core.Config{Socket: job.Socket, TokenFile: job.Tokens, HTTP: core.Off, GRPC: "127.0.0.1:0",
		Logger:  slog.New(slog.DiscardHandler),
		Started: func(_, rpc net.Addr) { _ = child.Tell("serves", rpc.String()) }})
	if err != nil {
		return err
	}
	return gateway.New(g).Serve(child.Context())
}

// dialGateway sends inputs through a gateway.
func dialGateway(address, token string) (sending, error) {
	c, err := grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	return func(ctx context.Context, kind string, id int64) error {
		x := make([]byte, 8*testbed.Width)
		binary.NativeEndian.PutUint64(x, uint64(firstOf[kind]))
		binary.NativeEndian.PutUint64(x[8:], uint64(id))
		_, err := oip.NewGRPCInferenceServiceClient(c).ModelInfer(metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+token),
			&oip.ModelInferRequest{ModelName: theModel.Name, RawInputContents: [][]byte{x},
				Inputs: []*oip.ModelInferRequest_InferInputTensor{{Name: "x", Datatype: "INT64", Shape: []int64{1, testbed.Width}}}})
		return err
	}, err
}
