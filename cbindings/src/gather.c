/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Gathering: the rows of a batch, copied together for a model that reads them.
 * One thread is limited by one core's memory bandwidth, while clients write with all
 * cores. So a crew of threads copies large batches. It starts with the first large
 * batch and sleeps between batches.
 *
 *  1. the worker's thread describes a job, opens it and wakes the first helpers
 *  2. every thread takes parts of the job until none is left, and wakes others before
 *     copying: waking all helpers would take the worker's thread a third of the
 *     copying time
 *  3. the worker's thread closes the job and waits for the helpers inside
 *
 * With rb_batch_prefetch, half of the crew begins while the worker's thread runs and
 * answers the batch before. rb_batch_gather wakes the rest and does step 3. There are
 * two jobs: a helper that finds no part left continues with the next batch, even while
 * another helper is preempted with the last part.
 */
#include <sched.h>
#include <signal.h>
#include <string.h>

#include "worker.h"

#define PART (256u << 10)       /* bytes that a thread takes at once */
#define LEAST_BYTES (1u << 20)  /* less is not worth a wake-up */
#define MOST_HELPERS 15u
#define WAKES 2u                /* helpers that a thread wakes at once */
#define JOBS 2u

typedef struct job {
	_Atomic bool open;
	_Atomic uint32_t inside; /* helpers that look at it */
	rb_rows rows;
	uint64_t bytes;
	uint8_t *to;
	_Atomic uint64_t next;    /* the first byte that no thread has taken */
	_Atomic uint32_t to_wake; /* helpers still to be woken for it */
} job;

struct rb_crew {
	pthread_t thread[MOST_HELPERS];
	uint32_t helpers;
	_Atomic uint32_t round; /* +1 for each job, and at the end; a futex */
	_Atomic bool stop;
	_Atomic uint32_t first; /* the job to look at first */
	job job[JOBS];
};

/* Wakes some helpers, which wake the others. */
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

/* The row at a byte of the copy, and where that row begins and ends. */
static uint64_t row_at(const rb_rows *r, uint64_t at, uint64_t *begin, uint64_t *end)
{
	uint64_t low = r->start ? 0 : at / r->size, high = r->start ? r->count : low + 1;
	while (high - low > 1) { /* the last row that begins here or before: an empty one does not */
		uint64_t middle = (low + high) / 2;
		*(r->start[middle] <= at ? &low : &high) = middle;
	}
	*begin = r->start ? r->start[low] : low * r->size;
	*end = r->start ? r->start[low + 1] : *begin + r->size;
	return low;
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
			uint64_t begin, stop, row = row_at(r, at, &begin, &stop), n = (stop < end ? stop : end) - at;
			memcpy(j->to + at, r->plane + r->slot[row] * r->stride + (at - begin), n);
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
			/* Count inside, then look at open; the owner closes, then looks at inside: one sees the other. */
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

/* One thread per core of this process, since clients wait for the batch. With few cores none: clients would preempt a
 * helper in the midst of its part. */
static uint32_t wanted_helpers(uint32_t asked)
{
	uint32_t cores = asked ? 0 : rb_cores();
	uint32_t threads = asked ? asked : cores < 4 ? 1 : cores;
	return threads - 1 < MOST_HELPERS ? threads - 1 : MOST_HELPERS;
}

/* The crew, made at the first call; NULL if there are no helpers. */
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

/* Wakes that many helpers, at most one for each part left. */
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

/* The job with these rows, opened if need be; NULL if there are no helpers, or too few bytes for them. */
static job *job_of(rb_work *w, const rb_rows *r, uint8_t *to)
{
	uint64_t bytes = r->start ? r->start[r->count] : r->count * r->size;
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
	free->to_wake = 0; /* the job before may have ended before all helpers were woken */
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
	c->first = (uint32_t)(j - c->job); /* the caller waits for it */
	wake(c, j, c->helpers);
	finish(c, j);
	c->first = (c->first + 1) % JOBS; /* the other job is older than the next one */
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
