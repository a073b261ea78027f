// SPDX-License-Identifier: Apache-2.0

package client

import (
	"context"
	"fmt"
	"math/bits"
	"slices"
	"time"

	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
)

// claimer is a Claim that waits in the line of a link. Whoever frees slots takes them for
// the claimers, in order, and wakes those that were served.
type claimer struct {
	rows  int
	at    int           // -1: not served yet
	short int64         // since when free slots are there but too few, while it is first; 0: not yet
	polls bool          // it looks again each millisecond
	wake  chan struct{} // holds one value: served, or look again
}

func (w *claimer) look() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// holdStep is the first of the times by which the first in line holds up the others.
const holdStep = 10 * time.Millisecond

// holdsUp reports whether claimers behind this one wait for it, although fewer rows would
// fit. By turns it holds them up and lets them pass, each time for twice as long: 10 ms,
// 10 ms, 20 ms, 40 ms … 2.56 s, then from the beginning. So many rows are served although
// few keep coming, and few although a goroutine keeps slots that many rows need.
func (w *claimer) holdsUp(now int64) bool {
	if w.short == 0 {
		w.short = now
	}
	return bits.Len64(uint64((now-w.short)/int64(holdStep)%512))%2 == 0
}

// claimSlots takes slots behind the claimers that are there. It returns -1 without an
// error if the client has left this link. If it waits and start is 0, it sets start.
func (l *link) claimSlots(ctx context.Context, wait bool, rows int, q *Sequence, start *int64) (at int, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.line) == 0 {
		if at, ok := l.take(rows); ok {
			return at, nil
		}
	}
	w := &claimer{rows: rows, at: -1, wake: make(chan struct{}, 1)}
	l.line = append(l.line, w)
	l.serveLine()
	for w.at < 0 && err == nil && !l.left(q) {
		if err = l.roomFor(rows, q); err == nil && !wait {
			err = status.ErrFull
		}
		if err == nil {
			if *start == 0 {
				*start = shm.Now()
			}
			err = l.awaitTurn(ctx, w)
		}
	}
	if w.at >= 0 {
		return w.at, nil
	}
	l.line = slices.DeleteFunc(l.line, func(o *claimer) bool { return o == w })
	l.serveLine()
	return -1, err
}

// left reports whether the client has left this link. A copy of a sequence stays.
func (l *link) left(q *Sequence) bool {
	return l.dead.Load() || l.refs.Load() >= retired && (q == nil || q.from == nil)
}

// roomFor is nil if there may be slots one day for a request, or for the sequence q.
func (l *link) roomFor(rows int, q *Sequence) error {
	if q != nil || rows <= l.info.Window-l.kept {
		return nil
	}
	return fmt.Errorf("%w: this client's sequences keep %d of its %d slots, so a request has at most %d rows: close some, "+
		"or dial with a larger window", status.ErrRows, l.kept, l.info.Window, l.info.Window-l.kept)
}

// awaitTurn sleeps until w is served or has to look again. The caller holds mu.
func (l *link) awaitTurn(ctx context.Context, w *claimer) (err error) {
	var poll <-chan time.Time
	if w.polls = l.line[0] == w && l.mayChange(); w.polls {
		poll = time.After(time.Millisecond)
	}
	l.mu.Unlock()
	select {
	case <-w.wake:
	case <-poll:
	case <-ctx.Done():
		err = fmt.Errorf("%w (%w)", status.ErrFull, ctx.Err())
	}
	l.mu.Lock()
	l.serveLine()
	return err
}

// mayChange reports whether a claimer may be served without a wake-up: when its turn to
// hold up the others is over, or when a worker is done with abandoned slots.
func (l *link) mayChange() bool { return l.nfree > 0 || len(l.abandoned) > 0 }

// serveLine takes slots for the claimers. Those with equal rows are served in order. The
// caller holds mu.
func (l *link) serveLine() {
	if len(l.line) == 0 || l.dead.Load() {
		return
	}
	l.reapAbandoned()
	for i := 0; i < len(l.line) && l.nfree > 0; {
		w := l.line[i]
		if at, ok := l.take(w.rows); ok {
			w.at = at
			l.line = slices.Delete(l.line, i, i+1)
			w.look()
		} else if i == 0 && w.holdsUp(shm.Now()) {
			break
		} else {
			i++
		}
	}
	if len(l.line) > 0 && !l.line[0].polls && l.mayChange() {
		l.line[0].look()
	}
}

// wakeClaims makes every waiting Claim look again. The caller holds mu.
func (l *link) wakeClaims() {
	for _, w := range l.line {
		w.look()
	}
}
