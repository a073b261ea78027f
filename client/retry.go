// SPDX-License-Identifier: Apache-2.0

package client

import (
	"context"
	"time"

	"github.com/ringbatch/ringbatch/internal/backoff"
	"github.com/ringbatch/ringbatch/status"
)

// WithRetry makes Infer and InferInto send a request again if it ended with a retryable
// error (status.Code.Retryable): the broker went away or drains, the queue is full, no
// worker is attached. They try until the context's deadline. Without a deadline they
// try for at most the given time; 0 is as long as the context lives. With WithRetry a
// restart of the broker is a pause for the caller, not an error.
//
// A request never runs twice at the same time: it is sent again only after its broker
// has ended it, or is gone. It may run twice one after the other, so a model with side
// effects should not be called this way. Requests that are claimed and committed by
// hand are not sent again.
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
