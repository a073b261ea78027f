/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Waiting. The bell of a window is one futex word for one waiter. So of
 * all threads that wait on one client, one is the leader and parks on the bell;
 * the others follow, each on a word of its own slot. A leader whose own request
 * has ended hands the lead to a follower. A single waiter is always the leader:
 * its wake-up is one futex hop. A client with a notifier has its reaper for a
 * leader instead (see notify.c).
 */
#include <errno.h>
#include <sched.h>
#include <unistd.h>

#include "client.h"

static void unfollow(rb_link *l, uint32_t at)
{
	CLEAR_BIT(l->follow, at);
	l->followers--;
}

/* The caller holds mu. */
static void poke(rb_link *l, uint32_t at)
{
	unfollow(l, at);
	atomic_fetch_add(&l->slots[at].wake, 1);
	rb_futex_wake(&l->slots[at].wake, 1, true);
}

/* Has all look who wait for the lead in notify.c. The caller holds mu. */
void rb_link_pass_turn(rb_link *l)
{
	atomic_fetch_add(&l->turn, 1);
	rb_futex_wake(&l->turn, INT32_MAX, true);
}

/* Has some follower try for the lead, if there is no leader. The caller holds mu. */
static void promote(rb_link *l)
{
	if (l->leading)
		return;
	if (l->reapers_waiting) {
		rb_link_pass_turn(l);
		return;
	}
	for (uint32_t w = 0; l->followers && w < l->free_words; w++)
		if (l->follow[w]) {
			poke(l, w * 64 + (uint32_t)__builtin_ctzll(l->follow[w]));
			return;
		}
}

void rb_link_resign(rb_link *l)
{
	pthread_mutex_lock(&l->mu);
	l->leading = false;
	promote(l);
	pthread_mutex_unlock(&l->mu);
}

/* Makes a parked leader look around. A futex wake that comes before the wait
 * is lost, hence the loop; it ends as soon as the leader has moved. */
void rb_link_kick(rb_link *l)
{
	uint64_t p = l->parked;
	while (p % 2 == 1 && l->parked == p) {
		rb_futex_wake(&l->session.board.bells[l->first].count, 2, false);
		usleep(20);
	}
}

/* Pokes the followers whose requests have ended, and rings the notifier if a
 * request that it watches has. */
void rb_link_wake_ended(rb_link *l)
{
	pthread_mutex_lock(&l->mu);
	rb_notifier_tell(l);
	for (uint32_t w = 0; l->followers && w < l->free_words; w++)
		for (uint64_t left = l->follow[w]; left; left &= left - 1) {
			uint32_t at = w * 64 + (uint32_t)__builtin_ctzll(left);
			if (rb_link_over(l, at))
				poke(l, at);
		}
	pthread_mutex_unlock(&l->mu);
}

/* Pokes all of them: the link is dead. */
void rb_link_wake_followers(rb_link *l)
{
	pthread_mutex_lock(&l->mu);
	for (uint32_t w = 0; l->followers && w < l->free_words; w++)
		while (l->follow[w])
			poke(l, w * 64 + (uint32_t)__builtin_ctzll(l->follow[w]));
	pthread_mutex_unlock(&l->mu);
}

/*
 * A leader that has parked for twice as long as usual looks at the board by
 * itself, and then each time after twice as long again. Any process that is
 * attached can take a wake-up away (it may read the board, so it may requeue
 * its futexes). A timer that is due before the kernel's next tick is dear, so
 * it is set only while there is reason to believe that there is a thief.
 */
int64_t rb_link_first_slice(rb_link *l)
{
	if (l->stolen_waits > 0) {
		l->stolen_waits--;
		return STOLEN_SLICE;
	}
	return LEAST_SLICE;
}

/* After a wait that ended by itself: the worker knows when it answered. */
static int64_t true_end(rb_link *l, uint32_t at, int64_t start, int64_t now)
{
	rb_record r;
	rb_read_once(&r, &l->session.board.records[l->first + at], sizeof r);
	if (r.finished > start && now - r.finished > STOLEN_AFTER)
		l->stolen_waits = STOLEN_FOR;
	return rb_min(r.finished, now); /* a damaged worker may write any number */
}

/*
 * Looks at the board for a moment before it parks, as workers and the broker
 * do: waking a parked thread takes longer than the rest of a small request's
 * way. Only while the last wait was that short, and yielding the core to others.
 */
static void spin(rb_link *l, uint32_t at, uint32_t seen, int64_t end)
{
	_Atomic uint32_t *bell = &l->session.board.bells[l->first].count;
	while (!rb_link_over(l, at) && atomic_load_explicit(bell, memory_order_acquire) == seen && rb_now() < end)
		sched_yield();
}

/*
 * Parks on the bell until the leader's own request has ended.
 *
 * In docs/model: Look, then FUTEX_WAIT.
 */
static int lead(rb_link *l, uint32_t at, int64_t until)
{
	_Atomic uint32_t *bell = &l->session.board.bells[l->first].count;
	int64_t start = rb_now(), now = start;
	int64_t slice = rb_min(rb_max(rb_link_first_slice(l), 2 * l->usual), MOST_SLICE);
	bool late = false;
	int status = RB_OK;
	for (;;) {
		uint32_t seen = atomic_load_explicit(bell, memory_order_acquire);
		rb_link_wake_ended(l);
		if (rb_link_ended(l, at)) {
			int64_t end = now;
			if (late && l->slots[at].status == RB_OK)
				end = true_end(l, at, start, now);
			if (end > start)
				l->usual += (end - start - l->usual) / 8;
			l->spin_pays = now - start < SPIN;
			break;
		}
		if (now >= until) {
			status = RB_ERR_TIMEOUT;
			break;
		}
		if (l->spin_pays && now < start + SPIN) {
			spin(l, at, seen, rb_min(start + SPIN, until));
			now = rb_now();
			atomic_store_explicit(&l->woke, now, memory_order_relaxed);
			continue;
		}
		/* Parked first, then look; kick has its cause visible first, then
		 * looks at parked: one of us sees the other. */
		atomic_fetch_add(&l->parked, 1);
		int error = 0;
		if (!l->dead)
			error = rb_futex_wait(bell, seen, rb_min(rb_min(until, l->slots[at].ends) - now, slice), false);
		atomic_fetch_add(&l->parked, 1);
		int64_t parked = now;
		now = rb_now();
		atomic_store_explicit(&l->woke, now, memory_order_relaxed);
		if (now - parked >= slice) {
			slice = rb_min(2 * slice, MOST_SLICE);
			late = true;
			rb_link_check_stream(l, at, now);
			if (rb_session_gone(&l->session)) /* nobody will ring any more */
				rb_conn_lost(l->client, l);
		}
		if (error == EINTR)
			until = rb_interrupted(until, start);
	}
	rb_link_resign(l);
	return status ? rb_say(status) : RB_OK;
}

int rb_link_await(rb_link *l, uint32_t at, int64_t until)
{
	_Atomic uint32_t *wake = &l->slots[at].wake;
	int64_t start = rb_now(), now = start;
	while (!rb_link_ended(l, at)) {
		pthread_mutex_lock(&l->mu);
		if (!l->leading) {
			l->leading = true;
			pthread_mutex_unlock(&l->mu);
			return lead(l, at, until);
		}
		uint32_t seen = *wake;
		SET_BIT(l->follow, at);
		l->followers++;
		rb_link_wake_reaper(l);
		pthread_mutex_unlock(&l->mu);
		/* Who pokes may have looked before we were listed. */
		if (!rb_link_over(l, at)) {
			if (rb_futex_wait(wake, seen, rb_min(rb_min(until, l->slots[at].ends) - now, SECOND), true) == EINTR)
				until = rb_interrupted(until, start);
			now = rb_now();
		}
		pthread_mutex_lock(&l->mu);
		if (BIT(l->follow, at)) /* nobody took us off the list */
			unfollow(l, at);
		bool ended = rb_link_ended(l, at), over = now >= until;
		if (ended || over)
			promote(l); /* perhaps it was the lead that we were woken for: pass it on */
		pthread_mutex_unlock(&l->mu);
		if (over && !ended)
			return rb_say(RB_ERR_TIMEOUT);
	}
	return RB_OK;
}
