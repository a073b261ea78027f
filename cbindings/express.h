/*
 * A slot that the client lends to C, so that a whole request is sent and
 * awaited without entering Go. In Go: shm.Express, which this mirrors.
 */
#ifndef RINGBATCH_EXPRESS_H
#define RINGBATCH_EXPRESS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>

#include "ringbatch.h"

#define RB_EXPRESS_TENSORS 8
#define RB_EXPRESS_CLIENTS 64 /* handles beyond these go through Go */

/* One of a client's commits, as in docs/protocol.md. */
typedef struct {
	uint8_t kind; /* 1: commit */
	int8_t level; /* -1: the model's default */
	uint16_t zero;
	uint32_t rows, slot, gen;
	int64_t deadline, committed;
	uint32_t dims[8];
} rb_commit_entry;

/* The words of a commit ring. */
typedef struct {
	_Atomic uint64_t tail;
	char other_line[56];
	_Atomic uint64_t head, armed_at;
} rb_ring_words;

typedef struct {
	void *at;
	uint64_t bytes;
} rb_express_row;

typedef struct rb_express {
	_Atomic uint64_t owner;
	_Atomic uint32_t inside, wanted, dead, ring_lock;
	uint64_t ring_tail; /* under ring_lock */
	/* What follows belongs to whoever set inside. */
	_Atomic uint32_t lent;
	uint32_t slot, gen, inputs, outputs, ring_mask;
	int64_t doorbell;
	int64_t committed, usual;
	_Atomic uint64_t *word;
	_Atomic uint32_t *bell;
	rb_ring_words *ring;
	rb_commit_entry *entries;
	rb_express_row in[RB_EXPRESS_TENSORS], out[RB_EXPRESS_TENSORS];
} rb_express;

_Static_assert(sizeof(rb_commit_entry) == 64, "a commit is a cache line");
_Static_assert(offsetof(rb_ring_words, armed_at) == 72, "as in docs/protocol.md");

/* For the comparison with Go. */
enum {
	RB_EXPRESS_LENT_AT = offsetof(rb_express, lent),
	RB_EXPRESS_DOORBELL_AT = offsetof(rb_express, doorbell),
	RB_EXPRESS_IN_AT = offsetof(rb_express, in),
};

/* The place for a handle; NULL if there is none. */
rb_express *rb_express_of(rb_client c);

/*
 * Runs one row through the lent slot. false: not this way, nothing was done.
 * Otherwise *status is the result, as rb_infer's.
 */
bool rb_express_infer(rb_client c, const void *const *in, void *const *out, int64_t timeout, int64_t slice, uint64_t *r, char *message, int *status);

#endif
