/* SPDX-License-Identifier: Apache-2.0 */
/* The names and texts of the statuses. */
#include "internal.h"

static const struct {
	const char *name, *text;
	bool retryable, retry_attach;
} statuses[RB_STATUS_COUNT] = {
	/* BEGIN statuses: written by `go generate ./status` from status/table.go */
	[RB_OK] = {"OK", "ok", false, false},
	[RB_ERR_FAILED] = {"Failed", "the model failed this request", false, false},
	[RB_ERR_EXPIRED] = {"Expired", "the request's deadline passed", false, false},
	[RB_ERR_CANCELED] = {"Canceled", "the request was canceled", false, false},
	[RB_ERR_QUEUE_FULL] = {"QueueFull", "the queue of this priority level is full", true, false},
	[RB_ERR_QUEUE_TIMEOUT] = {"QueueTimeout", "the request waited in the queue for longer than its level allows", false, false},
	[RB_ERR_TOO_LARGE] = {"TooLarge", "the request has more rows than max_batch_size", false, false},
	[RB_ERR_WORKER_DIED] = {"WorkerDied", "every worker that ran this request died", false, false},
	[RB_ERR_WORKER_HUNG] = {"WorkerHung", "the worker outlived its lease and could not be killed", false, false},
	[RB_ERR_DRAINING] = {"Draining", "the broker is shutting down and takes no new requests", true, true},
	[RB_ERR_BROKER_GONE] = {"BrokerGone", "the broker went away; retry", true, true},
	[RB_ERR_NO_BROKER] = {"NoBroker", "no broker is listening; start one with: ringbatch broker", true, true},
	[RB_ERR_UNKNOWN_MODEL] = {"UnknownModel", "the broker has no such model; declare it, or start a worker that registers it", false, true},
	[RB_ERR_VERSION] = {"Version", "version mismatch; use the same ringbatch release on both sides", false, false},
	[RB_ERR_LAYOUT] = {"Layout", "segment geometry does not match its description", false, false},
	[RB_ERR_FORBIDDEN] = {"Forbidden", "this user may not use this broker", false, false},
	[RB_ERR_NO_MEMORY] = {"NoMemory", "the kernel refused the memory", false, true},
	[RB_ERR_SIGNATURE_MISMATCH] = {"SignatureMismatch", "the model exists with another signature", false, false},
	[RB_ERR_RING_FULL] = {"RingFull", "no free window of that size; raise the model's slots or lower the client's window", true, true},
	[RB_ERR_BROKER_RUNNING] = {"BrokerRunning", "another broker already serves this socket", false, false},
	[RB_ERR_PROTOCOL] = {"Protocol", "the peer broke the protocol", false, false},
	[RB_ERR_INVALID] = {"Invalid", "invalid value", false, false},
	[RB_ERR_DTYPE] = {"DType", "wrong element type", false, false},
	[RB_ERR_SHAPE] = {"Shape", "wrong shape", false, false},
	[RB_ERR_ROWS] = {"Rows", "wrong number of rows", false, false},
	[RB_ERR_SIZE] = {"Size", "wrong byte length", false, false},
	[RB_ERR_OUTPUT_TOO_SMALL] = {"OutputTooSmall", "output buffer too small", false, false},
	[RB_ERR_FULL] = {"Full", "every slot of this client's window is in use", true, false},
	[RB_ERR_CLOSED] = {"Closed", "closed", false, false},
	[RB_ERR_RELEASED] = {"Released", "the request was released", false, false},
	[RB_ERR_COMMITTED] = {"Committed", "the request was committed already", false, false},
	[RB_ERR_NOT_COMMITTED] = {"NotCommitted", "the request was not committed yet", false, false},
	[RB_ERR_NOT_DONE] = {"NotDone", "the request has not ended yet", false, false},
	[RB_ERR_NO_LEVEL] = {"NoLevel", "no such priority level", false, false},
	[RB_ERR_TIMEOUT] = {"Timeout", "timed out waiting", false, true},
	[RB_ERR_FORKED] = {"Forked",
		"this process was forked after the library was loaded; start it afresh, or load the library in the child only", false, false},
	[RB_ERR_NO_GPU] = {"NoGPU", "no GPU here", false, false},
	[RB_ERR_TOO_MANY_CONNECTIONS] = {"TooManyConnections",
		"the broker has no connection free; raise its max_clients, or close clients that are not needed", true, true},
	[RB_ERR_NO_DESCRIPTORS] = {"NoDescriptors",
		"no file descriptor is free; raise the limit of open files (ulimit -n, LimitNOFILE)", true, true},
	[RB_ERR_NO_WORKER] = {"NoWorker", "no worker attached: nobody runs this model now; start one, or see ringbatch ready", true, true},
	[RB_ERR_QUOTA] = {"Quota", "this user or process has as much of the broker as one may have", false, true},
	[RB_ERR_NAMESPACE] = {"Namespace", "this process and the broker cannot serve each other across their namespaces", false, false},
	[RB_ERR_OVERLOADED] = {"Overloaded",
		"the request could not be answered in time any more, as the model's latency_goal or its own deadline asks; retry later, or elsewhere", true, false},
	[RB_ERR_WRONG_GPU] = {"WrongGPU", "this process does not see the GPU that the model's device memory is on", false, false},
	[RB_ERR_STATE_LOST] = {"StateLost", "the state of this sequence is gone with its broker; reset the sequence, and begin anew", false, false},
	[RB_ERR_BUSY] = {"Busy", "another process has this role already", false, true},
	[RB_ERR_RESTARTED] = {"Restarted", "the stream began again: what it showed does not count; send the request again", true, false},
	/* END statuses */
};

static int known(int status) { return status >= 0 && status < RB_STATUS_COUNT; }

const char *rb_version(void) { return RINGBATCH_VERSION; }
const char *rb_status_name(int status) { return known(status) ? statuses[status].name : "Unknown"; }
const char *rb_status_text(int status) { return known(status) ? statuses[status].text : "unknown status"; }
int rb_status_retryable(int status) { return known(status) && statuses[status].retryable; }
bool rb_retry_attach(int status) { return known(status) && statuses[status].retry_attach; }
