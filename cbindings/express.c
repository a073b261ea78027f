//go:build cgo

#define _GNU_SOURCE
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "_cgo_export.h"
#include "express.h"
#include "internal.h"

/*
 * The steps of a request, as in docs/protocol.md:
 *
 *   enter      or go the other way: another thread is here, or no slot is lent
 *   write      the inputs into the slot
 *   push       the commit, and ring the broker's doorbell if it sleeps
 *   wait       until the slot's word shows this generation
 *   read       the outputs, and leave
 *
 * Whatever is not plain sailing (no end in time, an error, a broker that went
 * away) is left to Go: it adopts the request as one of its own.
 */

static rb_express all[RB_EXPRESS_CLIENTS];

rb_express *rb_express_of(rb_client c)
{
	uint32_t index = (uint32_t)c;
	return index < RB_EXPRESS_CLIENTS ? &all[index] : NULL;
}

static int64_t now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000000LL + t.tv_nsec;
}

/* The sum; never, if that is beyond the end of time. */
static int64_t later(int64_t t, int64_t d) { return d > INT64_MAX - t ? INT64_MAX : t + d; }

static void leave(rb_express *x, rb_client c)
{
	atomic_store(&x->inside, 0);
	/* Leave, then look; who wants it wants it, then tries: one of us sees the other. */
	if (atomic_load(&x->wanted))
		rbgo_express_back(c);
}

/* SYNC POINT "entry", release side: as shm.Producer.Push. */
static bool push(rb_express *x, int64_t timeout)
{
	x->committed = now();
	rb_commit_entry e = {.kind = 1, .level = -1, .rows = 1, .slot = x->slot, .gen = x->gen + 1, .committed = x->committed};
	if (timeout > 0)
		e.deadline = later(x->committed, timeout);
	uint32_t unlocked = 0;
	while (!atomic_compare_exchange_weak(&x->ring_lock, &unlocked, 1)) {
		unlocked = 0;
		sched_yield();
	}
	uint64_t tail = x->ring_tail;
	bool full = tail - atomic_load(&x->ring->head) > x->ring_mask;
	bool ring = false;
	if (!full) {
		x->entries[tail & x->ring_mask] = e;
		x->ring_tail = tail + 1;
		x->gen = e.gen;
		atomic_exchange(&x->ring->tail, tail + 1);
		ring = atomic_load(&x->ring->armed_at) == tail;
	}
	atomic_store(&x->ring_lock, 0);
	if (ring) {
		uint64_t one = 1;
		/* Not write(): a thread that is canceled must not end in here. */
		while (syscall(SYS_write, (int)x->doorbell, &one, sizeof one) < 0 && errno == EINTR)
			;
	}
	return !full;
}

/*
 * Waits until the request has ended, for slice at most; false if it has not,
 * or will not. SYNC POINT "completion", acquire side: *word.
 *
 * A process that is attached too can take a wake-up away. So the board is
 * looked at again after twice the usual time, and then each time after twice
 * as long; not sooner than a timer costs nothing (see client/waiting.go).
 */
static bool wait_for_end(rb_express *x, int64_t slice, uint64_t *word)
{
	const int64_t least = 10000000, most = 50000000;
	int64_t start = x->committed, until = slice < 0 ? INT64_MAX : later(start, slice);
	int64_t look = x->usual < least / 2 ? least : x->usual < most / 2 ? 2 * x->usual : most;
	for (;;) {
		uint32_t seen = atomic_load(x->bell);
		*word = atomic_load(x->word);
		int64_t t = now();
		if ((uint32_t)(*word >> 32) == x->gen) {
			x->usual += (t - start - x->usual) / 8;
			return true;
		}
		if (t >= until || atomic_load(&x->dead))
			return false;
		int64_t d = until - t < look ? until - t : look;
		struct timespec ts = {d / 1000000000, d % 1000000000};
		if (syscall(SYS_futex, x->bell, FUTEX_WAIT, seen, &ts, NULL, 0) < 0 && errno == ETIMEDOUT)
			look = 2 * look > most ? most : 2 * look;
	}
}

/* Whether the caller gave memory for every tensor; Go says what is missing. */
static bool complete(const rb_express *x, const void *const *in, void *const *out)
{
	if (!in || !out)
		return false;
	for (uint32_t k = 0; k < x->inputs; k++)
		if (!in[k])
			return false;
	for (uint32_t k = 0; k < x->outputs; k++)
		if (!out[k])
			return false;
	return true;
}

bool rb_express_infer(rb_client c, const void *const *in, void *const *out, int64_t timeout, int64_t slice, uint64_t *r, char *message, int *status)
{
	rb_express *x = rb_express_of(c);
	if (!x || atomic_load(&x->owner) != c || atomic_exchange(&x->inside, 1))
		return false;
	if (atomic_load(&x->owner) != c || !atomic_load(&x->lent) || atomic_load(&x->dead) || !complete(x, in, out)) {
		leave(x, c);
		return false;
	}
	for (uint32_t k = 0; k < x->inputs; k++)
		memcpy(x->in[k].at, in[k], x->in[k].bytes);
	if (!push(x, timeout)) {
		leave(x, c);
		return false;
	}
	uint64_t word;
	if (!wait_for_end(x, slice, &word) || (uint32_t)word != RB_OK) { /* status, and held */
		*status = rbgo_express_adopt(c, (void **)out, r, message); /* leaves */
		return true;
	}
	for (uint32_t k = 0; k < x->outputs; k++)
		memcpy(out[k], x->out[k].at, x->out[k].bytes);
	leave(x, c);
	*r = 0;
	*status = RB_OK;
	return true;
}
