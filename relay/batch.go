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

	"github.com/ringbatch/ringbatch/gateway/oip"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/worker"
)

// trip is a batch on its way to a host, and after a failure to other hosts. The
// goroutine that takes batches starts the trip, a finisher ends it.
type trip struct {
	r     *relay
	b     *worker.Batch
	model *policy.Settings // on this host

	ctx    context.Context // ends with the last deadline, or before the lease
	cancel context.CancelFunc
	first  *sending // in flight; nil: no host was there
	last   error    // why a host did not run the batch, or went away
	begun  bool     // a host may have run a part, and did not answer
	ended  []bool   // requests that have an answer or an error
	faulty bool     // a fault of ours has failed the batch
}

func newTrip(r *relay, b *worker.Batch, model *policy.Settings) *trip {
	return &trip{r: r, b: b, model: model, ended: make([]bool, b.Len())}
}

// A request may kill the hosts that run it. After lossesTogether lost hosts, the
// requests of a batch go one by one; after lossesAlone more, a request fails.
const (
	lossesTogether = 2
	lossesAlone    = 1
)

// start sends the batch to a host, if there is one, and does not wait for the
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
	if t.faulty { // a part may have been sent
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

// failUnanswered fails requests with neither an answer nor an error. They would end
// well otherwise, with the old contents of their slots.
func (t *trip) failUnanswered() {
	for i, ended := range t.ended {
		switch {
		case ended:
		case t.b.Waiting(i):
			t.b.Fail(i, errNoAnswer)
		default: // the request has ended, or its client learns of that here first
			t.b.Fail(i, status.ErrBrokerGone)
		}
	}
}

var errNoAnswer = errors.New("the relay has no answer for it: please report this fault")

// guard makes a panic fail the batch, not the relay.
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

// until returns the last deadline of the requests, but not the last tenth of the
// lease: the broker would take this worker for hung.
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
	now := shm.Now() // first: a deadline must not end here before the broker's
	return time.Now().Add(time.Duration(min(last, latest) - now))
}

// stillOpen returns the requests that a client waits for.
func (t *trip) stillOpen(requests []int) (open []int) {
	for _, i := range requests {
		if t.b.Waiting(i) {
			open = append(open, i)
		}
	}
	return open
}

// deliver sends requests together until each has ended. It returns the suspects:
// requests that too many hosts went away with.
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
		had := func(o outcome) bool {
			return slices.ContainsFunc(results, func(r result) bool { return r.outcome == o })
		}
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
			case res.outcome == lost && lostHosts >= losses:
				suspects = append(suspects, res.again...)
				continue
			case (res.outcome == lost || res.outcome == refused) && attempts >= t.r.cfg.Attempts:
				t.fail(res.again, t.spent(res))
				continue
			case res.outcome == lost:
				t.r.log.Info("batch goes to another host", "left", s.host.name, "requests", len(res.again), "reason", res.err)
			}
			requests = append(requests, res.again...)
		}
		slices.Sort(requests) // a message keeps the batch's order
		switch {
		case len(requests) == 0:
			return suspects
		case had(refused):
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
	leastWait    = 2 * time.Millisecond // after a refusal of every host; doubles up to mostWait
	mostWait     = 200 * time.Millisecond
)

// outOfTime fails requests that no host answered before their deadline or the
// lease. now is the error of their present host, if there is one; sent says whether
// a host may have run them.
func (t *trip) outOfTime(requests []int, now error, sent bool) {
	for _, i := range requests {
		if d := t.b.Request(i).Deadline; d > 0 && d-shm.Now() < int64(time.Millisecond) { // as the broker is about to do
			t.fail([]int{i}, status.ErrExpired)
		} else {
			t.fail([]int{i}, t.late(now, sent))
		}
	}
}

// late returns the error of requests that no host answered in time.
func (t *trip) late(now error, sent bool) error {
	switch {
	case !sent && errors.Is(t.last, status.ErrQueueFull): // no host has run them: clients may retry
		return t.last
	case now == nil && t.last != nil:
		now = t.last
	case now == nil:
		now = t.r.hosts.complaint()
	}
	return fmt.Errorf("%w: no host answered in time: %w", status.ErrFailed, now)
}

// spent returns the error of requests without attempts left. A refusal means that no
// host ran them, unless a host was lost before.
func (t *trip) spent(res result) error {
	if res.outcome == refused && t.begun {
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

// answered ends the requests of an answer. Requests that failed with a retryable
// status go to another host.
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
		case status.Retryable(code):
			res = result{refused, append(res.again, i), err}
		case code.Group() == status.Ends && code != status.ErrFailed:
			t.fail([]int{i}, err)
		default: // the model's error text is enough
			t.fail([]int{i}, errors.New(strings.TrimPrefix(f.text, status.ErrFailed.Error()+": ")))
		}
	}
	if n := len(res.again); n > 0 && 2*n >= len(requests) { // fewer may just have short deadlines
		h.overloaded()
	}
	return res
}

// codeNamed returns a status by its name, and ErrFailed for a later release's.
func codeNamed(name string) status.Code {
	for _, code := range status.All() {
		if code.Name() == name {
			return code
		}
	}
	return status.ErrFailed
}

// maxMessage is gRPC's limit.
const maxMessage = 1<<31 - 1

// maxAnswer bounds an answer: the outputs of the batch, and a little for their
// names. The limit is odd, unlike those of servers, so that answerTooLarge
// recognizes it.
func (r *relay) maxAnswer(b *worker.Batch) int {
	n := oip.MaxMetaBytes
	for k := range b.Signature().Outputs {
		row := b.Output(k).RowBytes()
		if spec := b.Output(k).Spec(); spec.DType == tensor.Str {
			row += 4 * spec.RowElems() / spec.TextBytes() // lengths of texts
		}
		n += b.Rows() * row
	}
	return min(n|1, maxMessage)
}
