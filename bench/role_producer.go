// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"

	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/test/testbed"
	"github.com/ringbatch/ringbatch/tools/load"
)

func producerRole(c *testbed.Child, job load.Job) error {
	ctx := context.Background()
	conn, err := client.Dial(ctx, job.Model, client.WithSocket(job.Socket), client.WithWindow(job.Window()))
	if err != nil {
		return err
	}
	p := load.NewProducer(conn, job)
	return eachWindow(c, func(r *load.Recorder) { p.Load(ctx, r) })
}

// eachWindow sends "ready" and runs the load for every window that the parent orders.
func eachWindow(c *testbed.Child, run func(*load.Recorder)) error {
	return testbed.Serve(c, func(o load.Order) (*load.Report, error) {
		r := load.NewRecorder(o)
		load.SleepUntil(o.Start)
		run(r)
		return r.Report(), nil
	})
}
