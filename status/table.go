// SPDX-License-Identifier: Apache-2.0

package status

//go:generate go run ../internal/statusgen

// entry is one row of the table.
type entry struct {
	group   Group
	name    string
	text    string // for users, with advice
	meaning string // for programmers, beside the constant; empty: as text
	is      flags
}

type flags uint8

const (
	retryable   flags = 1 << iota // see Retryable
	retryAttach                   // see RetryAttach
)

// Group is the kind of situation in which a status occurs.
type Group string

// The groups.
const (
	Ends       Group = "a request's end"
	Connecting Group = "connecting"
	Using      Group = "using"
)

// table is the list of statuses. The index of a row is its number, which is compiled into
// other programs: append rows, and never remove one. After a change run
//
//	go generate ./status
//
// which writes the table for Go, C, Python and the documentation.
var table = [...]entry{
	{"", "OK", "ok", "", 0},

	{Ends, "Failed", "the model failed this request", "the model's function failed this request; the text says why", 0},
	{Ends, "Expired", "the request's deadline passed", "its deadline passed", 0},
	{Ends, "Canceled", "the request was canceled", "its client canceled it", 0},
	{Ends, "QueueFull", "the queue of this priority level is full", "its priority level's queue is full", retryable},
	{Ends, "QueueTimeout", "the request waited in the queue for longer than its level allows",
		"it waited for longer than its priority level allows", 0},
	{Ends, "TooLarge", "the request has more rows than max_batch_size", "more rows than max_batch_size", 0},
	{Ends, "WorkerDied", "every worker that ran this request died",
		"it was in a batch that killed its worker, every time it was tried, or hung two of them", 0},
	{Ends, "WorkerHung", "the worker outlived its lease and could not be killed",
		"its worker outlived its lease and could not be killed", 0},
	{Ends, "Draining", "the broker is shutting down and takes no new requests", "", retryable | retryAttach},
	{Ends, "BrokerGone", "the broker went away; retry", "the broker went away; safe to retry", retryable | retryAttach},

	{Connecting, "NoBroker", "no broker is listening; start one with: ringbatch broker",
		"nothing listens on the socket", retryable | retryAttach},
	{Connecting, "UnknownModel", "the broker has no such model; declare it, or start a worker that registers it",
		"the broker has no model of that name", retryAttach},
	{Connecting, "Version", "version mismatch; use the same ringbatch release on both sides",
		"the peer speaks another version of the protocol", 0},
	{Connecting, "Layout", "segment geometry does not match its description", "", 0},
	{Connecting, "Forbidden", "this user may not use this broker", "this uid may not use this broker", 0},
	{Connecting, "NoMemory", "the kernel refused the memory", "", retryAttach},
	{Connecting, "SignatureMismatch", "the model exists with another signature", "", 0},
	{Connecting, "RingFull", "no free window of that size; raise the model's slots or lower the client's window",
		"no window of that many slots is free for a new client", retryable | retryAttach},
	{Connecting, "BrokerRunning", "another broker already serves this socket", "another broker serves this socket", 0},
	{Connecting, "Protocol", "the peer broke the protocol", "a peer broke the protocol and was disconnected", 0},

	{Using, "Invalid", "invalid value", "an argument or configuration value is not acceptable", 0},
	{Using, "DType", "wrong element type", "tensor has another element type", 0},
	{Using, "Shape", "wrong shape", "tensor has another shape", 0},
	{Using, "Rows", "wrong number of rows", "inputs disagree on rows, or rows outside 1..max", 0},
	{Using, "Size", "wrong byte length", "byte length does not fit the shape", 0},
	{Using, "OutputTooSmall", "output buffer too small", "the caller's buffer cannot hold the output", 0},
	{Using, "Full", "every slot of this client's window is in use", "every slot of the client's window is in use", retryable},
	{Using, "Closed", "closed", "the client or worker was closed", 0},
	{Using, "Released", "the request was released", "the request was released; its views are gone", 0},
	{Using, "Committed", "the request was committed already", "", 0},
	{Using, "NotCommitted", "the request was not committed yet", "", 0},
	{Using, "NotDone", "the request has not ended yet", "", 0},
	{Using, "NoLevel", "no such priority level", "", 0},
	{Using, "Timeout", "timed out waiting", "the caller's wait ended before the request did", retryAttach},
	{Using, "Forked", "this process was forked after the library was loaded; start it afresh, or load the library in the child only",
		"this process was forked from the process that connected", 0},
	{Using, "NoGPU", "no GPU here", "this needs a GPU and there is none", 0},

	{Connecting, "TooManyConnections", "the broker has no connection free; raise its max_clients, or close clients that are not needed",
		"the broker serves as many connections as it may", retryable | retryAttach},
	{Connecting, "NoDescriptors", "no file descriptor is free; raise the limit of open files (ulimit -n, LimitNOFILE)",
		"the broker or this process has no file descriptor left", retryable | retryAttach},
	{Ends, "NoWorker", "no worker attached: nobody runs this model now; start one, or see ringbatch ready",
		"no worker is attached, and the model's policy says no_worker=refuse", retryable | retryAttach},
	{Connecting, "Quota", "this user or process has as much of the broker as one may have",
		"this user or process has as much of the broker as one may have; the text says of what, and which setting raises it", retryAttach},
	{Connecting, "Namespace", "this process and the broker cannot serve each other across their namespaces",
		"the peer lives in another time namespace, or in a PID namespace in which the broker cannot watch it", 0},

	{Ends, "Overloaded",
		"the request could not be answered in time any more, as the model's latency_goal or its own deadline asks; " +
			"retry later, or elsewhere",
		"refused on arrival: it could not be answered within its deadline or the model's latency_goal", retryable},
	{Connecting, "WrongGPU", "this process does not see the GPU that the model's device memory is on",
		"the model's device memory is on a GPU that this process does not see", 0},
	{Using, "StateLost", "the state of this sequence is gone with its broker; reset the sequence, and begin anew",
		"the sequence's state is gone with its broker; reset the sequence", 0},
	{Connecting, "Busy", "another process has this role already", "another process publishes the weights of this model", retryAttach},
	{Using, "Restarted", "the stream began again: what it showed does not count; send the request again",
		"a stream that must not begin again did", retryable},
}

const count = Code(len(table))
