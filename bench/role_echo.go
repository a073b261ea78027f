// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"time"

	"github.com/ringbatch/ringbatch/internal/testbed"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/worker"
)

// echoJob is a model without arithmetic: as much of the input as fits is the
// output.
type echoJob struct {
	Socket   string
	Model    string
	Inputs   []string
	Outputs  []string
	MaxBatch int
	WaitTime time.Duration // 0: no waiting
	Slots    int
}

func echoWorkerRole(c *testbed.Child, job echoJob) error {
	sig, err := tensor.ParseSignature(job.Inputs, job.Outputs)
	if err != nil {
		return err
	}
	ctx := context.Background()
	w, err := worker.Attach(ctx, worker.Config{
		Socket: job.Socket, Model: job.Model, Signature: sig,
		Policy: policy.New(policy.MaxBatchSize(job.MaxBatch), policy.WaitTime(job.WaitTime), policy.Slots(job.Slots)),
	})
	if err != nil {
		return err
	}
	if err := c.Ready(); err != nil {
		return err
	}
	for {
		b, err := w.Next(ctx)
		if err != nil {
			return err
		}
		in, out := b.Input(0), b.Output(0)
		if in.RowBytes() == out.RowBytes() {
			for i := range b.Runs() {
				copy(out.RunBytes(i), in.RunBytes(i))
			}
		} else {
			for i := range b.Rows() {
				copy(out.Bytes(i), in.Bytes(i))
			}
		}
		b.Complete()
	}
}
