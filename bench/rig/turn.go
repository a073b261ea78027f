// SPDX-License-Identifier: Apache-2.0

package rig

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/ringbatch/ringbatch/test/testbed"
)

// Caller sends one request and checks the answer.
type Caller func(context.Context) error

// Turn is the outcome of callers that called for a while.
type Turn struct {
	PerSecond float64
	MedianUS  float64
	P99US     float64
}

// Call has every caller call as fast as it can for that long.
func Call(ctx context.Context, callers []Caller, d time.Duration) (Turn, error) {
	return timed(ctx, callers, func(last time.Time, i int) (time.Time, bool) { return last, true }, d)
}

// CallAt has the callers call at the given times after the start, whatever the answers do. Times count from then.
func CallAt(ctx context.Context, callers []Caller, due []time.Duration) (Turn, error) {
	begin := time.Now()
	queue := make(chan time.Duration, len(due))
	for _, d := range due {
		queue <- d
	}
	close(queue)
	return timed(ctx, callers, func(time.Time, int) (time.Time, bool) {
		d, more := <-queue
		if more {
			time.Sleep(time.Until(begin.Add(d)))
		}
		return begin.Add(d), more
	}, 1<<62)
}

// timed calls until next says that there is no more, or the time is over.
func timed(ctx context.Context, callers []Caller, next func(last time.Time, i int) (time.Time, bool), d time.Duration) (Turn, error) {
	took, failed := make([][]float64, len(callers)), make([]error, len(callers))
	var all sync.WaitGroup
	begin := time.Now()
	for i, call := range callers {
		all.Go(func() {
			for last := begin; failed[i] == nil && last.Sub(begin) < d; {
				start, more := next(last, i)
				if !more {
					return
				}
				failed[i] = call(ctx)
				last = time.Now()
				took[i] = append(took[i], float64(last.Sub(start))/1e3)
			}
		})
	}
	all.Wait()
	every := slices.Sorted(slices.Values(slices.Concat(took...)))
	if err := errors.Join(failed...); err != nil || len(every) == 0 {
		return Turn{}, errors.Join(err, ctx.Err())
	}
	n := len(every)
	return Turn{float64(n) / time.Since(begin).Seconds(), every[n/2], every[n*99/100]}, nil
}

// Compare gives the medians of several sets of callers that take turns.
func (r *Rig) Compare(what string, sets ...[]Caller) []Turn {
	kinds := make([]func(time.Duration) (Turn, error), len(sets))
	for i, set := range sets {
		kinds[i] = func(d time.Duration) (Turn, error) { return Call(r.Context(), set, d) }
	}
	return r.CompareTurns(what, kinds...)
}

// CompareTurns gives the medians of several kinds of turns.
func (r *Rig) CompareTurns(what string, kinds ...func(time.Duration) (Turn, error)) []Turn {
	rates, medians, tails := make([][]float64, len(kinds)), make([][]float64, len(kinds)), make([][]float64, len(kinds))
	r.InTurns(what, func(counts bool) {
		for i, take := range kinds {
			t, err := take(r.Round)
			r.Must(err)
			if counts {
				rates[i], medians[i], tails[i] = append(rates[i], t.PerSecond), append(medians[i], t.MedianUS), append(tails[i], t.P99US)
			}
		}
	})
	turns := make([]Turn, len(kinds))
	for i := range turns {
		turns[i] = Turn{Median(rates[i]), Median(medians[i]), Median(tails[i])}
	}
	return turns
}

// OrderAll sends one command to all processes and gathers their answers.
func OrderAll[R any](r *Rig, procs []*testbed.Process, order any) []R {
	for _, p := range procs {
		r.Must(p.Send(order))
	}
	results := make([]R, len(procs))
	for i, p := range procs {
		r.Must(p.Receive(&results[i]))
	}
	return results
}
