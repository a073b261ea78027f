// SPDX-License-Identifier: Apache-2.0

// Producer sends requests to the model of examples/go/worker: first with copies, then in
// place with several requests in flight.
package main

import (
	"context"
	"fmt"
	"log"
	"time"

	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/tensor"
)

func main() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	c, err := client.Dial(ctx, "double", client.WaitForModel())
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close()

	outs, err := c.Infer(ctx, []float32{1, 2, 3, 4})
	if err != nil {
		log.Fatal(err)
	}
	y, _ := tensor.As[float32](outs[0])
	fmt.Println("simple:", y)

	if err := inFlight(ctx, c); err != nil {
		log.Fatal(err)
	}
}

// inFlight writes four inputs into shared memory, sends them together, and reads the
// answers in place.
func inFlight(ctx context.Context, c *client.Client) error {
	var requests []client.Request
	for i := range 4 {
		r, err := c.Claim(ctx, 1)
		if err != nil {
			return err
		}
		defer r.Release()
		in, err := r.Input("x")
		if err != nil {
			return err
		}
		x, err := tensor.As[float32](in)
		if err != nil {
			return err
		}
		for j := range x {
			x[j] = float32(10*i + j)
		}
		requests = append(requests, r)
	}
	if err := client.CommitAll(ctx, requests); err != nil {
		return err
	}
	for i, r := range requests {
		if err := r.Wait(ctx); err != nil {
			return err
		}
		out, err := r.Output("y")
		if err != nil {
			return err
		}
		y, err := tensor.As[float32](out)
		if err != nil {
			return err
		}
		fmt.Printf("in place %d: %v\n", i, y)
	}
	return nil
}
