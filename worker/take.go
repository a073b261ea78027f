// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"cmp"
	"context"
	"math"
	"sync"
)

// taking is shared by TakeBatches and TakeSoon.
type taking struct {
	turn sync.Mutex // at the mailbox; not held while parked
	err  error      // why there are no more batches
}

// TakeBatches calls take for every batch of one attachment, until ctx ends or the broker
// goes away. It is for a worker that passes batches on: take returns soon, and other
// goroutines complete the batches, in any order. At most Depth batches are in flight.
func (w *Worker) TakeBatches(ctx context.Context, take func(b *Batch)) error {
	stop := context.AfterFunc(ctx, w.poke)
	defer stop()
	w.parker.Polite = true // leave the cores to the goroutines that complete batches
	for {
		seen := w.mail.Bell.Load()
		b, next, err := w.takeInTurn(ctx)
		switch {
		case err != nil:
			return err
		case b != nil:
			take(b)
		default:
			w.mail.Wait(&w.parker, seen, next, math.MaxInt64)
		}
	}
}

// takeInTurn takes the next batch if there is one, else it returns the batch's number.
func (w *Worker) takeInTurn(ctx context.Context) (b *Batch, next uint64, err error) {
	t := &w.taking
	t.turn.Lock()
	defer t.turn.Unlock()
	if t.err = cmp.Or(t.err, ctx.Err()); t.err == nil {
		b, t.err = w.TryNext()
	}
	return b, w.next, t.err
}

// TakeSoon is for a goroutine that has just completed a batch of TakeBatches. It takes
// the next batch, if that is there or follows at once, sooner than TakeBatches wakes
// up; otherwise it returns nil. It spins only while no other batch is in flight, and
// only while spinning pays.
func (w *Worker) TakeSoon() *Batch {
	t := &w.taking
	if !t.turn.TryLock() {
		return nil
	}
	defer t.turn.Unlock()
	if t.err != nil || !w.hasNext() && !w.spinForNext() {
		return nil
	}
	b, err := w.TryNext()
	if err != nil {
		t.err = err
		w.poke() // for TakeBatches to return it
	}
	return b
}

// spinForNext spins for the next batch while that pays.
func (w *Worker) spinForNext() bool {
	w.mu.Lock()
	inFlight := len(w.taken)
	w.mu.Unlock()
	w.spin.Limit = w.spinFor.Load()
	return inFlight == 0 && w.spin.Until(w.hasNext, math.MaxInt64)
}
