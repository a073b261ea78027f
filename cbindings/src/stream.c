/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Requests whose inputs a stream writes, and whose outputs a stream reads.
 *
 * The caller waits for a stream that is done within a moment, such as copies of rows:
 * 25 µs for each request, asleep after the first 25. A host function costs 15 µs of
 * latency and 20 of CPU time, and under MPS it wakes a driver thread in every process
 * on the GPU (docs/results, H200). After longer work, a host function on the stream
 * does the step.
 *
 *	rb_commit_on_stream   the request is committed and pending; the host function
 *	                      sends it to the broker, and it is no longer pending
 *	rb_release_on_stream  the number is gone, the slot leaving; the host function
 *	                      gives the slot back
 *
 * A host function holds its link with the segments, but not the client. If the
 * client was closed meanwhile, only the hold ends. A host function never calls the
 * driver, and mu is never held during a call of the driver.
 */
#include "client.h"

#define STREAM_SPIN (25 * MICROSECOND)
#define STREAM_MOST (16 * STREAM_SPIN)
#define STREAM_NAP (20 * MICROSECOND)

/* How long to wait for a stream with that many requests. */
static int64_t worth_waiting(uint32_t count) { return rb_min(count * STREAM_SPIN, STREAM_MOST); }

static _Atomic bool *long_before(rb_link *l, uint32_t count) { return &l->streams_are_long[count > 1]; }

/* Whether the stream is done. */
static bool done_in_a_moment(rb_link *l, void *stream, uint32_t count)
{
	bool patient = !*long_before(l, count);
	int64_t start = rb_now(), end = start + worth_waiting(count);
	bool idle = rb_device_idle(&l->session.device, stream, patient ? start + STREAM_SPIN : 0);
	while (!idle && patient && rb_now() < end) {
		rb_sleep(STREAM_NAP);
		idle = rb_device_idle(&l->session.device, stream, 0);
	}
	if (!idle)
		*long_before(l, count) = true; /* until a host function runs soon */
	return idle;
}

typedef struct step {
	rb_client client;
	rb_link *link;
	int64_t timeout, launched;
	uint32_t flags, count;
	bool release, over, cancel; /* the slots are free then; the request had not ended */
	uint32_t at[];
} step;

static int no_device(const rb_link *l)
{
	return rb_explain(RB_ERR_INVALID, "%s has no tensor in device memory: no stream orders anything here", l->session.model);
}

/* The caller, or its request, holds the link already. */
static step *new_step(rb_client client, rb_link *l, uint32_t count)
{
	step *s = malloc(sizeof *s + count * sizeof *s->at);
	if (s) {
		*s = (step){.client = client, .link = l, .launched = rb_now()};
		atomic_fetch_add(&l->refs, 1);
		atomic_fetch_add(&l->owners, 1);
	}
	return s;
}

static void free_step(step *s)
{
	rb_link_drop(s->link);
	rb_link_disown(s->link);
	free(s);
}

static void commit_now(rb_conn *c, const step *s)
{
	rb_link *l = s->link;
	bool ring = false, full = false;
	int64_t now = rb_now();
	pthread_mutex_lock(&l->mu);
	for (uint32_t i = 0; i < s->count; i++) {
		l->slots[s->at[i]].pending = false;
		if (!l->dead)
			full |= !rb_link_send(l, s->at[i], now, s->timeout, &ring);
	}
	pthread_mutex_unlock(&l->mu);
	rb_link_after_send(c, l, ring, full, s->flags);
}

static void release_now(const step *s)
{
	rb_link *l = s->link;
	bool ring = false;
	pthread_mutex_lock(&l->mu);
	if (s->over) {
		l->slots[s->at[0]].state = RB_SLOT_FREE;
		rb_link_give_back(l, s->at[0], l->slots[s->at[0]].rows);
	} else {
		rb_link_abandon(l, s->at[0], s->cancel, &ring);
	}
	pthread_mutex_unlock(&l->mu);
	if (ring)
		rb_eventfd_ring(l->session.doorbell);
}

/* The host function. */
static void run(void *argument)
{
	step *s = argument;
	rb_device_host_function(true);
	if (rb_now() - s->launched < rb_max(worth_waiting(s->count), 2 * STREAM_SPIN))
		*long_before(s->link, s->count) = false;
	rb_entry *entry = rb_table_enter(&rb_clients, s->client);
	if (entry) {
		if (s->release)
			release_now(s);
		else
			commit_now(entry->value, s);
		rb_table_leave(entry);
	}
	if (s->release)
		rb_link_drop(s->link); /* the request's hold */
	free_step(s);
	rb_device_host_function(false);
}

/* Commits requests of one attachment. */
static int commit_together(rb_client client, const rb_req *r, uint32_t count, void *stream, int64_t timeout, uint32_t flags)
{
	rb_link *l = r->link;
	int64_t now = rb_now();
	step *s = new_step(client, l, count);
	if (!s)
		return rb_say(RB_ERR_NO_MEMORY);
	s->timeout = timeout;
	s->flags = flags;
	pthread_mutex_lock(&l->mu);
	if (!rb_reqs_mark_committed(r, count)) {
		pthread_mutex_unlock(&l->mu);
		free_step(s);
		return rb_say(RB_ERR_COMMITTED);
	}
	for (uint32_t i = 0; i < count; i++) {
		rb_slot *slot = rb_req_slot(&r[i]);
		rb_link_book(l, r[i].at, now, flags);
		slot->pending = true;
		slot->stream_looked = now;
		s->at[s->count++] = r[i].at;
	}
	pthread_mutex_unlock(&l->mu);
	int status = rb_device_launch(&l->session.device, stream, run, s);
	if (status) { /* undo everything */
		pthread_mutex_lock(&l->mu);
		for (uint32_t i = 0; i < s->count; i++) {
			rb_link_unwatch(l, s->at[i]);
			l->slots[s->at[i]].pending = false;
			l->slots[s->at[i]].state = RB_SLOT_CLAIMED;
			l->gens[s->at[i]]--;
			if (l->slots[s->at[i]].sequence)
				l->slots[s->at[i]].sequence->stepping = false;
		}
		pthread_mutex_unlock(&l->mu);
		free_step(s);
		return status;
	}
	return RB_OK;
}

typedef struct on_stream {
	rb_client client;
	void *stream;
	int64_t timeout;
} on_stream;

static int commit(rb_conn *c, const rb_req *r, uint32_t count, uint32_t flags, const void *how)
{
	const on_stream *o = how;
	for (uint32_t i = 0; i < count; i++) {
		int status = r[i].link->session.device.base ? rb_req_check_commit(c, &r[i], flags) : no_device(r[i].link);
		if (status)
			return status;
	}
	if (count && done_in_a_moment(r->link, o->stream, count))
		return rb_req_commit(c, r, count, o->timeout, flags);
	for (uint32_t i = 0, n; i < count; i += n) {
		for (n = 1; i + n < count && r[i + n].link == r[i].link;)
			n++;
		int status = commit_together(o->client, r + i, n, o->stream, o->timeout, flags);
		if (status)
			return status;
	}
	return RB_OK;
}

int rb_commit_on_stream(rb_client client, const uint64_t *requests, uint32_t count, void *stream, int64_t timeout, uint32_t flags)
{
	WITH_CLIENT(requests || !count, client, rb_reqs_commit(c, requests, count, flags, commit, &(on_stream){client, stream, timeout}));
}

/* Whether the request has gone to the broker: the stream had got there. */
static bool was_sent(const rb_req *r)
{
	const rb_slot *s = rb_req_slot(r);
	return s->state != RB_SLOT_CLAIMED && !s->pending;
}

static int release(rb_client client, const rb_req *r, void *stream)
{
	rb_link *l = r->link;
	rb_slot *slot = rb_req_slot(r);
	if (!l->session.device.base)
		return no_device(l);
	/* No stream touches a slot whose request has ended, with outputs on the host: the inputs were written before the commit. */
	if (slot->sequence) /* the next step comes later on the same stream */
		return rb_req_release(r);
	if ((!l->client->on_device[RB_OUTPUT] && was_sent(r) && rb_req_is_over(r)) || done_in_a_moment(l, stream, 1))
		return rb_req_release(r);
	step *s = new_step(client, l, 1);
	if (!s)
		return rb_say(RB_ERR_NO_MEMORY);
	s->release = true;
	s->at[s->count++] = r->at;
	s->over = rb_req_is_over(r);
	uint32_t handle = r->handle;
	pthread_mutex_lock(&l->mu);
	uint8_t before = slot->state;
	bool mine = atomic_compare_exchange_strong(&slot->handle, &handle, r->handle + 1), watched = mine && BIT(l->watched, r->at);
	if (mine) {
		s->cancel = before == RB_SLOT_COMMITTED;
		slot->state = RB_SLOT_LEAVING;
		rb_link_unwatch(l, r->at);
	}
	pthread_mutex_unlock(&l->mu);
	int status = mine ? rb_device_launch(&l->session.device, stream, run, s) : rb_say(RB_ERR_RELEASED);
	if (status) {
		pthread_mutex_lock(&l->mu);
		if (mine) { /* undo everything */
			slot->state = before;
			atomic_store(&slot->handle, r->handle);
			if (watched)
				rb_link_watch(l, r->at);
		}
		pthread_mutex_unlock(&l->mu);
		free_step(s);
	}
	return status;
}

int rb_release_on_stream(rb_client client, uint64_t request, void *stream)
{
	WITH_REQUEST(true, client, request, release(client, &r, stream));
}
