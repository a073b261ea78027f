/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Waiting. The bell of a window is one futex word for one waiter. So one of a
 * client's waiting threads, the leader, parks on the bell; the others follow, each
 * on the word of its slot. When the leader's request has ended, a follower takes
 * the lead. A single waiter always leads: its wake-up is one futex hop. A client
 * with a notifier has the reaper for a leader (notify.c).
 */
#include <errno.h>

#include "client.h"

/*
 * Spins on the board before parking, as workers and the broker do: waking a parked
 * thread takes longer than the rest of a small request. Only if the last wait was
 * that short, and yielding the core. Returns the time.
 */
static int64_t spin(rb_link *l, uint32_t at, uint32_t seen, int64_t now, int64_t end)
{
	_Atomic uint32_t *bell = &l->session.board.bells[l->first].count;
	while (!rb_link_over(l, at) && atomic_load_explicit(bell, memory_order_acquire) == seen && now < end)
		if (!rb_yield(&now, &l->spin_rest))
			break;
	return now;
}

/* Parks on the bell until the leader's own request has ended. In test/model: Look, then FUTEX_WAIT. */
static int lead(rb_link *l, uint32_t at, int64_t until)
{
	_Atomic uint32_t *bell = &l->session.board.bells[l->first].count;
	int64_t start = rb_now(), now = start;
	int status = RB_OK;
	for (;;) {
		uint32_t seen = atomic_load_explicit(bell, memory_order_acquire);
		rb_link_wake_ended(l);
		if (rb_link_ended(l, at)) {
			l->spin_pays = now - start < SPIN;
			break;
		}
		if (now >= until) {
			status = RB_ERR_TIMEOUT;
			break;
		}
		if (l->spin_pays && now < start + SPIN && now >= l->spin_rest) {
			now = spin(l, at, seen, now, rb_min(start + SPIN, until));
			atomic_store_explicit(&l->woke, now, memory_order_relaxed);
			continue;
		}
		rb_ask_short_slice();
		/* Store parked, then load dead; rb_link_kick's caller stores its cause, then loads parked: one sees the other. */
		atomic_fetch_add(&l->parked, 1);
		int error = 0;
		if (!l->dead)
			error = rb_futex_wait(bell, seen, rb_min(rb_min(until, l->slots[at].ends) - now, PARK_SLICE), false);
		atomic_fetch_add(&l->parked, 1);
		now = rb_now();
		atomic_store_explicit(&l->woke, now, memory_order_relaxed);
		if (error == ETIMEDOUT) { /* no ring: the stream or the broker may be gone */
			rb_link_check_stream(l, at, now);
			if (rb_link_lost(l, now, PARK_SLICE / 2))
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
		/* The leader may have looked before this follower was listed. */
		if (!rb_link_over(l, at)) {
			if (rb_futex_wait(wake, seen, rb_min(rb_min(until, l->slots[at].ends) - now, SECOND), true) == EINTR)
				until = rb_interrupted(until, start);
			now = rb_now();
		}
		pthread_mutex_lock(&l->mu);
		if (BIT(l->follow, at)) /* still on the list */
			rb_link_unfollow(l, at);
		bool ended = rb_link_ended(l, at), over = now >= until;
		if (ended || over)
			rb_link_promote(l); /* the wake-up may have been for the lead: pass it on */
		pthread_mutex_unlock(&l->mu);
		if (over && !ended)
			return rb_say(RB_ERR_TIMEOUT);
	}
	return RB_OK;
}
