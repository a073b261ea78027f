/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The free slots of a link, and the line of claims that wait for them. The thread that frees slots takes them
 * for the claimers, in order, and wakes those that were served: a claimer never competes
 * for them. As Go's client/line.go.
 */
#include <errno.h>

#include "client.h"

/* Finds that many consecutive free slots. */
static bool find(rb_link *l, uint32_t rows, uint32_t *at)
{
	if (l->nfree < rows)
		return false;
	if (rows == 1) {
		for (uint32_t w = l->lowest; w < l->free_words; w++)
			if (l->free[w]) {
				l->lowest = w;
				*at = w * 64 + (uint32_t)__builtin_ctzll(l->free[w]);
				return true;
			}
		return false;
	}
	uint32_t run = 0;
	for (uint32_t i = l->lowest * 64; i < l->window; i++) {
		run = BIT(l->free, i) ? run + 1 : 0;
		if (run == rows) {
			*at = i - rows + 1;
			return true;
		}
	}
	return false;
}

static void set_free(rb_link *l, uint32_t at, uint32_t rows)
{
	for (uint32_t i = at; i < at + rows; i++)
		SET_BIT(l->free, i);
	if (at / 64 < l->lowest)
		l->lowest = at / 64;
	l->nfree += rows;
}

/* Frees released slots whose word says that neither broker nor worker has them any more. */
static void reap_abandoned(rb_link *l)
{
	uint32_t keep = 0;
	for (uint32_t i = 0; i < l->nabandoned; i++) {
		uint32_t at = l->abandoned[i];
		uint64_t w = rb_board_word(&l->session.board, l->first + at);
		if (rb_word_gen(w) == l->gens[at] && !rb_word_held(w)) {
			l->slots[at].state = RB_SLOT_FREE;
			set_free(l, at, l->slots[at].rows);
		} else {
			l->abandoned[keep++] = at;
		}
	}
	l->nabandoned = keep;
}

/* Lowest first: the slots used last are warm in the cache, and neighbours in time become neighbours in memory. */
static bool take(rb_link *l, uint32_t rows, uint32_t *at)
{
	if (!find(l, rows, at))
		return false;
	for (uint32_t i = *at; i < *at + rows; i++)
		CLEAR_BIT(l->free, i);
	l->nfree -= rows;
	return true;
}

#define HOLD_STEP (10 * MILLISECOND)

/*
 * Whether claimers behind the first wait for it, although fewer rows would fit. By turns it
 * holds them up and lets them pass, each time for twice as long: 10 ms, 10 ms, 20 ms, 40 ms
 * ... 2.56 s, then from the beginning.
 */
static bool holds_up(rb_claimer *first, int64_t now)
{
	first->short_since = first->short_since ? first->short_since : now;
	uint64_t steps = (uint64_t)((now - first->short_since) / HOLD_STEP % 512);
	return !steps || (64 - __builtin_clzll(steps)) % 2 == 0;
}

static bool served(const rb_claimer *w) { return w->wake % 2; }

/* A claimer may be served without a wake-up: when the first one's turn to hold up the others is over, or when a worker is
 * done with abandoned slots. */
static bool may_change(const rb_link *l) { return l->nfree || l->nabandoned; }

void rb_link_serve(rb_link *l)
{
	if (!l->line || l->dead)
		return;
	reap_abandoned(l);
	for (rb_claimer **at = &l->line, *w = *at; w && l->nfree; w = *at) {
		if (take(l, w->rows, &w->at)) {
			*at = w->next;
			rb_claimer_wake(w, RB_SERVED);
		} else if (w == l->line && holds_up(w, rb_now())) {
			break;
		} else {
			at = &w->next;
		}
	}
	if (l->line && !l->line->polls && may_change(l))
		rb_claimer_wake(l->line, RB_LOOK);
}

void rb_link_give_back(rb_link *l, uint32_t at, uint32_t rows)
{
	set_free(l, at, rows);
	rb_link_serve(l);
}

/* The last claim of this thread that gave up. Waits that are cut into slices, as Python's are, keep their place. */
static _Thread_local struct {
	const rb_link *link;
	uint32_t rows;
	int64_t joined, short_since, left;
} place;

static void join(rb_link *l, rb_claimer *w, int64_t now)
{
	bool back = place.link == l && place.rows == w->rows && now - place.left < PARK_SLICE;
	w->joined = back ? place.joined : now;
	w->short_since = back ? place.short_since : 0;
	place.link = NULL;
	rb_claimer **at = &l->line;
	while (*at && (*at)->joined <= w->joined)
		at = &(*at)->next;
	w->next = *at;
	*at = w;
}

static void leave(rb_link *l, const rb_claimer *w, int64_t now)
{
	place.link = l, place.rows = w->rows;
	place.joined = w->joined, place.short_since = w->short_since, place.left = now;
	rb_claimer **at = &l->line;
	while (*at != w)
		at = &(*at)->next;
	*at = w->next;
}

/* Takes slots, or joins the line: false. */
static bool take_or_join(rb_link *l, rb_claimer *w)
{
	pthread_mutex_lock(&l->mu);
	bool taken = !l->line && take(l, w->rows, &w->at);
	if (!taken) {
		join(l, w, w->now);
		rb_link_serve(l);
		taken = served(w);
	}
	pthread_mutex_unlock(&l->mu);
	return taken;
}

/* Sleeps while w has to wait; true if it is served. */
static bool await_turn(rb_link *l, rb_claimer *w)
{
	pthread_mutex_lock(&l->mu);
	uint32_t seen = w->wake;
	bool wait = !served(w) && !l->dead;
	w->polls = l->line == w && may_change(l);
	pthread_mutex_unlock(&l->mu);
	if (wait)
		w->interrupted |= rb_futex_wait(&w->wake, seen, rb_min(w->until - w->now, w->polls ? MILLISECOND : PARK_SLICE), true) == EINTR;
	if (served(w))
		return true;
	pthread_mutex_lock(&l->mu);
	rb_link_serve(l);
	pthread_mutex_unlock(&l->mu);
	return served(w);
}

/* False if the sequences of the client have the slots that a plain request would need. */
static bool has_room(rb_link *l, const rb_claimer *w)
{
	pthread_mutex_lock(&l->mu);
	bool room = w->kept || w->rows <= l->window - l->nkept;
	pthread_mutex_unlock(&l->mu);
	return room;
}

/* Waits in line until w is served, late, or without hope here. */
static bool wait_in_line(rb_link *l, rb_claimer *w)
{
	bool again = false;
	while (!again && w->now < w->until && !l->dead && (w->stays || l->client->live == l) && has_room(l, w)) {
		w->start = w->start ? w->start : w->now;
		bool mine = await_turn(l, w);
		w->now = rb_now();
		if (w->interrupted)
			w->until = rb_interrupted(w->until, w->start);
		if (mine)
			return true;
		if (rb_link_lost(l, w->now, PARK_SLICE / 2))
			rb_conn_lost(l->client, l);
		again = !w->stays && l->session.again;
	}
	pthread_mutex_lock(&l->mu);
	if (!served(w)) {
		leave(l, w, w->now);
		rb_link_serve(l);
	}
	pthread_mutex_unlock(&l->mu);
	return served(w);
}

int rb_link_claim(rb_link *l, rb_claimer *w)
{
	if (take_or_join(l, w) || wait_in_line(l, w))
		return RB_OK;
	if (!has_room(l, w))
		return rb_explain(RB_ERR_ROWS, "this client's sequences keep %u of its %u slots, so a request has at most %u rows: close some, or "
			"connect with a larger window", l->nkept, l->window, l->window - l->nkept);
	return w->now >= w->until ? rb_say(RB_ERR_FULL) : RB_LOOK_AGAIN;
}
