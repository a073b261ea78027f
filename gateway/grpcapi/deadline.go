// SPDX-License-Identifier: Apache-2.0

package grpcapi

import (
	"context"
	"strings"
	"time"

	"github.com/ringbatch/ringbatch/gateway/core"
	"google.golang.org/grpc/metadata"
)

// endEarly makes a call's deadline a little shorter, so that the handler's answer
// precedes the transport's reset at the deadline. A caller takes the reset for
// CANCELLED if its clock is behind; the clock of gRPC's C core counts milliseconds.
//
// Clients of grpc-go have a finer clock and keep their deadline: a relay would take
// an early end for a host's fault.
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
