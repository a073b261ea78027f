// SPDX-License-Identifier: Apache-2.0

package relay

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	rpcstatus "google.golang.org/grpc/status"

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
	faulty bool     // a fault of ours has failed it
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
			for range t.deliver(t.ctx, []int{i}, lossesAlone) {
				t.b.Fail(i, fmt.Errorf("%w: %d hosts went away while they ran it", status.ErrWorkerDied, lossesTogether+lossesAlone))
			}
		}
	})
}

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
	return time.Now().Add(time.Duration(min(last, latest) - shm.Now()))
}

// stillOpen leaves out the requests that nobody waits for.
func (t *trip) stillOpen(requests []int) (open []int) {
	for _, i := range requests {
		if t.b.Open(i) {
			open = append(open, i)
		}
	}
	return open
}

// deliver sends requests together until each has ended, and returns those whose
// hosts went away too often.
func (t *trip) deliver(ctx context.Context, requests []int, losses int) (suspects []int) {
	var been []*host
	var last error // of the last host that refused
	wait := notSentPause
	for sends, lost := 0, 0; ; {
		changed := t.r.hosts.wait()
		s := t.first
		if t.first = nil; s == nil {
			if requests = t.stillOpen(requests); len(requests) == 0 {
				return nil
			}
			if ctx.Err() != nil {
				t.outOfTime(requests, last)
				return nil
			}
			if s = t.send(ctx, requests, been); s == nil {
				t.r.hosts.pause(ctx, retryPause, changed)
				continue
			}
		}
		res := s.receive()
		if requests = res.again; len(requests) == 0 {
			return nil
		}
		been = append(been, s.host)
		last = res.err
		switch {
		case res.lost:
			if lost++; lost >= losses {
				return requests
			}
			t.r.log.Info("batch goes to another host", "left", s.host.name, "requests", len(requests), "reason", res.err)
		case !res.sent: // that host has nothing to do with it
			t.r.hosts.pause(ctx, wait, changed)
			wait = min(2*wait, mostNotSentPause)
			continue
		}
		if sends++; sends >= t.r.cfg.Attempts {
			t.fail(requests, res.err)
			return nil
		}
		if !res.lost { // it was refused: wherever it goes, a little later
			t.r.hosts.pause(ctx, refusedPause, nil)
		}
	}
}

const (
	retryPause       = 50 * time.Millisecond
	notSentPause     = 2 * time.Millisecond // doubles each time, up to
	mostNotSentPause = 200 * time.Millisecond
	refusedPause     = 5 * time.Millisecond
)

// outOfTime fails requests that no host has answered when the batch's time was over:
// that of those with a deadline, or the lease.
func (t *trip) outOfTime(requests []int, last error) {
	for _, i := range requests {
		if d := t.b.Request(i).Deadline; d > 0 && d-shm.Now() < int64(time.Millisecond) { // as the broker would, which is just about to
			t.b.Fail(i, status.ErrExpired)
		} else {
			t.b.Fail(i, t.late(last))
		}
	}
}

// late is the error of requests that no host took while the broker let us try.
func (t *trip) late(last error) error {
	switch {
	case last == nil:
		last = t.r.hosts.complaint()
	case errors.Is(last, status.ErrQueueFull): // it may be sent again
		return last
	}
	return fmt.Errorf("%w: no host answered in time: %w", status.ErrFailed, last)
}

func (t *trip) fail(requests []int, err error) {
	for _, i := range requests {
		t.b.Fail(i, err)
	}
}

// failedAlone ends the requests that failed by themselves, but for those that
// another host may do better with.
func (t *trip) failedAlone(h *host, requests []int, failed map[int]failure) (res result) {
	res.sent = true
	if len(failed) == 0 {
		return res
	}
	for _, i := range requests {
		f, ok := failed[i]
		if !ok {
			continue
		}
		code := codeNamed(f.name)
		err := fmt.Errorf("%w: %s: %s", code, h.name, f.text)
		switch {
		case code.Retryable():
			res.again, res.err = append(res.again, i), err
		case code.Group() == status.Ends && code != status.ErrFailed:
			t.b.Fail(i, err)
		default: // the model's own words are enough
			t.b.Fail(i, errors.New(strings.TrimPrefix(f.text, status.ErrFailed.Error()+": ")))
		}
	}
	if len(res.again) > 0 {
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

// failed decides what a call's error means for its requests.
func (t *trip) failed(x *exchange, err error, sent bool) result {
	ctx, h, requests := x.ctx, x.host, x.requests
	if cause := context.Cause(ctx); errors.Is(cause, errHostSilent) {
		return result{requests, true, true, fmt.Errorf("%w: %s: %w", status.ErrBrokerGone, h.name, cause)}
	} else if errors.Is(cause, errNobodyWaits) {
		return result{}
	}
	s := rpcstatus.Convert(err)
	named := func(code status.Code) error { return fmt.Errorf("%w: %s: %s", code, h.name, s.Message()) }
	switch s.Code() {
	case codes.DeadlineExceeded, codes.Canceled:
		if ctx.Err() != nil { // ours: its requests have ended, or the lease is nearly over
			t.outOfTime(t.stillOpen(requests), fmt.Errorf("%s: %s", h.name, s.Message()))
			return result{sent: true}
		}
		return result{requests, sent, sent, named(status.ErrBrokerGone)} // a proxy's or the host's own
	case codes.Unavailable:
		return result{requests, sent && !refused(s.Message()), sent && !refused(s.Message()), named(status.ErrBrokerGone)}
	case codes.ResourceExhausted:
		if tooLarge(s.Message()) {
			if len(requests) > 1 {
				h.tooLarge(tensorBytes(t.b, requests), s.Message())
				return result{requests, false, false, named(status.ErrQueueFull)}
			}
			t.fail(requests, fmt.Errorf("%s: a request is larger than it takes (%s): raise --max_message_bytes or --caller_bytes there", h.name, s.Message()))
			return result{sent: true}
		}
		h.overloaded()
		// Of a gateway these are its limits, while single requests have an end of
		// their own: the batch waits, as it would if the host's window were full.
		return result{requests, x.plain, false, named(status.ErrQueueFull)}
	case codes.Unauthenticated, codes.PermissionDenied, codes.NotFound, codes.Unimplemented:
		h.unwell(problem(err), false)
		return result{requests, false, false, named(status.ErrBrokerGone)}
	case codes.InvalidArgument, codes.FailedPrecondition: // another model than we believe?
		if t.r.differs(h) {
			return result{requests, false, false, named(status.ErrBrokerGone)}
		}
	}
	t.fail(requests, fmt.Errorf("%s: %s", h.name, s.Message()))
	return result{sent: true}
}

// tooLarge tells that a host will never take the message: gRPC's words, and a gateway's.
func tooLarge(text string) bool {
	return strings.Contains(text, "message larger than max") || strings.HasPrefix(text, "a message of ")
}

// refused tells that a host answered that it takes nothing: it has not run it.
func refused(text string) bool {
	for _, words := range []string{
		"shutting down", "not ready", "no broker", // a gateway's
		"Exceeds maximum queue size", "not at ready state", "has no available versions", // Triton's
		"no healthy upstream", "remote connection failure", "delayed connect error", // Envoy's: it reached no host
	} {
		if strings.Contains(text, words) {
			return true
		}
	}
	return false
}

// maxMessage is what gRPC can send at all.
const maxMessage = 1<<31 - 1

// maxAnswer bounds the memory of an answer: what the outputs of such a batch can
// have, and a little for their names.
func (r *relay) maxAnswer(b *worker.Batch) int {
	n := maxMetaBytes
	for k := range b.Layout().Outputs {
		n += b.Rows() * int(b.Layout().Outputs[k].Stride)
	}
	return min(n, maxMessage)
}
