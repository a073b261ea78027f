/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Gathering: the rows of a batch, copied together for a model that reads them.
 * One thread copies what one core's memory bandwidth allows, and the clients
 * write with all cores; so large batches are copied by a crew of threads. It is
 * made at the first large one, and sleeps in between.
 *
 *  1. the worker's thread describes the job, opens it and wakes the crew
 *  2. everybody takes parts of it until there are none left
 *  3. the worker's thread closes the job and waits for who is still inside
 *
 * With rb_batch_prefetch half of the crew begins alone, while the worker's thread
 * runs and answers the batch before: the other cores are for that. The rest of
 * the crew, and 3, come with rb_batch_gather, which the worker's thread waits for.
 */
#include <sched.h>
#include <signal.h>
#include <string.h>

#include "worker.h"

#define PART (256u << 10)       /* bytes that a thread takes at once */
#define LEAST_BYTES (1u << 20)  /* less is not worth waking anybody */
#define MOST_HELPERS 15u

struct rb_crew {
	pthread_t thread[MOST_HELPERS];
	uint32_t helpers;
	_Atomic uint32_t round;  /* +1 for each job, and at the end; a futex */
	_Atomic bool open, stop;
	_Atomic uint32_t inside; /* helpers that look at the job */
	/* The job. */
	rb_rows rows;
	uint64_t bytes;
	uint8_t *to;
	_Atomic uint64_t next; /* the first byte that nobody has taken */
};

/* Takes parts until there are none left. */
static void copy_parts(rb_crew *c)
{
	const rb_rows *r = &c->rows;
	for (;;) {
		uint64_t at = atomic_fetch_add(&c->next, PART), end = at + PART < c->bytes ? at + PART : c->bytes;
		if (at >= c->bytes)
			return;
		while (at < end) {
			uint64_t row = at / r->size, in_row = at % r->size, n = r->size - in_row < end - at ? r->size - in_row : end - at;
			memcpy(c->to + at, r->plane + r->slot[row] * r->stride + in_row, n);
			at += n;
		}
	}
}

static void *help(void *crew)
{
	rb_crew *c = crew;
	while (!c->stop) {
		uint32_t seen = c->round;
		/* Inside first, then look; the owner closes first, then looks who is
		 * inside: one of us sees the other. */
		atomic_fetch_add(&c->inside, 1);
		if (c->open)
			copy_parts(c);
		atomic_fetch_sub(&c->inside, 1);
		if (!c->stop)
			rb_futex_wait(&c->round, seen, 3600 * SECOND, true);
	}
	return NULL;
}

/* As many threads as this process may use cores: the clients of this batch wait for
 * it. Not where there are few: a helper that was preempted by other clients is waited for. */
static uint32_t wanted_helpers(uint32_t asked)
{
	uint32_t cores = asked ? 0 : rb_cores();
	uint32_t threads = asked ? asked : cores < 4 ? 1 : cores;
	return threads - 1 < MOST_HELPERS ? threads - 1 : MOST_HELPERS;
}

/* NULL: there is nobody to help. */
static rb_crew *crew_of(rb_work *w)
{
	if (w->crew || w->alone)
		return w->crew;
	uint32_t helpers = wanted_helpers(w->gather_threads);
	rb_crew *c = helpers ? calloc(1, sizeof *c) : NULL;
	sigset_t all, before;
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before); /* the library's threads take no signals */
	while (c && c->helpers < helpers && !pthread_create(&c->thread[c->helpers], NULL, help, c))
		c->helpers++;
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	w->alone = !c;
	return w->crew = c;
}

/* Wakes so many of the crew, and no more than there are parts left. */
static void wake(rb_crew *c, uint32_t helpers)
{
	uint64_t next = c->next, parts = next < c->bytes ? (c->bytes - next + PART - 1) / PART : 0;
	if (parts)
		rb_futex_wake(&c->round, (int)(parts < helpers ? parts : helpers), true);
}

/* Describes the job and lets the crew in. */
static void open_job(rb_crew *c, const rb_rows *r, uint8_t *to)
{
	c->rows = *r;
	c->bytes = r->count * r->size;
	c->to = to;
	c->next = 0;
	c->open = true;
	atomic_fetch_add(&c->round, 1);
}

void rb_crew_finish(rb_work *w)
{
	rb_crew *c = w->crew;
	if (!c || !c->open)
		return;
	copy_parts(c);
	c->open = false;
	while (c->inside)
		sched_yield(); /* they have one part left each */
}

void rb_crew_leave(rb_work *w, const uint32_t *slot)
{
	if (w->crew && w->crew->open && w->crew->rows.slot == slot)
		rb_crew_finish(w);
}

bool rb_crew_begin(rb_work *w, const rb_rows *r, uint8_t *to, bool ahead)
{
	rb_crew *c = r->count * r->size >= LEAST_BYTES ? crew_of(w) : NULL;
	if (!c)
		return false;
	if (!c->open || c->to != to || memcmp(&c->rows, r, sizeof *r)) { /* it has not begun yet */
		rb_crew_finish(w);
		open_job(c, r, to);
	}
	wake(c, ahead ? (c->helpers + 1) / 2 : c->helpers);
	return true;
}

void rb_crew_end(rb_work *w)
{
	rb_crew *c = w->crew;
	if (!c)
		return;
	w->crew = NULL;
	c->open = false;
	c->stop = true;
	atomic_fetch_add(&c->round, 1);
	rb_futex_wake(&c->round, INT32_MAX, true);
	for (uint32_t i = 0; i < c->helpers && !w->parents; i++) /* a forked child has none of them */
		pthread_join(c->thread[i], NULL);
	free(c);
}
