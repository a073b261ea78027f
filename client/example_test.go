// SPDX-License-Identifier: Apache-2.0

package client_test

import (
	"context"
	"fmt"
	"log"

	"github.com/ringbatch/ringbatch/broker"
	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/client/ringbatchtest"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/worker"
)

// serveDouble runs a broker and a worker that doubles four numbers, as other
// processes of the host would. It returns the broker's socket.
func serveDouble() (socket string, stop func()) {
	b, err := ringbatchtest.Open(broker.Config{})
	if err != nil {
		log.Fatal(err)
	}
	served := make(chan error, 1)
	work, leave := context.WithCancel(context.Background())
	go func() {
		served <- worker.Serve(work, worker.Config{
			Model: "double", Socket: b.Socket(),
			Signature: tensor.Signature{
				Inputs:  []tensor.Spec{{Name: "x", DType: tensor.F32, Shape: []int{4}}},
				Outputs: []tensor.Spec{{Name: "y", DType: tensor.F32, Shape: []int{4}}},
			},
		}, double)
	}()
	return b.Socket(), func() {
		leave()
		<-served
		_ = b.Close()
	}
}

func Example() {
	socket, stop := serveDouble()
	defer stop()
	ctx := context.Background()

	c, err := client.Dial(ctx, "double", client.WithSocket(socket), client.WaitForModel())
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close()
	outs, err := c.Infer(ctx, []float32{1, 2, 3, 4})
	if err != nil {
		log.Fatal(err)
	}
	y, err := tensor.As[float32](outs[0])
	fmt.Println(y, err)
	// Output: [2 4 6 8] <nil>
}

// Without copies: write into the slot, read from it, give it back.
func ExampleClient_Claim() {
	socket, stop := serveDouble()
	defer stop()
	ctx := context.Background()
	c, err := client.Dial(ctx, "double", client.WithSocket(socket), client.WaitForModel())
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close()

	r, err := c.Claim(ctx, 1)
	if err != nil {
		log.Fatal(err)
	}
	defer r.Release()
	in, err := r.Input("x")
	if err != nil {
		log.Fatal(err)
	}
	x, err := tensor.As[float32](in) // a view into shared memory
	if err != nil {
		log.Fatal(err)
	}
	for i := range x {
		x[i] = float32(i)
	}
	if err := r.Commit(ctx); err != nil { // the worker's from here on
		log.Fatal(err)
	}
	if err := r.Wait(ctx); err != nil {
		log.Fatal(err)
	}
	out, err := r.Output("y")
	if err != nil {
		log.Fatal(err)
	}
	y, err := tensor.As[float32](out)
	fmt.Println(y, err)
	// Output: [0 2 4 6] <nil>
}

// Several requests in flight from one goroutine.
func ExampleRequest_Wait() {
	socket, stop := serveDouble()
	defer stop()
	ctx := context.Background()
	c, err := client.Dial(ctx, "double", client.WithSocket(socket), client.WaitForModel(), client.WithWindow(3))
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close()

	var requests []client.Request
	for i := range 3 {
		r, err := c.Claim(ctx, 1)
		if err != nil {
			log.Fatal(err)
		}
		in, _ := r.Input("x")
		x, _ := tensor.As[float32](in)
		for j := range x {
			x[j] = float32(i)
		}
		if err := r.Commit(ctx); err != nil {
			log.Fatal(err)
		}
		requests = append(requests, r)
	}
	for _, r := range requests {
		if err := r.Wait(ctx); err != nil {
			log.Fatal(err)
		}
		out, _ := r.Output("y")
		y, _ := tensor.As[float32](out)
		fmt.Println(y)
		_ = r.Release()
	}
	// Output:
	// [0 0 0 0]
	// [2 2 2 2]
	// [4 4 4 4]
}
