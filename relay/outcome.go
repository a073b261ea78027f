// SPDX-License-Identifier: Apache-2.0

package relay

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"google.golang.org/grpc/codes"
	rpcstatus "google.golang.org/grpc/status"

	"github.com/ringbatch/ringbatch/gateway/oip"
	"github.com/ringbatch/ringbatch/status"
)

// result is the outcome of a message.
type result struct {
	outcome outcome
	again   []int // requests to send again, to this host or another
	err     error // why
}

// outcome says how a message's requests go on.
type outcome int

const (
	ended    outcome = iota // each has its answer or its error
	lost                    // the host went away, and may have run them
	refused                 // the host had no room, and may have begun: it counts as an attempt
	waits                   // the host has not run them: they wait for a host with room
	tooLarge                // as waits, but they go at once, in smaller messages
)

// failed derives the outcome of a message from its call's error.
func (t *trip) failed(x *exchange, err error, sent bool) result {
	ctx, h, requests := x.ctx, x.host, x.requests
	if cause := context.Cause(ctx); errors.Is(cause, errHostSilent) {
		return result{lost, requests, fmt.Errorf("%w: %s: %w", status.ErrBrokerGone, h.name, cause)}
	} else if errors.Is(cause, errNobodyWaits) {
		return result{waits, t.stillOpen(requests), cause} // there are none
	}
	s := rpcstatus.Convert(err)
	named := func(code status.Code) error { return fmt.Errorf("%w: %s: %s", code, h.name, s.Message()) }
	notRun := strings.Join(x.trailer.Get(oip.NotRunTrailer), "")
	broken := waits // the outcome of a broken call
	if sent && notRun == "" {
		broken = lost
	}
	switch s.Code() {
	case codes.DeadlineExceeded, codes.Canceled:
		if ctx.Err() != nil { // ours: the requests have ended, or the lease is nearly over
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
		tooMuch := notRun == status.ErrTooLarge.Name() || messageTooLarge(s.Message())
		switch {
		case answerTooLarge(s.Message(), t.r.maxAnswer(t.b)):
			t.fail(requests, fmt.Errorf("%s: its answer is larger than the outputs of the model can be (%s)", h.name, s.Message()))
			return result{}
		case tooMuch && len(requests) > 1:
			h.tooLarge(tensorBytes(t.b, requests), s.Message())
			return result{tooLarge, requests, fmt.Errorf("%s: %s", h.name, s.Message())}
		case tooMuch:
			t.fail(requests, fmt.Errorf("%s: a request is larger than it takes (%s): raise --max-message-bytes or --caller-bytes there",
				h.name, s.Message()))
			return result{}
		}
		h.overloaded()
		if notRun == "" {
			return result{refused, requests, named(status.ErrQueueFull)}
		}
		return result{waits, requests, named(status.ErrQueueFull)}
	case codes.Unauthenticated, codes.PermissionDenied, codes.NotFound, codes.Unimplemented:
		h.markUnusable(problem(err), false)
		return result{waits, requests, named(status.ErrBrokerGone)}
	case codes.InvalidArgument, codes.FailedPrecondition: // another model than we believe?
		if t.r.differs(h) {
			return result{waits, requests, named(status.ErrBrokerGone)}
		}
	}
	t.fail(requests, fmt.Errorf("%s: %s", h.name, s.Message()))
	return result{}
}

// messageTooLarge recognizes gRPC's refusal of a message's size.
func messageTooLarge(text string) bool { return strings.Contains(text, "message larger than max") }

// answerTooLarge reports whether gRPC refused an answer of more than most bytes
// here. Its words are those by which a server refuses a request.
func answerTooLarge(text string, most int) bool {
	return strings.Contains(text, "larger than max") && strings.HasSuffix(strings.TrimSuffix(text, ")"), fmt.Sprintf(" %d", most))
}

const tritonsQueueIsFull = "Exceeds maximum queue size"

// takesNothing recognizes another server that takes no requests, and has not run this
// one. A gateway says it by oip.NotRunTrailer.
func takesNothing(text string) bool {
	for _, words := range []string{
		"not at ready state", "has no available versions", // Triton's
		"no healthy upstream", "remote connection failure", "delayed connect error", // Envoy's: it reached no host
	} {
		if strings.Contains(text, words) {
			return true
		}
	}
	return false
}
