/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Fork. A child has its parent's handles, but none of its sessions: at the
 * first use it attaches for itself. The handler runs first in the child, which then
 * has one thread. It neither frees nor allocates: it closes the child's copies of
 * descriptors, renews locks that a thread of the parent may hold, and marks the
 * parent's links.
 */
#include <string.h>
#include <sys/mman.h>

#include "client.h"
#include "weights.h"
#include "worker.h"

/* The parent's slots are not mapped here (MADV_DONTFORK). Arrays over them may still exist: they get private zeros. */
static void zero_pages(rb_segment *s)
{
	const int empty = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE;
	if (s->at && mmap(s->at, s->bytes, PROT_READ | PROT_WRITE, empty, -1, 0) != (void *)s->at)
		s->at = NULL;
}

/* Forgets the parent's session; once, since a grandchild inherits the zeros. */
static void disown(rb_session *s)
{
	rb_close_fd(&s->socket);
	rb_close_fd(&s->doorbell);
	zero_pages(&s->planes);
	s->device = (rb_device){.ordinal = -1}; /* CUDA does not survive a fork */
	s->board_segment.at = s->words.at = NULL;
}

void rb_link_in_child(void *link)
{
	rb_link *l = link;
	pthread_mutex_init(&l->mu, NULL);
	if (!l->parents)
		disown(&l->session);
	l->parents = true;
	l->dead = true;
	l->line = NULL;
	l->waiting = NULL;
}

void rb_worker_in_child(void *worker)
{
	rb_work *w = worker;
	w->busy = false;
	if (!w->parents)
		disown(&w->session);
	w->parents = true;
}

static void weights_in_child(void *weights)
{
	rb_weights *w = weights;
	pthread_mutex_init(&w->mu, NULL);
	pthread_cond_init(&w->left, NULL);
	rb_attach_cancel(&w->pending);
	for (rb_weights_link *l = w->links; l && !w->parents; l = l->next) {
		rb_close_fd(&l->socket);
		zero_pages(&l->segment);
	}
	w->parents = true;
}

static void conn_in_child(void *conn)
{
	rb_conn *c = conn;
	pthread_mutex_init(&c->mu, NULL);
	for (rb_link *l = c->links; l; l = l->next)
		rb_link_in_child(l);
	c->live = NULL;
	c->attaching = false;
	c->reaping = false;
	c->left = false;
	rb_attach_cancel(&c->pending);
	c->next_try = 0;
	c->why = 0;
	rb_close_fd(&c->notify_fd);
	rb_close_fd(&c->poke_fd);
}

static void sequence_in_child(void *sequence) { ((rb_seq *)sequence)->busy = false; }

static void in_child(void)
{
	rb_device_in_child();
	rb_table_in_child(&rb_clients, conn_in_child);
	rb_table_in_child(&rb_workers, rb_worker_in_child);
	rb_table_in_child(&rb_sequences, sequence_in_child); /* they know their links */
	rb_table_in_child(&rb_publishers, weights_in_child);
	rb_table_in_child(&rb_followers, weights_in_child);
	rb_table_in_child(&rb_maps, rb_map_in_child); /* of closed clients and workers, too */
}

static void watch(void) { pthread_atfork(NULL, NULL, in_child); }

void rb_watch_forks(void)
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;
	pthread_once(&once, watch);
}
