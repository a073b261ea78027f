// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"cmp"
	"context"
	"math"
	"sync"
)

// taking is what those share who take batches to pass them on.
type taking struct {
	turn sync.Mutex // at the mailbox; not held while parked
	err  error      // why there are no more batches
}

// TakeBatches calls take for every batch of one attachment, until ctx ends or
// the broker goes away. It is for a worker that passes its batches on: take
// returns soon, and other goroutines complete the batches, in any order. No
// more than Depth of them are under way.
func (w *Worker) TakeBatches(ctx context.Context, take func(b *Batch)) error {
	stop := context.AfterFunc(ctx, w.poke)
	defer stop()
	w.parker.Polite = true // for those who complete them
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

// takeInTurn takes the next batch if there is one, else tells its number.
func (w *Worker) takeInTurn(ctx context.Context) (b *Batch, next uint64, err error) {
	t := &w.taking
	t.turn.Lock()
	defer t.turn.Unlock()
	if t.err = cmp.Or(t.err, ctx.Err()); t.err == nil {
		b, t.err = w.TryNext()
	}
	return b, w.next, t.err
}

// TakeSoon is for the goroutine that has just completed a batch of TakeBatches:
// it takes the next one, if that is there already or follows at once, sooner
// than the goroutine that sleeps until there is one. It spins for it only while
// no other batch is under way and as long as that pays. Else it returns nil.
func (w *Worker) TakeSoon() *Batch {
	t := &w.taking
	if !t.turn.TryLock() {
		return nil
	}
	defer t.turn.Unlock()
	if t.err != nil || !w.awake() && !w.comesSoon() {
		return nil
	}
	b, err := w.TryNext()
	if err != nil {
		t.err = err
		w.poke() // for TakeBatches to return it
	}
	return b
}

// comesSoon spins for the next batch, if that is worth it.
func (w *Worker) comesSoon() bool {
	w.mu.Lock()
	underWay := len(w.taken)
	w.mu.Unlock()
	w.spin.Limit = w.spinFor.Load()
	return underWay == 0 && w.spin.Until(w.awake, math.MaxInt64)
}
