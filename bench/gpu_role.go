// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"fmt"
	"time"

	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/test/testbed"
	"github.com/ringbatch/ringbatch/tools/load"
	"github.com/ringbatch/ringbatch/worker"
)

var background = context.Background()

// serveFunc starts a worker in another process. It returns the worker's pid; wait
// returns when the worker has ended.
type serveFunc func(worker.Config) (pid int, wait func() error, err error)

// startTime is how long such a worker may take to attach: PyTorch takes many seconds.
const startTime = 3 * time.Minute

// serveByItself is ready when the worker is attached.
func serveByItself(c *testbed.Child, job *workerJob, m *openModel) error {
	pid, run, err := m.Serve(worker.Config{
		Socket: job.Socket, Model: modelName, Policy: policy.New(policy.MaxBatchSize(job.MaxBatch), policy.WaitTime(job.WaitTime),
			policy.Slots(job.Slots)),
	})
	if err != nil {
		return err
	}
	ready := make(chan error, 1)
	go func() { ready <- awaitWorker(job.Socket, pid, c) }()
	ended := make(chan error, 1)
	go func() { ended <- run() }()
	select {
	case err := <-ended:
		return endedEarly(err)
	case err := <-ready:
		if err != nil {
			return err
		}
	}
	return endedEarly(<-ended)
}

func endedEarly(err error) error {
	if err == nil {
		err = fmt.Errorf("the model worker ended")
	}
	return err
}

func awaitWorker(socket string, pid int, c *testbed.Child) error {
	for end := time.Now().Add(startTime); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		st, err := load.ModelStats(background, socket, modelName)
		if err != nil {
			continue // no worker has declared the model yet
		}
		for _, w := range st.Workers {
			if w.Pid == pid {
				return c.Ready()
			}
		}
	}
	return fmt.Errorf("the model worker did not attach within %v", startTime)
}
