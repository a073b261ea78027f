/* SPDX-License-Identifier: Apache-2.0 */
/* A client's answer in parts. Go's shm/parts.go has the picture. */
#include <string.h>

#include "client.h"

static rb_bell *bell_of(const rb_link *l, uint32_t at) { return &l->session.board.bells[l->first + at]; }

/* Copies what is new; RB_ERR_NOT_DONE if nothing is. */
static int take_part(const rb_req *r, uint8_t *to, uint64_t room, uint64_t *bytes, uint32_t *restarted)
{
	rb_link *l = r->link;
	rb_slot *s = rb_req_slot(r);
	uint32_t dim, dims[RB_DIMS];
	const rb_tensor *t = rb_growing(&l->session.layout, &dim);
	bool ended = rb_link_ended(l, r->at); /* first: nothing is shown after the end */
	/* SYNC POINT "parts", acquire side. */
	uint64_t shown = atomic_load_explicit(&bell_of(l, r->at)->shown, memory_order_acquire);
	uint32_t size = rb_shown_steps(shown), attempt = rb_shown_attempt(shown);
	pthread_mutex_lock(&l->mu);
	s->seen_shown = shown;
	pthread_mutex_unlock(&l->mu);
	if ((attempt == s->attempt && !s->begun) || bell_of(l, r->at)->plane != rb_page_of(t))
		size = 0; /* an earlier request's, or another output of a pipeline */
	if (ended) {
		int status = rb_req_poll(r);
		if (status)
			return status;
		rb_req_row_dims(r, 0, dims);
		size = dims[dim];
	}
	bool again = attempt != s->attempt && s->begun;
	uint32_t from = again ? 0 : s->given;
	if (again && !restarted)
		return rb_say(RB_ERR_RESTARTED);
	if (size > t->shape[0] || size < from)
		return rb_explain(RB_ERR_PROTOCOL, "a worker shows %u steps of \"%s\", after %u of at most %llu", size, t->name, from,
			(unsigned long long)t->shape[0]);
	if (size == from && !again && !ended)
		return RB_ERR_NOT_DONE;
	uint64_t step = t->row_bytes / t->shape[0];
	if (size > from && room < step)
		return rb_explain(RB_ERR_OUTPUT_TOO_SMALL, "a step has %llu bytes, the buffer %llu", (unsigned long long)step,
			(unsigned long long)room);
	if (size - from > room / step)
		size = from + (uint32_t)(room / step);
	memcpy(to, rb_req_rows(r, t) + from * step, (size - from) * step);
	/* A worker may have died, and another attempt overwritten the steps. */
	atomic_thread_fence(memory_order_acquire);
	if (!ended && rb_shown_attempt(atomic_load_explicit(&bell_of(l, r->at)->shown, memory_order_acquire)) != attempt)
		return RB_ERR_NOT_DONE;
	s->attempt = attempt;
	s->begun |= size > 0;
	s->given = size;
	*bytes = (size - from) * step;
	if (restarted)
		*restarted = again;
	return RB_OK;
}

static int next_part(const rb_req *r, uint8_t *to, uint64_t room, int64_t until, uint64_t *bytes, uint32_t *restarted)
{
	if (rb_req_slot(r)->state == RB_SLOT_CLAIMED)
		return rb_say(RB_ERR_NOT_COMMITTED);
	if (!rb_req_slot(r)->parts)
		return rb_explain(RB_ERR_INVALID, "the request was committed without RB_PARTS");
	for (bool late = false;;) {
		int status = take_part(r, to, room, bytes, restarted);
		if (status != RB_ERR_NOT_DONE)
			return status;
		if (late) /* a broken worker's word may change all the time */
			return rb_say(RB_ERR_TIMEOUT);
		rb_link_await_parts(r->link, r->at, true); /* then look again, also without a wait: a part may have come before */
		if ((status = rb_link_await(r->link, r->at, until)))
			return status;
		late = rb_now() >= until;
	}
}

int rb_next_part(rb_client client, uint64_t request, void *to, uint64_t room, int64_t timeout, uint64_t *bytes, uint32_t *restarted)
{
	WITH_REQUEST(to && bytes, client, request,
		next_part(&r, to, room, rb_until(timeout, timeout < 0 ? 0 : rb_now()), bytes, restarted));
}
