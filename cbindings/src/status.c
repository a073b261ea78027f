

/*
 * The list of statuses, once more: a forked child must be able to print its
 * error without entering Go. A test compares it with package shm.
 */
#include "../ringbatch.h"

#ifndef RB_VERSION
#define RB_VERSION "0.1.0"
#endif

static const struct {
	const char *name, *text;
} statuses[RB_STATUS_COUNT] = {
	[RB_OK] = {"OK", "ok"},
	[RB_ERR_FAILED] = {"Failed", "the model failed this request"},
	[RB_ERR_EXPIRED] = {"Expired", "the request's deadline passed"},
	[RB_ERR_CANCELED] = {"Canceled", "the request was canceled"},
	[RB_ERR_QUEUE_FULL] = {"QueueFull", "the queue of this priority level is full"},
	[RB_ERR_QUEUE_TIMEOUT] = {"QueueTimeout", "the request waited in the queue for longer than its level allows"},
	[RB_ERR_TOO_LARGE] = {"TooLarge", "the request has more rows than max_batch_size"},
	[RB_ERR_WORKER_DIED] = {"WorkerDied", "every worker that ran this request died"},
	[RB_ERR_WORKER_HUNG] = {"WorkerHung", "the worker outlived its lease and could not be killed"},
	[RB_ERR_DRAINING] = {"Draining", "the broker is shutting down and takes no new requests"},
	[RB_ERR_BROKER_GONE] = {"BrokerGone", "the broker went away; retry"},
	[RB_ERR_NO_BROKER] = {"NoBroker", "no broker is listening; start one with: ringbatch broker"},
	[RB_ERR_UNKNOWN_MODEL] = {"UnknownModel", "the broker has no such model; declare it, or start a worker that registers it"},
	[RB_ERR_VERSION] = {"Version", "layout version mismatch; use the same ringbatch release on both sides"},
	[RB_ERR_LAYOUT] = {"Layout", "segment geometry does not match its description"},
	[RB_ERR_FORBIDDEN] = {"Forbidden", "this user may not use this broker"},
	[RB_ERR_NO_MEMORY] = {"NoMemory", "the kernel refused the memory"},
	[RB_ERR_SIGNATURE_MISMATCH] = {"SignatureMismatch", "the model exists with another signature"},
	[RB_ERR_RING_FULL] = {"RingFull", "no free window of that size; raise the model's slots or lower the client's window"},
	[RB_ERR_BROKER_RUNNING] = {"BrokerRunning", "another broker already serves this socket"},
	[RB_ERR_PROTOCOL] = {"Protocol", "the peer broke the protocol"},
	[RB_ERR_INVALID] = {"Invalid", "invalid value"},
	[RB_ERR_DTYPE] = {"DType", "wrong element type"},
	[RB_ERR_SHAPE] = {"Shape", "wrong shape"},
	[RB_ERR_ROWS] = {"Rows", "wrong number of rows"},
	[RB_ERR_SIZE] = {"Size", "wrong byte length"},
	[RB_ERR_OUTPUT_TOO_SMALL] = {"OutputTooSmall", "output buffer too small"},
	[RB_ERR_FULL] = {"Full", "every slot of this client's window is in use"},
	[RB_ERR_CLOSED] = {"Closed", "closed"},
	[RB_ERR_RELEASED] = {"Released", "the request was released"},
	[RB_ERR_COMMITTED] = {"Committed", "the request was committed already"},
	[RB_ERR_NOT_COMMITTED] = {"NotCommitted", "the request was not committed yet"},
	[RB_ERR_NOT_DONE] = {"NotDone", "the request has not ended yet"},
	[RB_ERR_NO_LEVEL] = {"NoLevel", "no such priority level"},
	[RB_ERR_TIMEOUT] = {"Timeout", "timed out waiting"},
	[RB_ERR_FORKED] = {"Forked", "this process was forked after the library was loaded; start it afresh, or load the library in the child only"},
	[RB_ERR_NO_GPU] = {"NoGPU", "no GPU here"},
};

static int known(int status) { return status >= 0 && status < RB_STATUS_COUNT; }

const char *rb_version(void) { return RB_VERSION; }
const char *rb_status_name(int status) { return known(status) ? statuses[status].name : "Unknown"; }
const char *rb_status_text(int status) { return known(status) ? statuses[status].text : "unknown status"; }

int rb_status_retryable(int status)
{
	switch (status) {
	case RB_ERR_BROKER_GONE:
	case RB_ERR_DRAINING:
	case RB_ERR_QUEUE_FULL:
	case RB_ERR_FULL:
	case RB_ERR_RING_FULL:
	case RB_ERR_NO_BROKER:
		return 1;
	}
	return 0;
}
