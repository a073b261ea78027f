// SPDX-License-Identifier: Apache-2.0

package client_test

import (
	"context"
	"fmt"
	"sync"
	"testing"

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/admin/alias"
	"github.com/ringbatch/ringbatch/broker"
	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/test/testbed"
	"github.com/ringbatch/ringbatch/worker"
)

// In one process, so that the race detector sees it.
func TestOneClientOfManyGoroutinesFollowsAnAliasAndLosesNothing(t *testing.T) {
	cfg := broker.Config{OpenFolder: true}
	for i := range 2 {
		m := plain(t)
		m.Name = fmt.Sprintf("m@%d", i+1)
		cfg.Models = append(cfg.Models, m)
		cfg.Aliases = []alias.Alias{{Name: "m", To: []alias.Target{{Model: "m@1", Share: alias.Whole}}}}
	}
	b := testbed.StartOnHeap(t, cfg)
	for i, m := range cfg.Models {
		b.Serve(t, worker.Config{Model: m.Name, Signature: m.Signature},
			func(_ context.Context, batch *worker.Batch) error {
				for row := range batch.Rows() {
					worker.Row[float32](batch.Output(0), row)[0] = float32(i+1) * worker.Row[float32](batch.Input(0), row)[0]
				}
				return nil
			})
	}
	c, err := client.Dial(soon(t), "m", client.WithSocket(b.Socket()), client.WithWindow(4))
	must.Do(t, err)
	answers := make(chan float32, 64)
	stop := make(chan struct{})
	var callers sync.WaitGroup
	for range 6 { // more than the window has slots: some wait in Claim
		callers.Go(func() {
			for {
				outs, err := c.Infer(soon(t), []float32{3, 0, 0, 0})
				if err != nil {
					t.Error(err)
					return
				}
				y, _ := tensor.As[float32](outs[0])
				select {
				case answers <- y[0]:
				case <-stop:
					return
				}
			}
		})
	}
	for i := range 20 {
		to := 2 - i%2
		a, err := alias.Parse("m", fmt.Sprintf("m@%d", to))
		if err == nil {
			err = admin.New(b.Socket()).SetAlias(soon(t), a, false)
		}
		must.Do(t, err)
		for moved := false; !moved; {
			select {
			case y := <-answers:
				if y != 3 && y != 6 {
					t.Fatalf("%v belongs to no version", y)
				}
				moved = y == float32(3*to)
			case <-soon(t).Done():
				t.Fatal("the other version never answered")
			}
		}
	}
	// Claimed by hand, moved away from, and closed: its views stay until it is released.
	req, err := c.Claim(soon(t), 1)
	must.Do(t, err)
	close(stop)
	callers.Wait()
	must.Check(t, c.Close())
	if _, err := req.Input("x"); err != nil {
		t.Error(err)
	}
	_ = req.Release()
}
