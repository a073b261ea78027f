// SPDX-License-Identifier: Apache-2.0

package rig

import (
	"context"
	"fmt"
	"time"

	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/test/testbed"
	"github.com/ringbatch/ringbatch/worker"
)

// EchoJob is a worker whose model computes nothing: the beginning of the input is the output.
type EchoJob struct {
	Socket   string
	Model    string
	In, Out  string // tensors without their names, like u8[64]
	MaxBatch int
	WaitTime time.Duration // 0: no waiting
	Slots    int
}

// EchoWorker is the role "echo worker" of a process.
func EchoWorker(c *testbed.Child, job EchoJob) error {
	sig, err := tensor.ParseSignature([]string{"x:" + job.In}, []string{"y:" + job.Out})
	if err != nil {
		return err
	}
	ctx := context.Background()
	p := []policy.Setting{policy.MaxBatchSize(job.MaxBatch), policy.WaitTime(job.WaitTime)}
	if job.Slots > 0 {
		p = append(p, policy.Slots(job.Slots))
	}
	w, err := worker.Attach(ctx, worker.Config{Socket: job.Socket, Model: job.Model, Signature: sig, Policy: policy.New(p...)})
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

// StartEcho starts an echo worker and waits until it is attached.
func (r *Rig) StartEcho(job EchoJob) *testbed.Process {
	return r.MustStart(testbed.Spec{Role: "echo worker", Job: job, Procs: 2})
}

// Pattern is an input of that many bytes, whose echo is easily checked.
func Pattern(bytes int) []byte {
	input := make([]byte, bytes)
	for i := range input {
		input[i] = byte(i)
	}
	return input
}

// Submit claims rows and writes the input into each. It commits the request if commit is true.
func Submit(ctx context.Context, c *client.Client, rows int, input []byte, commit bool) (client.Request, error) {
	r, err := c.Claim(ctx, rows)
	if err != nil {
		return r, err
	}
	dst, err := r.InputBytes(0)
	if err != nil {
		return r, err
	}
	for ; len(dst) > 0; dst = dst[len(input):] {
		copy(dst, input)
	}
	if !commit {
		return r, nil
	}
	return r, r.Commit(ctx)
}

// Finish waits for the answer, checks its first row and releases the slots.
func Finish(ctx context.Context, r client.Request) error {
	if err := r.Wait(ctx); err != nil {
		return err
	}
	out, err := r.OutputBytes(0)
	if err != nil {
		return err
	}
	if n := len(out) / r.Rows(); out[n-1] != byte(n-1) {
		return fmt.Errorf("wrong answer: byte %d is %d", n-1, out[n-1])
	}
	return r.Release()
}

// Ask is one request of one row, from Claim to Release.
func Ask(ctx context.Context, c *client.Client, input []byte) error {
	r, err := Submit(ctx, c, 1, input, true)
	if err != nil {
		return err
	}
	return Finish(ctx, r)
}
