/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Waiting. The bell of a window is one futex word for one waiter. So one of the waiting
 * threads, the leader, parks on the bell, and wakes the others, each on a word of its own.
 * A thread waits for the end of its request, or watches for rb_reap (notify.c):
 *
 *	wait in the list -- no leader, or woken --> lead -- done, or late --> resign: the next one leads
 *	      |                                       |
 *	      +-------- done, or late ------> leave   +-- wake every thread whose request has ended
 *
 * A single waiter always leads: its wake-up is one futex hop.
 */
#include <errno.h>
#include <poll.h>
#include <unistd.h>

#include "client.h"

static bool watches(const rb_waiter *w) { return w->at == RB_WATCHES; }

/* Whether a watched request has ended. The caller holds mu. */
static bool any_over(const rb_link *l)
{
	for (uint32_t w = 0; l->nwatched && w < l->free_words; w++)
		for (uint64_t left = l->watched[w]; left; left &= left - 1)
			if (rb_link_over(l, w * 64 + (uint32_t)__builtin_ctzll(left)))
				return true;
	return false;
}

/* Whether the thread has nothing to wait for here. A thread in rb_reap_wait gives way to the reaper. The caller holds mu. */
static bool is_done(rb_link *l, const rb_waiter *w)
{
	const rb_conn *c = l->client;
	if (!watches(w))
		return rb_link_ended(l, w->at) || rb_link_has_part(l, w->at);
	return l->dead || c->closing || c->live != l || (!w->reaper && (c->reaping || any_over(l)));
}

/* Wakes a thread to lead, if there is none: one that watches, if one waits. The caller holds mu. */
static void promote(rb_link *l)
{
	rb_waiter **at = &l->waiting;
	if (l->leading || !l->waiting)
		return;
	while (*at && !watches(*at))
		at = &(*at)->next;
	rb_waiter_wake(*at ? at : &l->waiting);
}

/* Waits in the list until the thread leads; false if it is done or late. */
static bool await_lead(rb_link *l, rb_waiter *w)
{
	bool done;
	pthread_mutex_lock(&l->mu);
	for (int64_t now = w->start; !(done = is_done(l, w)) && l->leading && now < w->until; now = rb_now()) {
		uint32_t seen = w->wake;
		int64_t ends = watches(w) ? INT64_MAX : l->slots[w->at].ends;
		w->next = l->waiting;
		w->listed = true;
		l->waiting = w;
		rb_link_wake_idle(l);
		pthread_mutex_unlock(&l->mu);
		if (rb_futex_wait(&w->wake, seen, rb_min(rb_min(w->until, ends) - now, SECOND), true) == EINTR)
			w->until = rb_interrupted(w->until, w->start);
		pthread_mutex_lock(&l->mu);
		rb_waiter **at = &l->waiting;
		while (w->listed && *at != w)
			at = &(*at)->next;
		if (w->listed)
			*at = w->next;
		w->listed = false;
	}
	bool lead = !done && !l->leading;
	l->leading |= lead;
	if (lead && w->reaper)
		rb_link_wake_waiting(l); /* threads in rb_reap_wait give way */
	promote(l); /* the wake-up may have been for the lead: pass it on */
	pthread_mutex_unlock(&l->mu);
	return lead;
}

/* ---- the leader's work ---------------------------------------------------------- */

/* Wakes every waiter whose request has ended, and rings the notifier; true if the leader is done, too. */
static bool look(rb_link *l, const rb_waiter *w)
{
	pthread_mutex_lock(&l->mu);
	bool over = any_over(l);
	if (over)
		rb_eventfd_ring(l->client->notify_fd);
	for (rb_waiter **at = &l->waiting; *at;) {
		if (watches(*at) ? over : rb_link_over(l, (*at)->at))
			rb_waiter_wake(at);
		else
			at = &(*at)->next;
	}
	bool done = is_done(l, w);
	pthread_mutex_unlock(&l->mu);
	return done;
}

/* Checks the requests of links that the client has left: these have no leader. True if any is still watched;
 * *over if one has ended. */
static bool look_at_left(rb_conn *c, rb_link *present, bool *over)
{
	bool watched = false;
	if (!c->left)
		return false;
	c->left = false; /* before the check: a thread that leaves a link meanwhile sets it again */
	for (rb_link *l = c->links; l; l = l->next) {
		if (l == present || l->parents || !rb_link_hold(l))
			continue;
		if (rb_link_lost(l, rb_now(), PARK_SLICE))
			rb_conn_lost(c, l);
		pthread_mutex_lock(&l->mu);
		watched |= l->nwatched > 0;
		if (any_over(l)) {
			*over = true;
			rb_eventfd_ring(c->notify_fd);
		}
		pthread_mutex_unlock(&l->mu);
		rb_link_drop(l);
	}
	if (watched)
		c->left = true;
	return watched;
}

/*
 * Spins on the board before parking, as workers and the broker do: waking a parked
 * thread takes longer than the rest of a small request. Only if the last wait was
 * that short, and yielding the core.
 */
static void spin(rb_link *l, uint32_t at, uint32_t seen, int64_t now, int64_t end)
{
	_Atomic uint32_t *bell = &l->session.board.bells[l->first].count;
	while (!rb_link_over(l, at) && atomic_load_explicit(bell, memory_order_acquire) == seen && now < end)
		if (!rb_yield(&now, &l->spin_rest))
			break;
	atomic_store_explicit(&l->woke, now, memory_order_relaxed);
}

/* Sleeps while nothing is under way. Not on the bell: another process could steal the wake-up. */
static bool idle(rb_conn *c, rb_link *l, rb_waiter *w)
{
	if (l->session.again) /* the client is to attach again now */
		return false;
	pthread_mutex_lock(&l->mu);
	bool sleep = l->idle = !l->nwatched && !l->waiting && !l->dead && !c->closing;
	pthread_mutex_unlock(&l->mu);
	if (!sleep)
		return false;
	/* POLLIN even if another thread has just seen that the client is to attach again. */
	struct pollfd p[2] = {{.fd = c->poke_fd, .events = POLLIN}, {.fd = l->session.socket, .events = POLLRDHUP | POLLIN}};
	if (poll(p, 2, (int)(rb_min(w->until - rb_now(), 3600 * SECOND) / MILLISECOND)) < 0)
		w->until = rb_interrupted(w->until, w->start);
	uint64_t count;
	if (p[0].revents && read(p[0].fd, &count, sizeof count) < 0) { /* another thread has read it */
	}
	pthread_mutex_lock(&l->mu);
	l->idle = false;
	pthread_mutex_unlock(&l->mu);
	if (rb_session_judge(&l->session, p[1].revents))
		rb_conn_lost(c, l);
	return true;
}

/* Parks until the bell rings, or for that long. 0, or an errno. In test/model: FUTEX_WAIT. */
static int park(rb_link *l, uint32_t seen, int64_t most)
{
	int error = 0;
	rb_ask_short_slice();
	/* Store parked, then load dead; rb_link_stir's caller stores its cause, then loads parked: one sees the other. */
	atomic_fetch_add(&l->parked, 1);
	if (!l->dead)
		error = rb_futex_wait(&l->session.board.bells[l->first].count, seen, most, false);
	atomic_fetch_add(&l->parked, 1);
	int64_t now = rb_now();
	atomic_store_explicit(&l->woke, now, memory_order_relaxed);
	if (error == ETIMEDOUT && rb_link_lost(l, now, PARK_SLICE / 2)) /* no ring: the broker may be gone */
		rb_conn_lost(l->client, l);
	return error;
}

/* Leads until the thread is done or late. In test/model: Look. */
static void lead(rb_link *l, rb_waiter *w)
{
	rb_conn *c = l->client;
	int64_t start = rb_now(), now = start;
	for (bool quiet = false, over = false, interrupted;; now = rb_now()) {
		uint32_t seen = atomic_load_explicit(&l->session.board.bells[l->first].count, memory_order_acquire);
		int64_t most = watches(w) ? PARK_SLICE : rb_min(PARK_SLICE, l->slots[w->at].ends - now);
		if (watches(w) && l->session.again && rb_conn_follow(c, l, MILLISECOND, &interrupted))
			break;
		bool left = watches(w) && look_at_left(c, l, &over);
		if (left)
			most = MILLISECOND;
		if (look(l, w) || (over && !w->reaper)) {
			if (!watches(w))
				l->spin_pays = now - start < SPIN;
			break;
		}
		if (now >= w->until)
			break;
		if (!watches(w) && l->spin_pays && now < start + SPIN && now >= l->spin_rest) {
			spin(l, w->at, seen, now, rb_min(start + SPIN, w->until));
			continue;
		}
		if (quiet && !left && idle(c, l, w)) { /* no bell of ours rings for a request that was left */
			quiet = false;
			continue;
		}
		int error = park(l, seen, rb_min(most, w->until - now));
		quiet = watches(w) && error == ETIMEDOUT;
		if (!watches(w) && error == ETIMEDOUT) /* the stream may have failed */
			rb_link_check_stream(l, w->at, rb_now());
		if (error == EINTR)
			w->until = rb_interrupted(w->until, w->start);
	}
	pthread_mutex_lock(&l->mu);
	l->leading = false;
	promote(l);
	pthread_mutex_unlock(&l->mu);
}

int rb_link_await(rb_link *l, uint32_t at, int64_t until)
{
	rb_waiter w = {.at = at, .start = rb_now(), .until = until};
	if (await_lead(l, &w))
		lead(l, &w);
	return rb_link_ended(l, at) || rb_link_has_part(l, at) ? RB_OK : rb_say(RB_ERR_TIMEOUT);
}

int64_t rb_link_await_watched(rb_link *l, bool reaper, int64_t until)
{
	rb_waiter w = {.at = RB_WATCHES, .reaper = reaper, .start = rb_now(), .until = until};
	if (await_lead(l, &w))
		lead(l, &w);
	return w.until;
}
