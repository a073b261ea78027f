/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Gathering: the rows of a batch, copied together for a model that reads them.
 * One thread copies what one core's memory bandwidth allows, and the clients
 * write with all cores; so large batches are copied by a crew of threads. It is
 * made at the first large one, and sleeps in between.
 *
 *  1. the worker's thread describes a job, opens it and wakes the first of the crew
 *  2. everybody takes parts of it until there are none left, and wakes others before
 *     copying: to wake all of them would keep the worker's thread for as long as a
 *     third of the copying takes
 *  3. the worker's thread closes the job and waits for who is still inside
 *
 * With rb_batch_prefetch half of the crew begins alone, while the worker's thread
 * runs and answers the batch before: the other cores are for that. The rest of
 * the crew, and 3, come with rb_batch_gather, which the worker's thread waits for.
 * There may be two jobs, so that who finds no part of a batch left goes on with the
 * next one, instead of waiting for who was preempted with the last part in hand.
 */
#include <sched.h>
#include <signal.h>
#include <string.h>

#include "worker.h"

#define PART (256u << 10)       /* bytes that a thread takes at once */
#define LEAST_BYTES (1u << 20)  /* less is not worth waking anybody */
#define MOST_HELPERS 15u
#define WAKES 2u                /* helpers that a thread wakes at once */
#define JOBS 2u

typedef struct job {
	_Atomic bool open;
	_Atomic uint32_t inside; /* helpers that look at it */
	rb_rows rows;
	uint64_t bytes;
	uint8_t *to;
	_Atomic uint64_t next;    /* the first byte that nobody has taken */
	_Atomic uint32_t to_wake; /* helpers that somebody is still to wake for it */
} job;

struct rb_crew {
	pthread_t thread[MOST_HELPERS];
	uint32_t helpers;
	_Atomic uint32_t round; /* +1 for each job, and at the end; a futex */
	_Atomic bool stop;
	_Atomic uint32_t first; /* the job to look at first */
	job job[JOBS];
};

/* Wakes some of those that are to be woken; they wake the others. */
static void wake_some(rb_crew *c, job *j)
{
	uint32_t left = j->to_wake, n;
	do {
		n = left < WAKES ? left : WAKES;
		if (!n)
			return;
	} while (!atomic_compare_exchange_weak(&j->to_wake, &left, left - n));
	rb_futex_wake(&c->round, (int)n, true);
}

/* Takes parts until there are none left. */
static void copy_parts(rb_crew *c, job *j)
{
	const rb_rows *r = &j->rows;
	for (;;) {
		uint64_t at = atomic_fetch_add(&j->next, PART), end = at + PART < j->bytes ? at + PART : j->bytes;
		if (at >= j->bytes)
			return;
		wake_some(c, j);
		while (at < end) {
			uint64_t row = at / r->size, in_row = at % r->size, n = r->size - in_row < end - at ? r->size - in_row : end - at;
			memcpy(j->to + at, r->plane + r->slot[row] * r->stride + in_row, n);
			at += n;
		}
	}
}

static void *help(void *crew)
{
	rb_crew *c = crew;
	while (!c->stop) {
		uint32_t seen = c->round, first = c->first;
		for (uint32_t i = 0; i < JOBS; i++) {
			job *j = &c->job[(first + i) % JOBS];
			/* Inside first, then look; the owner closes first, then looks who is
			 * inside: one of us sees the other. */
			atomic_fetch_add(&j->inside, 1);
			if (j->open)
				copy_parts(c, j);
			atomic_fetch_sub(&j->inside, 1);
		}
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

/* Has so many of the crew woken, and no more than there are parts left. */
static void wake(rb_crew *c, job *j, uint32_t helpers)
{
	uint64_t next = j->next, parts = next < j->bytes ? (j->bytes - next + PART - 1) / PART : 0;
	j->to_wake = parts < helpers ? (uint32_t)parts : helpers;
	wake_some(c, j);
}

/* Closes a job when all of it is copied. */
static void finish(rb_crew *c, job *j)
{
	if (!j->open)
		return;
	copy_parts(c, j);
	j->open = false;
	while (j->inside)
		sched_yield(); /* they have one part left each */
}

/* The job with these rows, opened if it is not yet; NULL: there is nobody to help, or it is not worth it. */
static job *job_of(rb_work *w, const rb_rows *r, uint8_t *to)
{
	uint64_t bytes = r->count * r->size;
	rb_crew *c = bytes >= LEAST_BYTES ? crew_of(w) : w->crew;
	if (!c)
		return NULL;
	job *free = NULL;
	for (job *j = c->job; j < c->job + JOBS; j++) {
		if (j->open && j->to == to && !memcmp(&j->rows, r, sizeof *r))
			return j;
		if (j->open && j->to < to + bytes && to < j->to + j->bytes) /* into the same memory: one after the other */
			finish(c, j);
		if (!j->open)
			free = j;
	}
	if (bytes < LEAST_BYTES)
		return NULL;
	if (!free)
		finish(c, free = &c->job[c->first]);
	free->rows = *r;
	free->bytes = bytes;
	free->to = to;
	free->next = 0;
	free->to_wake = 0; /* what the job before left: it was done before all were woken */
	free->open = true;
	atomic_fetch_add(&c->round, 1);
	return free;
}

bool rb_crew_gather(rb_work *w, const rb_rows *r, uint8_t *to)
{
	job *j = job_of(w, r, to);
	if (!j)
		return false;
	rb_crew *c = w->crew;
	c->first = (uint32_t)(j - c->job); /* somebody waits for it */
	wake(c, j, c->helpers);
	finish(c, j);
	c->first = (c->first + 1) % JOBS; /* the other one is older than what comes next */
	return true;
}

void rb_crew_prefetch(rb_work *w, const rb_rows *r, uint8_t *to)
{
	job *j = job_of(w, r, to);
	if (j)
		wake(w->crew, j, (w->crew->helpers + 1) / 2);
}

void rb_crew_leave(rb_work *w, const uint32_t *slot)
{
	for (uint32_t i = 0; w->crew && i < JOBS; i++)
		if (w->crew->job[i].open && w->crew->job[i].rows.slot == slot)
			finish(w->crew, &w->crew->job[i]);
}

void rb_crew_end(rb_work *w)
{
	rb_crew *c = w->crew;
	if (!c)
		return;
	w->crew = NULL;
	for (uint32_t i = 0; i < JOBS; i++)
		c->job[i].open = false;
	c->stop = true;
	atomic_fetch_add(&c->round, 1);
	rb_futex_wake(&c->round, INT32_MAX, true);
	for (uint32_t i = 0; i < c->helpers && !w->parents; i++) /* a forked child has none of them */
		pthread_join(c->thread[i], NULL);
	free(c);
}
