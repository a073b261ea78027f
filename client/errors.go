package client

import (
	"context"
	"errors"

	"github.com/ringbatch/ringbatch/status"
)

// The named errors of a client. Compare with errors.Is; the text of the error
// says more.
const (
	ErrFailed            = status.ErrFailed            // the model failed this request; Error() is its reason
	ErrExpired           = status.ErrExpired           // the deadline passed; also matches context.DeadlineExceeded
	ErrCanceled          = status.ErrCanceled          // canceled; also matches context.Canceled
	ErrQueueFull         = status.ErrQueueFull         // the priority level's queue is full
	ErrQueueTimeout      = status.ErrQueueTimeout      // waited for longer than the priority level allows
	ErrTooLarge          = status.ErrTooLarge          // more rows than max_batch_size
	ErrWorkerDied        = status.ErrWorkerDied        // every worker that ran it died
	ErrWorkerHung        = status.ErrWorkerHung        // its worker hung and could not be killed
	ErrDraining          = status.ErrDraining          // the broker is shutting down
	ErrBrokerGone        = status.ErrBrokerGone        // the broker went away; the client re-attaches by itself, retry
	ErrNoBroker          = status.ErrNoBroker          // nothing listens on the socket
	ErrUnknownModel      = status.ErrUnknownModel      // no such model
	ErrVersion           = status.ErrVersion           // other layout version
	ErrLayout            = status.ErrLayout            // segment geometry mismatch
	ErrForbidden         = status.ErrForbidden         // this uid may not connect
	ErrNoMemory          = status.ErrNoMemory          // the kernel refused the memory
	ErrSignatureMismatch = status.ErrSignatureMismatch // after a broker restart the model has another signature
	ErrRingFull          = status.ErrRingFull          // no window of that size is free
	ErrDType             = status.ErrDType             // wrong element type
	ErrShape             = status.ErrShape             // wrong shape
	ErrRows              = status.ErrRows              // wrong number of rows
	ErrSize              = status.ErrSize              // wrong byte length
	ErrOutputTooSmall    = status.ErrOutputTooSmall    // the buffer given for an output cannot hold it
	ErrFull              = status.ErrFull              // every slot of the window is in use
	ErrClosed            = status.ErrClosed            // the client was closed
	ErrReleased          = status.ErrReleased          // the request was released
	ErrCommitted         = status.ErrCommitted         // the request was committed already
	ErrNotCommitted      = status.ErrNotCommitted      // the request was not committed yet
	ErrNotDone           = status.ErrNotDone           // the request has not ended yet
	ErrNoLevel           = status.ErrNoLevel           // no such priority level
	ErrInvalid           = status.ErrInvalid           // an argument is not acceptable
	ErrTimeout           = status.ErrTimeout           // WaitFor's time was over before the request was
)

// ended is the error of a request that ended other than well.
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

// Is lets an expired or canceled request match the context errors too, since
// the deadline may be noticed on either side first.
func (e *ended) Is(target error) bool {
	return e.status == status.ErrExpired && target == context.DeadlineExceeded ||
		e.status == status.ErrCanceled && target == context.Canceled
}

// fromContext names the end of a caller's context.
func fromContext(err error) error {
	if err == error(status.ErrTimeout) {
		return err
	}
	if errors.Is(err, context.DeadlineExceeded) {
		return &ended{status: status.ErrExpired}
	}
	return &ended{status: status.ErrCanceled}
}
