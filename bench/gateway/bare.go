// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/ringbatch/ringbatch/bench/rig"
	"github.com/ringbatch/ringbatch/gateway/oip"
	"github.com/ringbatch/ringbatch/test/testbed"
)

// Size describes a model: the bytes of an input row and of an output row.
type Size struct {
	Name          string
	Bytes, Answer int
	Model         string
}

// Sizes of the models that the bare server and the echo workers serve.
var Sizes = []Size{{"64 bytes", 64, 64, "small"}, {"602,112 bytes", 602112, 4000, "large"}}

// Addresses are where a server listens.
type Addresses struct{ HTTP, GRPC string }

// BareRole is a plain server with net/http and grpc-go: it reads the whole message and answers with as many bytes as the
// gateway.
func BareRole(c *testbed.Child) error {
	var listeners [2]net.Listener
	for i := range listeners {
		var err error
		if listeners[i], err = net.Listen("tcp", "127.0.0.1:0"); err != nil {
			return err
		}
	}
	go func() { _ = http.Serve(listeners[0], http.HandlerFunc(bareHTTP)) }()
	s := grpc.NewServer(grpc.MaxRecvMsgSize(256<<20), grpc.InitialWindowSize(1<<20), grpc.InitialConnWindowSize(4<<20))
	oip.RegisterGRPCInferenceServiceServer(s, &bareRPC{})
	go func() { _ = s.Serve(listeners[1]) }()
	if err := c.Tell("listening", Addresses{listeners[0].Addr().String(), listeners[1].Addr().String()}); err != nil {
		return err
	}
	<-c.Context().Done()
	return nil
}

// StartBare starts the bare server.
func StartBare(r *rig.Rig) (p *testbed.Process, at Addresses) {
	p, err := r.Start(testbed.Spec{Role: "bare"})
	r.Must(err)
	r.Must(p.Expect("listening", &at, startTime))
	return p, at
}

// bareBodies reuses memory: a server that allocates each body would be too easy to beat.
var bareBodies = sync.Pool{New: func() any { return new([]byte) }}

func bareHTTP(w http.ResponseWriter, r *http.Request) {
	kept := bareBodies.Get().(*[]byte)
	defer bareBodies.Put(kept)
	if int64(cap(*kept)) < r.ContentLength {
		*kept = make([]byte, r.ContentLength)
	}
	body := (*kept)[:r.ContentLength]
	if _, err := io.ReadFull(r.Body, body); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	for _, s := range Sizes {
		if s.Bytes < len(body) && len(body) < s.Bytes+1024 {
			head := fmt.Sprintf(`{"model_name":"%s","model_version":"1","outputs":[{"name":"y","datatype":"UINT8","shape":[1,%d],`+
				`"parameters":{"binary_data_size":%d}}]}`,
				s.Model, s.Answer, s.Answer)
			w.Header().Set("Content-Type", "application/octet-stream")
			w.Header().Set("Inference-Header-Content-Length", strconv.Itoa(len(head)))
			w.Header().Set("Content-Length", strconv.Itoa(len(head)+s.Answer))
			_, _ = io.WriteString(w, head)
			_, _ = w.Write(body[len(body)-s.Bytes:][:s.Answer])
		}
	}
}

type bareRPC struct {
	oip.UnimplementedGRPCInferenceServiceServer
}

func (*bareRPC) ModelInfer(_ context.Context, r *oip.ModelInferRequest) (*oip.ModelInferResponse, error) {
	for _, s := range Sizes {
		if s.Model == r.ModelName {
			rows := r.Inputs[0].Shape[0]
			y := &oip.ModelInferResponse_InferOutputTensor{Name: "y", Datatype: "UINT8", Shape: []int64{rows, int64(s.Answer)}}
			return &oip.ModelInferResponse{ModelName: r.ModelName, ModelVersion: "1",
				Outputs:           []*oip.ModelInferResponse_InferOutputTensor{y},
				RawOutputContents: [][]byte{r.RawInputContents[0][:int(rows)*s.Answer]}}, nil
		}
	}
	return nil, fmt.Errorf("model %q", r.ModelName)
}

// Dial connects gRPC callers to a server.
func Dial(address string) (*grpc.ClientConn, error) {
	const most = 64 << 20
	return grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(most), grpc.MaxCallSendMsgSize(most)))
}

// RPCCaller sends messages of that many rows.
func RPCCaller(conn *grpc.ClientConn, s Size, rows int) rig.Caller {
	service := oip.NewGRPCInferenceServiceClient(conn)
	input := bytes.Repeat(rig.Pattern(s.Bytes), rows)
	x := &oip.ModelInferRequest_InferInputTensor{Name: "x", Datatype: "UINT8", Shape: []int64{int64(rows), int64(s.Bytes)}}
	request := &oip.ModelInferRequest{ModelName: s.Model, Inputs: []*oip.ModelInferRequest_InferInputTensor{x},
		RawInputContents: [][]byte{input}}
	return func(ctx context.Context) error {
		rep, err := service.ModelInfer(ctx, request)
		if err != nil {
			return err
		}
		if len(rep.RawOutputContents) != 1 || len(rep.RawOutputContents[0]) != rows*s.Answer ||
			!bytes.Equal(rep.RawOutputContents[0][:s.Answer], input[:s.Answer]) {
			return errAnswer
		}
		return nil
	}
}
