package client

import (
	"context"
	"errors"

	"github.com/ringbatch/ringbatch/shm"
)

// The named errors of a client. Compare with errors.Is; the text of the error
// says more.
const (
	ErrFailed            = shm.ErrFailed            // the model failed this request; Error() is its reason
	ErrExpired           = shm.ErrExpired           // the deadline passed; also matches context.DeadlineExceeded
	ErrCanceled          = shm.ErrCanceled          // canceled; also matches context.Canceled
	ErrQueueFull         = shm.ErrQueueFull         // the priority level's queue is full
	ErrQueueTimeout      = shm.ErrQueueTimeout      // waited for longer than the priority level allows
	ErrTooLarge          = shm.ErrTooLarge          // more rows than max_batch_size
	ErrWorkerDied        = shm.ErrWorkerDied        // every worker that ran it died
	ErrWorkerHung        = shm.ErrWorkerHung        // its worker hung and could not be killed
	ErrDraining          = shm.ErrDraining          // the broker is shutting down
	ErrBrokerGone        = shm.ErrBrokerGone        // the broker went away; the client re-attaches by itself, retry
	ErrNoBroker          = shm.ErrNoBroker          // nothing listens on the socket
	ErrUnknownModel      = shm.ErrUnknownModel      // no such model
	ErrVersion           = shm.ErrVersion           // other layout version
	ErrLayout            = shm.ErrLayout            // segment geometry mismatch
	ErrForbidden         = shm.ErrForbidden         // this uid may not connect
	ErrNoMemory          = shm.ErrNoMemory          // the kernel refused the memory
	ErrSignatureMismatch = shm.ErrSignatureMismatch // after a broker restart the model has another signature
	ErrRingFull          = shm.ErrRingFull          // no window of that size is free
	ErrDType             = shm.ErrDType             // wrong element type
	ErrShape             = shm.ErrShape             // wrong shape
	ErrRows              = shm.ErrRows              // wrong number of rows
	ErrSize              = shm.ErrSize              // wrong byte length
	ErrOutputTooSmall    = shm.ErrOutputTooSmall    // the buffer given for an output cannot hold it
	ErrFull              = shm.ErrFull              // every slot of the window is in use
	ErrClosed            = shm.ErrClosed            // the client was closed
	ErrReleased          = shm.ErrReleased          // the request was released
	ErrCommitted         = shm.ErrCommitted         // the request was committed already
	ErrNotCommitted      = shm.ErrNotCommitted      // the request was not committed yet
	ErrNotDone           = shm.ErrNotDone           // the request has not ended yet
	ErrNoLevel           = shm.ErrNoLevel           // no such priority level
	ErrInvalid           = shm.ErrInvalid           // an argument is not acceptable
	ErrTimeout           = shm.ErrTimeout           // WaitFor's time was over before the request was
)

// ended is the error of a request that ended other than well.
type ended struct {
	status shm.Status
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
	return e.status == shm.ErrExpired && target == context.DeadlineExceeded ||
		e.status == shm.ErrCanceled && target == context.Canceled
}

// fromContext names the end of a caller's context.
func fromContext(err error) error {
	if err == error(shm.ErrTimeout) {
		return err
	}
	if errors.Is(err, context.DeadlineExceeded) {
		return &ended{status: shm.ErrExpired}
	}
	return &ended{status: shm.ErrCanceled}
}
