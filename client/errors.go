// SPDX-License-Identifier: Apache-2.0

package client

import (
	"context"
	"errors"

	"github.com/ringbatch/ringbatch/status"
)

// The named errors, which are those of package status: compare with errors.Is.
// The text of an error has the details. ErrExpired also matches
// context.DeadlineExceeded, ErrCanceled also context.Canceled.
const (
	// BEGIN statuses: written by `go generate ./status` from status/table.go

	// a request's end
	ErrFailed       = status.ErrFailed       // the model's function failed this request; the text says why
	ErrExpired      = status.ErrExpired      // its deadline passed
	ErrCanceled     = status.ErrCanceled     // its client canceled it
	ErrQueueFull    = status.ErrQueueFull    // its priority level's queue is full
	ErrQueueTimeout = status.ErrQueueTimeout // it waited for longer than its priority level allows
	ErrTooLarge     = status.ErrTooLarge     // more rows than max_batch_size
	ErrWorkerDied   = status.ErrWorkerDied   // it was in a batch that killed its worker, every time it was tried, or hung two of them
	ErrWorkerHung   = status.ErrWorkerHung   // its worker outlived its lease and could not be killed
	ErrDraining     = status.ErrDraining     // the broker is shutting down and takes no new requests
	ErrBrokerGone   = status.ErrBrokerGone   // the broker went away; safe to retry
	ErrNoWorker     = status.ErrNoWorker     // no worker is attached, and the model's policy says no_worker=refuse
	ErrOverloaded   = status.ErrOverloaded   // refused on arrival: it could not be answered within its deadline or the model's latency_goal

	// connecting
	ErrNoBroker           = status.ErrNoBroker           // nothing listens on the socket
	ErrUnknownModel       = status.ErrUnknownModel       // the broker has no model of that name
	ErrVersion            = status.ErrVersion            // the peer speaks another version of the protocol
	ErrLayout             = status.ErrLayout             // segment geometry does not match its description
	ErrForbidden          = status.ErrForbidden          // this uid may not use this broker
	ErrNoMemory           = status.ErrNoMemory           // the kernel refused the memory
	ErrSignatureMismatch  = status.ErrSignatureMismatch  // the model exists with another signature
	ErrRingFull           = status.ErrRingFull           // no window of that many slots is free for a new client
	ErrBrokerRunning      = status.ErrBrokerRunning      // another broker serves this socket
	ErrProtocol           = status.ErrProtocol           // a peer broke the protocol and was disconnected
	ErrTooManyConnections = status.ErrTooManyConnections // the broker serves as many connections as it may
	ErrNoDescriptors      = status.ErrNoDescriptors      // the broker or this process has no file descriptor left
	// this user or process has as much of the broker as one may have; the text says of what, and which setting raises it
	ErrQuota = status.ErrQuota
	// the peer lives in another time namespace, or in a PID namespace in which the broker cannot watch it
	ErrNamespace = status.ErrNamespace
	ErrWrongGPU  = status.ErrWrongGPU // the model's device memory is on a GPU that this process does not see
	ErrBusy      = status.ErrBusy     // another process publishes the weights of this model

	// using
	ErrInvalid        = status.ErrInvalid        // an argument or configuration value is not acceptable
	ErrDType          = status.ErrDType          // tensor has another element type
	ErrShape          = status.ErrShape          // tensor has another shape
	ErrRows           = status.ErrRows           // inputs disagree on rows, or rows outside 1..max
	ErrSize           = status.ErrSize           // byte length does not fit the shape
	ErrOutputTooSmall = status.ErrOutputTooSmall // the caller's buffer cannot hold the output
	ErrFull           = status.ErrFull           // every slot of the client's window is in use
	ErrClosed         = status.ErrClosed         // the client or worker was closed
	ErrReleased       = status.ErrReleased       // the request was released; its views are gone
	ErrCommitted      = status.ErrCommitted      // the request was committed already
	ErrNotCommitted   = status.ErrNotCommitted   // the request was not committed yet
	ErrNotDone        = status.ErrNotDone        // the request has not ended yet
	ErrNoLevel        = status.ErrNoLevel        // no such priority level
	ErrTimeout        = status.ErrTimeout        // the caller's wait ended before the request did
	ErrForked         = status.ErrForked         // this process was forked from the process that connected
	ErrNoGPU          = status.ErrNoGPU          // this needs a GPU and there is none
	ErrStateLost      = status.ErrStateLost      // the sequence's state is gone with its broker; reset the sequence
	// END statuses
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
