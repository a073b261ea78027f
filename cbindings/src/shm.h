/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The memory protocol: the contents of the segments that broker, clients and
 * workers share. Go's package shm has the pictures, docs/protocol.md the words.
 * layout_gen.h has the offsets as Go computes them; if these structs differ, shm.c
 * does not compile.
 */
#ifndef RB_SHM_H
#define RB_SHM_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "layout_gen.h"

#define RB_DIMS RB_GO_MAX_VARIABLE_DIMS

enum { RB_KIND_PLANES = RB_GO_KIND_PLANES, RB_KIND_BOARD, RB_KIND_CLIENT, RB_KIND_WORKER };

/* Every segment begins with one. */
typedef struct rb_header {
	uint64_t magic;
	uint32_t version, kind; /* the version is checked before any other field */
	uint64_t size, epoch, geometry;
	uint32_t slots, max_batch;
	uint8_t zero[16];
} rb_header;

/* The client's message "slots slot ... slot+rows-1 hold a request". */
typedef struct rb_commit_entry {
	uint8_t kind;
	int8_t level; /* -1: the model's default */
	uint16_t cost; /* of one row, as the client gave it; 0: by its size */
	uint32_t rows, slot, gen;
	int64_t deadline, committed;
	uint32_t dims[RB_DIMS];
} rb_commit_entry;

/* The broker's message "run this batch". */
typedef struct rb_mail {
	uint64_t batch;
	int64_t dispatched;
	uint32_t requests, rows, pad_to, level;
	uint32_t dims[RB_DIMS];
} rb_mail;

typedef struct rb_mail_request {
	uint32_t slot, gen, rows, bell;
	int64_t deadline, committed;
	uint32_t dims[RB_DIMS];
} rb_mail_request;

/* The worker's message "that batch is done". */
typedef struct rb_done_entry {
	uint64_t batch;
	int64_t started, finished;
	uint32_t failed;
	uint32_t whole; /* 1: it failed as a whole; the broker runs its unanswered requests again, or fails them */
} rb_done_entry;

/* Written by the worker before the word. */
typedef struct rb_record {
	int64_t dispatched, started, finished;
	uint32_t reason_len, version; /* of the weights; 0: none */
	uint32_t dims[RB_DIMS];
} rb_record;

/* These steer one direction of a session. */
typedef struct rb_ring_words {
	_Atomic uint64_t tail; /* the producer's */
	uint8_t other_line[56];
	_Atomic uint64_t head, armed_at; /* the consumer's */
	uint8_t rest[48];
} rb_ring_words;

typedef struct rb_mail_words {
	_Atomic uint64_t tail; /* the broker's, with bell */
	uint8_t gap[48];
	_Atomic uint32_t bell;
	uint32_t zero;
	_Atomic uint64_t taken; /* the worker's, with parked, lanes and rounds */
	_Atomic uint32_t parked, lanes;
	_Atomic uint64_t rounds;
	uint8_t rest[104];
} rb_mail_words;

/* Whether the client's model is recorded; written by the broker. */
typedef struct rb_record_words {
	_Atomic uint32_t recording;
	uint8_t rest[60];
} rb_record_words;

/* A request's times, as its client reports them. */
typedef struct rb_times {
	uint32_t gen, zero;
	int64_t asked, claimed; /* when it began to look for slots, and had them */
	_Atomic int64_t woken;  /* when it saw the end */
	uint8_t rest[32];
} rb_times;

typedef struct rb_bell {
	_Atomic uint32_t count;
	/* Of the slot itself, whose request's client takes parts. Go's shm/parts.go has the picture. */
	_Atomic uint32_t streams; /* the request's generation; the broker's */
	_Atomic uint64_t shown;   /* attempt << 32 | steps; the worker's, as plane */
	_Atomic uint32_t plane;   /* page at which the growing output's plane begins */
	uint8_t rest[44];
} rb_bell;

static inline uint32_t rb_shown_attempt(uint64_t shown) { return (uint32_t)(shown >> 32); }
static inline uint32_t rb_shown_steps(uint64_t shown) { return (uint32_t)shown; }

/* Of a weights segment; Go's shm/weights.go has the picture. Written by the publisher; from refused on by any peer. */
typedef struct rb_weight_words {
	_Atomic uint64_t current, good; /* a version and its buffer; 0: none */
	_Atomic uint32_t last;          /* the latest version that was ever published */
	uint32_t zero;
	_Atomic int64_t published;
	_Atomic uint32_t refused[4];           /* the latest version of each buffer that was refused */
	_Atomic uint32_t reasoned, reason_len; /* reasoned: the latest version whose reason a peer writes, or has written */
	uint8_t rest[8];
} rb_weight_words;

typedef struct rb_follower_words {
	_Atomic uint32_t in_use; /* 1 + the buffer that the follower reads; 0: none */
	_Atomic uint32_t loaded; /* the version that it has loaded last */
	uint8_t rest[56];
} rb_follower_words;

/* Copies memory that another process may be writing. Each word is read once, and the copy is checked afterwards. Both
 * are aligned; bytes is a multiple of 8. */
typedef uint64_t __attribute__((may_alias)) rb_any_word;
static inline void rb_read_once(void *to, const void *from, size_t bytes)
{
	rb_any_word *t = to;
	const rb_any_word *f = from;
	for (size_t i = 0; i < bytes / 8; i++)
		t[i] = __atomic_load_n(&f[i], __ATOMIC_RELAXED);
}

static inline uint64_t rb_round_up(uint64_t n, uint64_t to) { return (n + to - 1) / to * to; }

/* ---- the board: how requests ended ------------------------------------- */

/*
 * 63          32 31        9   8    7      0
 * +-------------+-----------+------+--------+
 * | generation  |     0     | held | status |
 * +-------------+-----------+------+--------+
 */
static inline uint64_t rb_word(uint32_t gen, uint8_t status) { return (uint64_t)gen << 32 | status; }
static inline uint32_t rb_word_gen(uint64_t w) { return (uint32_t)(w >> 32); }
static inline uint8_t rb_word_status(uint64_t w) { return (uint8_t)w; }
static inline bool rb_word_held(uint64_t w) { return w & RB_GO_HELD_BIT; }

typedef struct rb_board {
	rb_bell *bells;
	_Atomic uint64_t *words;
	rb_record *records;
	char *reasons;
} rb_board;

/* SYNC POINT "completion", acquire side: outputs, record and reason that were
 * written before rb_board_end are visible after a word that shows its generation. */
static inline uint64_t rb_board_word(const rb_board *b, uint32_t slot)
{
	return atomic_load_explicit(&b->words[slot], memory_order_acquire);
}

/* Whether neither this generation nor a later one has ended yet. */
static inline bool rb_board_open(const rb_board *b, uint32_t slot, uint32_t gen)
{
	return (int32_t)(gen - rb_word_gen(rb_board_word(b, slot))) > 0;
}

/* Moves the word to this generation's end, unless it has ended already.
 * SYNC POINT "completion", release side. In test/model: End. */
bool rb_board_end(rb_board *b, uint32_t slot, uint32_t gen, uint8_t status);

/* Adds one and wakes the client whose window begins at slot. In test/model: Ring. */
void rb_board_ring(rb_board *b, uint32_t slot);

/* ---- one direction of a session: the side that pushes ------------------- */

typedef struct rb_producer {
	rb_ring_words *words;
	uint8_t *entries;
	uint32_t entry_bytes;
	uint64_t capacity; /* a power of two */
	uint64_t tail;     /* private: the shared word is written, and never read back */
} rb_producer;

/* The ring of a session's words. */
static inline rb_producer rb_ring_at(uint8_t *words, uint32_t entry_bytes, uint64_t capacity)
{
	return (rb_producer){(void *)(words + RB_GO_RING_WORDS), words + RB_GO_SEGMENT_HEADER, entry_bytes, capacity, 0};
}

/* Appends an entry; false if the ring is full. If *ring, the caller rings the consumer's doorbell.
 * SYNC POINT "entry", release side. In test/model: Store, then RingIfArmed. */
bool rb_push(rb_producer *p, const void *entry, bool *ring);

/* ---- waking and sleeping ------------------------------------------------ */

/* Sleeps while *word is seen, for at most ns. 0, or an errno: EAGAIN, EINTR, ETIMEDOUT. */
int rb_futex_wait(_Atomic uint32_t *word, uint32_t seen, int64_t ns, bool private);
void rb_futex_wake(_Atomic uint32_t *word, int n, bool private);

/* Adds one to an eventfd. */
void rb_eventfd_ring(int fd);

/* CLOCK_MONOTONIC in nanoseconds. */
int64_t rb_now(void);

/* Yields the core and sets *now. False if that took long: the cores are full, so a spin takes the core from the process
 * that it waits for. Then *rest is the time before which the caller should not spin. */
bool rb_yield(int64_t *now, int64_t *rest);

/* Gives the calling thread a short time slice, once: the kernel then runs it sooner after a wake-up. */
void rb_ask_short_slice(void);

/* The sum; never, if that is beyond the end of time. */
static inline int64_t rb_later(int64_t t, int64_t d) { return d > INT64_MAX - t ? INT64_MAX : t + d; }

static inline int64_t rb_min(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t rb_max(int64_t a, int64_t b) { return a > b ? a : b; }

#endif
