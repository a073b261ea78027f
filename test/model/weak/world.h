/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Every program here includes the library's code for shared memory, as it is compiled
 * for users, and the broker's half. The broker is written in Go, whose atomics are
 * sequentially consistent; the half is repeated here with C11 atomics, line by line,
 * and names the Go function.
 *
 * FUTEX_WAIT is one step, "sleep unless the word has changed", so a wait is the load
 * that decides.
 */
#include <assert.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* The checker needs accesses of one size at each address: an entry is words. */
static inline void copy_words(void *to, const void *from, size_t bytes)
{
	uint64_t *t = to;
	const uint64_t *f = from;
	for (size_t i = 0; i < bytes / 8; i++)
		t[i] = f[i];
}
#define memcpy copy_words

/* A mutant weakens the library's own code; check.sh says which must be caught. */
#if defined RELAXED_TAIL
#define atomic_exchange(p, v) atomic_exchange_explicit(p, v, memory_order_relaxed)
#elif defined RELEASE_TAIL
#define atomic_exchange(p, v) (atomic_store_explicit(p, v, memory_order_release), 0)
#elif defined RELAXED_END
#undef atomic_compare_exchange_weak
#define atomic_compare_exchange_weak(p, e, v) \
	atomic_compare_exchange_strong_explicit(p, e, v, memory_order_relaxed, memory_order_relaxed)
#elif defined RELAXED_HEAD
#define atomic_load(p) atomic_load_explicit(p, memory_order_relaxed)
#endif
#include "shm.c"
#undef atomic_exchange
#undef atomic_load
#define atomic_exchange(p, v) atomic_exchange_explicit(p, v, memory_order_seq_cst)
#define atomic_load(p) atomic_load_explicit(p, memory_order_seq_cst)

/* ---- the broker's half: Go's package shm --------------------------------- */

typedef struct consumer {
	rb_ring_words *words;
	uint64_t *entries;
	uint64_t capacity, head;
} consumer;

/* Consumer.Pending */
static uint64_t pending(consumer *c) { return atomic_load(&c->words->tail) - c->head; }

/* Consumer.Take, for entries of one word */
static uint64_t take(consumer *c) { return c->entries[c->head++ & (c->capacity - 1)]; }

/* Consumer.Give */
static void give(consumer *c) { atomic_store(&c->words->head, c->head); }

/* Consumer.Arm */
static _Bool arm(consumer *c)
{
	atomic_exchange(&c->words->armed_at, c->head);
	return atomic_load(&c->words->tail) == c->head;
}

/* Mailbox.Post; whether it wakes the worker */
static _Bool post(rb_mail_words *m, uint64_t n)
{
	atomic_store(&m->tail, n + 1);
	atomic_fetch_add(&m->bell, 1);
	return atomic_load(&m->parked) != 0;
}
