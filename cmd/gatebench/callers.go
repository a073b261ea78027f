// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/gateway/oip"
)

// caller sends one request and reads its answer. One goroutine uses it.
type caller struct {
	call func(ctx context.Context) error
	end  func()
}

func calls(callers []caller) (list []func(context.Context) error) {
	for _, c := range callers {
		list = append(list, c.call)
	}
	return list
}

var errAnswer = errors.New("not the answer")

// newCallers connects callers to a server.
func newCallers(n int, protocol, address string, s size) ([]caller, error) {
	var all []caller
	var shared *grpc.ClientConn
	for i := range n {
		if protocol == "http" {
			c, err := newHTTPCaller(address, s)
			if err != nil {
				return all, err
			}
			all = append(all, c)
			continue
		}
		end := func() {}
		if i%callersPerConnection == 0 {
			var err error
			if shared, err = grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(64<<20))); err != nil {
				return all, err
			}
			end = func() { shared.Close() }
		}
		all = append(all, newRPCCaller(shared, s, end))
	}
	return all, nil
}

// gRPC callers share connections, as those of one process do.
const callersPerConnection = 8

// newHTTPCaller writes the same bytes each time and reads the answer with
// net/http's own reader: a caller that costs as little as possible shows what
// the server costs.
func newHTTPCaller(address string, s size) (caller, error) {
	conn, err := net.Dial("tcp", address)
	if err != nil {
		return caller{}, err
	}
	input := s.input()
	head := fmt.Sprintf(`{"inputs":[{"name":"x","datatype":"FP32","shape":[1,%d],"parameters":{"binary_data_size":%d}}],"outputs":[{"name":"y","parameters":{"binary_data":true}}]}`, s.elements, len(input))
	var request bytes.Buffer
	fmt.Fprintf(&request, "POST /v2/models/%s/infer HTTP/1.1\r\nHost: %s\r\nContent-Type: application/octet-stream\r\nInference-Header-Content-Length: %d\r\nContent-Length: %d\r\n\r\n%s", s.model, address, len(head), len(head)+len(input), head)
	request.Write(input)
	want := input[:4*s.answer]
	in := bufio.NewReaderSize(conn, 64<<10)
	body := make([]byte, 4*s.answer+1024)
	call := func(context.Context) error {
		if _, err := conn.Write(request.Bytes()); err != nil {
			return err
		}
		rep, err := http.ReadResponse(in, nil)
		if err != nil {
			return err
		}
		n := int(rep.ContentLength)
		if rep.StatusCode != http.StatusOK || n < len(want) || n > len(body) {
			text, _ := io.ReadAll(rep.Body)
			return fmt.Errorf("%w: %s %s", errAnswer, rep.Status, text)
		}
		if _, err := io.ReadFull(rep.Body, body[:n]); err != nil {
			return err
		}
		if !bytes.Equal(body[n-len(want):n], want) {
			return errAnswer
		}
		return nil
	}
	return caller{call, func() { conn.Close() }}, nil
}

func newRPCCaller(conn *grpc.ClientConn, s size, end func()) caller {
	c := oip.NewGRPCInferenceServiceClient(conn)
	input := s.input()
	request := &oip.ModelInferRequest{ModelName: s.model,
		Inputs:           []*oip.ModelInferRequest_InferInputTensor{{Name: "x", Datatype: "FP32", Shape: []int64{1, int64(s.elements)}}},
		RawInputContents: [][]byte{input}}
	return caller{func(ctx context.Context) error {
		rep, err := c.ModelInfer(ctx, request)
		if err != nil {
			return err
		}
		if len(rep.RawOutputContents) != 1 || !bytes.Equal(rep.RawOutputContents[0], input[:4*s.answer]) {
			return errAnswer
		}
		return nil
	}, end}
}

// newRingCaller asks the ring itself.
func newRingCaller(ctx context.Context, s size) (caller, error) {
	c, err := client.Dial(ctx, s.model, client.WithWindow(1))
	if err != nil {
		return caller{}, err
	}
	input := s.input()
	return caller{func(ctx context.Context) error {
		r, err := c.Claim(ctx, 1)
		if err != nil {
			return err
		}
		defer r.Release()
		in, err := r.InputBytes(0)
		if err != nil {
			return err
		}
		copy(in, input)
		if err := r.Commit(ctx); err != nil {
			return err
		}
		if err := r.Wait(ctx); err != nil {
			return err
		}
		out, err := r.OutputBytes(0)
		if err == nil && !bytes.Equal(out, input[:4*s.answer]) {
			err = errAnswer
		}
		return err
	}, func() { c.Close() }}, nil
}
