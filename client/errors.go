// SPDX-License-Identifier: Apache-2.0

package client

import (
	"context"
	"errors"

	"github.com/ringbatch/ringbatch/status"
)

// ended is the error of a request that did not end well.
type ended struct {
	status status.Code
	text   string
}

func (e *ended) Error() string {
	if e.text != "" {
		return e.text
	}
	return e.status.Error()
}

func (e *ended) Unwrap() error { return e.status }

// Is makes an expired or canceled request match the context errors, too: either side
// may notice the deadline first.
func (e *ended) Is(target error) bool {
	return e.status == status.ErrExpired && target == context.DeadlineExceeded ||
		e.status == status.ErrCanceled && target == context.Canceled
}

// fromContext turns the end of a caller's context into a named error.
func fromContext(err error) error {
	if err == error(status.ErrTimeout) {
		return err
	}
	if errors.Is(err, context.DeadlineExceeded) {
		return &ended{status: status.ErrExpired}
	}
	return &ended{status: status.ErrCanceled}
}
