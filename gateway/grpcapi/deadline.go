// SPDX-License-Identifier: Apache-2.0

package grpcapi

import (
	"context"
	"strings"
	"time"

	"github.com/ringbatch/ringbatch/gateway/core"
	"google.golang.org/grpc/metadata"
)

// endEarly is the context of a call that has a deadline, a little shorter. At
// the deadline the transport resets the stream by itself, with CANCEL, and what
// a handler says then goes nowhere. A caller makes DEADLINE_EXCEEDED of the reset
// if its clock has passed the deadline too, and CANCELLED otherwise; the clock of
// gRPC's C core counts milliseconds.
//
// grpc-go's own clients, which relays are, have a finer one, and keep their time:
// a relay takes an early end for a host's fault.
func endEarly(ctx context.Context, p *core.Pace, header metadata.MD) context.Context {
	deadline, ok := ctx.Deadline()
	if !ok {
		return ctx
	}
	if agent := header.Get("user-agent"); len(agent) > 0 && strings.HasPrefix(agent[0], "grpc-go/") {
		return ctx
	}
	early := min(p.Early, time.Until(deadline)/time.Duration(p.EarlyShare))
	ctx, cancel := context.WithDeadline(ctx, deadline.Add(-early))
	_ = cancel // the stream's end cancels it
	return ctx
}
