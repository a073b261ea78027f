/* SPDX-License-Identifier: Apache-2.0 */
/* Answers in parts, on both sides. Go's shm/parts.go has the picture. */
#include <string.h>

#include "client.h"
#include "worker.h"

/* ---- the worker ----------------------------------------------------------------- */

void rb_taken_begin(rb_taken *b)
{
	const rb_session *s = &b->worker->session;
	uint32_t dim;
	const rb_tensor *t = rb_growing(&s->layout, &dim);
	for (uint32_t i = 0; i < b->shown.requests; i++) {
		const rb_member *m = &b->member[i];
		rb_bell *bell = &s->board.bells[b->answer[i].slot];
		for (uint32_t row = m->row; row < m->row + m->rows; row++) {
			b->progress[row] = (rb_progress){.request = i};
			b->streamed[row] = 0;
		}
		if (s->hands_on || bell->streams != b->answer[i].gen)
			continue;
		rb_progress *p = &b->progress[m->row];
		b->streamed[m->row] = 1;
		p->attempt = rb_shown_attempt(bell->shown) + 1;
		bell->plane = rb_page_of(t);
		/* Before the worker writes: a reader that sees a new step sees the new attempt. */
		atomic_exchange(&bell->shown, (uint64_t)p->attempt << 32);
		atomic_thread_fence(memory_order_seq_cst);
	}
}

bool rb_taken_took_back(const rb_taken *b, uint32_t row)
{
	uint32_t dim;
	rb_growing(&b->worker->session.layout, &dim);
	if (b->dims[row][dim] >= b->progress[row].steps)
		return false;
	rb_fail(RB_ERR_FAILED, "the worker took back steps of row %u: it showed %u, and answers %u", row, b->progress[row].steps,
		b->dims[row][dim]);
	return true;
}

int rb_taken_show(rb_taken *b, uint32_t row, uint32_t steps)
{
	rb_session *s = &b->worker->session;
	uint32_t dim;
	const rb_tensor *t = rb_growing(&s->layout, &dim);
	if (!t)
		return rb_no_growing();
	if (row >= b->shown.rows)
		return rb_explain(RB_ERR_ROWS, "row %u of a batch of %u", row, b->shown.rows);
	rb_progress *p = &b->progress[row];
	const rb_answer *a = &b->answer[p->request];
	if (steps < p->steps)
		return rb_explain(RB_ERR_INVALID, "%u steps of row %u were shown already, and stay", p->steps, row);
	if (steps > t->shape[0])
		return rb_explain(RB_ERR_SHAPE, "output \"%s\" grows to %llu at most, not %u", t->name, (unsigned long long)t->shape[0], steps);
	bool more = steps > p->steps;
	p->steps = b->dims[row][dim] = steps;
	if (more && b->streamed[row] && rb_board_open(&s->board, a->slot, a->gen)) {
		/* SYNC POINT "parts", release side. */
		atomic_store_explicit(&s->board.bells[a->slot].shown, (uint64_t)p->attempt << 32 | steps, memory_order_release);
		rb_board_ring(&s->board, a->bell);
	}
	return RB_OK;
}

/* ---- the client ----------------------------------------------------------------- */

static rb_bell *bell_of(const rb_link *l, uint32_t at) { return &l->session.board.bells[l->first + at]; }

int rb_req_check_parts(const rb_req *r)
{
	uint32_t dim, rows = rb_req_slot(r)->rows;
	if (rows != 1)
		return rb_explain(RB_ERR_ROWS, "an answer in parts has one row, this request has %u", rows);
	return rb_growing(&r->link->session.layout, &dim) ? RB_OK : rb_no_growing();
}

void rb_link_book_parts(rb_link *l, uint32_t at, uint32_t flags)
{
	rb_slot *s = &l->slots[at];
	s->parts = true;
	s->begun = false;
	s->given = 0;
	s->notified = s->awaited = flags & RB_NOTIFY;
	s->seen_shown = bell_of(l, at)->shown;
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

/* Copies what is new; RB_ERR_NOT_DONE if nothing is. */
static int take_part(const rb_req *r, uint8_t *to, uint64_t room, uint64_t *bytes, uint32_t *restarted)
{
	rb_link *l = r->link;
	rb_slot *s = rb_req_slot(r);
	uint32_t dim, dims[RB_DIMS];
	const rb_tensor *t = rb_growing(&l->session.layout, &dim);
	for (;;) {
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
			continue;
		s->attempt = attempt;
		s->begun |= size > 0;
		s->given = size;
		*bytes = (size - from) * step;
		if (restarted)
			*restarted = again;
		return RB_OK;
	}
}

static int next_part(const rb_req *r, uint8_t *to, uint64_t room, int64_t until, uint64_t *bytes, uint32_t *restarted)
{
	if (rb_req_slot(r)->state == RB_SLOT_CLAIMED)
		return rb_say(RB_ERR_NOT_COMMITTED);
	if (!rb_req_slot(r)->parts)
		return rb_explain(RB_ERR_INVALID, "the request was committed without RB_PARTS");
	for (int status;;) {
		if ((status = take_part(r, to, room, bytes, restarted)) != RB_ERR_NOT_DONE)
			return status;
		rb_link_await_parts(r->link, r->at, true);
		if ((status = rb_link_await(r->link, r->at, until)))
			return status;
	}
}

int rb_next_part(rb_client client, uint64_t request, void *to, uint64_t room, int64_t timeout, uint64_t *bytes, uint32_t *restarted)
{
	WITH_REQUEST(to && bytes, client, request,
		next_part(&r, to, room, rb_until(timeout, timeout < 0 ? 0 : rb_now()), bytes, restarted));
}
