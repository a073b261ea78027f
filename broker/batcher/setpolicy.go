// SPDX-License-Identifier: Apache-2.0

package batcher

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/status"
)

// SetPolicy changes the policy while requests wait. If settings is not valid, or conflicts with a
// request in flight, nothing changes; the error wraps status.ErrInvalid and names the field.
//
// Wait time, maxima, preferred sizes, ageing, order and OnTimeout apply at once to waiting
// requests. The limits and times of a level apply to requests that arrive from now on.
func (b *Batcher) SetPolicy(settings policy.Settings) error {
	if err := settings.Validate(); err != nil {
		return err
	}
	if err := b.fits(&settings); err != nil {
		return err
	}
	ids := b.emptyQueues()
	delayed := b.ranks - 1
	b.settings = settings.Clone()
	b.advisor.SetPolicy(&b.settings)
	b.sizeLevels()
	for _, id := range ids {
		if r := &b.requests[id]; int(r.base) == delayed {
			r.base = uint8(b.ranks - 1)
		}
	}
	b.fillQueues(ids)
	return nil
}

func refuse(format string, args ...any) error {
	return fmt.Errorf("%w: %s", status.ErrInvalid, fmt.Sprintf(format, args...))
}

// fits checks settings against the requests in flight.
func (b *Batcher) fits(settings *policy.Settings) error {
	inFlight := false
	for i := range b.requests {
		r := &b.requests[i]
		if r.state == unknown {
			continue
		}
		inFlight = true
		if int(r.rows) > settings.MaxBatchSize {
			return refuse("max_batch_size is %d, but a request of %d rows is in flight", settings.MaxBatchSize, r.rows)
		}
		if int(r.level) >= settings.LevelCount() {
			return refuse("priorities is %d, but a request of level %d is in flight", settings.LevelCount(), r.level)
		}
	}
	if inFlight && !slices.EqualFunc(settings.Buckets, b.settings.Buckets, slices.Equal[[]uint32]) {
		return refuse("buckets cannot change while requests are in flight")
	}
	return nil
}

// emptyQueues takes every waiting request out of the queues and returns them
// in the order of their seq. They stay admitted.
func (b *Batcher) emptyQueues() []RequestID {
	var ids []RequestID
	for i := range b.requests {
		r := &b.requests[i]
		if r.state != waiting {
			continue
		}
		id := RequestID(i)
		ids = append(ids, id)
		if !r.held {
			b.leave(id)
		}
		r.held = false
	}
	for i := range b.clients {
		b.clients[i].runEnd, b.clients[i].runRows = none, 0
	}
	slices.SortFunc(ids, func(x, y RequestID) int {
		return cmp.Compare(b.requests[x].seq, b.requests[y].seq)
	})
	b.readies.clear()
	b.reorders.clear()
	for i := range b.shapes.shapes {
		sh := &b.shapes.shapes[i]
		sh.full, sh.ready, sh.stale, sh.preferred = false, false, false, 0
	}
	b.stale = b.stale[:0]
	return ids
}

// fillQueues undoes emptyQueues under the present policy. Which ready times
// have passed already is found by the next Decide.
func (b *Batcher) fillQueues(ids []RequestID) {
	for _, id := range ids {
		b.setReadyTimer(-Never, id)
		r := &b.requests[id]
		r.held = b.settings.PreserveOrder || r.owed
		if b.settings.PreserveOrder {
			b.linkOrder(id)
		} else if !r.owed {
			b.enter(id)
		}
	}
	for i := range b.clients {
		b.release(&b.clients[i])
	}
}
