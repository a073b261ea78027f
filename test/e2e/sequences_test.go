// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/test/testbed"
	"github.com/ringbatch/ringbatch/worker"
)

// Random schedules for sequences, on memory that the race detector sees: each answer is
// computed from the state of the last delivered step.
func TestSequencesAdvanceIfAndOnlyIfTheirStepsAreDelivered(t *testing.T) {
	for seed := range uint64(4) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			randomSequences(t, seed, 600*time.Millisecond)
		})
	}
}

func randomSequences(t *testing.T, seed uint64, lasts time.Duration) {
	rng := rand.New(rand.NewPCG(seed, 0))
	m := testbed.Model{Name: "m", Slots: 256, MaxBatch: 3 + rng.IntN(10), Wait: 200 * time.Microsecond, Lease: lease, State: true}
	r := inProcess(t, shm.NewHeap(), m)
	ctx, cancel := context.WithTimeout(context.Background(), 10*patience)
	defer cancel()
	exp := &expected{ends: map[string]int{}, t: t}
	var wg sync.WaitGroup
	wg.Go(func() { // on a slow machine until 50 turns have succeeded
		for start := time.Now(); time.Since(start) < lasts || exp.count("ok") < 50 && ctx.Err() == nil; {
			time.Sleep(5 * time.Millisecond)
		}
		cancel()
	})
	serve := func(seed uint64) (leave func()) {
		cfg := m.WorkerConfig(r.socket)
		cfg.Depth = 1 + int(seed%3)
		return r.serveAs(cfg, unsteadySteps(seed))
	}
	serve(seed) // this worker stays, another comes and goes
	wg.Go(func() {
		rng := rand.New(rand.NewPCG(seed, 1))
		for ctx.Err() == nil {
			leave := serve(rng.Uint64())
			time.Sleep(time.Duration(rng.IntN(40)) * time.Millisecond)
			leave()
		}
	})
	for k := range uint64(3) {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(seed, 2+k))
			for ctx.Err() == nil {
				life, end := context.WithTimeout(ctx, time.Duration(50+rng.IntN(150))*time.Millisecond)
				c := r.dial(client.WithWindow(1 + rng.IntN(24)))
				var in sync.WaitGroup
				for range 1 + rng.IntN(8) {
					own := rand.New(rand.NewPCG(rng.Uint64(), 0))
					in.Go(func() { takeTurns(life, c, own, exp) })
				}
				in.Wait()
				c.Close()
				end()
			}
		})
	}
	wg.Wait()
	r.settled()
	if exp.ends["ok"] == 0 {
		t.Errorf("nothing succeeded: %v", exp.ends)
	}
	t.Log(exp.ends)
}

// unsteadySteps runs steps, after a random time or with an error.
func unsteadySteps(seed uint64) worker.Func {
	return func(_ context.Context, b *worker.Batch) error {
		rng := rand.New(rand.NewPCG(seed, b.ID())) // batches may run at once
		if rng.IntN(10) == 0 {
			time.Sleep(time.Duration(rng.IntN(3000)) * time.Microsecond)
		}
		for i := range b.Rows() {
			testbed.RunStep(b, i, func() {})
		}
		if rng.IntN(20) == 0 {
			return errors.New("out of the blue")
		}
		return nil
	}
}

// takeTurns runs sequences until the client's life ends.
func takeTurns(life context.Context, c *client.Client, rng *rand.Rand, exp *expected) {
	allowed := []error{client.ErrFailed, client.ErrCanceled, client.ErrExpired, client.ErrOverloaded, client.ErrFull, client.ErrTimeout}
	for life.Err() == nil {
		q, err := testbed.NewSequence(life, c, 1+rng.IntN(min(3, c.Model().Window)), rng)
		if err != nil {
			exp.end(err, allowed...)
			continue
		}
		for range rng.IntN(60) {
			if life.Err() != nil {
				break
			}
			exp.end(q.Turn(life, func(string) {}), allowed...)
		}
		q.Close()
	}
}
