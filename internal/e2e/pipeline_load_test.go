// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"math/rand"
	"sync"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/internal/testbed"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/worker"
)

// What a slow stage has not taken stays in its clients' slots: these are full
// before long, and the clients wait where they claim.
func TestASlowStagePushesBackOnTheClients(t *testing.T) {
	const clients, window, each = 2, 8, 20
	m := testbed.Model{Name: "m", Slots: 64, MaxBatch: 4, Wait: time.Millisecond, Lease: patience, Stages: 2}
	r := inProcess(t, shm.NewHeap(), m)
	goOn := make(chan struct{})
	for stage := 1; stage <= 2; stage++ {
		r.serveAs(m.StageConfig(stage, r.socket), func(_ context.Context, b *worker.Batch) error {
			if stage == 2 {
				<-goOn
			}
			return (&obedient{say: func(string) {}}).obeyAt(m, stage, b)
		})
	}
	release := sync.OnceFunc(func() { close(goOn) })
	defer release()
	var all []*client.Client
	var asked sync.WaitGroup
	for range clients {
		c := r.dial(client.WithWindow(window))
		defer c.Close()
		all = append(all, c)
		for range each {
			asked.Go(func() {
				must.Check(t, ask(background(t), c, cmdAnswer, 0, 1))
			})
		}
	}
	r.eventually("the windows are full of what the second stage has to do", func() error {
		first, second := r.model("m/s1"), r.model("m/s2")
		if first.Ended["OK"] != clients*window || second.SlotsQueued+second.SlotsRunning != clients*window {
			return fmt.Errorf("the first stage ended %d, the second has %d waiting and %d running", first.Ended["OK"], second.SlotsQueued, second.SlotsRunning)
		}
		return nil
	})
	for _, c := range all {
		if _, err := c.TryClaim(1); !errors.Is(err, client.ErrFull) {
			t.Errorf("a client whose window is full claims: %v", err)
		}
	}
	if s := r.model("m/s1"); s.Requests != clients*window || s.SlotsQueued+s.SlotsRunning != 0 {
		t.Errorf("the first stage has seen %d requests, and has %d", s.Requests, s.SlotsQueued+s.SlotsRunning)
	}
	release()
	asked.Wait()
	for stage := 1; stage <= 2; stage++ {
		r.eventually("the broker has heard of every end", func() error { // workers answer first, and tell it then
			if s := r.model("m/" + m.StageName(stage)); s.Ended["OK"] != clients*each {
				return fmt.Errorf("stage %d ended %v", stage, s.Ended)
			}
			return nil
		})
	}
	for _, c := range all {
		c.Close()
	}
	r.settled()
}

// The random schedules of random_test.go through two stages.
func TestRandomSchedulesThroughTwoStagesEndEveryRequestOnceAndRightly(t *testing.T) {
	for seed := range int64(2) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			randomPipeline(t, seed, 400*time.Millisecond)
		})
	}
}

func randomPipeline(t *testing.T, seed int64, lasts time.Duration) {
	rng := rand.New(rand.NewSource(seed))
	m := testbed.Model{Name: "m", Slots: 256, MaxBatch: 1 + rng.Intn(12), Wait: time.Millisecond, Lease: lease, Stages: 2}
	r := inProcess(t, shm.NewHeap(), m)
	exp := &expected{ends: map[string]int{}, t: t}
	ctx, cancel := context.WithTimeout(context.Background(), 10*patience)
	defer cancel()
	var wg sync.WaitGroup
	wg.Go(func() { // as long as told, and on a slow machine until enough has happened
		for start := time.Now(); time.Since(start) < lasts || exp.count("ok") < 50 && ctx.Err() == nil; {
			time.Sleep(5 * time.Millisecond)
		}
		cancel()
	})
	for stage := 1; stage <= 2; stage++ {
		// One worker of each stage stays, another comes and goes.
		r.serveAs(m.StageConfig(stage, r.socket), unsteadyAt(m, stage, seed))
		wg.Go(func() {
			rng := rand.New(rand.NewSource(seed*100 + int64(stage)))
			for ctx.Err() == nil {
				cfg := m.StageConfig(stage, r.socket)
				cfg.Concurrency = 1 + rng.Intn(4)
				leave := r.serveAs(cfg, unsteadyAt(m, stage, rng.Int63()))
				time.Sleep(time.Duration(rng.Intn(40)) * time.Millisecond)
				leave()
			}
		})
	}
	for k := range 3 {
		wg.Go(func() { r.randomClients(ctx, m, seed, int64(k), exp) })
	}
	wg.Wait()
	r.settled()
	for stage := 1; stage <= 2; stage++ {
		line := r.model("m/" + m.StageName(stage))
		must.Check(t, testbed.Settled(&line))
	}
	if exp.ends["ok"] == 0 {
		t.Errorf("nothing succeeded in %v: %v", 10*patience, exp.ends)
	}
	t.Log(exp.ends)
}

// unsteadyAt is unsteady for a stage.
func unsteadyAt(m testbed.Model, stage int, seed int64) worker.Func {
	return func(ctx context.Context, b *worker.Batch) error {
		rng := rand.New(rand.NewSource(seed + int64(b.ID())))
		switch rng.Intn(20) {
		case 0:
			time.Sleep(time.Duration(rng.Intn(4)) * time.Millisecond)
		case 1:
			return errors.New("out of the blue")
		}
		return (&obedient{say: func(string) {}}).obeyAt(m, stage, b)
	}
}
