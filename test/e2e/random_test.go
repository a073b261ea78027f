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

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/admin/stats"
	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/test/testbed"
	"github.com/ringbatch/ringbatch/worker"
)

// Random schedules on memory that the race detector sees: a request ends once, with the
// answer computed here, or with an error that the schedule may cause.

// expected counts the ends of requests.
type expected struct {
	mu   sync.Mutex
	ends map[string]int
	t    *testing.T
}

func (e *expected) end(err error, allowed ...error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if err == nil {
		e.ends["ok"]++
		return
	}
	for _, a := range allowed {
		if errors.Is(err, a) {
			e.ends[a.Error()]++
			return
		}
	}
	e.t.Errorf("request ended with %v, allowed were %v", err, allowed)
}

func (e *expected) count(what string) int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.ends[what]
}

func TestRandomSchedulesEndEveryRequestOnceAndRightly(t *testing.T) {
	seeds := int64(8)
	if testing.Short() {
		seeds = 4
	}
	for seed := range seeds {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			randomSchedule(t, seed, 600*time.Millisecond)
		})
	}
}

// randomSchedule plays one seed. Each fourth has a pipeline of two stages, and each fourth
// sequences: each answer is computed from the state of the last delivered step.
func randomSchedule(t *testing.T, seed int64, lasts time.Duration) {
	rng := rand.New(rand.NewSource(seed))
	m := testbed.Model{Name: "m", Slots: 256, MaxBatch: 1 + rng.Intn(12), Wait: time.Millisecond, Lease: lease}
	recorded := "m"
	serve := func(_ int, cfg worker.Config, fn worker.Func, r *ring) (leave func()) { return r.serve(cfg, fn) }
	switch seed % 4 {
	case 2:
		m.State = true
		serve = func(_ int, cfg worker.Config, fn worker.Func, r *ring) (leave func()) {
			cfg.Model, cfg.Signature, cfg.Socket = m.Name, m.Signature(), r.socket
			return r.serveAs(cfg, fn)
		}
	case 3:
		m.Stages, recorded = 2, "m/s1"
		serve = func(k int, cfg worker.Config, fn worker.Func, r *ring) (leave func()) {
			at := m.StageConfig(1+k%2, r.socket)
			at.Depth, at.Concurrency = cfg.Depth, cfg.Concurrency
			return r.serveAs(at, fn)
		}
	}
	r := inProcess(t, m)
	exp := &expected{ends: map[string]int{}, t: t}
	ctx, cancel := context.WithTimeout(context.Background(), 10*patience)
	defer cancel()
	var wg sync.WaitGroup
	wg.Go(func() { // on a slow machine until 50 requests have succeeded
		for start := time.Now(); time.Since(start) < lasts || exp.count("ok") < 50 && ctx.Err() == nil; {
			time.Sleep(5 * time.Millisecond)
		}
		cancel()
	})
	// One worker of each stage stays, another comes and goes.
	for k := range 2 {
		serve(k, worker.Config{Depth: 1 + rng.Intn(3)}, unsteady(m, k, seed), r)
		wg.Go(func() {
			rng := rand.New(rand.NewSource(seed*100 + int64(k)))
			for ctx.Err() == nil {
				leave := serve(k, worker.Config{Concurrency: 1 + rng.Intn(6)}, unsteady(m, k, rng.Int63()), r)
				time.Sleep(time.Duration(rng.Intn(40)) * time.Millisecond)
				leave()
			}
		})
	}
	wg.Go(func() { // recordings
		for ctx.Err() == nil {
			began := time.Now()
			if _, err := admin.New(r.socket).Trace(t.Context(), recorded, 20*time.Millisecond); err != nil && !tookTooLong(began) {
				t.Errorf("trace: %v", err)
				return
			}
			time.Sleep(time.Millisecond)
		}
	})
	// Clients come and go too, each with many goroutines.
	for k := range 4 {
		wg.Go(func() { r.randomClients(ctx, m, seed, int64(k), exp) })
	}
	wg.Wait()
	r.settled()
	for stage := 1; stage <= m.Stages; stage++ {
		line := r.model("m/" + m.StageName(stage))
		must.Check(t, testbed.Settled(&line))
	}
	if exp.ends["ok"] == 0 {
		t.Errorf("nothing succeeded in %v: %v", 10*patience, exp.ends)
	}
	t.Log(exp.ends)
}

// randomClients come and go, each with many goroutines, until ctx ends.
func (r *ring) randomClients(ctx context.Context, m testbed.Model, seed, k int64, exp *expected) {
	rng := rand.New(rand.NewSource(seed*1000 + k))
	for begun := time.Now(); ctx.Err() == nil; {
		c := r.dial(client.WithWindow(1 + rng.Intn(24)))
		slow := time.Since(begun) / (5 * time.Second) // on a slow machine clients live longer
		life, end := context.WithTimeout(ctx, time.Duration(rng.Intn(150))*time.Millisecond<<min(slow, 8))
		var in sync.WaitGroup
		for g := range 1 + rng.Intn(20) {
			rng := rand.New(rand.NewSource(seed*7 + 1000*k + int64(g)))
			if m.State {
				in.Go(func() { randomTurns(life, c, rng, exp) })
			} else {
				in.Go(func() { randomRequests(life, c, m, rng, exp) })
			}
		}
		if rng.Intn(2) == 0 { // some are closed with requests in flight
			in.Wait()
		} else {
			<-life.Done()
		}
		c.Close()
		in.Wait()
		end()
	}
}

// unsteady answers after a random time or with an error. It serves a model, or stage
// 1 + k of two.
func unsteady(m testbed.Model, k int, seed int64) worker.Func {
	return func(ctx context.Context, b *worker.Batch) error {
		rng := rand.New(rand.NewSource(seed + int64(b.ID()))) // batches may run at once
		for i := 0; m.State && i < b.Rows(); i++ {
			testbed.RunStep(b, i, func() {})
		}
		switch rng.Intn(20) {
		case 0:
			time.Sleep(time.Duration(rng.Intn(4)) * time.Millisecond)
		case 1:
			return errors.New("out of the blue")
		}
		if m.State {
			return nil
		}
		if m.Stages > 0 {
			return (&obedient{say: func(string) {}}).obeyAt(m, 1+k, b)
		}
		return obey(ctx, b)
	}
}

// randomTurns runs sequences until the client's life ends.
func randomTurns(life context.Context, c *client.Client, rng *rand.Rand, exp *expected) {
	allowed := []error{status.ErrFailed, status.ErrClosed, status.ErrBrokerGone, status.ErrStateLost, status.ErrCanceled, status.ErrExpired,
		status.ErrOverloaded, status.ErrFull, status.ErrTimeout}
	for life.Err() == nil {
		q, err := testbed.NewSequence(life, c, 1+rng.Intn(min(3, c.Model().Window, c.Model().MaxBatchSize)), rng.Uint64())
		if err != nil {
			exp.end(err, allowed...)
			continue
		}
		for range rng.Intn(60) {
			if life.Err() == nil {
				exp.end(q.Turn(life, func(string) {}), allowed...)
			}
		}
		q.Close()
	}
}

// randomRequests runs requests until the client's life ends.
func randomRequests(life context.Context, c *client.Client, m testbed.Model, rng *rand.Rand, exp *expected) {
	for life.Err() == nil {
		rows := 1 + rng.Intn(min(3, c.Model().Window, m.MaxBatch))
		ctx, cancel := life, context.CancelFunc(func() {})
		allowed := []error{status.ErrFailed, status.ErrClosed, status.ErrBrokerGone, status.ErrCanceled, status.ErrExpired,
			status.ErrOverloaded, status.ErrFull}
		switch rng.Intn(6) {
		case 0: // a short deadline
			ctx, cancel = context.WithTimeout(context.Background(), time.Duration(rng.Intn(3000))*time.Microsecond)
		case 1: // canceled
			ctx, cancel = context.WithCancel(context.Background())
			stop := time.AfterFunc(time.Duration(rng.Intn(3000))*time.Microsecond, cancel)
			defer stop.Stop()
		case 2: // given up after the commit
			giveUp(life, c, rows, exp)
			cancel()
			continue
		}
		exp.end(ask(ctx, c, cmdAnswer, 0, rows), allowed...)
		cancel()
	}
}

// giveUp claims, writes, perhaps commits, and releases without waiting.
func giveUp(ctx context.Context, c *client.Client, rows int, exp *expected) {
	req, err := c.Claim(ctx, rows)
	if err != nil {
		exp.end(err, status.ErrFull, status.ErrClosed, status.ErrBrokerGone)
		return
	}
	if b, err := req.InputBytes(0); err == nil {
		clear(b)
	}
	if rows != 2 {
		if err := req.Commit(context.Background()); err != nil {
			exp.t.Errorf("commit: %v", err)
		}
	}
	if err := req.Release(); err != nil {
		exp.t.Errorf("release: %v", err)
	}
	must.Fail(exp.t, "second release", req.Release(), status.ErrReleased)
}

// Many goroutines wait on one client, as leaders and followers, and deadlines hit them
// at any moment.
func TestNoWaitIsForgotten(t *testing.T) {
	t.Parallel()
	r := inProcess(t, testbed.Model{Name: "m", Slots: 64, MaxBatch: 16, Lease: lease})
	r.worker(2, obey)
	c := r.dial(client.WithWindow(56))
	ctx, cancel := context.WithTimeout(context.Background(), 1500*time.Millisecond)
	defer cancel()
	var wg sync.WaitGroup
	for g := range 48 {
		wg.Go(func() {
			rng := rand.New(rand.NewSource(int64(g)))
			for ctx.Err() == nil {
				own, end := context.Background(), context.CancelFunc(func() {})
				if rng.Intn(2) == 0 {
					own, end = context.WithTimeout(own, time.Duration(rng.Intn(400))*time.Microsecond)
				}
				err := ask(own, c, cmdAnswer, 0, 1)
				end()
				if err != nil {
					must.Fail(t, "request", err, status.ErrExpired, status.ErrOverloaded, status.ErrFull)
				}
				if rng.Intn(8) == 0 { // at times no other answer wakes a leader
					time.Sleep(time.Duration(rng.Intn(2000)) * time.Microsecond)
				}
			}
		})
	}
	r.wait(&wg)
	c.Close()
	r.settled()
}

// Five busy models on three loops, in memory that the race detector sees: a loop that
// touches another loop's ring is a race. An answer of another model would be wrong.
func TestLoopsServeTheirModelsWithoutTouchingOneAnothers(t *testing.T) {
	t.Parallel()
	var models []testbed.Model
	for i := range 5 {
		models = append(models, testbed.Model{Name: fmt.Sprint("m", i), Slots: 64, MaxBatch: 1 + 3*i,
			Wait: time.Duration(i) * 200 * time.Microsecond, Lease: lease, Width: 4 + i})
	}
	r := onLoops(t, 3, models...)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	var wg sync.WaitGroup
	for i, m := range models {
		cfg := m.WorkerConfig(r.socket)
		cfg.Depth = 1 + i%2
		r.serveAs(cfg, obey)
		for k := range 2 {
			wg.Go(func() {
				rng := rand.New(rand.NewSource(int64(10*i + k)))
				for range 3 { // clients come and go
					c, err := client.Dial(ctx, m.Name, client.WithSocket(r.socket),
						client.WithWindow(1+rng.Intn(8)))
					if err != nil {
						t.Error(err)
						return
					}
					for range 40 {
						x := make([]int64, m.Width)
						for j := range x {
							x[j] = 1000 + rng.Int63n(1<<40) // no command
						}
						if err := testbed.Ask(ctx, c, x, m.Width); err != nil {
							t.Errorf("%s: %v", m.Name, err)
						}
					}
					c.Close()
				}
			})
		}
	}
	wg.Wait()
	for _, m := range models {
		// The broker hears of an answer after the client.
		r.until("every end is counted", m.Name, func(s stats.Model) bool { return s.Requests == 240 && s.Ended["OK"] == 240 })
	}
}
