// SPDX-License-Identifier: Apache-2.0

// Command sum has two workers for the gateway's tests: sum has state, and answers each
// step with the sum of its sequence's inputs; letters shows its answer in parts.
package main

import (
	"context"
	"encoding/binary"
	"log"
	"math"
	"os/signal"
	"syscall"
	"time"

	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/worker"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	sig, err := tensor.ParseSignature([]string{"x:f32[16]"}, []string{"y:f32[16]"}, "total:f32[16]")
	if err != nil {
		log.Fatal(err)
	}
	go letters(ctx)
	cfg := worker.Config{Model: "sum", Signature: sig, WaitForBroker: 2 * time.Minute, Policy: policy.New(policy.WaitTime(0))}
	if err := worker.Serve(ctx, cfg, sum); err != nil {
		log.Fatal(err)
	}
}

func sum(_ context.Context, b *worker.Batch) error {
	for i := range b.Rows() {
		x, y := worker.Row[float32](b.Input(0), i), worker.Row[float32](b.Output(0), i)
		total, next := b.State(0).Bytes(i), b.NextState(0).Bytes(i)
		for j := range x {
			y[j] = x[j] + math.Float32frombits(binary.LittleEndian.Uint32(total[4*j:]))
			binary.LittleEndian.PutUint32(next[4*j:], math.Float32bits(y[j]))
		}
	}
	return nil
}

// letters answers with n letters, one after the other.
func letters(ctx context.Context) {
	sig, err := tensor.ParseSignature([]string{"n:i32[]"}, []string{"text:u8[<=64]"})
	if err != nil {
		log.Fatal(err)
	}
	cfg := worker.Config{Model: "letters", Signature: sig, WaitForBroker: 2 * time.Minute, Policy: policy.New(policy.WaitTime(0))}
	err = worker.Serve(ctx, cfg, func(_ context.Context, b *worker.Batch) error {
		for row := range b.Rows() {
			text := b.Output(0).Bytes(row)
			for i := range worker.Row[int32](b.Input(0), row)[0] {
				text[i] = 'a' + byte(i)
				if err := b.Show(row, int(i)+1); err != nil {
					return err
				}
				time.Sleep(20 * time.Millisecond)
			}
		}
		return nil
	})
	if err != nil {
		log.Fatal(err)
	}
}
