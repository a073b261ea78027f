// SPDX-License-Identifier: Apache-2.0

package client

import (
	"context"
	"errors"
	"time"

	"github.com/ringbatch/ringbatch/status"
)

// WithRetry makes Infer and InferInto send a request again that ended for a
// reason that passes (status.Code.Retryable: the broker went away or drains,
// the queue is full, no worker is attached), until the context's deadline, or
// for at most so long if it has none (0: for as long as the context lives). A
// restart of the broker is then a pause for the caller, and no error.
//
// Nothing runs twice at the same time: a request is sent again only after the
// broker that had it has ended it, or is gone. A worker that was about to
// answer a broker that was killed may have computed for nothing, so a model
// that does more than compute should not be called with it. Requests that are
// claimed and committed by hand are not sent again: their caller has the views.
func WithRetry(most time.Duration) Option {
	return func(o *options) { o.retry, o.retryFor = true, most }
}

// Waiting between two attempts: doubled each time.
const (
	firstResend = time.Millisecond
	lastResend  = 100 * time.Millisecond
)

// retrying calls once until it succeeds, or fails for good.
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
		if !passes(err) || ctx.Err() != nil {
			return err
		}
		wait := time.NewTimer(delay)
		select {
		case <-wait.C:
		case <-ctx.Done():
			wait.Stop()
			return err // says more than that time is over
		}
	}
}

// passes tells whether an error is of a kind that is over some time.
func passes(err error) bool {
	var code status.Code
	return errors.As(err, &code) && code.Retryable()
}
