// SPDX-License-Identifier: Apache-2.0

package relay

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/worker"
)

// trip is one batch on its way: to a host, and where that fails to others. The
// goroutine that takes batches starts it, another one finishes it.
type trip struct {
	r     *relay
	b     *worker.Batch
	model *policy.Settings // of the model here

	ctx    context.Context // ends when nobody waits any more
	cancel context.CancelFunc
	first  *sending // is under way; nil: no host was there
	last   error    // why a host did not run it, or went away
	begun  bool     // a host may have run some of it, and did not answer
	ended  []bool   // requests that have an answer or an error
	faulty bool     // a fault of ours has failed it
}

func newTrip(r *relay, b *worker.Batch, model *policy.Settings) *trip {
	return &trip{r: r, b: b, model: model, ended: make([]bool, b.Len())}
}

// How often hosts that were sent a batch may go away before its requests go on
// one by one, and how often with a request that goes alone. The request that
// makes hosts die is then found, fails, and takes nothing with it but these.
const (
	lossesTogether = 2
	lossesAlone    = 1
)

// start sends the batch to a host, if there is one. It does not wait for the
// answer.
func (t *trip) start() {
	all := t.all()
	t.ctx, t.cancel = context.WithDeadline(context.Background(), t.until(all))
	if t.ctx.Err() == nil {
		t.guard(func() { t.first = t.send(t.ctx, all, nil) })
	}
}

// finish ends every request of the batch.
func (t *trip) finish() {
	defer t.b.Complete()
	defer t.cancel()
	if t.faulty { // what was sent of it must not be sent again
		return
	}
	t.guard(func() {
		suspects := t.deliver(t.ctx, t.all(), lossesTogether)
		for _, i := range suspects {
			if alone := t.deliver(t.ctx, []int{i}, lossesAlone); len(alone) > 0 {
				t.fail(alone, fmt.Errorf("%w: %d hosts went away while they ran it", status.ErrWorkerDied, lossesTogether+lossesAlone))
			}
		}
		t.failUnanswered()
	})
}

// failUnanswered fails what has neither an answer nor an error. Such a request
// would end well, with what its slot had before.
func (t *trip) failUnanswered() {
	for i, ended := range t.ended {
		switch {
		case ended:
		case t.b.Waiting(i):
			t.b.Fail(i, errNoAnswer)
		default: // it has ended, or its client may learn of that here first
			t.b.Fail(i, status.ErrBrokerGone)
		}
	}
}

var errNoAnswer = errors.New("the relay has no answer for it: please report this fault")

// guard has a fault of ours fail the batch, not the relay.
func (t *trip) guard(step func()) {
	defer func() {
		if fault := recover(); fault != nil {
			t.faulty = true
			t.r.log.Error("the relay panicked", "panic", fault, "stack", string(debug.Stack()))
			t.b.FailAll(fmt.Errorf("the relay panicked: %v", fault))
		}
	}()
	step()
}

func (t *trip) all() []int {
	all := make([]int, t.b.Len())
	for i := range all {
		all[i] = i
	}
	return all
}

// until is when nobody waits any more, or the broker would lose patience with
// this worker.
func (t *trip) until(requests []int) time.Time {
	last := t.b.Dispatched() + int64(t.model.Lease)*9/10
	latest := int64(0)
	for _, i := range requests {
		d := t.b.Request(i).Deadline
		if d == 0 {
			latest = last
			break
		}
		latest = max(latest, d)
	}
	now := shm.Now() // first: a deadline must not end here before it does at the broker
	return time.Now().Add(time.Duration(min(last, latest) - now))
}

// stillOpen leaves out the requests that nobody waits for.
func (t *trip) stillOpen(requests []int) (open []int) {
	for _, i := range requests {
		if t.b.Waiting(i) {
			open = append(open, i)
		}
	}
	return open
}

// deliver sends requests together until each has ended, and returns those whose
// hosts went away too often.
func (t *trip) deliver(ctx context.Context, requests []int, losses int) (suspects []int) {
	var been []*host
	wait := leastWait
	for attempts, lostHosts := 0, 0; ; {
		changed := t.r.hosts.wait()
		s := t.first
		if t.first = nil; s == nil {
			if requests = t.stillOpen(requests); len(requests) == 0 {
				return suspects
			}
			if ctx.Err() != nil {
				t.outOfTime(requests, nil, t.begun)
				return suspects
			}
			if s = t.send(ctx, requests, been); s == nil {
				pauseUntil(ctx, retryPause, changed)
				continue
			}
		}
		results := s.receive()
		if !slices.Contains(been, s.host) {
			been = append(been, s.host)
		}
		had := func(f fate) bool { return slices.ContainsFunc(results, func(r result) bool { return r.fate == f }) }
		if had(lost) {
			lostHosts++
			t.begun = true
		}
		if had(lost) || had(refused) {
			attempts++
		}
		requests = nil
		for _, res := range results {
			t.last = res.err
			switch {
			case res.fate == lost && lostHosts >= losses:
				suspects = append(suspects, res.again...)
				continue
			case (res.fate == lost || res.fate == refused) && attempts >= t.r.cfg.Attempts:
				t.fail(res.again, t.spent(res))
				continue
			case res.fate == lost:
				t.r.log.Info("batch goes to another host", "left", s.host.name, "requests", len(res.again), "reason", res.err)
			}
			requests = append(requests, res.again...)
		}
		slices.Sort(requests) // a message of all of them has them in the batch's order
		switch {
		case len(requests) == 0:
			return suspects
		case had(refused): // wherever it goes, a little later
			pause(ctx, refusedPause)
		case had(waits) && !t.r.hosts.others(been):
			pause(ctx, wait)
			wait = min(2*wait, mostWait)
		}
	}
}

const (
	retryPause   = 50 * time.Millisecond
	refusedPause = 5 * time.Millisecond
	leastWait    = 2 * time.Millisecond // of what every host has refused; doubles each time, up to
	mostWait     = 200 * time.Millisecond
)

// outOfTime fails requests that no host has answered when the batch's time was over:
// that of those with a deadline, or the lease. now is of the host that they were meant
// for, if there is one; if they were sent it may have run them.
func (t *trip) outOfTime(requests []int, now error, sent bool) {
	for _, i := range requests {
		if d := t.b.Request(i).Deadline; d > 0 && d-shm.Now() < int64(time.Millisecond) { // as the broker would, which is just about to
			t.fail([]int{i}, status.ErrExpired)
		} else {
			t.fail([]int{i}, t.late(now, sent))
		}
	}
}

// late is the error of requests that no host answered while the broker let us try.
func (t *trip) late(now error, sent bool) error {
	switch {
	case !sent && errors.Is(t.last, status.ErrQueueFull): // no host has them: they may be sent again
		return t.last
	case now == nil && t.last != nil:
		now = t.last
	case now == nil:
		now = t.r.hosts.complaint()
	}
	return fmt.Errorf("%w: no host answered in time: %w", status.ErrFailed, now)
}

// spent is the error of requests that have been to as many hosts as they may. A refusal
// says that nobody has run them only if no host was lost before.
func (t *trip) spent(res result) error {
	if res.fate == refused && t.begun {
		return fmt.Errorf("%w: a host that may have run it went away, and another refused it: %v", status.ErrFailed, res.err)
	}
	return res.err
}

func (t *trip) fail(requests []int, err error) {
	for _, i := range requests {
		t.ended[i] = true
		t.b.Fail(i, err)
	}
}

// answered ends the requests of an answer, but for those that failed by themselves
// and that another host may do better with.
func (t *trip) answered(h *host, requests []int, failed map[int]failure) (res result) {
	for _, i := range requests {
		f, ok := failed[i]
		if !ok {
			t.ended[i] = true
			continue
		}
		code := codeNamed(f.name)
		err := fmt.Errorf("%w: %s: %s", code, h.name, f.text)
		switch {
		case code.Retryable():
			res = result{refused, append(res.again, i), err}
		case code.Group() == status.Ends && code != status.ErrFailed:
			t.fail([]int{i}, err)
		default: // the model's own words are enough
			t.fail([]int{i}, errors.New(strings.TrimPrefix(f.text, status.ErrFailed.Error()+": ")))
		}
	}
	if n := len(res.again); n > 0 && 2*n >= len(requests) { // fewer have a deadline that the host cannot keep, and others can
		h.overloaded()
	}
	return res
}

// codeNamed is a status by its name; a later release may have more of them.
func codeNamed(name string) status.Code {
	for _, code := range status.All() {
		if code.Name() == name {
			return code
		}
	}
	return status.ErrFailed
}

// maxMessage is what gRPC can send at all.
const maxMessage = 1<<31 - 1

// maxAnswer bounds the memory of an answer: what the outputs of such a batch can
// have, and a little for their names. It is odd, unlike the limits that servers
// have: answerTooLarge tells ours from theirs.
func (r *relay) maxAnswer(b *worker.Batch) int {
	n := maxMetaBytes
	for k := range b.Layout().Outputs {
		n += b.Rows() * int(b.Layout().Outputs[k].Stride)
	}
	return min(n|1, maxMessage)
}
