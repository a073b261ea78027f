package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/signal"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/internal/histogram"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

// tally is what a process of honest clients has seen.
type tally struct {
	OK       int            // with the right bytes
	Named    map[string]int // ended with a named error
	Poisoned int            // poisonous requests that ended with WorkerDied
	Wrong    []string       // wrong bytes, or an error without a name
	Late     []string       // ended more than 100 ms after its deadline
	Stood    time.Duration  // how long the whole machine stood still, in all
	P50, P99 time.Duration  // since the last mark (SIGUSR1)
	Max      time.Duration
}

const (
	patience = 5 * time.Second        // deadline of every request
	grace    = 100 * time.Millisecond // and how late its end may come
)

// load sends requests from several goroutines until told to stop, and checks
// every answer. It says a tally every 200 ms.
func (ro *role) load(ctx context.Context) error {
	dial, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	c, err := client.Dial(dial, modelName, client.WithSocket(ro.Socket), client.WithWindow(2*ro.Load), client.WaitForModel())
	if err != nil {
		return err
	}
	var (
		mu sync.Mutex
		t  = tally{Named: map[string]int{}}
		h  histogram.Histogram
		wg sync.WaitGroup
	)
	report := func() {
		mu.Lock()
		defer mu.Unlock()
		t.P50, t.P99, t.Max = h.Quantile(0.5), h.Quantile(0.99), h.Max()
		text, _ := json.Marshal(&t)
		say("%s", text)
	}
	var stood atomic.Int64
	go func() { // a sleep that lasts longer than grace: nobody ran, not even the clock's watcher
		for {
			start := time.Now()
			time.Sleep(10 * time.Millisecond)
			if d := time.Since(start); d > grace {
				stood.Add(int64(d))
			}
		}
	}()
	for k := range ro.Load {
		wg.Add(1)
		go func() {
			defer wg.Done()
			rng := rand.New(rand.NewPCG(ro.Seed, uint64(k)))
			x := make([]int64, width)
			for id := int64(1); ctx.Err() == nil; id++ {
				for j := range x {
					x[j] = rng.Int64()
				}
				x[0], x[1] = cmdAnswer, id<<8|int64(k)
				poison := rng.Float64() < ro.Poison
				if poison {
					x[0] = cmdPoison
				}
				start, before := time.Now(), stood.Load()
				err := ro.ask(c, x)
				took := time.Since(start)
				mu.Lock()
				t.Stood = time.Duration(stood.Load())
				t.count(err, took, t.Stood-time.Duration(before), poison)
				h.Add(took)
				mu.Unlock()
				if ro.Pause > 0 {
					time.Sleep(time.Duration(ro.Pause/2+rng.IntN(ro.Pause)) * time.Microsecond)
				}
			}
		}()
	}
	mark := make(chan os.Signal, 1)
	signal.Notify(mark, syscall.SIGUSR1)
	ended := make(chan struct{})
	go func() { wg.Wait(); close(ended) }()
	for tick := time.NewTicker(200 * time.Millisecond); ; {
		select {
		case <-tick.C:
			report()
			continue
		case <-mark:
			mu.Lock()
			h = histogram.Histogram{}
			mu.Unlock()
			continue
		case <-ended:
		}
		report()
		return c.Close()
	}
}

// errBytes is a wrong answer.
var errBytes = errors.New("wrong bytes")

func (ro *role) ask(c *client.Client, x []int64) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	outs, err := c.Infer(ctx, x)
	if err != nil {
		return err
	}
	y, err := tensor.As[int64](outs[0])
	if err != nil {
		return err
	}
	for j := range x {
		if y[j] != answer(x[j], j) {
			return fmt.Errorf("%w: element %d of request %d is %d", errBytes, j, x[1], y[j])
		}
	}
	return nil
}

func (t *tally) count(err error, took, stood time.Duration, poison bool) {
	var s status.Code
	switch {
	case errors.Is(err, errBytes):
		t.Wrong = append(t.Wrong, err.Error())
	case poison && errors.Is(err, status.ErrWorkerDied):
		t.Poisoned++
	case err == nil && poison:
		t.Wrong = append(t.Wrong, "a poisonous request was answered")
	case err == nil:
		t.OK++
	case errors.As(err, &s):
		t.Named[s.Name()]++
	default:
		t.Wrong = append(t.Wrong, "unnamed: "+err.Error())
	}
	if took > patience+grace+stood {
		t.Late = append(t.Late, fmt.Sprintf("%v: %v", took, err))
	}
}
