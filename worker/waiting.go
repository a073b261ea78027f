// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"context"
	"time"

	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
)

// watchEvery is how often a batch's context checks whether a client still waits: a
// cancellation is a word in shared memory and wakes no worker.
const watchEvery = 5 * time.Millisecond

// Waiting reports whether a client still waits for request i.
func (b *Batch) Waiting(i int) bool {
	q := &b.reqs[i]
	return !b.w.gone.Load() && isOpen(b.w.session.Board, q.slot, q.gen)
}

func (b *Batch) anyWaiting() bool {
	for i := range b.reqs {
		if b.Waiting(i) {
			return true
		}
	}
	return false
}

// deadline is when the last request expires; false if one never does.
func (b *Batch) deadline() (time.Time, bool) {
	last := int64(0)
	for i := range b.reqs {
		d := b.mails[b.reqs[i].mail].Deadline
		if d == 0 {
			return time.Time{}, false
		}
		last = max(last, d)
	}
	return time.Now().Add(time.Duration(last - shm.Now())), true
}

// Context ends with parent, at the last deadline, or with ErrCanceled shortly after no client
// waits any more. Call cancel before Complete.
func (b *Batch) Context(parent context.Context) (ctx context.Context, cancel context.CancelFunc) {
	ctx, give := context.WithCancelCause(parent)
	release := func() {}
	if at, ok := b.deadline(); ok {
		ctx, release = context.WithDeadline(ctx, at)
	}
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		tick := time.NewTicker(watchEvery)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
				if !b.anyWaiting() {
					give(status.ErrCanceled)
				}
			}
		}
	}()
	return ctx, func() {
		give(context.Canceled)
		release()
		<-watched
	}
}
