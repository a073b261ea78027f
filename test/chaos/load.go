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

// tally counts the ends of requests of a process of honest clients.
type tally struct {
	OK       int            // with the right bytes
	Named    map[string]int // ended with a named error
	Poisoned int            // poisonous requests that ended as they should
	Wrong    []string       // wrong bytes, or an error without a name
	Late     []string       // ended more than 100 ms after its deadline
	Stood    time.Duration  // for which this process, or the whole machine, stood still
	Slowest  time.Duration

	Sequences, Steps, Restarts int
}

func (t *tally) add(u *tally) {
	t.OK += u.OK
	t.Poisoned += u.Poisoned
	t.Sequences += u.Sequences
	t.Steps += u.Steps
	t.Restarts += u.Restarts
	t.Stood = max(t.Stood, u.Stood)
	t.Slowest = max(t.Slowest, u.Slowest)
	for name, n := range u.Named {
		t.Named[name] += n
	}
}

// latencies of a process of honest clients since they were last asked for.
type latencies struct {
	N             uint64
	P50, P99, Max time.Duration
}

const (
	patience = 20 * time.Second       // deadline of every request, unless its load has another
	grace    = 100 * time.Millisecond // how long after its deadline a request may end

	enoughTime = 2 * time.Minute // for every expected event, on any machine
)

// loadJob describes a process of honest clients.
type loadJob struct {
	Socket  string
	Model   string // default theModel
	Seed    uint64
	Load    int           // goroutines
	Clients int           // which they share; default 1
	Pause   int           // microseconds between requests, about
	Poison  float64       // share of requests whose workers die
	Raise   float64       // share of requests at which workers' functions raise
	Timeout time.Duration // default patience
}

// playLoad sends requests from several goroutines until SIGTERM and checks every
// answer. It answers every command with its latencies; its last message is the tally.
func playLoad(child *testbed.Child, job loadJob) error {
	ctx := child.Context()
	dial, cancel := context.WithTimeout(ctx, enoughTime)
	defer cancel()
	clients := make([]*client.Client, max(1, job.Clients))
	for i := range clients {
		c, err := client.Dial(dial, job.Model, client.WithSocket(job.Socket), client.WithWindow(2*job.Load/len(clients)), client.WaitForModel())
		if err != nil {
			return err
		}
		defer c.Close()
		clients[i] = c
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
				poison := status.OK // the request's end
				switch p := rng.Float64(); {
				case p < job.Poison:
					x[0], poison = cmdPoison, status.ErrWorkerDied
				case p < job.Poison+job.Raise:
					x[0], poison = cmdRaise, status.ErrFailed
				}
				start := time.Now()
				err := askWithin(clients[k%len(clients)], x, job.Timeout)
				took := time.Since(start)
				if took > job.Timeout+grace {
					time.Sleep(grace) // the watcher of stalls may have stood still too
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
			l := latencies{h.Count(), h.Quantile(0.5), h.Quantile(0.99), h.Max()}
			h = histogram.Histogram{}
			mu.Unlock()
			if err := child.Tell("latencies", l); err != nil {
				return err
			}
		case <-ended:
			t.Stood = stalls.Since(time.Time{})
			return child.Tell("tally", &t)
		}
	}
}

// latencies of the first load since they were last asked for.
func (h *host) latencies() (l latencies) {
	h.r.must(h.loads[0].Send("latencies"))
	h.r.must(h.loads[0].Expect("latencies", &l, enoughTime))
	return l
}

// comparison is the latencies of honest clients at an attacked broker and at a
// control broker, in the same seconds: a busy machine slows both.
type comparison struct {
	attacked, control latencies
	from              time.Time
}

// compareWith measures both brokers while something happens to the first.
func (h *host) compareWith(control *host, something func()) (c comparison) {
	h.latencies()
	control.latencies()
	c.from = time.Now()
	something()
	c.attacked, c.control = h.latencies(), control.latencies()
	return c
}

// notSlower checks a quantile of the attacked broker against the control's. A machine
// that stood still for a hundredth of the time makes the p99 by itself.
func (c *comparison) notSlower(r *run, what string, attacked, control, slack time.Duration) {
	elapsed, stood := time.Since(c.from), r.stalls.Since(c.from)
	ok := attacked <= 2*control+slack
	switch text := fmt.Sprintf("%s: %v beside an attack, %v at a broker without", what, attacked, control); {
	case min(c.attacked.N, c.control.N) < enough:
		r.notJudged("%s; %d and %d requests are too few", text, c.attacked.N, c.control.N)
	case !ok && stood > elapsed/100:
		r.notJudged("%s; but the machine stood still for %v of %v", text, stood, elapsed)
	default:
		r.quick(ok, "%s", text)
	}
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
		t.Wrong = append(t.Wrong, "a poisonous request ended with "+err.Error())
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
