// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"fmt"
	"time"

	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/test/testbed"
	"github.com/ringbatch/ringbatch/tools/load"
	"github.com/ringbatch/ringbatch/worker"
)

// workerJob is one model worker process.
type workerJob struct {
	Socket   string
	Model    modelJob
	MaxBatch int
	WaitTime time.Duration
	Slots    int
}

// modelName is the model's name at the broker.
const modelName = "bench"

func (j *modelJob) load() (*openModel, error) {
	kind, ok := modelKinds()[j.Type]
	if !ok {
		return nil, fmt.Errorf("no model type %q", j.Type)
	}
	return kind.open(*j)
}

// modelWorkerRole serves the model on one thread.
func modelWorkerRole(c *testbed.Child, job workerJob) error {
	m, err := job.Model.load()
	if err != nil {
		return err
	}
	if m.Serve != nil {
		return serveByItself(c, &job, m)
	}
	m.Alone(job.MaxBatch)() // warm scratch memory and caches
	ctx := context.Background()
	w, err := worker.Attach(ctx, worker.Config{
		Socket: job.Socket, Model: modelName, Signature: m.Signature,
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
		if err := m.Run(ctx, b); err != nil {
			b.FailAll(err)
		}
		b.Complete()
	}
}

// aloneJob is one process that runs the model by itself on batches of its rows.
type aloneJob struct {
	Model modelJob
	Rows  int
}

func aloneRole(c *testbed.Child, job aloneJob) error {
	m, err := job.Model.load()
	if err != nil {
		return err
	}
	run := m.Alone(job.Rows)
	run()
	return eachWindow(c, func(r *load.Recorder) {
		for now := shm.Now(); !r.Over(now); {
			start := now
			run()
			now = shm.Now()
			var st load.Stages
			st[load.StageCompute] = now - start
			r.Add(now, now-start, job.Rows, st)
		}
	})
}
