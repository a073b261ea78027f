// SPDX-License-Identifier: Apache-2.0

package client

import (
	"context"
	"errors"
	"time"

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

// Pauses between two attempts: doubled each time.
const (
	firstResend = time.Millisecond
	lastResend  = 100 * time.Millisecond
)

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
	for delay := firstResend; ; delay = min(2*delay, lastResend) {
		err := once(ctx)
		if !isRetryable(err) || ctx.Err() != nil {
			return err
		}
		wait := time.NewTimer(delay)
		select {
		case <-wait.C:
		case <-ctx.Done():
			wait.Stop()
			return err // it says more than ctx.Err()
		}
	}
}

func isRetryable(err error) bool {
	var code status.Code
	return errors.As(err, &code) && code.Retryable()
}
