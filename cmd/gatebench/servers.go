// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"sync"
	"time"

	"google.golang.org/grpc"

	"github.com/ringbatch/ringbatch/gateway/oip"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/worker"
)

// serveModels is a worker of both models: the answer is the beginning of the
// input, so that nothing is computed.
func serveModels(ctx context.Context) error {
	failed := make(chan error, len(sizes))
	for _, s := range sizes {
		sig, err := tensor.ParseSignature([]string{fmt.Sprintf("x:f32[%d]", s.elements)}, []string{fmt.Sprintf("y:f32[%d]", s.answer)})
		if err != nil {
			return err
		}
		cfg := worker.Config{Alone: true, Model: s.model, Signature: sig, WaitForBroker: 20 * time.Second, Policy: policy.New(policy.MaxBatchSize(32), policy.WaitTime(0))}
		go func() {
			failed <- worker.Serve(ctx, cfg, func(_ context.Context, b *worker.Batch) error {
				for i := range b.Rows() {
					copy(b.Output(0).Bytes(i), b.Input(0).Bytes(i))
				}
				return nil
			})
		}()
	}
	return <-failed
}

// serveBare is what anybody would write with these libraries: it reads the
// whole message and answers as many bytes as the gateway would.
func serveBare(ctx context.Context) error {
	web, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	rpc, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	go func() { _ = http.Serve(web, http.HandlerFunc(bareHTTP)) }()
	s := grpc.NewServer(grpc.MaxRecvMsgSize(256<<20), grpc.InitialWindowSize(1<<20), grpc.InitialConnWindowSize(4<<20))
	oip.RegisterGRPCInferenceServiceServer(s, &bareRPC{})
	go func() { _ = s.Serve(rpc) }()
	fmt.Printf("http %s\ngrpc %s\n", web.Addr(), rpc.Addr())
	<-ctx.Done()
	return nil
}

// bareBodies are used again: a server that makes garbage of each body would be
// an easy mark.
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
	for _, s := range sizes {
		if s.elements*4 < len(body) && len(body) < s.elements*4+1024 {
			head := answerHead(s)
			w.Header().Set("Content-Type", "application/octet-stream")
			w.Header().Set("Inference-Header-Content-Length", strconv.Itoa(len(head)))
			w.Header().Set("Content-Length", strconv.Itoa(len(head)+4*s.answer))
			_, _ = io.WriteString(w, head)
			_, _ = w.Write(body[len(body)-4*s.elements:][:4*s.answer])
		}
	}
}

func answerHead(s size) string {
	return fmt.Sprintf(`{"model_name":"%s","model_version":"1","outputs":[{"name":"y","datatype":"FP32","shape":[1,%d],"parameters":{"binary_data_size":%d}}]}`, s.model, s.answer, 4*s.answer)
}

type bareRPC struct {
	oip.UnimplementedGRPCInferenceServiceServer
}

func (*bareRPC) ModelInfer(_ context.Context, r *oip.ModelInferRequest) (*oip.ModelInferResponse, error) {
	for _, s := range sizes {
		if s.model == r.ModelName && len(r.RawInputContents) == 1 && len(r.RawInputContents[0]) == 4*s.elements {
			return &oip.ModelInferResponse{ModelName: r.ModelName, ModelVersion: "1",
				Outputs:           []*oip.ModelInferResponse_InferOutputTensor{{Name: "y", Datatype: "FP32", Shape: []int64{1, int64(s.answer)}}},
				RawOutputContents: [][]byte{r.RawInputContents[0][:4*s.answer]}}, nil
		}
	}
	return nil, fmt.Errorf("model %q", r.ModelName)
}

// input is one row of a size, the same in every request.
func (s *size) input() []byte {
	b := make([]byte, 0, 4*s.elements)
	for i := range s.elements {
		b = binary.LittleEndian.AppendUint32(b, uint32(i))
	}
	return b
}
