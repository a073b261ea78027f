// SPDX-License-Identifier: Apache-2.0

package client

import (
	"context"
	"time"

	"github.com/ringbatch/ringbatch/internal/backoff"
	"github.com/ringbatch/ringbatch/status"
)

// WithRetry makes Infer send a request again while status.Retryable is true: a restart of
// the broker is a pause. It ends with the context's deadline; without one, after that
// time, unless 0. The request may run twice, one after the other.
func WithRetry(most time.Duration) Option {
	return func(o *options) { o.retry, o.retryFor = true, most }
}

// retrying calls once until it succeeds or fails for good.
func (c *Client) retrying(ctx context.Context, once func(context.Context) error) error {
	if !c.opts.retry {
		return once(ctx)
	}
	if _, bounded := ctx.Deadline(); !bounded && c.opts.retryFor > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, c.opts.retryFor)
		defer cancel()
	}
	var pause backoff.Backoff
	for {
		err := once(ctx)
		if !status.Retryable(err) || !pause.Wait(ctx) {
			return err // it says more than ctx.Err()
		}
	}
}
