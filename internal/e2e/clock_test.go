// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/internal/testbed"
)

// clockEnv asks for the test that sets this machine's clock.
const clockEnv = "RINGBATCH_TEST_CLOCK"

// grace is how late a request may end.
const grace = 100 * time.Millisecond

// timedRequest is one kind of request of the test below, sent again and
// again: how it must end, and how long it must take by the monotonic clock.
type timedRequest struct {
	what        string
	ask         func(t *testing.T, models map[string]*client.Client) error
	want        error
	least, most time.Duration
}

var timedRequests = []timedRequest{
	{"answered at once, with a deadline", func(_ *testing.T, m map[string]*client.Client) error {
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
		defer cancel()
		return ask(ctx, m["quick"], cmdAnswer, 0, 1)
	}, nil, 0, 2 * time.Second},
	{"answered at once, without one", func(_ *testing.T, m map[string]*client.Client) error {
		return ask(context.Background(), m["quick"], cmdAnswer, 0, 1)
	}, nil, 0, 2 * time.Second},
	{"waiting for others to batch with, for wait_time", func(_ *testing.T, m map[string]*client.Client) error {
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
		defer cancel()
		return ask(ctx, m["patient"], cmdAnswer, 0, 1)
	}, nil, 300 * time.Millisecond, 300 * time.Millisecond},
	{"expiring in the queue", func(_ *testing.T, m map[string]*client.Client) error {
		ctx, cancel := context.WithTimeout(context.Background(), 150*time.Millisecond)
		defer cancel()
		return ask(ctx, m["unserved"], cmdAnswer, 0, 1)
	}, context.DeadlineExceeded, 150 * time.Millisecond, 150 * time.Millisecond},
	{"expiring while it runs", func(_ *testing.T, m map[string]*client.Client) error {
		ctx, cancel := context.WithTimeout(context.Background(), 200*time.Millisecond)
		defer cancel()
		return ask(ctx, m["slow"], cmdSlow, 400, 1)
	}, context.DeadlineExceeded, 200 * time.Millisecond, 200 * time.Millisecond},
	{"expiring by the broker's clock alone", func(_ *testing.T, m map[string]*client.Client) error {
		r, err := m["unserved"].Claim(context.Background(), 1)
		if err != nil {
			return err
		}
		defer r.Release()
		ctx, cancel := context.WithTimeout(context.Background(), 250*time.Millisecond)
		defer cancel()
		if err := r.Commit(ctx); err != nil {
			return err
		}
		return r.Wait(context.Background())
	}, context.DeadlineExceeded, 250 * time.Millisecond, 250 * time.Millisecond},
	{"not waited for any longer", func(_ *testing.T, m map[string]*client.Client) error {
		r, err := m["unserved"].Claim(context.Background(), 1)
		if err != nil {
			return err
		}
		defer r.Release()
		if err := r.Commit(context.Background()); err != nil {
			return err
		}
		return r.WaitFor(120 * time.Millisecond)
	}, client.ErrTimeout, 120 * time.Millisecond, 120 * time.Millisecond},
}

func TestJumpsOfTheWallClockMoveNoDeadline(t *testing.T) {
	if os.Getenv(clockEnv) == "" {
		t.Skipf("sets the clock of the whole machine a minute forth and back, several times: only with %s=1", clockEnv)
	}
	specs := []testbed.Model{
		{Name: "quick", Slots: 64, MaxBatch: 8, Wait: time.Millisecond, Lease: 5 * time.Second},
		{Name: "patient", Slots: 64, MaxBatch: 8, Wait: 300 * time.Millisecond, Lease: 5 * time.Second},
		{Name: "slow", Slots: 64, MaxBatch: 1, Wait: time.Millisecond, Lease: 5 * time.Second},
		{Name: "unserved", Slots: 64, MaxBatch: 8, Wait: time.Millisecond, Lease: 5 * time.Second},
	}
	h := newHost(t, specs...)
	models := map[string]*client.Client{}
	for _, m := range specs {
		if m.Name != "unserved" {
			h.worker(m)
		}
		models[m.Name] = h.dialModel(m.Name)
	}
	other := h.dialModel("patient") // that sends nothing: without it nobody would be waited for
	if t.Failed() {
		t.FailNow()
	}
	works(t, models["quick"], 10)

	clock := h.startClock()
	var wg sync.WaitGroup
	for _, r := range timedRequests {
		wg.Add(1)
		go func() { defer wg.Done(); r.repeat(t, models, clock) }()
	}
	wg.Add(1)
	go func() { // the control plane has deadlines of its own
		defer wg.Done()
		for clock.running() {
			if c := h.dialModel("quick"); c != nil {
				c.Close()
			}
			time.Sleep(5 * time.Millisecond)
		}
	}()
	h.wait(&wg)
	clock.check()
	other.Close()

	for _, m := range specs {
		if s := h.model(m.Name); s.WorkersLost+s.WorkersHung > 0 {
			t.Errorf("%s lost %d workers, %d hung", m.Name, s.WorkersLost, s.WorkersHung)
		}
		models[m.Name].Close()
	}
	h.eventually("every request was ended once", func() error {
		for _, m := range h.stats().Models {
			if err := testbed.Settled(&m); err != nil {
				return err
			}
		}
		return nil
	})
}

// repeat sends the request until the clock stands still again.
func (r *timedRequest) repeat(t *testing.T, models map[string]*client.Client, clock *jumpingClock) {
	n := 0
	for ; clock.running() && !t.Failed(); n++ {
		stood, start := clock.stood.Load(), time.Now() // time.Since below is by the monotonic reading
		err := r.ask(t, models)
		took := time.Since(start)
		stalled := time.Duration(clock.stood.Load() - stood)
		if !errors.Is(err, r.want) {
			t.Errorf("%s: ended after %v with %v, expected %v", r.what, took, err, r.want)
		}
		if took < r.least-time.Millisecond || took > r.most+grace+stalled {
			t.Errorf("%s: took %v, expected %v to %v, and %v to be late; the machine stood still for %v", r.what, took, r.least, r.most, grace, stalled)
		}
	}
	t.Logf("%s: %d requests", r.what, n)
}

// dialModel is dial for a model of that name, and for any goroutine.
func (h *host) dialModel(name string) *client.Client {
	h.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	c, err := client.Dial(ctx, name, client.WithSocket(h.socket), client.WithWindow(4))
	if err != nil {
		h.t.Errorf("dial %s: %v", name, err)
		return nil
	}
	return c
}

// jumpingClock is a process that sets the machine's clock, and what this one
// sees of it.
type jumpingClock struct {
	t              *testing.T
	proc           *proc
	began          time.Time
	stood          atomic.Int64 // for how long in all this process did not run when it should have
	forth, back    time.Duration
	watched, ended chan struct{}
}

// startClock has the clock jump until that process is done.
func (h *host) startClock() *jumpingClock {
	h.t.Helper()
	c := &jumpingClock{t: h.t, began: time.Now(), watched: make(chan struct{}), ended: make(chan struct{})}
	c.proc = h.start(testbed.Spec{Role: "clock"})
	h.t.Cleanup(func() { // before it is killed: it must have put the clock right
		c.proc.Signal(syscall.SIGTERM)
		_ = c.proc.end()
	})
	c.proc.expect("jumping") // it was asked for: where the clock cannot be set, the test fails
	go c.watch()
	return c
}

func (c *jumpingClock) running() bool { return c.proc.Running() }

// off is by how much the wall clock is off, measured by the monotonic one.
func (c *jumpingClock) off() time.Duration {
	now := time.Now()
	return now.Round(0).Sub(c.began.Round(0)) - now.Sub(c.began) // Round strips the monotonic reading
}

func (c *jumpingClock) watch() {
	defer close(c.watched)
	for c.running() {
		before := time.Now()
		time.Sleep(10 * time.Millisecond)
		if d := time.Since(before); d > 30*time.Millisecond {
			c.stood.Add(int64(d))
		}
		c.forth, c.back = max(c.forth, c.off()), min(c.back, c.off())
	}
}

// check expects that the clock did jump, and is right again.
func (c *jumpingClock) check() {
	c.t.Helper()
	<-c.watched
	c.t.Logf("the clock went %v forth and %v back, and is off by %v now", c.forth, c.back, c.off())
	if c.proc.end() != nil || c.forth < 59*time.Second || c.back > -59*time.Second {
		c.t.Errorf("the clock went %v forth and %v back: %v", c.forth, c.back, c.proc.State())
	}
	if off := c.off().Abs(); off > time.Second {
		c.t.Errorf("the clock is off by %v", off)
	}
}
