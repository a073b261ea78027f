/* SPDX-License-Identifier: Apache-2.0 */
/* One attachment of a client: its life, and waking the threads that wait in it. client.h describes the functions. */
#include <string.h>
#include <unistd.h>

#include "client.h"

/* ---- waking ------------------------------------------------------------------ */

void rb_waiter_wake(rb_waiter **at)
{
	rb_waiter *w = *at; /* it leaves only with mu */
	*at = w->next;
	w->listed = false;
	atomic_fetch_add(&w->wake, 1);
	rb_futex_wake(&w->wake, 1, true);
}

void rb_link_wake_waiting(rb_link *l)
{
	while (l->waiting)
		rb_waiter_wake(&l->waiting);
}

/* It may leave at the new value: then the wake-up meets nothing. */
void rb_claimer_wake(rb_claimer *w, uint32_t add)
{
	atomic_fetch_add(&w->wake, add);
	rb_futex_wake(&w->wake, 1, true);
}

void rb_link_wake_claims(rb_link *l)
{
	for (rb_claimer *w = l->line; w; w = w->next)
		rb_claimer_wake(w, RB_LOOK);
}

void rb_link_wake_idle(rb_link *l)
{
	if (l->idle) {
		l->idle = false;
		rb_eventfd_ring(l->client->poke_fd);
	}
}

/* A futex wake before the wait is lost, hence the loop; it ends as soon as the leader has moved. */
static void kick(rb_link *l)
{
	uint64_t p = l->parked;
	while (p % 2 == 1 && l->parked == p) {
		rb_futex_wake(&l->session.board.bells[l->first].count, INT32_MAX, false);
		usleep(20);
	}
}

void rb_link_stir(rb_link *l)
{
	pthread_mutex_lock(&l->mu);
	rb_link_wake_claims(l);
	rb_link_wake_idle(l);
	rb_link_wake_waiting(l);
	if (l->dead && l->nwatched)
		rb_eventfd_ring(l->client->notify_fd);
	pthread_mutex_unlock(&l->mu);
	kick(l);
}

void rb_link_watch(rb_link *l, uint32_t at)
{
	SET_BIT(l->watched, at);
	l->nwatched++;
	rb_link_wake_idle(l);
}

void rb_link_unwatch(rb_link *l, uint32_t at)
{
	if (l->nwatched && BIT(l->watched, at)) {
		CLEAR_BIT(l->watched, at);
		l->nwatched--;
	}
}

void rb_link_book_parts(rb_link *l, uint32_t at, uint32_t flags)
{
	rb_slot *s = &l->slots[at];
	s->parts = true;
	s->begun = false;
	s->given = 0;
	s->notified = s->awaited = flags & RB_NOTIFY;
	s->seen_shown = l->session.board.bells[l->first + at].shown;
	s->attempt = rb_shown_attempt(s->seen_shown);
}

void rb_link_await_parts(rb_link *l, uint32_t at, bool on)
{
	rb_slot *s = &l->slots[at];
	pthread_mutex_lock(&l->mu);
	s->awaited = on;
	if (on && s->notified) {
		rb_link_unwatch(l, at);
		rb_link_watch(l, at);
		if (rb_link_over(l, at)) /* the watching thread may have looked before */
			rb_eventfd_ring(l->client->notify_fd);
	}
	pthread_mutex_unlock(&l->mu);
}

/* ---- life -------------------------------------------------------------------- */

rb_link *rb_link_new(rb_conn *c, rb_session *s, int *status)
{
	uint32_t n = s->window, words = (n + 63) / 64, tensors = rb_tensors(&s->layout), touched = 0;
	rb_link *l = calloc(1, sizeof *l);
	rb_range ranges[RB_GO_MAX_TENSORS + 1];
	*status = RB_OK;
	if (l) {
		l->slots = calloc(n, sizeof *l->slots);
		l->gens = calloc(n, sizeof *l->gens);
		l->abandoned = calloc(n, sizeof *l->abandoned);
		l->free = calloc(words, 8);
		l->watched = calloc(words, 8);
	}
	if (!l || !l->slots || !l->gens || !l->abandoned || !l->free || !l->watched)
		*status = rb_say(RB_ERR_NO_MEMORY);
	/* Touch the window's pages now: a refusal is an error here, not a SIGBUS later, and no request pays for page faults. */
	for (uint32_t k = 0; k < tensors; k++) {
		const rb_tensor *t = &s->layout.tensor[k];
		if (!t->on_device)
			ranges[touched++] = (rb_range){t->offset + s->first_slot * t->stride, n * t->stride};
	}
	if (s->layout.states)
		ranges[touched++] = (rb_range){s->layout.steps_at + s->first_slot * RB_STEP_BYTES, n * RB_STEP_BYTES};
	if (!*status)
		*status = rb_segment_populate(&s->planes, ranges, touched);
	if (*status) {
		rb_session_close(s);
		rb_link_free(l);
		return NULL;
	}
	l->client = c;
	l->session = *s;
	l->first = s->first_slot;
	l->window = l->nfree = n;
	l->free_words = words;
	l->commits = rb_ring_at(s->words.at, sizeof(rb_commit_entry), rb_commit_ring_size(n));
	if (s->times) {
		l->record = (void *)(s->words.at + RB_GO_RECORD_WORDS);
		l->times = (void *)(s->words.at + rb_times_at(n));
	}
	for (uint32_t i = 0; i < n; i++) {
		l->gens[i] = s->first_gen;
		SET_BIT(l->free, i);
	}
	l->refs = 1;
	l->owners = 1;
	l->looked = rb_now();
	pthread_mutex_init(&l->mu, NULL);
	return l;
}

void rb_link_free(rb_link *l)
{
	if (!l)
		return;
	free(l->slots);
	free(l->gens);
	free(l->abandoned);
	free(l->free);
	free(l->watched);
	free(l);
}

bool rb_link_hold(rb_link *l)
{
	int64_t n = l->refs;
	while (n > 0)
		if (atomic_compare_exchange_weak(&l->refs, &n, n + 1))
			return true;
	return false;
}

void rb_link_drop(rb_link *l)
{
	if (atomic_fetch_sub(&l->refs, 1) == 1)
		rb_session_close(&l->session);
}

void rb_link_disown(rb_link *l)
{
	if (atomic_fetch_sub(&l->owners, 1) == 1)
		rb_link_free(l);
}

static void release_map(void *link)
{
	rb_link_drop(link);
	rb_link_disown(link);
}

int rb_link_map(rb_link *l, rb_map *out)
{
	atomic_fetch_add(&l->owners, 1);
	return rb_map_new(out, &l->session, l->number, l, release_map, rb_link_in_child);
}

/* Ends everything in flight: no answer comes any more. */
void rb_link_fail(rb_link *l)
{
	l->dead = true;
	rb_link_stir(l);
}

bool rb_link_lost(rb_link *l, int64_t now, int64_t every)
{
	if (l->dead)
		return true;
	if (now - atomic_load_explicit(&l->looked, memory_order_relaxed) < every)
		return false;
	atomic_store_explicit(&l->looked, now, memory_order_relaxed);
	return rb_session_gone(&l->session);
}

bool rb_link_push(rb_link *l, const rb_commit_entry *e, bool *ring)
{
	bool now = false, pushed = rb_push(&l->commits, e, &now);
	*ring |= now;
	return pushed;
}

/* Whether the request has ended. Its first status counts, even if the broker dies after that. */
bool rb_link_ended(rb_link *l, uint32_t at)
{
	rb_slot *s = &l->slots[at];
	if (s->state != RB_SLOT_COMMITTED)
		return true;
	uint64_t w = rb_board_word(&l->session.board, l->first + at);
	if (rb_word_gen(w) == l->gens[at]) {
		s->status = rb_word_status(w);
		s->held = rb_word_held(w);
		if (s->status >= RB_STATUS_COUNT) /* a damaged worker wrote it */
			s->status = RB_ERR_PROTOCOL;
	} else if (l->dead) {
		s->status = RB_ERR_BROKER_GONE;
		s->held = true;
	} else if (s->broken) {
		s->status = RB_ERR_FAILED;
		s->held = true;
	} else if (rb_link_expired(l, at)) {
		s->status = RB_ERR_EXPIRED;
		s->held = true; /* until the broker has ended it, too */
	} else {
		return false;
	}
	s->state = RB_SLOT_ENDED;
	s->seen = atomic_load_explicit(&l->woke, memory_order_relaxed); /* one wake-up reads the clock for many requests */
	if (s->seen < s->committed) /* no thread had to wait */
		s->seen = rb_now();
	if (s->traced)
		atomic_store_explicit(&rb_link_times(l, at)->woken, s->seen, memory_order_relaxed);
	return true;
}

void rb_link_check_stream(rb_link *l, uint32_t at, int64_t now)
{
	rb_slot *s = &l->slots[at];
	if (!s->pending || now - s->stream_looked < PARK_SLICE)
		return;
	s->stream_looked = now;
	if (rb_device_broken(&l->session.device))
		s->broken = true;
}
