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
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "client.h"

static void *reap(void *conn)
{
	rb_conn *c = conn;
	rb_ask_short_slice();
	while (!c->closing) {
		rb_link *l;
		bool interrupted = false;
		uint32_t seen = c->change;
		if (rb_conn_link(c, rb_later(rb_now(), SECOND), true, &l, &interrupted) == RB_OK) {
			rb_link_await_watched(l, true, INT64_MAX);
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

/* Waits until a request may have ended: in the reaper's place, or for the reaper if there is one. Returns `until`, or earlier
 * after a signal. */
static int64_t watch(rb_conn *c, int64_t start, int64_t until, int64_t now)
{
	rb_link *l;
	bool interrupted = false;
	uint32_t seen = c->change;
	if (c->reaping) {
		struct pollfd p = {.fd = c->notify_fd, .events = POLLIN};
		interrupted = poll(&p, 1, (int)(rb_min(until - now, 50 * MILLISECOND) / MILLISECOND)) < 0;
	} else if (rb_conn_link(c, rb_min(until, now + SECOND), true, &l, &interrupted) == RB_OK) {
		until = rb_link_await_watched(l, false, until);
		rb_link_drop(l);
	} else {
		interrupted |= rb_futex_wait(&c->change, seen, rb_max(1, rb_min(until - now, PARK_SLICE)), true) == EINTR;
	}
	return interrupted ? rb_interrupted(until, start) : until;
}

static int reap_wait(rb_conn *c, int64_t timeout, uint64_t *requests, uint32_t max, uint32_t *count)
{
	pthread_mutex_lock(&c->mu);
	int status = open_notifier(c);
	pthread_mutex_unlock(&c->mu);
	*count = 0;
	for (int64_t now = rb_now(), start = now, until = rb_until(timeout, now); !status; now = rb_now()) {
		if (c->final != RB_ERR_CLOSED)
			reap_all(c, requests, max, count);
		if (*count || now >= until)
			break;
		if (c->final)
			status = rb_say(c->final);
		else
			until = watch(c, start, until, now);
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
