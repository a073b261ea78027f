// SPDX-License-Identifier: Apache-2.0

// Worker serves a model that doubles numbers, a batch at a time.
//
//	ringbatch broker &
//	go run ./examples/go/worker &
//	go run ./examples/go/producer
package main

import (
	"context"
	"log"
	"os"
	"os/signal"

	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/worker"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	cfg := worker.Config{
		Model: "double",
		Signature: tensor.Signature{
			Inputs:  []tensor.Spec{{Name: "x", DType: tensor.F32, Shape: []int{4}}},
			Outputs: []tensor.Spec{{Name: "y", DType: tensor.F32, Shape: []int{4}}},
		},
	}
	cfg.Policy = policy.New(policy.MaxBatchSize(32))
	err := worker.Serve(ctx, cfg, func(_ context.Context, b *worker.Batch) error {
		for i := range b.Rows() {
			x, y := worker.Row[float32](b.Input(0), i), worker.Row[float32](b.Output(0), i)
			for j := range x {
				y[j] = 2 * x[j]
			}
		}
		return nil
	})
	if err != nil {
		log.Fatal(err)
	}
}
