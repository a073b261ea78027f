/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Requests. Their numbers:
 *
 *	63      52 51    32 31      0
 *	+---------+--------+--------+
 *	| link    | slot   | handle |   never 0: a claimed slot's handle is odd
 *	+---------+--------+--------+
 *
 * link is the attachment's number; slots are counted from the window's first.
 */
#include <string.h>

#include "client.h"

_Static_assert(1 << RB_SLOT_BITS >= RB_GO_MAX_SLOTS, "a window's slots fit");

#define DEFAULT_LEVEL (-1)

uint64_t rb_req_id(const rb_req *r)
{
	return (uint64_t)(r->link->number & RB_LINK_MASK) << (RB_HANDLE_BITS + RB_SLOT_BITS) | (uint64_t)r->at << RB_HANDLE_BITS | r->handle;
}

int rb_req_find(rb_conn *c, uint64_t id, rb_req *r)
{
	uint32_t number = (uint32_t)(id >> (RB_HANDLE_BITS + RB_SLOT_BITS)), at = (uint32_t)(id >> RB_HANDLE_BITS) & ((1u << RB_SLOT_BITS) - 1);
	for (rb_link *l = c->links; l && id % 2; l = l->next) {
		if ((l->number & RB_LINK_MASK) != number || at >= l->window)
			continue;
		if (l->parents)
			return rb_fail(RB_ERR_FORKED, "this request is the parent process's: a forked child claims its own");
		*r = (rb_req){l, at, (uint32_t)id};
		return atomic_load_explicit(&l->slots[at].handle, memory_order_acquire) == r->handle ? RB_OK : rb_say(RB_ERR_RELEASED);
	}
	return rb_say(RB_ERR_RELEASED);
}

rb_request rb_req_shown(const rb_req *r)
{
	return (rb_request){.id = rb_req_id(r), .base = r->link->session.planes.at, .slot = r->link->first + r->at,
			    .rows = rb_req_slot(r)->rows, .attachment = r->link->number};
}

/* ---- claim -------------------------------------------------------------------- */

static int bad_rows(rb_conn *c, uint32_t rows)
{
	if (rows > c->max_batch)
		return rb_explain(RB_ERR_TOO_LARGE, "%u rows, at most %u", rows, c->max_batch);
	return rb_explain(RB_ERR_ROWS, "a request has 1..%u rows (this client's window), got %u", c->window, rows);
}

int rb_link_check_dims(const rb_link *l, const uint32_t *dims, uint32_t ndims)
{
	const rb_layout *of = &l->session.layout;
	if (ndims != of->dims[RB_INPUT])
		return rb_explain(RB_ERR_SHAPE, "the inputs have %u variable dimensions, %u sizes were given", of->dims[RB_INPUT], ndims);
	for (uint32_t i = 0; i < ndims; i++)
		if (dims[i] > of->most[RB_INPUT][i])
			return rb_explain(RB_ERR_SHAPE, "variable input dimension %u is 0..%u, got %u", i, of->most[RB_INPUT][i], dims[i]);
	return RB_OK;
}

void rb_link_padded(const rb_link *l, const rb_slot *s, uint32_t dims[RB_DIMS])
{
	memcpy(dims, s->dims, sizeof s->dims);
	for (uint32_t i = 0; i < RB_DIMS; i++)
		for (uint32_t j = 0; j < l->session.buckets[i]; j++)
			if (dims[i] <= l->session.bucket[i][j]) {
				dims[i] = l->session.bucket[i][j];
				break;
			}
}

/* Zeroes the inputs of a request that is smaller than its bucket. */
static void clear_padding(const rb_req *r)
{
	uint32_t dims[RB_DIMS];
	rb_slot *s = rb_req_slot(r);
	const rb_layout *l = &r->link->session.layout;
	if (!l->dims[RB_INPUT])
		return;
	rb_link_padded(r->link, s, dims);
	if (!memcmp(dims, s->dims, sizeof dims))
		return;
	for (uint32_t k = 0; k < l->inputs; k++)
		if (l->tensor[k].variable)
			memset(rb_req_rows(r, &l->tensor[k]), 0, s->rows * l->tensor[k].stride);
}

void rb_req_begin(rb_link *l, uint32_t at, uint32_t rows, const uint32_t *dims, int64_t start, int64_t now, rb_req *r)
{
	rb_slot *s = &l->slots[at];
	for (uint32_t i = 0; i < l->session.layout.dims[RB_INPUT]; i++)
		s->dims[i] = dims[i];
	s->state = RB_SLOT_CLAIMED;
	s->rows = rows;
	s->level = DEFAULT_LEVEL;
	s->cost = 0;
	s->parts = s->awaited = false;
	if (s->broken) /* only then: an atomic store costs */
		s->broken = false;
	s->traced = rb_link_recorded(l);
	s->claimed = now;
	s->claim_took = start ? now - start : 0;
	*r = (rb_req){l, at, (s->handle + 1) | 1}; /* a sequence's slot may still have the number of the step before */
	atomic_store_explicit(&s->handle, r->handle, memory_order_release);
	for (uint32_t i = 0; l->session.layout.states && i < rows; i++)
		*rb_link_step(l, at + i) = RB_STEP_FRESH;
	clear_padding(r);
}

/* from: as in rb_req_claim_kept. kept: for a sequence. */
static int claim_from(rb_conn *c, rb_link *from, bool kept, uint32_t rows, const uint32_t *dims, uint32_t ndims, int64_t timeout,
	rb_req *r)
{
	rb_claimer w = {.rows = rows, .kept = kept, .stays = from, .now = rb_now()};
	w.until = rb_until(timeout, w.now);
	if (rows < 1 || rows > c->window || rows > c->max_batch)
		return bad_rows(c, rows);
	for (int status;;) {
		rb_link *l = from;
		if (from)
			status = !from->dead && rb_link_hold(from) ? RB_OK : rb_say(RB_ERR_STATE_LOST);
		else
			status = rb_conn_hold(c, w.until, timeout != 0, w.now, &l, &w.interrupted);
		if (status)
			return status;
		if (rows > l->window || rows > l->session.max_rows) /* a restarted broker may have other limits */
			status = bad_rows(c, rows);
		else if (!(status = rb_link_check_dims(l, dims, ndims)))
			status = rb_link_claim(l, &w);
		if (!status) {
			l->slots[w.at].sequence = NULL;
			rb_req_begin(l, w.at, rows, dims, w.start, w.now, r);
			return RB_OK;
		}
		rb_link_drop(l);
		if (status != RB_LOOK_AGAIN)
			return status;
	}
}

int rb_req_claim(rb_conn *c, uint32_t rows, const uint32_t *dims, uint32_t ndims, int64_t timeout, rb_req *r)
{
	return claim_from(c, NULL, false, rows, dims, ndims, timeout, r);
}

int rb_req_claim_kept(rb_conn *c, rb_link *from, uint32_t rows, int64_t timeout, rb_req *r)
{
	static const uint32_t no_dims[RB_DIMS]; /* for slots without inputs */
	return claim_from(c, from, true, rows, no_dims, c->input_dims, timeout, r);
}

/* ---- commit ------------------------------------------------------------------- */

static int check_parts(const rb_req *r)
{
	uint32_t dim, rows = rb_req_slot(r)->rows;
	if (rows != 1)
		return rb_explain(RB_ERR_ROWS, "an answer in parts has one row, this request has %u", rows);
	return rb_growing(&r->link->session.layout, &dim) ? RB_OK : rb_no_growing();
}

int rb_req_check_commit(rb_conn *c, const rb_req *r, uint32_t flags)
{
	if (rb_req_slot(r)->state != RB_SLOT_CLAIMED)
		return rb_say(RB_ERR_COMMITTED);
	if (flags & RB_NOTIFY && c->notify_fd < 0)
		return rb_explain(RB_ERR_INVALID, "this client has no notifier; call rb_client_fd first");
	return flags & RB_PARTS ? check_parts(r) : RB_OK;
}

void rb_link_book(rb_link *l, uint32_t at, int64_t now, uint32_t flags)
{
	rb_slot *s = &l->slots[at];
	s->state = RB_SLOT_COMMITTED;
	s->committed = now;
	s->ends = INT64_MAX;
	s->cancel = false;
	l->gens[at]++;
	for (uint32_t i = 0; s->sequence && i < s->rows; i++)
		*rb_link_step(l, at + i) = s->sequence->half | (s->sequence->row[i] & RB_STEP_FRESH);
	if (s->sequence) {
		s->sequence->stepping = true;
		s->sequence->told = s->sequence->undone = false;
	}
	if (flags & RB_PARTS)
		rb_link_book_parts(l, at, flags);
	if (flags & RB_NOTIFY)
		rb_link_watch(l, at);
}

static bool push_cancel_entry(rb_link *l, uint32_t at, bool *ring)
{
	rb_commit_entry e = {.kind = RB_GO_KIND_CANCEL, .rows = l->slots[at].rows, .slot = l->first + at, .gen = l->gens[at]};
	return rb_link_push(l, &e, ring);
}

bool rb_link_send(rb_link *l, uint32_t at, int64_t now, int64_t timeout, bool *ring)
{
	rb_slot *s = &l->slots[at];
	rb_commit_entry e = {.kind = s->parts ? RB_GO_KIND_STREAM : RB_GO_KIND_COMMIT, .committed = now, .deadline = timeout > 0 ? rb_later(now, timeout) : 0,
			     .level = s->level, .cost = s->cost, .rows = s->rows, .slot = l->first + at, .gen = l->gens[at]};
	memcpy(e.dims, s->dims, sizeof e.dims);
	s->committed = now;
	if (e.deadline)
		s->ends = rb_later(e.deadline, END_GRACE);
	if (s->traced) {
		rb_times *t = rb_link_times(l, at);
		t->gen = e.gen;
		t->asked = s->claimed - s->claim_took;
		t->claimed = s->claimed;
	}
	return rb_link_push(l, &e, ring) && (!s->cancel || push_cancel_entry(l, at, ring));
}

void rb_link_after_send(rb_conn *c, rb_link *l, bool ring, bool full, uint32_t flags)
{
	if (ring)
		rb_eventfd_ring(l->session.doorbell);
	if (full) /* only a broker that breaks the protocol leaves no room */
		rb_conn_lost(c, l);
	if (flags & RB_NOTIFY && l->dead) /* the link may have died before the request was listed */
		rb_eventfd_ring(c->notify_fd);
	if (flags & RB_NOTIFY && c->live != l) /* a link that the client has left has no leader */
		rb_conn_look_at_left(c);
}

bool rb_reqs_mark_committed(const rb_req *r, uint32_t count)
{
	for (uint32_t i = 0; i < count; i++) {
		if (rb_req_slot(&r[i])->state != RB_SLOT_CLAIMED) {
			while (i-- > 0)
				rb_req_slot(&r[i])->state = RB_SLOT_CLAIMED;
			return false;
		}
		rb_req_slot(&r[i])->state = RB_SLOT_COMMITTED;
	}
	return true;
}

int rb_req_commit(rb_conn *c, const rb_req *r, uint32_t count, int64_t timeout, uint32_t flags)
{
	for (uint32_t i = 0; i < count; i++) {
		int status = rb_req_check_commit(c, &r[i], flags);
		if (status)
			return status;
	}
	int64_t now = rb_now();
	for (uint32_t i = 0; i < count;) { /* the requests of one attachment together: the broker is woken once */
		rb_link *l = r[i].link;
		uint32_t end = i + 1;
		while (end < count && r[end].link == l)
			end++;
		bool ring = false, full = false;
		pthread_mutex_lock(&l->mu);
		if (!rb_reqs_mark_committed(&r[i], end - i)) {
			pthread_mutex_unlock(&l->mu);
			return rb_say(RB_ERR_COMMITTED);
		}
		for (; i < end; i++) {
			rb_link_book(l, r[i].at, now, flags);
			full |= !rb_link_send(l, r[i].at, now, timeout, &ring);
		}
		pthread_mutex_unlock(&l->mu);
		rb_link_after_send(c, l, ring, full, flags);
	}
	return RB_OK;
}

/* ---- the end -------------------------------------------------------------------- */

/* So begins the broker's reason for a request that ended while there was no worker. */
static const char NO_WORKER[] = "no worker attached";

/* The sequence may be closed meanwhile. */
static void tell(const rb_req *r)
{
	rb_slot *s = rb_req_slot(r);
	pthread_mutex_lock(&r->link->mu);
	if (s->sequence && s->handle == r->handle)
		s->sequence->told = true;
	pthread_mutex_unlock(&r->link->mu);
}

/* RB_OK, or how the request ended, with its reason. */
static int outcome(const rb_req *r)
{
	int status = rb_req_slot(r)->status;
	if (!status && rb_req_slot(r)->sequence)
		tell(r);
	if (rb_req_slot(r)->broken)
		return rb_explain(status, "its stream failed before it got to the commit; the CUDA context of this process is of no more use");
	/* While an expired request is held, a worker may still write its reason. */
	bool queued = status == RB_ERR_EXPIRED || status == RB_ERR_NO_WORKER;
	if (status != RB_ERR_FAILED && status != RB_ERR_WORKER_DIED && (!queued || rb_req_slot(r)->held))
		return status ? rb_say(status) : RB_OK;
	uint32_t slot = r->link->first + r->at;
	char text[RB_GO_REASON_BYTES];
	rb_record record;
	rb_read_once(&record, &r->link->session.board.records[slot], sizeof record);
	size_t n = record.reason_len < sizeof text ? record.reason_len : sizeof text;
	memcpy(text, r->link->session.board.reasons + (size_t)slot * RB_GO_REASON_BYTES, n);
	if (queued && (n < sizeof NO_WORKER - 1 || memcmp(text, NO_WORKER, sizeof NO_WORKER - 1)))
		return rb_say(status); /* the text comes from a late worker */
	if (status == RB_ERR_EXPIRED)
		return rb_explain(status, "%.*s", (int)n, text);
	return n ? rb_fail(status, "%.*s", (int)n, text) : rb_say(status);
}

int rb_req_wait(const rb_req *r, int64_t until)
{
	if (rb_req_slot(r)->state == RB_SLOT_CLAIMED)
		return rb_say(RB_ERR_NOT_COMMITTED);
	if (rb_req_slot(r)->awaited)
		rb_link_await_parts(r->link, r->at, false);
	if (!rb_link_ended(r->link, r->at)) {
		int status = rb_link_await(r->link, r->at, until);
		if (status)
			return status;
	}
	return outcome(r);
}

int rb_req_poll(const rb_req *r)
{
	rb_link *l = r->link;
	if (rb_req_slot(r)->state == RB_SLOT_CLAIMED)
		return rb_say(RB_ERR_NOT_COMMITTED);
	if (!rb_link_ended(l, r->at)) {
		/* A thread that only polls learns here that the broker, or its stream, is gone. */
		int64_t now = rb_now();
		rb_link_check_stream(l, r->at, now);
		if (!rb_link_ended(l, r->at)) {
			if (!rb_link_lost(l, now, PARK_SLICE))
				return rb_say(RB_ERR_NOT_DONE);
			rb_conn_lost(l->client, l);
			rb_link_ended(l, r->at);
		}
	}
	return outcome(r);
}

/* Sends the cancellation once. The caller holds mu. */
static void push_cancel(rb_link *l, rb_slot *s, uint32_t at, bool *ring)
{
	if (s->cancel)
		return;
	s->cancel = true;
	if (!s->pending) /* otherwise rb_link_send does, after the commit */
		push_cancel_entry(l, at, ring);
}

bool rb_req_is_over(const rb_req *r)
{
	rb_slot *s = rb_req_slot(r);
	return s->state == RB_SLOT_CLAIMED || (rb_link_ended(r->link, r->at) && !s->held); /* claimed: no other process has it */
}

void rb_link_abandon(rb_link *l, uint32_t at, bool cancel, bool *ring)
{
	if (cancel)
		push_cancel(l, &l->slots[at], at, ring);
	l->slots[at].state = RB_SLOT_ABANDONED;
	l->abandoned[l->nabandoned++] = at;
	rb_link_serve(l); /* the first claimer looks for abandoned slots now */
}

static int cancel_request(const rb_req *r)
{
	rb_link *l = r->link;
	bool ring = false;
	if (rb_req_slot(r)->state == RB_SLOT_CLAIMED)
		return rb_say(RB_ERR_NOT_COMMITTED);
	if (rb_link_ended(l, r->at))
		return RB_OK;
	pthread_mutex_lock(&l->mu);
	push_cancel(l, rb_req_slot(r), r->at, &ring);
	pthread_mutex_unlock(&l->mu);
	if (ring)
		rb_eventfd_ring(l->session.doorbell);
	return RB_OK;
}

int rb_req_release(const rb_req *r)
{
	rb_link *l = r->link;
	rb_slot *s = rb_req_slot(r);
	bool over = rb_req_is_over(r), ring = false;
	uint32_t handle = r->handle;
	pthread_mutex_lock(&l->mu);
	if (!atomic_compare_exchange_strong(&s->handle, &handle, r->handle + 1)) {
		pthread_mutex_unlock(&l->mu);
		return rb_say(RB_ERR_RELEASED);
	}
	rb_link_unwatch(l, r->at);
	bool kept = s->sequence;
	if (kept) { /* it keeps the slots, and their hold on the link */
		if (s->state == RB_SLOT_COMMITTED)
			push_cancel(l, s, r->at, &ring);
	} else if (over) {
		s->state = RB_SLOT_FREE;
		rb_link_give_back(l, r->at, s->rows);
	} else {
		rb_link_abandon(l, r->at, s->state == RB_SLOT_COMMITTED, &ring);
	}
	pthread_mutex_unlock(&l->mu);
	if (ring)
		rb_eventfd_ring(l->session.doorbell);
	if (!kept)
		rb_link_drop(l);
	return RB_OK;
}

static int claim(rb_conn *c, uint32_t rows, const uint32_t *dims, uint32_t ndims, int64_t timeout, rb_request *request)
{
	rb_req r;
	bool at_once = timeout == RB_AT_ONCE;
	int status = at_once && !c->live ? rb_say(RB_ERR_FULL) : rb_req_claim(c, rows, dims, ndims, at_once ? 0 : timeout, &r);
	if (!status)
		*request = rb_req_shown(&r);
	return status;
}

static int request_version(const rb_req *r, uint32_t *version)
{
	if (rb_req_slot(r)->state == RB_SLOT_CLAIMED || !rb_link_ended(r->link, r->at))
		return rb_say(RB_ERR_NOT_DONE);
	const rb_record *record = &r->link->session.board.records[r->link->first + r->at];
	*version = rb_req_slot(r)->status ? 0 : __atomic_load_n(&record->version, __ATOMIC_RELAXED);
	return RB_OK;
}

static int set_priority(const rb_req *r, uint32_t level)
{
	if (rb_req_slot(r)->state != RB_SLOT_CLAIMED)
		return rb_say(RB_ERR_COMMITTED);
	uint32_t levels = r->link->session.levels;
	if (level >= levels || level > INT8_MAX)
		return rb_explain(RB_ERR_NO_LEVEL, "%u, the model has 0..%u", level, levels - 1);
	rb_req_slot(r)->level = (int8_t)level;
	return RB_OK;
}

static int set_cost(const rb_req *r, uint32_t cost)
{
	if (rb_req_slot(r)->state != RB_SLOT_CLAIMED)
		return rb_say(RB_ERR_COMMITTED);
	if (cost > UINT16_MAX)
		return rb_explain(RB_ERR_INVALID, "the cost of a row is 0..%d, got %u", UINT16_MAX, cost);
	rb_req_slot(r)->cost = (uint16_t)cost;
	return RB_OK;
}

#define FEW 64 /* requests that are found without an allocation */

int rb_reqs_commit(rb_conn *c, const uint64_t *requests, uint32_t count, uint32_t flags, rb_committer commit, const void *how)
{
	rb_req few[FEW], *all = count <= FEW ? few : malloc(count * sizeof *all);
	int status = rb_check_flags(flags, RB_NOTIFY | RB_PARTS);
	if (!status && !all)
		status = rb_say(RB_ERR_NO_MEMORY);
	for (uint32_t i = 0; i < count && !status; i++)
		status = rb_req_find(c, requests[i], all + i);
	if (!status)
		status = commit(c, all, count, flags, how);
	if (all != few)
		free(all);
	return status;
}

static int commit_now(rb_conn *c, const rb_req *r, uint32_t count, uint32_t flags, const void *timeout)
{
	return rb_req_commit(c, r, count, *(const int64_t *)timeout, flags);
}

/* ---- the functions of the header ------------------------------------------------- */

int rb_claim(rb_client client, uint32_t rows, const uint32_t *dims, uint32_t ndims, int64_t timeout, rb_request *request)
{
	WITH_CLIENT(request && (dims || !ndims), client, claim(c, rows, dims, ndims, timeout, request));
}

int rb_commit(rb_client client, uint64_t request, int64_t timeout, uint32_t flags)
{
	int bad = rb_check_flags(flags, RB_NOTIFY | RB_PARTS);
	if (bad)
		return bad;
	WITH_REQUEST(true, client, request, rb_req_commit(c, &r, 1, timeout, flags));
}

int rb_commit_all(rb_client client, const uint64_t *requests, uint32_t count, int64_t timeout, uint32_t flags)
{
	WITH_CLIENT(requests || !count, client, rb_reqs_commit(c, requests, count, flags, commit_now, &timeout));
}

int rb_wait(rb_client client, uint64_t request, int64_t timeout)
{
	WITH_REQUEST(true, client, request, rb_req_wait(&r, rb_until(timeout, timeout < 0 ? 0 : rb_now())));
}

int rb_set_priority(rb_client client, uint64_t request, uint32_t level) { WITH_REQUEST(true, client, request, set_priority(&r, level)); }
int rb_set_cost(rb_client client, uint64_t request, uint32_t cost) { WITH_REQUEST(true, client, request, set_cost(&r, cost)); }
int rb_poll(rb_client client, uint64_t request) { WITH_REQUEST(true, client, request, rb_req_poll(&r)); }
int rb_cancel(rb_client client, uint64_t request) { WITH_REQUEST(true, client, request, cancel_request(&r)); }
int rb_release(rb_client client, uint64_t request) { WITH_REQUEST(true, client, request, rb_req_release(&r)); }
int rb_request_version(rb_client client, uint64_t request, uint32_t *version)
{
	WITH_REQUEST(version, client, request, request_version(&r, version));
}
