/* SPDX-License-Identifier: Apache-2.0 */
/* Waking the waiters of a link: the leader on the bell, each follower on the word of its slot, the notifier by its
 * descriptor. client.h describes the functions. */
#include <unistd.h>

#include "client.h"

void rb_link_pass_turn(rb_link *l)
{
	atomic_fetch_add(&l->turn, 1);
	rb_futex_wake(&l->turn, INT32_MAX, true);
}

bool rb_link_any_over(const rb_link *l)
{
	for (uint32_t w = 0; l->nwatched && w < l->free_words; w++)
		for (uint64_t left = l->watched[w]; left; left &= left - 1)
			if (rb_link_over(l, w * 64 + (uint32_t)__builtin_ctzll(left)))
				return true;
	return false;
}

void rb_link_ring_notifier(rb_link *l)
{
	if (!rb_link_any_over(l))
		return;
	rb_eventfd_ring(l->client->notify_fd);
	if (l->reapers_waiting)
		rb_link_pass_turn(l);
}

void rb_link_watch(rb_link *l, uint32_t at)
{
	SET_BIT(l->watched, at);
	l->nwatched++;
	rb_link_wake_reaper(l);
}

void rb_link_unwatch(rb_link *l, uint32_t at)
{
	if (l->nwatched && BIT(l->watched, at)) {
		CLEAR_BIT(l->watched, at);
		l->nwatched--;
	}
}

void rb_link_wake_reaper(rb_link *l)
{
	if (l->reaper_idle) {
		l->reaper_idle = false;
		rb_eventfd_ring(l->client->poke_fd);
	}
}

void rb_link_unfollow(rb_link *l, uint32_t at)
{
	CLEAR_BIT(l->follow, at);
	l->followers--;
}

/* The caller holds mu. */
static void poke(rb_link *l, uint32_t at)
{
	rb_link_unfollow(l, at);
	atomic_fetch_add(&l->slots[at].wake, 1);
	rb_futex_wake(&l->slots[at].wake, 1, true);
}

void rb_link_promote(rb_link *l)
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
	rb_link_promote(l);
	pthread_mutex_unlock(&l->mu);
}

/* A futex wake before the wait is lost, hence the loop; it ends as soon as the leader has moved. */
void rb_link_kick(rb_link *l)
{
	uint64_t p = l->parked;
	while (p % 2 == 1 && l->parked == p) {
		rb_futex_wake(&l->session.board.bells[l->first].count, INT32_MAX, false);
		usleep(20);
	}
}

void rb_link_wake_ended(rb_link *l)
{
	pthread_mutex_lock(&l->mu);
	rb_link_ring_notifier(l);
	for (uint32_t w = 0; l->followers && w < l->free_words; w++)
		for (uint64_t left = l->follow[w]; left; left &= left - 1) {
			uint32_t at = w * 64 + (uint32_t)__builtin_ctzll(left);
			if (rb_link_over(l, at))
				poke(l, at);
		}
	pthread_mutex_unlock(&l->mu);
}

void rb_link_wake_followers(rb_link *l)
{
	pthread_mutex_lock(&l->mu);
	for (uint32_t w = 0; l->followers && w < l->free_words; w++)
		while (l->follow[w])
			poke(l, w * 64 + (uint32_t)__builtin_ctzll(l->follow[w]));
	pthread_mutex_unlock(&l->mu);
}
