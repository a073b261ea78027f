// SPDX-License-Identifier: Apache-2.0

package status

// The statuses. Their numbers never change.
const (
	// BEGIN statuses: written by `go generate ./status` from table.go
	OK Code = 0

	// a request's end
	ErrFailed       Code = 1  // the model's function failed this request; the text says why
	ErrExpired      Code = 2  // its deadline passed
	ErrCanceled     Code = 3  // its client canceled it
	ErrQueueFull    Code = 4  // its priority level's queue is full
	ErrQueueTimeout Code = 5  // it waited for longer than its priority level allows
	ErrTooLarge     Code = 6  // more rows than max_batch_size
	ErrWorkerDied   Code = 7  // it was in a batch that killed its worker, every time it was tried, or hung two of them
	ErrWorkerHung   Code = 8  // its worker outlived its lease and could not be killed
	ErrDraining     Code = 9  // the broker is shutting down and takes no new requests
	ErrBrokerGone   Code = 10 // the broker went away; safe to retry
	ErrNoWorker     Code = 39 // no worker is attached, and the model's policy says no_worker=refuse
	ErrOverloaded   Code = 42 // refused on arrival: it could not be answered within its deadline or the model's latency_goal

	// connecting
	ErrNoBroker           Code = 11 // nothing listens on the socket
	ErrUnknownModel       Code = 12 // the broker has no model of that name
	ErrVersion            Code = 13 // the peer speaks another version of the protocol
	ErrLayout             Code = 14 // segment geometry does not match its description
	ErrForbidden          Code = 15 // this uid may not use this broker
	ErrNoMemory           Code = 16 // the kernel refused the memory
	ErrSignatureMismatch  Code = 17 // the model exists with another signature
	ErrRingFull           Code = 18 // no window of that many slots is free for a new client
	ErrBrokerRunning      Code = 19 // another broker serves this socket
	ErrProtocol           Code = 20 // a peer broke the protocol and was disconnected
	ErrTooManyConnections Code = 37 // the broker serves as many connections as it may
	ErrNoDescriptors      Code = 38 // the broker or this process has no file descriptor left
	// this user or process has as much of the broker as one may have; the text says of what, and which setting raises it
	ErrQuota     Code = 40
	ErrNamespace Code = 41 // the peer lives in another time namespace, or in a PID namespace in which the broker cannot watch it
	ErrWrongGPU  Code = 43 // the model's device memory is on a GPU that this process does not see
	ErrBusy      Code = 45 // another process publishes the weights of this model

	// using
	ErrInvalid        Code = 21 // an argument or configuration value is not acceptable
	ErrDType          Code = 22 // tensor has another element type
	ErrShape          Code = 23 // tensor has another shape
	ErrRows           Code = 24 // inputs disagree on rows, or rows outside 1..max
	ErrSize           Code = 25 // byte length does not fit the shape
	ErrOutputTooSmall Code = 26 // the caller's buffer cannot hold the output
	ErrFull           Code = 27 // every slot of the client's window is in use
	ErrClosed         Code = 28 // the client or worker was closed
	ErrReleased       Code = 29 // the request was released; its views are gone
	ErrCommitted      Code = 30 // the request was committed already
	ErrNotCommitted   Code = 31 // the request was not committed yet
	ErrNotDone        Code = 32 // the request has not ended yet
	ErrNoLevel        Code = 33 // no such priority level
	ErrTimeout        Code = 34 // the caller's wait ended before the request did
	ErrForked         Code = 35 // this process was forked from the process that connected
	ErrNoGPU          Code = 36 // this needs a GPU and there is none
	ErrStateLost      Code = 44 // the sequence's state is gone with its broker; reset the sequence
	ErrRestarted      Code = 46 // a stream that must not begin again did
	// END statuses
)
