/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The notifier wakes an event loop when requests have ended: its descriptor
 * becomes readable, and rb_reap lists them. One thread, the reaper, parks on
 * the bell for any number of watched requests.
 *
 *  1. a commit with RB_NOTIFY puts the request on the watch list
 *  2. the worker ends it and rings the window's bell
 *  3. the reaper wakes, finds it ended and makes the descriptor readable
 *  4. the event loop calls rb_reap, which takes it off the list
 *
 * The reaper is the library's only thread and starts with rb_client_fd. After a
 * restart of the broker it also attaches again. A program that has a thread
 * for this calls rb_reap_wait instead, and the library starts none.
 */
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "client.h"

/* Waits until another thread passes the turn, or for ns. The caller holds mu. */
static void await_turn(rb_link *l, int64_t ns)
{
	uint32_t seen = l->turn;
	pthread_mutex_unlock(&l->mu);
	rb_futex_wait(&l->turn, seen, rb_min(ns, SECOND), true);
	pthread_mutex_lock(&l->mu);
}

/* Waits for the leader to resign while the client has this link; false if the caller does not lead. A thread in
 * rb_reap_wait gives up at `until`, when a watched request has ended, or when there is a reaper. */
static bool take_lead(rb_conn *c, rb_link *l, bool reaper, int64_t until)
{
	pthread_mutex_lock(&l->mu);
	l->reapers_waiting++;
	for (int64_t now = rb_now(); l->leading && c->live == l; now = rb_now()) {
		if (!reaper && (c->reaping || now >= until || rb_link_any_over(l)))
			break;
		await_turn(l, until - now);
	}
	l->reapers_waiting--;
	bool lead = !l->leading;
	l->leading = true;
	if (reaper && l->reapers_waiting)
		rb_link_pass_turn(l); /* threads in rb_reap_wait stop waiting for the lead */
	pthread_mutex_unlock(&l->mu);
	return lead;
}

/* Sleeps while nothing is under way. Not on the bell: another process could steal the wake-up. */
static bool idle(rb_conn *c, rb_link *l, int64_t left)
{
	if (l->session.again) /* the client is to attach again now */
		return false;
	pthread_mutex_lock(&l->mu);
	l->reaper_idle = l->nwatched + l->followers == 0 && !l->dead && !c->closing;
	bool sleep = l->reaper_idle;
	pthread_mutex_unlock(&l->mu);
	if (!sleep)
		return false;
	/* POLLIN even if another thread has just seen that the client is to attach again. */
	struct pollfd p[2] = {{.fd = c->poke_fd, .events = POLLIN}, {.fd = l->session.socket, .events = POLLRDHUP | POLLIN}};
	poll(p, 2, (int)(rb_min(left, 3600 * SECOND) / MILLISECOND));
	uint64_t count;
	if (p[0].revents && read(p[0].fd, &count, sizeof count) < 0) { /* another thread has read it */
	}
	pthread_mutex_lock(&l->mu);
	l->reaper_idle = false;
	pthread_mutex_unlock(&l->mu);
	if (rb_session_judge(&l->session, p[1].revents))
		rb_conn_lost(c, l);
	return true;
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
		*over |= rb_link_any_over(l);
		rb_link_ring_notifier(l);
		pthread_mutex_unlock(&l->mu);
		rb_link_drop(l);
	}
	if (watched)
		c->left = true;
	return watched;
}

/* One check by a leader: the bell's count before it, and how long the leader may sleep. */
typedef struct look {
	uint32_t seen;
	int64_t slice;
	bool over; /* a watched request has ended */
} look;

static bool leads(rb_conn *c, rb_link *l) { return !l->dead && !c->closing && c->live == l; }

/* Wakes every waiter whose request has ended; false if the client has another link now. */
static bool look_around(rb_conn *c, rb_link *l, look *k)
{
	bool interrupted = false;
	*k = (look){.seen = l->session.board.bells[l->first].count, .slice = PARK_SLICE};
	if (l->session.again && rb_conn_follow(c, l, MILLISECOND, &interrupted))
		return false;
	rb_link_wake_ended(l);
	if (look_at_left(c, l, &k->over))
		k->slice = MILLISECOND;
	return true;
}

/* Parks until the bell rings, or for a slice; true if the bell stayed silent. */
static bool park(rb_conn *c, rb_link *l, const look *k)
{
	_Atomic uint32_t *bell = &l->session.board.bells[l->first].count;
	int64_t parked = rb_now();
	atomic_fetch_add(&l->parked, 1);
	if (!l->dead && !c->closing) /* as in lead */
		rb_futex_wait(bell, k->seen, k->slice, false);
	atomic_fetch_add(&l->parked, 1);
	l->woke = rb_now();
	bool slept = l->woke - parked >= k->slice;
	if (slept && rb_session_gone(&l->session))
		rb_conn_lost(c, l);
	return slept && *bell == k->seen;
}

/* The reaper leads while the link lives; a thread in rb_reap_wait until `until`, or until a watched request has ended. */
static void lead(rb_conn *c, rb_link *l, bool reaper, int64_t until)
{
	look k;
	if (!take_lead(c, l, reaper, until))
		return;
	for (bool quiet = false; leads(c, l) && look_around(c, l, &k);) {
		int64_t left = until - rb_now();
		if (!reaper) {
			pthread_mutex_lock(&l->mu);
			k.over |= rb_link_any_over(l);
			pthread_mutex_unlock(&l->mu);
			if (left <= 0 || k.over)
				break;
			k.slice = rb_min(k.slice, left);
		}
		quiet = quiet && idle(c, l, left) ? false : park(c, l, &k);
	}
	rb_link_resign(l);
}

static void *reap(void *conn)
{
	rb_conn *c = conn;
	rb_ask_short_slice();
	while (!c->closing) {
		rb_link *l;
		bool interrupted = false;
		uint32_t seen = c->change;
		if (rb_conn_link(c, rb_later(rb_now(), SECOND), true, &l, &interrupted) == RB_OK) {
			lead(c, l, true, INT64_MAX);
			rb_link_drop(l);
		} else if (!c->closing) {
			rb_futex_wait(&c->change, seen, PARK_SLICE, true);
		}
	}
	return NULL;
}

static int no_notifier(rb_conn *c)
{
	rb_close_fd(&c->notify_fd);
	rb_close_fd(&c->poke_fd);
	return rb_explain(RB_ERR_NO_MEMORY, "a completion descriptor and its thread");
}

/* Makes the descriptors, without the thread. The caller holds mu. */
static int open_notifier(rb_conn *c)
{
	if (c->notify_fd >= 0)
		return RB_OK;
	c->poke_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	c->notify_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	return c->poke_fd >= 0 && c->notify_fd >= 0 ? RB_OK : no_notifier(c);
}

static int start_notifier(rb_conn *c)
{
	pthread_mutex_lock(&c->mu);
	bool open = c->notify_fd >= 0; /* a thread in rb_reap_wait may use them */
	int status = open_notifier(c);
	if (!status && !c->reaping) {
		sigset_t all, before;
		/* No signal of the program's is delivered to the library's thread. */
		sigfillset(&all);
		pthread_sigmask(SIG_SETMASK, &all, &before);
		c->reaping = !c->closing; /* first: the thread takes the lead at once */
		if (c->reaping && pthread_create(&c->reaper, NULL, reap, c))
			c->reaping = false;
		pthread_sigmask(SIG_SETMASK, &before, NULL);
		if (!c->reaping)
			status = open ? rb_explain(RB_ERR_NO_MEMORY, "the notifier's thread") : no_notifier(c);
	}
	pthread_mutex_unlock(&c->mu);
	return status;
}

void rb_notifier_stop(rb_conn *c)
{
	if (!c->reaping)
		return;
	rb_eventfd_ring(c->poke_fd); /* the reaper may be idle */
	pthread_join(c->reaper, NULL);
	c->reaping = false;
}

/* Appends the watched requests of a link that have ended; false if there is no room for more. */
static bool reap_watched(rb_link *l, uint64_t *requests, uint32_t max, uint32_t *count)
{
	bool room = true;
	pthread_mutex_lock(&l->mu);
	for (uint32_t w = 0; room && l->nwatched && w < l->free_words; w++)
		for (uint64_t left = l->watched[w]; left; left &= left - 1) {
			uint32_t at = w * 64 + (uint32_t)__builtin_ctzll(left);
			if (!rb_link_over(l, at))
				continue;
			if (*count == max) {
				room = false;
				break;
			}
			rb_link_unwatch(l, at);
			requests[(*count)++] = rb_req_id(&(rb_req){l, at, l->slots[at].handle});
		}
	pthread_mutex_unlock(&l->mu);
	return room;
}

/* Lists the watched requests of all attachments that have ended. */
static void reap_all(rb_conn *c, uint64_t *requests, uint32_t max, uint32_t *count)
{
	uint64_t rung;
	*count = 0;
	if (read(c->notify_fd, &rung, sizeof rung) < 0) { /* it was not rung: reaped requests may have been left over */
	}
	for (rb_link *l = c->links; l; l = l->next)
		if (!l->parents && l->refs > 0 && !reap_watched(l, requests, max, count)) {
			rb_eventfd_ring(c->notify_fd);
			break;
		}
}

static int reap_now(rb_conn *c, uint64_t *requests, uint32_t max, uint32_t *count)
{
	int status = c->final == RB_ERR_CLOSED ? rb_say(RB_ERR_CLOSED) : start_notifier(c);
	*count = 0;
	if (!status)
		reap_all(c, requests, max, count);
	return status;
}

/* Waits until a request may have ended: in the reaper's place, or for the reaper if there is one. */
static void watch(rb_conn *c, int64_t until, int64_t now)
{
	rb_link *l;
	bool interrupted = false;
	uint32_t seen = c->change;
	if (c->reaping) {
		struct pollfd p = {.fd = c->notify_fd, .events = POLLIN};
		poll(&p, 1, (int)(rb_min(until - now, 50 * MILLISECOND) / MILLISECOND));
	} else if (rb_conn_link(c, rb_min(until, now + SECOND), true, &l, &interrupted) == RB_OK) {
		lead(c, l, false, until);
		rb_link_drop(l);
	} else {
		rb_futex_wait(&c->change, seen, rb_max(1, rb_min(until - now, PARK_SLICE)), true);
	}
}

static int reap_wait(rb_conn *c, int64_t timeout, uint64_t *requests, uint32_t max, uint32_t *count)
{
	pthread_mutex_lock(&c->mu);
	int status = open_notifier(c);
	pthread_mutex_unlock(&c->mu);
	*count = 0;
	for (int64_t now = rb_now(), until = rb_until(timeout, now); !status; now = rb_now()) {
		if (c->final != RB_ERR_CLOSED)
			reap_all(c, requests, max, count);
		if (*count || now >= until)
			break;
		if (c->final)
			status = rb_say(c->final);
		else
			watch(c, until, now);
	}
	return status;
}

static int notifier_fd(rb_conn *c, int *fd)
{
	int status = c->final ? rb_say(c->final) : start_notifier(c);
	if (!status)
		*fd = c->notify_fd;
	return status;
}

/* ---- the functions of the header ------------------------------------------------- */

int rb_reap(rb_client client, uint64_t *requests, uint32_t max, uint32_t *count)
{
	WITH_CLIENT(count && (requests || !max), client, reap_now(c, requests, max, count));
}

int rb_reap_wait(rb_client client, int64_t timeout, uint64_t *requests, uint32_t max, uint32_t *count)
{
	WITH_CLIENT(count && requests && max, client, reap_wait(c, timeout, requests, max, count));
}

int rb_client_fd(rb_client client, int *fd) { WITH_CLIENT(fd, client, notifier_fd(c, fd)); }
