/* SPDX-License-Identifier: Apache-2.0 */
/* A worker's answers in parts. Go's shm/parts.go has the picture. */
#include "worker.h"

/* Takes back what an earlier attempt has shown, before the worker writes: a reader that sees a new step sees the new attempt. */
static void begin_attempt(rb_taken *b, uint32_t row)
{
	const rb_session *s = &b->worker->session;
	uint32_t dim;
	rb_progress *p = &b->progress[row];
	rb_bell *bell = &s->board.bells[b->answer[p->request].slot];
	p->steps = 0;
	p->attempt = rb_shown_attempt(bell->shown) + 1;
	bell->plane = rb_page_of(rb_growing(&s->layout, &dim));
	atomic_exchange(&bell->shown, (uint64_t)p->attempt << 32);
	atomic_thread_fence(memory_order_seq_cst);
}

void rb_taken_begin(rb_taken *b)
{
	const rb_session *s = &b->worker->session;
	for (uint32_t i = 0; i < b->shown.requests; i++) {
		const rb_member *m = &b->member[i];
		for (uint32_t row = m->row; row < m->row + m->rows; row++) {
			b->progress[row] = (rb_progress){.request = i};
			b->streamed[row] = 0;
		}
		if (s->hands_on || s->board.bells[b->answer[i].slot].streams != b->answer[i].gen)
			continue;
		b->streamed[m->row] = 1;
		begin_attempt(b, m->row);
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
	if (steps && steps < p->steps)
		return rb_explain(RB_ERR_INVALID, "%u steps of row %u were shown already, and stay", p->steps, row);
	if (steps > t->shape[0])
		return rb_explain(RB_ERR_SHAPE, "output \"%s\" grows to %llu at most, not %u", t->name, (unsigned long long)t->shape[0], steps);
	uint32_t was = p->steps;
	p->steps = b->dims[row][dim] = steps;
	if (steps == was || !b->streamed[row] || !rb_board_open(&s->board, a->slot, a->gen))
		return RB_OK;
	if (!steps) {
		begin_attempt(b, row);
	} else {
		/* SYNC POINT "parts", release side. */
		atomic_store_explicit(&s->board.bells[a->slot].shown, (uint64_t)p->attempt << 32 | steps, memory_order_release);
		rb_board_ring(&s->board, a->bell);
	}
	return RB_OK;
}
