/* SPDX-License-Identifier: Apache-2.0 */
/* The names and texts of the statuses. */
#include "../ringbatch.h"

static const struct {
	const char *name, *text;
	int retryable;
} statuses[RB_STATUS_COUNT] = {
	/* BEGIN statuses: written by `go generate ./status` from status/table.go */
	[RB_OK] = {"OK", "ok", 0},
	[RB_ERR_FAILED] = {"Failed", "the model failed this request", 0},
	[RB_ERR_EXPIRED] = {"Expired", "the request's deadline passed", 0},
	[RB_ERR_CANCELED] = {"Canceled", "the request was canceled", 0},
	[RB_ERR_QUEUE_FULL] = {"QueueFull", "the queue of this priority level is full", 1},
	[RB_ERR_QUEUE_TIMEOUT] = {"QueueTimeout", "the request waited in the queue for longer than its level allows", 0},
	[RB_ERR_TOO_LARGE] = {"TooLarge", "the request has more rows than max_batch_size", 0},
	[RB_ERR_WORKER_DIED] = {"WorkerDied", "every worker that ran this request died", 0},
	[RB_ERR_WORKER_HUNG] = {"WorkerHung", "the worker outlived its lease and could not be killed", 0},
	[RB_ERR_DRAINING] = {"Draining", "the broker is shutting down and takes no new requests", 1},
	[RB_ERR_BROKER_GONE] = {"BrokerGone", "the broker went away; retry", 1},
	[RB_ERR_NO_BROKER] = {"NoBroker", "no broker is listening; start one with: ringbatch broker", 1},
	[RB_ERR_UNKNOWN_MODEL] = {"UnknownModel", "the broker has no such model; declare it, or start a worker that registers it", 0},
	[RB_ERR_VERSION] = {"Version", "version mismatch; use the same ringbatch release on both sides", 0},
	[RB_ERR_LAYOUT] = {"Layout", "segment geometry does not match its description", 0},
	[RB_ERR_FORBIDDEN] = {"Forbidden", "this user may not use this broker", 0},
	[RB_ERR_NO_MEMORY] = {"NoMemory", "the kernel refused the memory", 0},
	[RB_ERR_SIGNATURE_MISMATCH] = {"SignatureMismatch", "the model exists with another signature", 0},
	[RB_ERR_RING_FULL] = {"RingFull", "no free window of that size; raise the model's slots or lower the client's window", 1},
	[RB_ERR_BROKER_RUNNING] = {"BrokerRunning", "another broker already serves this socket", 0},
	[RB_ERR_PROTOCOL] = {"Protocol", "the peer broke the protocol", 0},
	[RB_ERR_INVALID] = {"Invalid", "invalid value", 0},
	[RB_ERR_DTYPE] = {"DType", "wrong element type", 0},
	[RB_ERR_SHAPE] = {"Shape", "wrong shape", 0},
	[RB_ERR_ROWS] = {"Rows", "wrong number of rows", 0},
	[RB_ERR_SIZE] = {"Size", "wrong byte length", 0},
	[RB_ERR_OUTPUT_TOO_SMALL] = {"OutputTooSmall", "output buffer too small", 0},
	[RB_ERR_FULL] = {"Full", "every slot of this client's window is in use", 1},
	[RB_ERR_CLOSED] = {"Closed", "closed", 0},
	[RB_ERR_RELEASED] = {"Released", "the request was released", 0},
	[RB_ERR_COMMITTED] = {"Committed", "the request was committed already", 0},
	[RB_ERR_NOT_COMMITTED] = {"NotCommitted", "the request was not committed yet", 0},
	[RB_ERR_NOT_DONE] = {"NotDone", "the request has not ended yet", 0},
	[RB_ERR_NO_LEVEL] = {"NoLevel", "no such priority level", 0},
	[RB_ERR_TIMEOUT] = {"Timeout", "timed out waiting", 0},
	[RB_ERR_FORKED] = {"Forked",
		"this process was forked after the library was loaded; start it afresh, or load the library in the child only", 0},
	[RB_ERR_NO_GPU] = {"NoGPU", "no GPU here", 0},
	[RB_ERR_TOO_MANY_CONNECTIONS] = {"TooManyConnections",
		"the broker has no connection free; raise its max_clients, or close clients that are not needed", 1},
	[RB_ERR_NO_DESCRIPTORS] = {"NoDescriptors", "no file descriptor is free; raise the limit of open files (ulimit -n, LimitNOFILE)", 1},
	[RB_ERR_NO_WORKER] = {"NoWorker", "no worker attached: nobody runs this model now; start one, or see ringbatch ready", 1},
	[RB_ERR_QUOTA] = {"Quota", "this user or process has as much of the broker as one may have", 0},
	[RB_ERR_NAMESPACE] = {"Namespace", "this process and the broker cannot serve each other across their namespaces", 0},
	[RB_ERR_OVERLOADED] = {"Overloaded",
		"the request could not be answered in time any more, as the model's latency_goal or its own deadline asks; retry later, or elsewhere", 1},
	[RB_ERR_WRONG_GPU] = {"WrongGPU", "this process does not see the GPU that the model's device memory is on", 0},
	[RB_ERR_STATE_LOST] = {"StateLost", "the state of this sequence is gone with its broker; reset the sequence, and begin anew", 0},
	[RB_ERR_BUSY] = {"Busy", "another process has this role already", 0},
	/* END statuses */
};

static int known(int status) { return status >= 0 && status < RB_STATUS_COUNT; }

const char *rb_version(void) { return RINGBATCH_VERSION; }
const char *rb_status_name(int status) { return known(status) ? statuses[status].name : "Unknown"; }
const char *rb_status_text(int status) { return known(status) ? statuses[status].text : "unknown status"; }
int rb_status_retryable(int status) { return known(status) && statuses[status].retryable; }
