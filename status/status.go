package status

import "fmt"

// Code is the one list of named outcomes. The same numbers travel in
// completion words, in control replies and through the C ABI, and the same
// names are the Go errors, the C constants and the Python exceptions.
//
// A Code other than OK is an error; callers compare with errors.Is.
type Code uint8

const (
	OK Code = iota

	// A request's end.
	ErrFailed       // the model's function failed this request; the text says why
	ErrExpired      // its deadline passed
	ErrCanceled     // its client canceled it
	ErrQueueFull    // its priority level's queue is full
	ErrQueueTimeout // it waited for longer than its priority level allows
	ErrTooLarge     // more rows than max_batch_size
	ErrWorkerDied   // it was in a batch that killed its worker, every time it was tried
	ErrWorkerHung   // its worker outlived its lease and could not be killed
	ErrDraining     // the broker is shutting down and takes no new requests
	ErrBrokerGone   // the broker went away; safe to retry

	// Connecting.
	ErrNoBroker          // nothing listens on the socket
	ErrUnknownModel      // the broker has no model of that name
	ErrVersion           // the peer speaks another layout version
	ErrLayout            // segment geometry does not match its description
	ErrForbidden         // this uid may not use this broker
	ErrNoMemory          // the kernel refused the memory
	ErrSignatureMismatch // the model exists with another signature
	ErrRingFull          // no window of that many slots is free for a new client
	ErrBrokerRunning     // another broker serves this socket
	ErrProtocol          // a peer broke the protocol and was disconnected

	// Using.
	ErrInvalid        // an argument or configuration value is not acceptable
	ErrDType          // tensor has another element type
	ErrShape          // tensor has another shape
	ErrRows           // inputs disagree on rows, or rows outside 1..max
	ErrSize           // byte length does not fit the shape
	ErrOutputTooSmall // the caller's buffer cannot hold the output
	ErrFull           // every slot of the client's window is in use
	ErrClosed         // the client or worker was closed
	ErrReleased       // the request was released; its views are gone
	ErrCommitted      // the request was committed already
	ErrNotCommitted   // the request was not committed yet
	ErrNotDone        // the request has not ended yet
	ErrNoLevel        // no such priority level
	ErrTimeout        // the caller's wait ended before the request did
	ErrForked         // this process is a fork of the one that connected
	ErrNoGPU          // this needs a GPU and there is none

	statusCount // not a status
)

var statusNames = [statusCount]string{
	OK:                   "OK",
	ErrFailed:            "Failed",
	ErrExpired:           "Expired",
	ErrCanceled:          "Canceled",
	ErrQueueFull:         "QueueFull",
	ErrQueueTimeout:      "QueueTimeout",
	ErrTooLarge:          "TooLarge",
	ErrWorkerDied:        "WorkerDied",
	ErrWorkerHung:        "WorkerHung",
	ErrDraining:          "Draining",
	ErrBrokerGone:        "BrokerGone",
	ErrNoBroker:          "NoBroker",
	ErrUnknownModel:      "UnknownModel",
	ErrVersion:           "Version",
	ErrLayout:            "Layout",
	ErrForbidden:         "Forbidden",
	ErrNoMemory:          "NoMemory",
	ErrSignatureMismatch: "SignatureMismatch",
	ErrRingFull:          "RingFull",
	ErrBrokerRunning:     "BrokerRunning",
	ErrProtocol:          "Protocol",
	ErrInvalid:           "Invalid",
	ErrDType:             "DType",
	ErrShape:             "Shape",
	ErrRows:              "Rows",
	ErrSize:              "Size",
	ErrOutputTooSmall:    "OutputTooSmall",
	ErrFull:              "Full",
	ErrClosed:            "Closed",
	ErrReleased:          "Released",
	ErrCommitted:         "Committed",
	ErrNotCommitted:      "NotCommitted",
	ErrNotDone:           "NotDone",
	ErrNoLevel:           "NoLevel",
	ErrTimeout:           "Timeout",
	ErrForked:            "Forked",
	ErrNoGPU:             "NoGPU",
}

var statusTexts = [statusCount]string{
	OK:                   "ok",
	ErrFailed:            "the model failed this request",
	ErrExpired:           "the request's deadline passed",
	ErrCanceled:          "the request was canceled",
	ErrQueueFull:         "the queue of this priority level is full",
	ErrQueueTimeout:      "the request waited in the queue for longer than its level allows",
	ErrTooLarge:          "the request has more rows than max_batch_size",
	ErrWorkerDied:        "every worker that ran this request died",
	ErrWorkerHung:        "the worker outlived its lease and could not be killed",
	ErrDraining:          "the broker is shutting down and takes no new requests",
	ErrBrokerGone:        "the broker went away; retry",
	ErrNoBroker:          "no broker is listening; start one with: ringbatch broker",
	ErrUnknownModel:      "the broker has no such model; declare it, or start a worker that registers it",
	ErrVersion:           "layout version mismatch; use the same ringbatch release on both sides",
	ErrLayout:            "segment geometry does not match its description",
	ErrForbidden:         "this user may not use this broker",
	ErrNoMemory:          "the kernel refused the memory",
	ErrSignatureMismatch: "the model exists with another signature",
	ErrRingFull:          "no free window of that size; raise the model's slots or lower the client's window",
	ErrBrokerRunning:     "another broker already serves this socket",
	ErrProtocol:          "the peer broke the protocol",
	ErrInvalid:           "invalid value",
	ErrDType:             "wrong element type",
	ErrShape:             "wrong shape",
	ErrRows:              "wrong number of rows",
	ErrSize:              "wrong byte length",
	ErrOutputTooSmall:    "output buffer too small",
	ErrFull:              "every slot of this client's window is in use",
	ErrClosed:            "closed",
	ErrReleased:          "the request was released",
	ErrCommitted:         "the request was committed already",
	ErrNotCommitted:      "the request was not committed yet",
	ErrNotDone:           "the request has not ended yet",
	ErrNoLevel:           "no such priority level",
	ErrTimeout:           "timed out waiting",
	ErrForked:            "this process was forked after the library was loaded; start it afresh, or load the library in the child only",
	ErrNoGPU:             "no GPU here",
}

// Name is the status's name without prefix, as in docs/errors.md.
func (s Code) Name() string {
	if s < statusCount {
		return statusNames[s]
	}
	return fmt.Sprintf("Status%d", uint8(s))
}

// Valid reports whether s is a status of this version.
func (s Code) Valid() bool { return s < statusCount }

// Error makes a Code an error.
func (s Code) Error() string {
	if s < statusCount {
		return statusTexts[s]
	}
	return fmt.Sprintf("unknown status %d", uint8(s))
}

// Retryable reports whether the same request may succeed if sent again.
func (s Code) Retryable() bool {
	switch s {
	case ErrBrokerGone, ErrDraining, ErrQueueFull, ErrFull, ErrRingFull, ErrNoBroker:
		return true
	}
	return false
}

// All lists every status, for bindings and documentation.
func All() []Code {
	all := make([]Code, statusCount)
	for i := range all {
		all[i] = Code(i)
	}
	return all
}
