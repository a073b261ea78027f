// SPDX-License-Identifier: Apache-2.0

package relay

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"google.golang.org/grpc/codes"
	rpcstatus "google.golang.org/grpc/status"

	"github.com/ringbatch/ringbatch/status"
)

// result is what became of a message.
type result struct {
	fate  fate
	again []int // requests that go on, to another host or the same
	err   error // why they do
}

// fate is what becomes of a message's requests.
type fate int

const (
	ended    fate = iota // each has its answer or its error
	lost                 // the host went away, and may have run them
	refused              // the host had no room, and may have begun: it counts as an attempt
	waits                // the host has not run them: they wait for one with room
	tooLarge             // as waits, and they may go at once, in smaller messages
)

// failed decides what a call's error means for its requests.
func (t *trip) failed(x *exchange, err error, sent bool) result {
	ctx, h, requests := x.ctx, x.host, x.requests
	if cause := context.Cause(ctx); errors.Is(cause, errHostSilent) {
		return result{lost, requests, fmt.Errorf("%w: %s: %w", status.ErrBrokerGone, h.name, cause)}
	} else if errors.Is(cause, errNobodyWaits) {
		return result{waits, t.stillOpen(requests), cause} // there are none
	}
	s := rpcstatus.Convert(err)
	named := func(code status.Code) error { return fmt.Errorf("%w: %s: %s", code, h.name, s.Message()) }
	broken := waits // what it means that the call broke
	if sent {
		broken = lost
	}
	switch s.Code() {
	case codes.DeadlineExceeded, codes.Canceled:
		if ctx.Err() != nil { // ours: its requests have ended, or the lease is nearly over
			t.outOfTime(t.stillOpen(requests), fmt.Errorf("%s: %s", h.name, s.Message()), sent || t.begun)
			return result{}
		}
		return result{broken, requests, named(status.ErrBrokerGone)} // a proxy's or the host's own
	case codes.Unavailable:
		switch {
		case strings.Contains(s.Message(), tritonsQueueIsFull):
			h.overloaded()
			return result{waits, requests, named(status.ErrQueueFull)}
		case takesNothing(s.Message()):
			return result{waits, requests, named(status.ErrBrokerGone)}
		}
		return result{broken, requests, named(status.ErrBrokerGone)}
	case codes.ResourceExhausted:
		switch {
		case answerTooLarge(s.Message(), t.r.maxAnswer(t.b)):
			t.fail(requests, fmt.Errorf("%s: its answer is larger than the outputs of the model can be (%s)", h.name, s.Message()))
			return result{}
		case messageTooLarge(s.Message()) && len(requests) > 1:
			h.tooLarge(tensorBytes(t.b, requests), s.Message())
			return result{tooLarge, requests, fmt.Errorf("%s: %s", h.name, s.Message())}
		case messageTooLarge(s.Message()):
			t.fail(requests, fmt.Errorf("%s: a request is larger than it takes (%s): raise --max_message_bytes or --caller_bytes there", h.name, s.Message()))
			return result{}
		}
		h.overloaded()
		if x.plain {
			return result{refused, requests, named(status.ErrQueueFull)}
		}
		// Of a gateway these are its limits, while single requests have an end of
		// their own: the batch waits, as it would if the host's window were full.
		return result{waits, requests, named(status.ErrQueueFull)}
	case codes.Unauthenticated, codes.PermissionDenied, codes.NotFound, codes.Unimplemented:
		h.unwell(problem(err), false)
		return result{waits, requests, named(status.ErrBrokerGone)}
	case codes.InvalidArgument, codes.FailedPrecondition: // another model than we believe?
		if t.r.differs(h) {
			return result{waits, requests, named(status.ErrBrokerGone)}
		}
	}
	t.fail(requests, fmt.Errorf("%s: %s", h.name, s.Message()))
	return result{}
}

// messageTooLarge tells that a host will never take the message: gRPC's words, and a gateway's.
func messageTooLarge(text string) bool {
	return strings.Contains(text, "message larger than max") || strings.HasPrefix(text, "a message of ")
}

// answerTooLarge tells that it was gRPC here that refused, an answer of more than
// most bytes. It says so in the words that a server has for a request.
func answerTooLarge(text string, most int) bool {
	return strings.Contains(text, "larger than max") && strings.HasSuffix(strings.TrimSuffix(text, ")"), fmt.Sprintf(" %d", most))
}

const tritonsQueueIsFull = "Exceeds maximum queue size"

// takesNothing tells that a host answered that it takes nothing: it has not run it.
func takesNothing(text string) bool {
	for _, words := range []string{
		"shutting down", "not ready", "no broker", // a gateway's
		"not at ready state", "has no available versions", // Triton's
		"no healthy upstream", "remote connection failure", "delayed connect error", // Envoy's: it reached no host
	} {
		if strings.Contains(text, words) {
			return true
		}
	}
	return false
}
