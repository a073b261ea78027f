/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ringbatch.h: the C ABI of ringbatch, for producers (clients) and workers.
 *
 * This file is written by hand and is the contract: version RB_ABI_VERSION.
 * Within a version, functions and constants are only added. ringbatch_weights.h has
 * live weights, ringbatch_cuda.h device memory.
 *
 * A producer                                A worker
 *
 *   rb_client c;                              rb_worker w;
 *   rb_connect("net", NULL, &c);              rb_worker_attach("net", "x:f32[4] -> y:f32[2]", NULL, &w);
 *   rb_request r;                             rb_batch *b;
 *   rb_claim(c, 1, NULL, 0, -1, &r);          while (rb_worker_next(w, -1, &b) == RB_OK) {
 *   rb_view x, y;                                 rb_view x, y;
 *   rb_input(c, r.id, 0, &x);  ...write...        for (uint32_t i = 0; i < b->runs; i++) {
 *   rb_commit(c, r.id, 0, 0);                         rb_batch_run(b, RB_INPUT, 0, i, &x);
 *   rb_wait(c, r.id, -1);                             rb_batch_run(b, RB_OUTPUT, 0, i, &y);
 *   rb_output(c, r.id, 0, &y); ...read...             ...compute...
 *   rb_release(c, r.id);                          }
 *   rb_close(c);                                  rb_batch_complete(b);
 *                                             }
 *
 * Rules that hold for every function:
 *
 * - It returns RB_OK or one of the other numbers of rb_status; out parameters
 *   are written only with RB_OK unless the function says otherwise. rb_error()
 *   then has the text, for the calling thread.
 * - Strings are UTF-8 and end with a zero byte. The function copies its string
 *   arguments before it returns: the caller keeps them.
 * - Times are nanoseconds, and points in time are on CLOCK_MONOTONIC. The parameter
 *   timeout says how long a call waits: 0 does not wait, a negative one has no limit.
 *   The parameter expires says how long after the commit a request that has not ended
 *   ends with RB_ERR_EXPIRED: 0 or less is never.
 * - A struct of options begins with its size, and a field of 0 or NULL is its default.
 *   Structs that begin with their size grow at their end, and programs that were
 *   compiled with a shorter one go on: fields that they lack are 0. A longer struct is
 *   refused, RB_ERR_VERSION, if it has more than zeros in the fields that this library
 *   lacks.
 * - Handles are numbers. A closed handle is refused: RB_ERR_CLOSED for clients and
 *   workers, RB_ERR_RELEASED for requests.
 * - If a needed pointer is NULL or a flag is unknown, the function does nothing and
 *   returns RB_ERR_INVALID.
 * - Fork: a child may use its parent's clients. At the first use it attaches for
 *   itself, with its own window; the parent is undisturbed. Requests, sequences,
 *   workers and batches stay the parent's: RB_ERR_FORKED. The child sees zeros in place of the
 *   slots' memory.
 * - Threads: a client may be used by many threads at once, a request, a sequence or
 *   a worker by one thread at a time.
 * - Signals: if a handler runs in a waiting thread, a wait with a timeout (not a
 *   negative one) times out 20 ms after it began, so that the caller can handle the
 *   signal. A handler must not call the library. The library has no handler and
 *   changes no mask; its only thread, which rb_client_fd starts, takes no signals.
 */
#ifndef RINGBATCH_H
#define RINGBATCH_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define RB_ABI_VERSION 1

/* The release. */
#define RINGBATCH_VERSION "0.1.0"
#define RINGBATCH_VERSION_NUMBER 100 /* 10000 * major + 100 * minor + patch */

#if defined(__GNUC__)
#define RB_API __attribute__((visibility("default")))
#else
#define RB_API
#endif

/* Limits, the same for every peer. */
#define RB_MAX_VARIABLE_DIMS 8
#define RB_MAX_RANK 8
#define RB_MAX_NAME_BYTES 128
#define RB_MAX_DIM_NAME_BYTES 31 /* of a variable dimension */

/* ---- status ------------------------------------------------------------ */

/* The same numbers and names as the Go errors and the Python exceptions. */
typedef enum rb_status {
	/* BEGIN statuses: written by `go generate ./status` from status/table.go */
	RB_OK = 0,

	/* a request's end */
	RB_ERR_FAILED = 1,        /* the model's function failed this request; the text says why */
	RB_ERR_EXPIRED = 2,       /* its deadline passed */
	RB_ERR_CANCELED = 3,      /* its client canceled it */
	RB_ERR_QUEUE_FULL = 4,    /* its priority level's queue is full */
	RB_ERR_QUEUE_TIMEOUT = 5, /* it waited for longer than its priority level allows */
	RB_ERR_TOO_LARGE = 6,     /* more rows than max_batch_size */
	RB_ERR_WORKER_DIED = 7,   /* it was in a batch that killed its worker, every time it was tried, or hung two of them */
	RB_ERR_WORKER_HUNG = 8,   /* its worker outlived its lease and could not be killed */
	RB_ERR_DRAINING = 9,      /* the broker is shutting down and takes no new requests */
	RB_ERR_BROKER_GONE = 10,  /* the broker went away; safe to retry */
	RB_ERR_NO_WORKER = 39,    /* no worker is attached, and the model's policy says no_worker=refuse */
	RB_ERR_OVERLOADED = 42,   /* refused on arrival: it could not be answered within its deadline or the model's latency_goal */

	/* connecting */
	RB_ERR_NO_BROKER = 11,            /* nothing listens on the socket */
	RB_ERR_UNKNOWN_MODEL = 12,        /* the broker has no model of that name */
	RB_ERR_VERSION = 13,              /* the peer speaks another version of the protocol */
	RB_ERR_LAYOUT = 14,               /* segment geometry does not match its description */
	RB_ERR_FORBIDDEN = 15,            /* this uid may not use this broker */
	RB_ERR_NO_MEMORY = 16,            /* the kernel refused the memory */
	RB_ERR_SIGNATURE_MISMATCH = 17,   /* the model exists with another signature */
	RB_ERR_RING_FULL = 18,            /* no window of that many slots is free for a new client */
	RB_ERR_BROKER_RUNNING = 19,       /* another broker serves this socket */
	RB_ERR_PROTOCOL = 20,             /* a peer broke the protocol and was disconnected */
	RB_ERR_TOO_MANY_CONNECTIONS = 37, /* the broker serves as many connections as it may */
	RB_ERR_NO_DESCRIPTORS = 38,       /* the broker or this process has no file descriptor left */
	/* this user or process has as much of the broker as one may have; the text says of what, and which setting raises it */
	RB_ERR_QUOTA = 40,
	/* the peer lives in another time namespace, or in a PID namespace in which the broker cannot watch it */
	RB_ERR_NAMESPACE = 41,
	RB_ERR_WRONG_GPU = 43,            /* the model's device memory is on a GPU that this process does not see */
	RB_ERR_BUSY = 45,                 /* another process publishes the weights of this model */

	/* using */
	RB_ERR_INVALID = 21,          /* an argument or configuration value is not acceptable */
	RB_ERR_DTYPE = 22,            /* tensor has another element type */
	RB_ERR_SHAPE = 23,            /* tensor has another shape */
	RB_ERR_ROWS = 24,             /* inputs disagree on rows, or rows outside 1..max */
	RB_ERR_SIZE = 25,             /* byte length does not fit the shape */
	RB_ERR_OUTPUT_TOO_SMALL = 26, /* the caller's buffer cannot hold the output */
	RB_ERR_FULL = 27,             /* every slot of the client's window is in use */
	RB_ERR_CLOSED = 28,           /* the client or worker was closed */
	RB_ERR_RELEASED = 29,         /* the request was released; its views are gone */
	RB_ERR_COMMITTED = 30,        /* the request was committed already */
	RB_ERR_NOT_COMMITTED = 31,    /* the request was not committed yet */
	RB_ERR_NOT_DONE = 32,         /* the request has not ended yet */
	RB_ERR_NO_LEVEL = 33,         /* no such priority level */
	RB_ERR_TIMEOUT = 34,          /* the caller's wait ended before the request did */
	RB_ERR_FORKED = 35,           /* this process was forked from the process that connected */
	RB_ERR_NO_GPU = 36,           /* this needs a GPU and there is none */
	RB_ERR_STATE_LOST = 44,       /* the sequence's state is gone with its broker; reset the sequence */
	RB_ERR_RESTARTED = 46,        /* a stream that must not begin again did */

	RB_STATUS_COUNT = 47 /* not a status */
	/* END statuses */
} rb_status;

/* Name of a status as in docs/errors.md ("QueueFull"), its general text, and
 * whether the same request may succeed if sent again (1) or not (0). The
 * strings are static. */
RB_API const char *rb_status_name(int status);
RB_API const char *rb_status_text(int status);
RB_API int rb_status_retryable(int status);

/* The text of the last call of this thread that failed. The library owns it;
 * it is valid until this thread's next call that fails. Never NULL. */
RB_API const char *rb_error(void);

/* RB_ABI_VERSION of the library, and the release's version (static). */
RB_API int rb_abi_version(void);
RB_API const char *rb_version(void);

/* How many cores this process may use: those of its affinity, or fewer where
 * the CPU quota of its control group, or of one above it, is less. */
RB_API uint32_t rb_cores(void);

/* ---- tensors ----------------------------------------------------------- */

typedef enum rb_dtype {
	RB_BOOL = 1, RB_U8, RB_I8, RB_I16, RB_I32, RB_I64, RB_F16, RB_BF16, RB_F32, RB_F64, RB_STR, RB_F8E4M3FN, RB_F8E5M2
} rb_dtype;

/* A state tensor has two halves in each slot. RB_STATE is the half that a step reads,
 * RB_NEXT_STATE the half that the step writes. */
typedef enum rb_side { RB_INPUT = 0, RB_OUTPUT = 1, RB_STATE = 2, RB_NEXT_STATE = 3 } rb_side;

/* One tensor of a model, without the row dimension. The row of slot s is at
 * base + offset + s * stride. base is the mapping's address; for a tensor in device
 * memory it is rb_device.base, a device pointer. After a restart of the broker the
 * offset may be another; rb_input and rb_output always follow it. A state tensor's
 * stride is twice its row_bytes: half h of slot s is at base + offset +
 * (2 * s + h) * row_bytes. */
typedef struct rb_tensor {
	char name[RB_MAX_NAME_BYTES + 1];
	uint8_t on_device;         /* 0: on the host; else 1 + the GPU's number in its text ("x:f32[4]@device:0") */
	uint32_t dtype;            /* rb_dtype */
	uint32_t rank;
	uint32_t variable;         /* bit i: dimension i has each request's own size, up to shape[i] */
	uint64_t shape[RB_MAX_RANK];
	uint64_t row_bytes;        /* of the largest row */
	uint64_t offset, stride;   /* in bytes */
	/* The names of variable dimensions, as in atoms<=200; "" without one. Dimensions of one name have one size. */
	char dim[RB_MAX_RANK][RB_MAX_DIM_NAME_BYTES + 1];
} rb_tensor;

/* A tensor of RB_STR has texts: shape[rank - 1] is the memory of one, in bytes. A text is UTF-8, which has no byte 0xff, and
 * such bytes follow one that is shorter. rb_commit and rb_batch_complete refuse other bytes: RB_ERR_DTYPE.
 *
 * Writes a text into its memory of that many bytes. RB_ERR_SIZE if it is longer, RB_ERR_DTYPE if it is not UTF-8. */
RB_API int rb_text_write(void *to, uint64_t most, const char *text, uint64_t bytes);

/* The size of the text in this memory, which begins at from. RB_ERR_DTYPE if it is not UTF-8. */
RB_API int rb_text_size(const void *from, uint64_t most, uint64_t *bytes);

/* Rows of a tensor in shared memory; in device memory, data is a device pointer.
 * shape[0] is the number of rows. stride is the distance between rows in bytes;
 * a row has no gaps. */
typedef struct rb_view {
	void *data;
	uint64_t bytes;            /* from data to the end of the last row's slot */
	uint64_t stride;
	uint32_t dtype;
	uint32_t rank;             /* of shape: 1 + the tensor's */
	uint64_t shape[1 + RB_MAX_RANK];
} rb_view;

/* The model of a client or worker, as the present broker has it. */
typedef struct rb_model {
	char name[RB_MAX_NAME_BYTES + 1];
	uint32_t inputs, outputs;  /* how many of each */
	uint32_t max_batch_size;   /* rows */
	uint32_t slots;            /* of the whole ring */
	uint32_t window;           /* client: rows it may have in use at once; worker: 0 */
	uint32_t levels;           /* priority levels */
	int64_t wait_time;         /* nanoseconds; -1: the broker chooses it */
} rb_model;

/* ---- the mapping ------------------------------------------------------- */

/* The mapped memory of all tensors of a model: to pin it for a GPU, or for views
 * that outlive their request. It stays mapped until rb_map_release, even if the
 * client or worker is closed. */
typedef struct rb_map {
	uint64_t id;
	uint8_t *base;
	uint64_t bytes;
	uint32_t attachment;       /* as in rb_request */
} rb_map;

RB_API int rb_map_release(uint64_t map);

/* ---- client: connecting ------------------------------------------------ */

typedef uint64_t rb_client; /* 0 is none */

/* Set size = sizeof(rb_connect_options), zero the rest, then fill in. */
typedef struct rb_connect_options {
	uint32_t size;
	uint32_t window;     /* slots: rows in use at once, at least one for each thread; 0: the broker chooses, 8 or fewer */
	const char *socket;  /* NULL: $RINGBATCH_SOCKET, or the user's runtime folder */
	const char *name;    /* for the broker's log and statistics; may be NULL */
	int64_t patience;    /* how long to try to connect; 0: 10 s, negative: no limit */
	uint32_t wait;       /* 1: also wait for a broker or model that is not there yet */
	uint32_t device;     /* 1: this program can use device pointers; 0: a model with tensors in device
	                      * memory is refused, RB_ERR_INVALID */
} rb_connect_options;

/* options may be NULL. The client is the caller's until rb_close.
 *
 * model may be an alias. Then the client uses one of the alias's models, and
 * attaches to another when the alias moves; rb_client_model names the present one.
 * A request ends in the attachment that it was claimed in. While every model of the
 * alias has another signature, a claim returns RB_ERR_SIGNATURE_MISMATCH. */
RB_API int rb_connect(const char *model, const rb_connect_options *options, rb_client *client);

/* Ends everything. Calls of other threads return RB_ERR_CLOSED or the end of
 * their request (canceled, broker gone). All requests are released, and the broker
 * has the window back, except for slots that a worker still uses. Pointers into the
 * slots are invalid; while an rb_map holds the memory, they point to private zeros.
 * (Device memory stays until its last rb_map.) A broker that stands still delays
 * this by a second. A client of a model with tensors in device memory first waits
 * until the GPU has done all work of this process. */
RB_API int rb_close(rb_client client);

RB_API int rb_client_model(rb_client client, rb_model *model);
RB_API int rb_client_tensor(rb_client client, int side, uint32_t k, rb_tensor *tensor);

/* Holds the mapping of the present attachment. */
RB_API int rb_client_map(rb_client client, rb_map *map);

/* ---- client: requests -------------------------------------------------- */

/* A claimed request: consecutive slots. After a restart of the broker the client
 * attaches again, with another mapping; attachment counts them. */
typedef struct rb_request {
	uint64_t id;          /* never 0 */
	uint8_t *base;        /* of its mapping */
	uint32_t slot, rows;
	uint32_t attachment;
} rb_request;

/* Takes slots for a request of that many rows. dims are the actual sizes of
 * all inputs' variable dimensions, in order; NULL and 0 if there are none.
 * RB_ERR_FULL if there is no room before the timeout, RB_ERR_TIMEOUT if the client
 * is still attaching (in a forked child, or after the broker's restart). Claims of
 * equal rows are served in order. If the free slots are too few for the first in line,
 * it holds up the others and lets them pass by turns, for 10 ms, 20 ms ... 2.56 s.
 * A thread that holds requests while it claims more can wait without end for another
 * that does the same: the window needs room for all that the threads hold. The
 * request is the caller's until rb_release, rb_collect or rb_close. With the timeout
 * RB_AT_ONCE it returns RB_ERR_FULL instead of waiting, even for an attachment. */
#define RB_AT_ONCE INT64_MIN
RB_API int rb_claim(rb_client client, uint32_t rows, const uint32_t *dims, uint32_t ndims, int64_t timeout, rb_request *request);

/* The k-th input of a request that is not committed yet: write here. If the model
 * has buckets, a variable dimension of the shape has the size of its bucket, and the
 * part beyond the claimed size is zero: leave it. */
RB_API int rb_input(rb_client client, uint64_t request, uint32_t k, rb_view *view);

/* The k-th output of a request that ended well: read here, until released. Rows
 * that differ in size have no view in common: RB_ERR_SHAPE. */
RB_API int rb_output(rb_client client, uint64_t request, uint32_t k, rb_view *view);

/* One row of the k-th output, in the row's own size. */
RB_API int rb_output_row(rb_client client, uint64_t request, uint32_t k, uint32_t row, rb_view *view);

/* Priority level, 0 being the most urgent. Before rb_commit. */
RB_API int rb_set_priority(rb_client client, uint64_t request, uint32_t level);

/* Cost of each row, 0..65535, for a model with max_batch_cost. 0, the default, is the
 * size of the model's first variable dimension, or the bytes of the longest text, or 1. Before rb_commit. */
RB_API int rb_set_cost(rb_client client, uint64_t request, uint32_t cost);

/* Hands the request over; its inputs now belong to the worker. With RB_NOTIFY its end
 * makes the descriptor of rb_client_fd readable. */
#define RB_NOTIFY 1u
RB_API int rb_commit(rb_client client, uint64_t request, int64_t expires, uint32_t flags);

/* Hands several requests over, with one wake-up of the broker. If one of them cannot
 * be committed, none is, unless some were claimed before and some after a restart of
 * the broker. */
RB_API int rb_commit_all(rb_client client, const uint64_t *requests, uint32_t count, int64_t expires, uint32_t flags);

/* With RB_PARTS the client takes the answer to one row in parts: rb_next_part. */
#define RB_PARTS 4u

/* Waits for the next part of the answer, the steps that the worker has shown since
 * (rb_batch_show), and copies it, or as much as there is room for. *bytes of 0, and
 * *restarted of 0, is the end of a request that ended well: all parts since the last restart,
 * joined, are the answer, and rb_output has all outputs. If the row began again on another
 * worker, *restarted is 1, the caller's parts do not count, and this one, which may be empty,
 * is the first; if restarted is NULL, RB_ERR_RESTARTED. RB_ERR_TIMEOUT; or the status of the
 * request's end. With RB_NOTIFY, RB_ERR_TIMEOUT says that the descriptor of rb_client_fd
 * tells of the next part, once: rb_reap then lists the request. */
RB_API int rb_next_part(rb_client client, uint64_t request, void *to, uint64_t room, int64_t timeout, uint64_t *bytes,
	uint32_t *restarted);

/* Waits until the request has ended: RB_OK, or the status of its end; RB_ERR_TIMEOUT
 * if it has not. */
RB_API int rb_wait(rb_client client, uint64_t request, int64_t timeout);

/* The same without waiting: RB_ERR_NOT_DONE if it has not ended. */
RB_API int rb_poll(rb_client client, uint64_t request);

/* Asks for the request's end; rb_wait waits for it. */
RB_API int rb_cancel(rb_client client, uint64_t request);

/* Gives the slots back in any state; a request under way is canceled. Pointers into
 * the slots belong to the next request. */
RB_API int rb_release(rb_client client, uint64_t request);

/* Holds the mapping of the request's attachment. */
RB_API int rb_request_map(rb_client client, uint64_t request, rb_map *map);

/* Where the time of an ended request went. */
typedef struct rb_timing {
	int64_t claim, write, queue, dispatch, compute, wake;
} rb_timing;
RB_API int rb_request_timing(rb_client client, uint64_t request, rb_timing *timing);

/* ---- client: whole requests in one call -------------------------------- */

/* For models without variable dimensions (else RB_ERR_SHAPE) and with tensors on the host
 * (else RB_ERR_INVALID). inputs and outputs are one pointer for each tensor in order, input_bytes
 * and output_bytes the size of the caller's memory there: rows * row_bytes, else
 * RB_ERR_SIZE, as for an array of another type. The call copies the bytes before it returns. */

/* Claim, copy in, commit, wait, copy out, release. The timeout limits all of that. If
 * it ends before the commit, rb_claim's RB_ERR_FULL or
 * RB_ERR_TIMEOUT with *request 0; if it ends later, RB_ERR_TIMEOUT with *request set:
 * go on with rb_wait and rb_collect, or rb_release. */
RB_API int rb_infer(rb_client client, uint32_t rows, const void *const *inputs, const uint64_t *input_bytes,
	void *const *outputs, const uint64_t *output_bytes, int64_t expires, int64_t timeout, uint64_t *request);

/* The first half: claim without waiting (RB_ERR_FULL), copy in, commit. With
 * RB_HOLD rb_commit_all commits it later. */
#define RB_HOLD 2u
RB_API int rb_submit(rb_client client, uint32_t rows, const void *const *inputs, const uint64_t *input_bytes, int64_t expires,
	uint32_t flags, uint64_t *request);

/* The second half: copy out and release; a failed request is released, and its status
 * returned. RB_ERR_NOT_DONE, and no release, if it has not ended. */
RB_API int rb_collect(rb_client client, uint64_t request, void *const *outputs, const uint64_t *output_bytes);

/* ---- client: sequences ------------------------------------------------- */

/* A sequence is a request of fixed slots that runs again and again: its steps. Each
 * step reads the state that the step before has written. The state advances if, and only
 * if, the caller learns that the step ended with RB_OK (rb_wait, rb_poll, rb_output). A
 * sequence of several rows is several sequences in step.
 * It is the caller's until rb_sequence_close or rb_close, and keeps its slots that long.
 *
 * After a restart of the broker, or when another broker has taken over, every function
 * but reset and close returns RB_ERR_STATE_LOST, until all rows are reset; a sequence whose
 * state is zero goes on. When an alias moves to another model, the sequence stays with its own.
 *
 * One thread at a time uses a sequence, from its call to the release of the request that the
 * call began: other threads get RB_ERR_NOT_DONE. A plain request that has no room beside the
 * sequences of its client is refused at once: RB_ERR_ROWS. */

/* Opens a sequence, whose state is zero. The rest as rb_claim. RB_ERR_INVALID if the
 * model has no state. */
RB_API int rb_sequence_open(rb_client client, uint32_t rows, int64_t timeout, uint64_t *sequence);

/* Begins the next step: waits until no worker uses the slots of the step before (else
 * RB_ERR_TIMEOUT; RB_ERR_NOT_DONE if that was not waited for or released), and returns the slots as a claimed request. rb_input,
 * rb_commit, rb_wait, rb_cancel, rb_output are as ever. rb_release and
 * rb_release_on_stream cancel a step under way, and keep the slots. The number of
 * the request before is released. dims as in rb_claim. */
RB_API int rb_sequence_request(rb_client client, uint64_t sequence, const uint32_t *dims, uint32_t ndims, int64_t timeout,
	rb_request *request);

/* rb_infer for a step. *request is set once the step was sent, whatever the result: after
 * RB_ERR_TIMEOUT go on with rb_wait and rb_collect, or rb_release. */
RB_API int rb_step(rb_client client, uint64_t sequence, const void *const *inputs, const uint64_t *input_bytes,
	void *const *outputs, const uint64_t *output_bytes, int64_t expires, int64_t timeout, uint64_t *request);

/* The state stays what it was before the last step, although that was answered: its caller
 * could not use the answer. Before the next step. request: the step's, so that no other one
 * is undone; 0: whichever was last. */
RB_API int rb_sequence_undo(rb_client client, uint64_t sequence, uint64_t request);

/* The state of these rows is zero again from the next commit on; NULL and 0: of all
 * rows. RB_ERR_ROWS if a row is given twice. */
RB_API int rb_sequence_reset(rb_client client, uint64_t sequence, const uint32_t *rows, uint32_t count);

/* The present state in place, between steps: the k-th state tensor, until the next
 * commit. fresh: memory for a byte of each row, which is 1 if the row begins its sequence;
 * then only read the state. With NULL it may be written, too: no row is fresh then.
 * RB_ERR_NOT_DONE while a step is under way, or a worker still uses the slots:
 * rb_sequence_request waits for that. */
RB_API int rb_sequence_state(rb_client client, uint64_t sequence, uint32_t k, rb_view *view, uint8_t *fresh);

/* Opens another sequence with the present state, at the same model, also after an alias has
 * moved to another one. The rest as rb_sequence_open. */
RB_API int rb_sequence_copy(rb_client client, uint64_t sequence, int64_t timeout, uint64_t *copy);

/* Gives the slots back; a step under way is canceled. RB_ERR_NOT_DONE, and nothing is
 * closed, while another thread is in the sequence or waits for its step. */
RB_API int rb_sequence_close(rb_client client, uint64_t sequence);

/* ---- client: event loops ----------------------------------------------- */

/* A descriptor that is readable when requests committed with RB_NOTIFY have
 * ended. The client owns it: do not read, write or close it. The first call starts
 * the thread that watches all of them. */
RB_API int rb_client_fd(rb_client client, int *fd);

/* Lists ended requests, at most max, each once. If there are more, the descriptor
 * stays readable. */
RB_API int rb_reap(rb_client client, uint64_t *requests, uint32_t max, uint32_t *count);

/* The same for a program that has a thread for it: waits for at least one; *count is 0
 * at the timeout. The calling thread watches all requests, and the library starts no
 * thread. The first call, with a timeout of 0 perhaps, comes before the first commit
 * with RB_NOTIFY. One thread at a time. */
RB_API int rb_reap_wait(rb_client client, int64_t timeout, uint64_t *requests, uint32_t max, uint32_t *count);

/* ---- worker ------------------------------------------------------------ */

typedef uint64_t rb_worker; /* 0 is none */

/* Set size = sizeof(rb_worker_options), zero the rest, then fill in. */
typedef struct rb_worker_options {
	uint32_t size;
	uint32_t depth;           /* batches handed over at once; 0: the default, 2 */
	const char *socket;
	const char *name;
	const char *gpu;          /* for statistics */
	int64_t patience;         /* how long to try to attach; 0: 10 s, negative: no limit */
	uint32_t share;           /* of the work, relative to other workers; 0: 1 */
	uint32_t pad_to;          /* pad every batch to that many rows; 0: no */
	uint32_t pad_preferred;   /* 1: pad to the next preferred size */
	uint32_t gather_threads;  /* of rb_batch_gather, for batches above 1 MiB, the caller's included;
	                           * 0: as many as rb_cores, one where there are fewer than 4; at most 16 */
	/* How to declare the model if the broker does not know it yet: key=value
	 * pairs with blanks or line ends between them, "max_batch_size=32
	 * wait_time=5ms". docs/configuration.md has the keys. Missing keys, and NULL,
	 * take the broker's defaults. */
	const char *policy;
	/* How to declare the pipeline of a stage ("PIPELINE/STAGE") if the broker does
	 * not know it yet: JSON, see docs/pipelines.md. NULL otherwise. */
	const char *pipeline;
	uint32_t lanes;           /* batches that it runs at once, at most depth. With fewer under way it also gets
	                           * batches that are not full; 0: 1 */
	uint32_t run_once;        /* 1: no request runs twice: if a batch fails or the worker dies, its requests fail */
	/* What the worker computes. Beside workers of another version it is refused, RB_ERR_INVALID, unless the broker has
	 * started them all: their answers would mix. Workers without a version (NULL) join each other; "any" joins all. */
	const char *version;
	uint32_t wait;            /* 1: also wait for a broker that is not there yet */
} rb_worker_options;

/* signature: inputs, "->", outputs, each name:dtype[dims] and separated by
 * blanks: "x:f32[3,224,224] -> y:f32[1000]"; a variable dimension is "<=512", or with a name
 * "atoms<=200": inputs that share a name have one size in a request, and so has an output.
 * "x:f32[4]@device:0" is in the memory of this worker's GPU 0; the first worker
 * allocates it for all. A worker completes a batch when its streams are done with it.
 * State tensors follow the word state: "x:f32[4] -> y:f32[2] state h:f32[64]".
 * The worker is the caller's until rb_worker_close. */
RB_API int rb_worker_attach(const char *model, const char *signature, const rb_worker_options *options, rb_worker *worker);

/* The differences between the model's policy and this worker's options, one line
 * each. The library owns the text, until rb_worker_close. */
RB_API int rb_worker_notes(rb_worker worker, const char **text);

/* Batches that are not completed fail; with RB_ERR_BROKER_GONE if the broker is gone. */
RB_API int rb_worker_close(rb_worker worker);

RB_API int rb_worker_model(rb_worker worker, rb_model *model);
RB_API int rb_worker_tensor(rb_worker worker, int side, uint32_t k, rb_tensor *tensor);
RB_API int rb_worker_map(rb_worker worker, rb_map *map);

/* Rows that are consecutive in memory. */
typedef struct rb_run {
	uint32_t slot;  /* of its first row */
	uint32_t row;   /* its first row in the batch */
	uint32_t rows;
} rb_run;

/* One request of a batch. */
typedef struct rb_member {
	uint32_t row, rows;                       /* which rows are its own */
	int64_t deadline, committed;              /* points in time; deadline 0 if none */
	uint32_t dims[RB_MAX_VARIABLE_DIMS];      /* true sizes of the inputs' variable dimensions */
} rb_member;

/* A batch. The library owns it, and it is valid until rb_batch_complete or
 * rb_worker_close. Read only. */
typedef struct rb_batch {
	uint64_t id;
	rb_worker worker;
	uint8_t *base;                            /* of the mapping; inputs there are read only, too (see rb_batch_run) */
	uint32_t requests, rows, runs;            /* how many */
	uint32_t pad_to;                          /* rows the model should see: rows, or more if padding was asked for */
	uint32_t dims[RB_MAX_VARIABLE_DIMS];      /* common sizes of the inputs' variable dimensions; ragged: the largest ones */
	const rb_member *request;                 /* requests long */
	const uint32_t *slot;                     /* rows long: the slot of each row */
	const rb_run *run;                        /* runs long */
	uint32_t place;                           /* the library's own */
	uint32_t ragged;                          /* 1: each request has its own sizes (rb_batch_row) */
	/* Rows long; NULL if the model has no state. Bit 0: the half that the row's step reads. Bit 1: fresh, that half
	 * counts as zero. The library has zeroed it, except in device memory. */
	const uint8_t *step;
	/* Rows long; NULL if no output can grow. 1: the row's client takes parts; the others need no rb_batch_show. */
	const uint8_t *streamed;
} rb_batch;

/* Takes the next batch; RB_ERR_TIMEOUT if none comes, RB_ERR_BROKER_GONE when
 * the broker went away (close the worker and attach again). Up to `depth` batches may
 * be taken before the first is completed: with a timeout of 0 that prefetches. */
RB_API int rb_worker_next(rb_worker worker, int64_t timeout, rb_batch **batch);

/* Waits until rb_worker_next with a timeout of 0 would succeed, and takes no batch: for
 * programs with an event loop, which wait here in a second thread. It may wait while
 * another thread uses the worker's batches, but not while that calls rb_worker_next. */
RB_API int rb_worker_wait(rb_worker worker, int64_t timeout);

/* Lists the batches in hand of which no client waits for a request any more, at most max: complete them. For a worker
 * with lanes, between two rounds. */
RB_API int rb_worker_unwanted(rb_worker worker, rb_batch **batches, uint32_t max, uint32_t *count);

/* Run i of the k-th tensor: rows in place. RB_ERR_SHAPE for a variable input
 * of a ragged batch of several requests: its rows differ in shape. A worker must
 * not write inputs: a retry, or a later stage of a pipeline, reads them, too.
 * RB_ERR_INVALID for state: rb_batch_row has its rows. */
RB_API int rb_batch_run(const rb_batch *batch, int side, uint32_t k, uint32_t i, rb_view *view);

/* Row i of the k-th tensor; of a ragged batch in its own size, which may be 0
 * bytes. Padding rows have no memory: RB_ERR_ROWS. A worker must not write
 * RB_STATE, and writes all of RB_NEXT_STATE. */
RB_API int rb_batch_row(const rb_batch *batch, int side, uint32_t k, uint32_t i, void **data, uint64_t *bytes);

/* For tensors on the host: copies all rows of the k-th tensor one after the other, and
 * clears the padding after them: pad_to rows in the batch's shape, RB_ERR_SIZE if the
 * buffer is smaller. */
RB_API int rb_batch_gather(const rb_batch *batch, int side, uint32_t k, void *to, uint64_t bytes);

/* Begins to gather an input above 1 MiB in the worker's threads, so that the next batch
 * is gathered while this one runs. rb_batch_gather with the same arguments finishes it.
 * Two at a time: a third call finishes one of them. The memory must stay until then, or
 * until the batch is completed. */
RB_API int rb_batch_prefetch(const rb_batch *batch, uint32_t k, void *to, uint64_t bytes);

/* Copies rows of the k-th output, each of its largest size, to their slots. */
RB_API int rb_batch_scatter(rb_batch *batch, uint32_t k, const void *from, uint64_t bytes);

/* The same for the k-th state tensor: the state after this step, on the host. */
RB_API int rb_batch_set_state(rb_batch *batch, uint32_t k, const void *from, uint64_t bytes);

/* For tensors on the host whose first dimension varies, or none: copies all rows of the
 * k-th input one after the other, each in its true size, without padding. Row i is
 * offsets[i] to offsets[i + 1] in steps of the first dimension; rows + 1 numbers, NULL if
 * they are not needed. If `to` is NULL only the offsets are written. RB_ERR_SIZE if the
 * buffer is smaller, RB_ERR_SHAPE if another dimension varies. */
RB_API int rb_batch_pack(const rb_batch *batch, uint32_t k, void *to, uint64_t bytes, int32_t *offsets);

/* The inverse for the k-th output: copies packed rows to their slots. If the first
 * dimension varies, each row has the size of the input whose name it has, or else of the
 * first variable input, and its output dims are set; RB_ERR_SHAPE if the output cannot hold a row. */
RB_API int rb_batch_unpack(rb_batch *batch, uint32_t k, const void *from, uint64_t bytes);

/* The actual sizes, 0 included, of the variable dimensions of one row's outputs, in
 * order; without it they are that of the input that has the same name, or the maximum.
 * RB_ERR_SHAPE for another size than that input's. */
RB_API int rb_batch_set_row_dims(rb_batch *batch, uint32_t row, const uint32_t *dims, uint32_t ndims);

/* The first `steps` steps of a row's growing output are written, and stay: the first output
 * of which only the first dimension varies. A client that takes parts gets them now. The
 * row's size is `steps`, unless it grows further. RB_ERR_INVALID for fewer steps than before,
 * except 0: that takes them back, the row begins again, and its stream says so. */
RB_API int rb_batch_show(rb_batch *batch, uint32_t row, uint32_t steps);

/* Ends request i alone, with RB_ERR_FAILED and the first 1024 bytes of this text. */
RB_API int rb_batch_fail(rb_batch *batch, uint32_t i, const char *text);

/* The same with another status that a request can end with (RB_ERR_FAILED …
 * RB_ERR_BROKER_GONE, RB_ERR_NO_WORKER, RB_ERR_OVERLOADED; else RB_ERR_INVALID):
 * for a worker that passes on another server's error. */
RB_API int rb_batch_fail_as(rb_batch *batch, uint32_t i, int status, const char *text);

/* Fails all requests that have not failed yet. The broker runs them again in smaller
 * batches, on another worker if it can; a request that fails alone ends with
 * RB_ERR_FAILED and this text. With run_once it is rb_batch_fail for each of them. */
RB_API int rb_batch_fail_all(rb_batch *batch, const char *text);

/* RB_OK while a client waits for request i; RB_ERR_CANCELED once it was canceled or
 * has expired. A worker that can give work up calls this now and then. */
RB_API int rb_batch_waiting(const rb_batch *batch, uint32_t i);

/* How many rounds the rows of the batch took in their lanes, summed up: the statistics have them. */
RB_API int rb_batch_set_rounds(rb_batch *batch, uint32_t rounds);

/* Answers the clients and gives the batch back: *batch is invalid, whatever is returned.
 *
 * If the worker never asked for a row of an output (rb_batch_run, rb_batch_row,
 * rb_batch_scatter, rb_batch_unpack), its slot still holds an earlier request's data. Then
 * the row's request ends with RB_ERR_FAILED, which is returned, and rb_error names the
 * first such output and row. The same holds for RB_NEXT_STATE (rb_batch_row,
 * rb_batch_set_state). A call that fails writes nothing. Rows of size 0 need no call.
 * rb_worker_map turns the check off: that worker may write rows by their addresses. */
RB_API int rb_batch_complete(rb_batch *batch);

/* ---- statistics -------------------------------------------------------- */

/* Everything the broker counts, as JSON. socket as for connecting. The string
 * is the caller's: give it back with rb_free. */
RB_API int rb_stats(const char *socket, int64_t timeout, char **json);
RB_API void rb_free(char *string);

#ifdef __cplusplus
}
#endif
#endif
