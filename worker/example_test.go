// SPDX-License-Identifier: Apache-2.0

package worker_test

import (
	"context"
	"errors"
	"fmt"
	"log"

	"github.com/ringbatch/ringbatch/broker"
	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/client/ringbatchtest"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/worker"
)

// exampleBroker runs a broker, as another process of the host would.
func exampleBroker() (socket string, stop func()) {
	b, err := ringbatchtest.Open(broker.Config{})
	if err != nil {
		log.Fatal(err)
	}
	return b.Socket(), func() { _ = b.Close() }
}

var rootSignature = tensor.Signature{
	Inputs:  []tensor.Spec{{Name: "x", DType: tensor.F64, Shape: []int{}}},
	Outputs: []tensor.Spec{{Name: "root", DType: tensor.I64, Shape: []int{}}},
}

// root is the model of these examples: the whole root of each number.
func root(_ context.Context, b *worker.Batch) error {
	for i := range b.Len() {
		row := b.Request(i).Row // each request here has one row
		x := worker.Row[float64](b.Input(0), row)[0]
		if x < 0 {
			b.Fail(i, fmt.Errorf("%v has no root", x)) // its neighbours are not harmed
			continue
		}
		n := int64(0)
		for float64((n+1)*(n+1)) <= x {
			n++
		}
		worker.Row[int64](b.Output(0), row)[0] = n
	}
	return nil
}

func ExampleServe() {
	socket, stop := exampleBroker()
	defer stop()

	ctx, leave := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() {
		served <- worker.Serve(ctx, worker.Config{Model: "root", Signature: rootSignature, Socket: socket}, root)
	}()

	c, err := client.Dial(ctx, "root", client.WithSocket(socket), client.WaitForModel())
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close()
	for _, x := range []float64{17, -1} {
		outs, err := c.Infer(ctx, []float64{x})
		if errors.Is(err, status.ErrFailed) {
			fmt.Println("failed:", err)
			continue
		} else if err != nil {
			log.Fatal(err)
		}
		y, _ := tensor.As[int64](outs[0])
		fmt.Println(y)
	}
	leave()
	fmt.Println(<-served)
	// Output:
	// [4]
	// failed: -1 has no root
	// <nil>
}

// A worker that overlaps batches takes the next before it completes the one
// before.
func ExampleWorker_Next() {
	socket, stop := exampleBroker()
	defer stop()
	ctx := context.Background()
	w, err := worker.Attach(ctx, worker.Config{Model: "root", Signature: rootSignature, Socket: socket, Depth: 2})
	if err != nil {
		log.Fatal(err)
	}
	defer w.Close()

	c, err := client.Dial(ctx, "root", client.WithSocket(socket))
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close()
	answer := make(chan []tensor.Tensor)
	go func() {
		outs, err := c.Infer(ctx, []float64{99})
		if err != nil {
			log.Fatal(err)
		}
		answer <- outs
	}()

	b, err := w.Next(ctx)
	if err != nil {
		log.Fatal(err)
	}
	if err := root(ctx, b); err != nil {
		b.FailAll(err)
	}
	b.Complete() // answers the clients
	y, _ := tensor.As[int64]((<-answer)[0])
	fmt.Println(y)
	// Output: [9]
}
