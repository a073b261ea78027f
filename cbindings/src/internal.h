/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Declarations for all files of the library. The files mirror Go's packages:
 *
 *   shm.h shm.c        shm: words, rings, bells, clock
 *   tensor.c layout.c  tensor, shm/layout: signatures, where everything lies
 *   segment.c cgroup.c shm/segment, shm/populate, internal/cgroup
 *   msgpack.c control.c reply.h reply.c   internal/control: messages, frames, descriptors
 *   policy.c           policy: its texts on the wire
 *   attach.c device.c stats.c   internal/attach: call the broker, check everything, map it
 *   link.c conn.c line.c waiting.c request.c views.c sequence.c infer.c stream.c notify.c client.c   client
 *   gather.c taken.c worker.c batch.c   worker
 *   weights.h weights.c publisher.c follower.c   publishers and followers of live weights
 *   handles.c fork.c error.c status.c   handles, forks and errors of the C library
 *
 * In each of the last four lines a file calls only the files before it.
 */
#ifndef RB_INTERNAL_H
#define RB_INTERNAL_H

#include <pthread.h>
#include <stdlib.h>
#include <sys/types.h>
#include <time.h>

#include "../ringbatch_cuda.h"
#include "../ringbatch_weights.h"
#include "shm.h"

#define SECOND INT64_C(1000000000)
#define MILLISECOND INT64_C(1000000)
#define MICROSECOND INT64_C(1000)

/* How long a thread parks at most. Then it checks the board, since another attached process may have taken its wake-up,
 * and the socket, since a dead broker rings no bell. */
#define PARK_SLICE (50 * MILLISECOND)

/* ---- errors ------------------------------------------------------------- */

/* Sets the text of rb_error, and returns the status. */
int rb_fail(int status, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* The same, after the status's general text. */
int rb_explain(int status, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* The general text alone. */
int rb_say(int status);
int rb_missing(void); /* a pointer is NULL */

/* ---- tensors and layout ------------------------------------------------- */

/* The places of everything in a model's segments. They follow from the signature, the slots and the maximum batch. */
typedef struct rb_layout {
	uint32_t inputs, outputs, states, slots, max_batch;
	rb_tensor *tensor;                   /* inputs, outputs, states */
	uint8_t dims_at[RB_GO_MAX_TENSORS];  /* a tensor's first variable dimension among those of its side */
	uint32_t dims[2];                    /* variable dimensions, by side */
	uint32_t most[2][RB_DIMS];           /* their maxima */
	uint64_t planes_size, board_size, device_size, geometry;
	bool on_device;                      /* this peer has a tensor in device memory */
	uint64_t words_at, records_at, reasons_at;
	uint64_t steps_at;                   /* the plane of step words, if there are states */
} rb_layout;

static inline uint32_t rb_tensors(const rb_layout *l) { return l->inputs + l->outputs + l->states; }

/* A step word is the first byte of a slot's cache line. */
enum { RB_STEP_ODD = 1, RB_STEP_FRESH = 2, RB_STEP_BYTES = 64 };

/* The board in a segment. */
static inline rb_board rb_board_at(const rb_layout *l, uint8_t *at)
{
	return (rb_board){.bells = (void *)(at + RB_GO_SEGMENT_HEADER), .words = (void *)(at + l->words_at),
			  .records = (void *)(at + l->records_at), .reasons = (char *)(at + l->reasons_at)};
}
/* The output that grows, and the place of its size among the outputs' dims: the first output of which only the first
 * dimension varies. NULL if none does. */
const rb_tensor *rb_growing(const rb_layout *l, uint32_t *dim);
int rb_no_growing(void);
static inline uint32_t rb_page_of(const rb_tensor *t) { return (uint32_t)(t->offset / RB_GO_PAGE); }
/* Reads one tensor's text. */
int rb_parse_tensor(const char *text, size_t bytes, rb_tensor *t);
/* Writes a tensor's text; returns its length, which may be more than the room. */
size_t rb_format_tensor(const rb_tensor *t, char *to, size_t room);
/* Reads "x:f32[4] -> y:f32[2] state h:f32[8]" into l, without places. */
int rb_parse_signature(const char *text, rb_layout *l);
/* Checks the tensors of l and computes the places. */
int rb_layout_place(rb_layout *l, uint32_t slots, uint32_t max_batch);
bool rb_same_tensors(const rb_layout *a, const rb_layout *b);
/* For the ring of a pipeline, or of a model with state, after rb_layout_place: the tensors of l are some of these planes. */
int rb_layout_among(rb_layout *l, rb_tensor *plane, uint32_t planes);
void rb_layout_free(rb_layout *l);
uint64_t rb_dtype_size(uint32_t dtype);
const char *rb_dtype_name(uint32_t dtype);
bool rb_valid_utf8(const char *text, size_t bytes);
static inline bool rb_blank(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

uint64_t rb_times_at(uint32_t window);
uint64_t rb_client_segment_size(uint32_t window, bool times);
uint64_t rb_commit_ring_size(uint32_t window);
uint64_t rb_done_ring_size(uint32_t depth);
uint64_t rb_mails_at(uint32_t depth);
uint64_t rb_mail_size(uint32_t max_batch);
uint64_t rb_worker_segment_size(uint32_t depth, uint32_t max_batch);

static inline const rb_tensor *rb_tensors_of(const rb_layout *l, int side)
{
	return l->tensor + (side == RB_INPUT ? 0 : side == RB_OUTPUT ? l->inputs : l->inputs + l->outputs);
}
/* Finds the k-th tensor of a side. */
int rb_pick(const rb_layout *l, int side, uint32_t k, const rb_tensor **t, uint32_t *dims_at);
/* Fills in a view of a tensor's rows; dims are the sizes of its variable dimensions. */
void rb_fill_view(rb_view *v, const rb_tensor *t, const uint32_t *dims, uint8_t *base, uint32_t slot, uint32_t rows);
/* Refuses a tensor in device memory. */
int rb_check_on_host(const rb_tensor *t);
uint64_t rb_row_bytes(const rb_tensor *t, const uint32_t *dims);

/* ---- msgpack ------------------------------------------------------------ */

typedef struct rb_writer {
	uint8_t *data;
	size_t length, room;
	bool failed; /* no memory */
} rb_writer;

void rb_put_map(rb_writer *w, uint32_t pairs);
void rb_put_array(rb_writer *w, uint32_t n);
void rb_put_text(rb_writer *w, const char *text, size_t bytes);
void rb_put_string(rb_writer *w, const char *text);
/* A key and its value. */
void rb_put_word(rb_writer *w, const char *key, const char *text); /* NULL is "" */
void rb_put_number(rb_writer *w, const char *key, int64_t n);
void rb_put_true(rb_writer *w, const char *key);

/* A place in a message that rb_check_message has accepted. */
typedef struct rb_reader {
	const uint8_t *at, *end;
} rb_reader;

/* Whether the bytes are exactly one value, not nested too deeply. */
bool rb_check_message(const uint8_t *data, size_t bytes);
/* Each reads one value; false if the value is of another kind. */
bool rb_get_map(rb_reader *r, uint32_t *pairs);
bool rb_get_array(rb_reader *r, uint32_t *n);
bool rb_get_text(rb_reader *r, const char **text, uint32_t *bytes); /* a string, or bytes */
bool rb_get_uint(rb_reader *r, uint64_t *n);
bool rb_skip_value(rb_reader *r);
static inline bool rb_is(const char *key, uint32_t bytes, const char *name)
{
	return __builtin_strlen(name) == bytes && !__builtin_memcmp(key, name, bytes);
}

/* ---- control: frames and sockets ---------------------------------------- */

#define RB_MAX_FDS 5
#define RB_CALL_TIMEOUT (10 * SECOND)
/* A broker that hangs up instead of answering may have been replaced: how often its successor is asked. */
#define RB_SUCCESSORS 4

/* Whether attaching may succeed later by itself: the column "attach again" of the status table. */
bool rb_retry_attach(int status);

/* The path of the broker's socket. */
int rb_socket_path(const char *given, char *path, size_t size);
int rb_dial(const char *socket, int64_t deadline, int *fd);
/* Sends one frame. 0, or an errno. */
int rb_send_frame(int fd, int64_t deadline, const uint8_t *body, size_t bytes);
/* Sends the descriptor that a request has announced ("gpu"), with one byte. */
int rb_send_offer(int fd, int64_t deadline, int offer);
/* The error if the broker does not answer. */
int rb_no_answer(int fd);
/* Waits until the socket is readable: RB_OK or RB_ERR_TIMEOUT. Sets *interrupted if a signal's handler ran. */
int rb_await_readable(int fd, int64_t deadline, bool *interrupted);

typedef struct rb_frame {
	uint8_t *body;
	uint32_t bytes;
	int fds[RB_MAX_FDS];
	int nfds;
} rb_frame;

/* Receives one frame. The caller frees it in any case. */
int rb_receive_frame(int fd, int64_t deadline, rb_frame *f);
void rb_frame_free(rb_frame *f);
void rb_frame_close_fds(rb_frame *f);

/* ---- segments ----------------------------------------------------------- */

typedef struct rb_segment {
	uint8_t *at; /* NULL: not mapped */
	uint64_t bytes;
} rb_segment;

/* Checks seals and size of a received memfd, and maps it. Closes fd in any case. */
int rb_segment_open(rb_segment *s, int fd, uint64_t bytes, bool writable);
/* Compares the header of a received segment with want, which needs no magic, version or size. */
int rb_check_header(const rb_segment *segment, rb_header want, const char *model);
void rb_segment_close(rb_segment *s);
/* Maps private zeros over the segment: pointers into it stay valid, and reach no slot. */
bool rb_segment_detach(rb_segment *s);
typedef struct rb_range {
	uint64_t offset, bytes;
} rb_range;
/* Makes the kernel back the ranges with memory. */
int rb_segment_populate(rb_segment *s, const rb_range *ranges, uint32_t count);
/* Widens a range of a segment to whole pages of the kernel, which may be larger than RB_GO_PAGE: 64 KiB on some arm64 machines. */
rb_range rb_whole_pages(rb_range r, uint64_t page, uint64_t size);
/* The memory that the cgroups of this process leave it; false if there is no limit. */
bool rb_cgroup_room(int64_t *left, int64_t *limit, char *group, size_t size);
/* The cores that a CPU quota is worth, rounded up: "150000 100000", a line of cpu.max, is 2; UINT32_MAX for none. */
uint32_t rb_quota_cores(const char *cpu_max);

/* ---- device memory ------------------------------------------------------ */

#define RB_GPU_BYTES sizeof(((rb_device *)0)->gpu)

/* Allocates device memory on the GPU of that number: gives a descriptor, which the caller closes, and the GPU's UUID. */
int rb_device_allocate(uint64_t bytes, uint64_t number, int *fd, char gpu[RB_GPU_BYTES]);
/* Maps that memory; the descriptor stays the caller's. */
int rb_device_import(rb_device *d, int fd, uint64_t bytes, const char *gpu);
/* Waits until the GPU has done all work of this process. Does nothing without device memory. */
void rb_device_synchronize(const rb_device *d);
/* Zeroes some of it, and waits until that is done. */
int rb_device_clear(const rb_device *d, uint64_t at, uint64_t bytes);
/* Copies within device memory, and waits for it. */
int rb_device_copy(const rb_device *d, const void *to, const void *from, uint64_t bytes);
/* Unmaps device memory; in a host function later. */
void rb_device_close(rb_device *d);
/* Maps the memory of a broker's reply and closes the descriptor. */
int rb_open_device(rb_device *d, int fd, uint64_t bytes, const char *gpu, uint32_t gpu_bytes);
/* Whether the stream has done all its work; asks until then. */
bool rb_device_idle(const rb_device *d, void *stream, int64_t until);
/* Runs f on a driver thread after the stream's work so far. f calls rb_device_host_function(true) first and (false) last:
 * between them the library does not call the driver. */
int rb_device_launch(const rb_device *d, void *stream, void (*f)(void *), void *argument);
void rb_device_host_function(bool runs);
/* Whether the context has failed. */
bool rb_device_broken(const rb_device *d);
void rb_device_in_child(void);

/* ---- attaching ---------------------------------------------------------- */

/* One attachment: a connection and its mapped segments. */
typedef struct rb_session {
	rb_layout layout;
	rb_segment planes, board_segment, words;
	rb_device device; /* base 0: none */
	rb_board board;
	_Atomic int socket, doorbell; /* -1: closed */
	pid_t owner;                  /* the process that attached, and may end the session */
	_Atomic bool again;           /* a client's: the broker wants it to attach again */
	uint64_t epoch;
	uint32_t first_slot, window, first_gen, depth;
	uint32_t max_rows; /* of a request */
	bool times;        /* a client's: it reports the times of its requests */
	bool hands_on;     /* a worker's: another stage follows, so it ends only failed requests */
	bool isolates;     /* a worker's: it may report that a batch failed as a whole */
	char model[RB_MAX_NAME_BYTES + 1];
	uint32_t levels;
	int64_t wait_time;
	bool ragged;
	uint32_t *bucket[RB_DIMS], buckets[RB_DIMS]; /* per variable input dimension: the sizes, and their number */
	char *notes;                                  /* the broker's remarks, a line each; may be NULL */
} rb_session;

/* The base of a tensor's offset. */
static inline uint8_t *rb_base_of(const rb_session *s, const rb_tensor *t)
{
	return t->on_device ? (uint8_t *)(uintptr_t)s->device.base : s->planes.at;
}

/* policy.c: writes a worker's policy, "key=value key=value". */
int rb_put_policy(rb_writer *w, const char *text);
/* Reads the model's policy from the broker's reply; after the layout. */
int rb_read_policy(rb_reader r, rb_session *s);

/* A call of the broker: begun by rb_attach_begin, continued by rb_attach_end. */
typedef struct rb_attach {
	int fd; /* -1: none is under way */
	pid_t owner;
	int64_t asked; /* when */
	bool worker;
	int64_t deadline; /* of the broker's reply */
	uint64_t needed, needed_on; /* RB_NEEDS_DEVICE: bytes, and the number of the GPU */
} rb_attach;

/* A status of rb_attach_end for workers: the ring has no device memory yet. The worker allocates it and attaches with the
 * descriptor. */
#define RB_NEEDS_DEVICE (-1)

/* Sends the request, with a descriptor unless offer is -1. */
int rb_attach_begin(rb_attach *a, const char *socket, int64_t deadline, const rb_writer *request, bool worker, int offer);
/* Waits for the reply, checks it and maps the segments. After RB_ERR_TIMEOUT call again, or rb_attach_cancel. */
int rb_attach_end(rb_attach *a, int64_t deadline, rb_session *s, bool *interrupted);
void rb_attach_cancel(rb_attach *a);

/* Whether the broker has hung up. Sets `again` if it wants the client to attach again. */
bool rb_session_gone(rb_session *s);
/* The same, from the result of a poll for POLLRDHUP and POLLIN. */
bool rb_session_judge(rb_session *s, short events);
void rb_session_hang_up(rb_session *s);
/* Hangs up and waits until the broker has ended the session. */
void rb_session_leave(rb_session *s);
/* Hangs up and unmaps. */
void rb_session_close(rb_session *s);
void rb_close_fd(_Atomic int *fd);
/* Waits until the broker has ended a connection, for a second at most. */
void rb_say_goodbye(int fd, pid_t owner);
/* Ends a connection, with every copy of a forked child. Any process but the owner only closes its descriptor. */
void rb_hang_up(int fd, pid_t owner);

/* Writes the tensors as two keys and their values, or as three if there are states. */
void rb_put_signature(rb_writer *w, const rb_layout *l);
/* Writes a request's first keys: version, op, model, name. */
void rb_begin_request(rb_writer *w, uint32_t pairs, const char *op, const char *model, const char *name);

/* ---- handles ------------------------------------------------------------ */

/*
 * 63          32 31          0
 * +-------------+-------------+
 * | generation  | index       |   never 0: generations start at 1
 * +-------------+-------------+
 */
typedef struct rb_entry {
	_Atomic uint32_t gen;   /* of the handle that is open */
	_Atomic uint32_t users; /* calls inside */
	void *_Atomic value;    /* NULL: free */
} rb_entry;

typedef struct rb_table {
	rb_entry *_Atomic chunk[24]; /* the k-th has 8 << k entries, and is never freed */
} rb_table;

extern rb_table rb_clients, rb_workers, rb_maps, rb_sequences, rb_publishers, rb_followers;

/* Gives a value a handle; 0 if there is no memory. */
uint64_t rb_table_put(rb_table *t, void *value);
/* Finds an open handle's entry and counts the caller in; NULL if the handle is closed. */
rb_entry *rb_table_enter(rb_table *t, uint64_t id);
static inline void rb_table_leave(rb_entry *e) { atomic_fetch_sub(&e->users, 1); }
/* Closes the handle: no caller enters any more. NULL if it is closed already. */
rb_entry *rb_table_shut(rb_table *t, uint64_t id);
/* Waits until all callers have left, and frees the entry. */
void rb_table_remove(rb_entry *e);
/* In a forked child: calls f for every value, and counts all callers out. */
void rb_table_in_child(rb_table *t, void (*f)(void *value));
void rb_map_in_child(void *map);

/* Installs the fork handler, once. */
void rb_watch_forks(void);

/* ---- maps --------------------------------------------------------------- */

/* Makes a handle that holds a session's mapping; in_child marks its owner as the parent's. */
int rb_map_new(rb_map *out, const rb_session *s, uint32_t attachment, void *owner, void (*release)(void *owner),
	void (*in_child)(void *owner));

/* Copies a caller's struct of options, which begins with its size and may be NULL; what the caller's lacks is 0. Refuses
 * fields that are set and that this library lacks. */
int rb_copy_options(void *options, const void *given, uint32_t bytes);
/* Copies to a caller's struct that says its size: the fields that it has. */
int rb_give_device(rb_device *to, const rb_device *from);
/* Refuses other flags than these. */
int rb_check_flags(uint32_t flags, uint32_t all);

/*
 * When a signal's handler interrupts a wait, the wait times out after this time from
 * its start, so that the caller can handle the signal. Not at once: frequent handlers
 * that wait themselves would pile up.
 */
#define INTERRUPTED_AFTER (20 * MILLISECOND)

static inline int64_t rb_interrupted(int64_t until, int64_t start)
{
	return until == INT64_MAX ? until : rb_min(until, start + INTERRUPTED_AFTER);
}

static inline void rb_sleep(int64_t ns) { nanosleep(&(struct timespec){ns / SECOND, ns % SECOND}, NULL); }

/*
 * The pause before another try to attach: 5 ms, then twice the one before, at most 500 ms,
 * less up to a quarter so that the peers of a broker that has started do not come all at once.
 * *backoff begins with 0.
 */
static inline int64_t rb_backoff(int64_t *backoff)
{
	*backoff = *backoff ? rb_min(2 * *backoff, 500 * MILLISECOND) : 5 * MILLISECOND;
	return *backoff - rb_now() % (*backoff / 4);
}

/* Sleeps before another try; false if that would take until `until`. */
static inline bool rb_back_off(int64_t *backoff, int64_t until)
{
	int64_t pause = rb_backoff(backoff);
	if (rb_now() >= until - pause)
		return false;
	rb_sleep(pause);
	return true;
}

/* A caller's timeout as a point in time; negative means never. */
static inline int64_t rb_until(int64_t timeout, int64_t now) { return timeout < 0 ? INT64_MAX : rb_later(now, timeout); }

#endif
