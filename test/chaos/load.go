// SPDX-License-Identifier: Apache-2.0

package chaos

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/internal/histogram"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/test/testbed"
)

// tally is what a process of honest clients has seen.
type tally struct {
	OK       int            // with the right bytes
	Named    map[string]int // ended with a named error
	Poisoned int            // poisonous requests that ended as they should
	Wrong    []string       // wrong bytes, or an error without a name
	Late     []string       // ended more than 100 ms after its deadline
	Stood    time.Duration  // how long this process, or the whole machine, stood still, in all
	Slowest  time.Duration
}

func (t *tally) add(u *tally) {
	t.OK += u.OK
	t.Poisoned += u.Poisoned
	t.Stood = max(t.Stood, u.Stood)
	t.Slowest = max(t.Slowest, u.Slowest)
	for name, n := range u.Named {
		t.Named[name] += n
	}
}

// window is what a process of honest clients has seen since it was last asked.
type window struct {
	N             uint64
	OK            int // since it began
	P50, P99, Max time.Duration
}

const (
	patience = 20 * time.Second       // deadline of every request, unless its load has another
	grace    = 100 * time.Millisecond // and how late its end may come

	enoughTime = 2 * time.Minute // for what surely comes, on any machine
)

// loadJob is that of a process of honest clients.
type loadJob struct {
	Socket  string
	Model   string // default theModel
	Seed    uint64
	Load    int           // goroutines
	Pause   int           // microseconds between requests, about
	Poison  float64       // share of poisonous requests: their workers die
	Raise   float64       // the same: their workers' functions raise
	Timeout time.Duration // default patience
}

// playLoad sends requests from several goroutines until it is told to stop,
// and checks every answer. Its last message is the tally; to every command it
// tells a window.
func playLoad(child *testbed.Child, job loadJob) error {
	ctx := child.Context()
	dial, cancel := context.WithTimeout(ctx, enoughTime)
	defer cancel()
	c, err := client.Dial(dial, job.Model, client.WithSocket(job.Socket), client.WithWindow(2*job.Load), client.WaitForModel())
	if err != nil {
		return err
	}
	_ = child.Ready()
	if job.Timeout == 0 {
		job.Timeout = patience
	}
	var (
		mu sync.Mutex
		t  = tally{Named: map[string]int{}}
		h  histogram.Histogram
		wg sync.WaitGroup
	)
	stalls := testbed.WatchStalls(nil, false)
	for k := range job.Load {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(job.Seed, uint64(k)))
			x := make([]int64, testbed.Width)
			for id := int64(1); ctx.Err() == nil; id++ {
				for j := range x {
					x[j] = rng.Int64()
				}
				x[0], x[1] = cmdAnswer, id<<8|int64(k)
				poison := status.OK // how it ends
				switch p := rng.Float64(); {
				case p < job.Poison:
					x[0], poison = cmdPoison, status.ErrWorkerDied
				case p < job.Poison+job.Raise:
					x[0], poison = cmdRaise, status.ErrFailed
				}
				start := time.Now()
				err := askWithin(c, x, job.Timeout)
				took := time.Since(start)
				if took > job.Timeout+grace {
					time.Sleep(grace) // who watches may have stood still too, and says so now
				}
				mu.Lock()
				t.count(err, took, job.Timeout+stalls.Since(start), poison)
				h.Add(took)
				mu.Unlock()
				if job.Pause > 0 {
					time.Sleep(time.Duration(job.Pause/2+rng.IntN(job.Pause)) * time.Microsecond)
				}
			}
		})
	}
	ended := make(chan struct{})
	go func() { wg.Wait(); close(ended) }()
	for {
		select {
		case <-child.Commands():
			mu.Lock()
			w := window{h.Count(), t.OK, h.Quantile(0.5), h.Quantile(0.99), h.Max()}
			h = histogram.Histogram{}
			mu.Unlock()
			if err := child.Tell("window", w); err != nil {
				return err
			}
		case <-ended:
			t.Stood = stalls.Since(time.Time{})
			return errors.Join(child.Tell("tally", &t), c.Close())
		}
	}
}

// windowOver is what the first load sees while something happens.
func (h *host) windowOver(something func()) window {
	h.window()
	something()
	return h.window()
}

// window asks the first load what it has seen since it was last asked.
func (h *host) window() (w window) {
	h.r.must(h.loads[0].Send("window"))
	h.r.must(h.loads[0].Expect("window", &w, enoughTime))
	return w
}

func ask(c *client.Client, x []int64) error { return askWithin(c, x, patience) }

func askWithin(c *client.Client, x []int64, timeout time.Duration) error {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	return testbed.Ask(ctx, c, x, testbed.Width)
}

func (t *tally) count(err error, took, allowed time.Duration, poison status.Code) {
	var s status.Code
	switch {
	case errors.Is(err, testbed.ErrWrongBytes):
		t.Wrong = append(t.Wrong, err.Error())
	case poison == status.ErrFailed && errors.Is(err, poison) && err.Error() != errRaised.Error() && err.Error() != errBroken.Error():
		t.Wrong = append(t.Wrong, "a poisonous request was told "+err.Error())
	case poison != status.OK && errors.Is(err, poison):
		t.Poisoned++
	case err == nil && poison != status.OK:
		t.Wrong = append(t.Wrong, "a poisonous request was answered")
	case err == nil:
		t.OK++
	case errors.As(err, &s):
		t.Named[s.Name()]++
	default:
		t.Wrong = append(t.Wrong, "unnamed: "+err.Error())
	}
	t.Slowest = max(t.Slowest, took)
	if took > allowed+grace {
		t.Late = append(t.Late, fmt.Sprintf("%v: %v", took, err))
	}
}
