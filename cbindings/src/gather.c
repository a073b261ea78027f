/*
 * Gathering: the rows of a batch, copied together for a model that reads them.
 * One thread copies what one core's memory bandwidth allows, and the clients
 * write with all cores; so large batches are copied by a crew of threads. It is
 * made at the first large one, and sleeps in between.
 *
 *  1. the worker's thread describes the job, opens it and wakes the crew
 *  2. everybody takes parts of it until there are none left
 *  3. the worker's thread closes the job and waits for who is still inside
 */
#include <sched.h>
#include <signal.h>
#include <string.h>

#include "worker.h"

#define PART (256u << 10)       /* bytes that a thread takes at once */
#define LEAST_BYTES (1u << 20)  /* less is not worth waking anybody */
#define MOST_HELPERS 7u

struct rb_crew {
	pthread_t thread[MOST_HELPERS];
	uint32_t helpers;
	_Atomic uint32_t round;  /* +1 for each job, and at the end; a futex */
	_Atomic bool open, stop;
	_Atomic uint32_t inside; /* helpers that look at the job */
	/* The job: rows of size bytes, from their slots to one place. */
	const uint8_t *plane;
	const uint32_t *slot;
	uint64_t size, stride, bytes;
	uint8_t *to;
	_Atomic uint64_t next; /* the first byte that nobody has taken */
};

/* Takes parts until there are none left. */
static void copy_parts(rb_crew *c)
{
	for (;;) {
		uint64_t at = atomic_fetch_add(&c->next, PART), end = at + PART < c->bytes ? at + PART : c->bytes;
		if (at >= c->bytes)
			return;
		while (at < end) {
			uint64_t row = at / c->size, in_row = at % c->size, n = c->size - in_row < end - at ? c->size - in_row : end - at;
			memcpy(c->to + at, c->plane + c->slot[row] * c->stride + in_row, n);
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

/* Half of the cores that this process may use: the others are the clients'. */
static uint32_t wanted_helpers(uint32_t asked)
{
	cpu_set_t set;
	if (asked)
		return asked - 1 < MOST_HELPERS ? asked - 1 : MOST_HELPERS;
	if (sched_getaffinity(0, sizeof set, &set))
		return 0;
	uint32_t half = (uint32_t)CPU_COUNT(&set) / 2;
	return half < 1 ? 0 : half - 1 < MOST_HELPERS ? half - 1 : MOST_HELPERS;
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

bool rb_gather_together(rb_work *w, const uint8_t *plane, const uint32_t *slot, uint32_t rows, uint64_t size, uint64_t stride, uint8_t *to)
{
	rb_crew *c = rows * size >= LEAST_BYTES ? crew_of(w) : NULL;
	if (!c)
		return false;
	c->plane = plane;
	c->slot = slot;
	c->size = size;
	c->stride = stride;
	c->bytes = rows * size;
	c->to = to;
	c->next = 0;
	c->open = true;
	atomic_fetch_add(&c->round, 1);
	uint64_t others = (c->bytes - 1) / PART; /* parts besides our own first one */
	rb_futex_wake(&c->round, (int)(others < c->helpers ? others : c->helpers), true);
	copy_parts(c);
	c->open = false;
	while (c->inside)
		sched_yield(); /* they have one part left each */
	return true;
}

void rb_crew_end(rb_work *w)
{
	rb_crew *c = w->crew;
	if (!c)
		return;
	w->crew = NULL;
	c->stop = true;
	atomic_fetch_add(&c->round, 1);
	rb_futex_wake(&c->round, INT32_MAX, true);
	for (uint32_t i = 0; i < c->helpers && !w->parents; i++) /* a forked child has none of them */
		pthread_join(c->thread[i], NULL);
	free(c);
}
