/* SPDX-License-Identifier: Apache-2.0 */
/* A batch as a worker has taken it: read from the mail, failed, answered. */
#include <stdlib.h>
#include <string.h>

#include "worker.h"

#define LEAST_SPIN (50 * MICROSECOND) /* a request's way through client, broker and worker */
#define MOST_SPIN MILLISECOND

void rb_taken_free(rb_taken *b)
{
	if (!b)
		return;
	free(b->mails);
	free(b->order);
	free(b->member);
	free(b->slot);
	free(b->run);
	free(b->step);
	free(b->half);
	free(b->start);
	free(b->answer);
	free(b->dims);
	free(b->progress);
	free(b->streamed);
	free(b->asked_of);
	free(b);
}

rb_taken *rb_work_spare(rb_work *w)
{
	for (uint32_t i = 0; i < w->batches; i++)
		if (!w->batch[i]->in_use)
			return w->batch[i];
	if (w->batches == sizeof w->batch / sizeof *w->batch)
		return NULL;
	uint32_t n = w->session.layout.max_batch, variable = w->session.layout.dims[RB_OUTPUT], states = w->session.layout.states;
	rb_taken *b = calloc(1, sizeof *b);
	if (!b)
		return NULL;
	b->mails = calloc(n, sizeof *b->mails);
	b->order = calloc(n, sizeof *b->order);
	b->member = calloc(n, sizeof *b->member);
	b->slot = calloc(n, sizeof *b->slot);
	b->run = calloc(n, sizeof *b->run);
	b->start = calloc(n + 1, sizeof *b->start);
	b->answer = calloc(n, sizeof *b->answer);
	b->asked_of = calloc(n, sizeof *b->asked_of);
	b->dims = variable ? calloc(n, sizeof *b->dims) : NULL;
	uint32_t dim;
	bool grows = rb_growing(&w->session.layout, &dim);
	b->progress = grows ? calloc(n, sizeof *b->progress) : NULL;
	b->streamed = grows ? calloc(n, sizeof *b->streamed) : NULL;
	b->step = states ? calloc(n, sizeof *b->step) : NULL;
	b->half = states ? calloc(n, sizeof *b->half) : NULL;
	if (!b->mails || !b->order || !b->member || !b->slot || !b->run || !b->start || !b->answer || !b->asked_of || (variable && !b->dims) || (grows && (!b->progress || !b->streamed)) ||
		(states && (!b->step || !b->half))) {
		rb_taken_free(b);
		return NULL;
	}
	b->worker = w;
	b->shown = (rb_batch){.worker = w->handle, .base = w->session.planes.at, .request = b->member, .slot = b->slot,
		.run = b->run, .place = w->batches, .ragged = w->session.ragged, .step = b->step, .streamed = b->streamed};
	w->batch[w->batches++] = b;
	return b;
}

static int by_number(const void *a, const void *b)
{
	uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
	return x < y ? -1 : x > y;
}

/* A row's outputs have the sizes of the inputs whose dimensions they share, else the maximum. */
static void default_sizes(const rb_layout *l, const uint32_t *given, uint32_t *dims)
{
	memcpy(dims, l->most[RB_OUTPUT], sizeof l->most[RB_OUTPUT]);
	for (uint32_t i = 0; l->ties.named && i < l->dims[RB_OUTPUT]; i++)
		if (l->ties.from[i] >= 0)
			dims[i] = given[l->ties.from[i]];
}

/* Appends a request's rows to the batch. */
static void add(rb_taken *b, const rb_mail_request *q)
{
	rb_batch *v = &b->shown;
	rb_member *m = &b->member[v->requests];
	*m = (rb_member){.row = v->rows, .rows = q->rows, .deadline = q->deadline, .committed = q->committed};
	memcpy(m->dims, q->dims, sizeof m->dims);
	b->answer[v->requests++] = (rb_answer){.slot = q->slot, .gen = q->gen, .bell = q->bell};
	for (uint32_t i = 0; i < q->rows; i++, v->rows++) {
		uint32_t slot = q->slot + i;
		if (v->rows && b->slot[v->rows - 1] + 1 == slot)
			b->run[v->runs - 1].rows++;
		else
			b->run[v->runs++] = (rb_run){.slot = slot, .row = v->rows, .rows = 1};
		b->slot[v->rows] = slot;
		if (b->dims)
			default_sizes(&b->worker->session.layout, q->dims, b->dims[v->rows]);
	}
}

/* Reads the step words, and zeroes the halves of fresh rows. */
static void read_steps(rb_taken *b)
{
	const rb_session *s = &b->worker->session;
	const rb_layout *l = &s->layout;
	for (uint32_t i = 0; i < b->shown.rows; i++) { /* a client may have written any byte */
		const uint8_t *word = s->planes.at + l->steps_at + (uint64_t)b->slot[i] * RB_STEP_BYTES;
		b->step[i] = __atomic_load_n(word, __ATOMIC_RELAXED) & (RB_STEP_ODD | RB_STEP_FRESH);
		b->half[i] = 2 * b->slot[i] + (b->step[i] & RB_STEP_ODD);
		for (uint32_t k = 0; b->step[i] & RB_STEP_FRESH && k < l->states; k++) {
			const rb_tensor *t = &rb_tensors_of(l, RB_STATE)[k];
			if (!t->on_device)
				memset(s->planes.at + t->offset + b->half[i] * t->row_bytes, 0, t->row_bytes);
		}
	}
}

int rb_taken_read(rb_taken *b, const uint8_t *mail)
{
	rb_session *s = &b->worker->session;
	rb_batch *v = &b->shown;
	rb_mail m;
	uint32_t live = 0;
	uint64_t rows = 0;
	bool sorted = true;
	rb_read_once(&m, mail, sizeof m);
	v->id = m.batch;
	v->requests = v->rows = v->runs = 0;
	memcpy(v->dims, m.dims, sizeof v->dims);
	for (uint32_t i = 0; i < s->layout.dims[RB_INPUT]; i++) /* no row is larger than its slot */
		if (v->dims[i] > s->layout.most[RB_INPUT][i])
			return rb_explain(RB_ERR_PROTOCOL, "mail of sizes beyond the maximum");
	b->mailed = m.dispatched;
	if (m.requests > s->layout.max_batch)
		return rb_explain(RB_ERR_PROTOCOL, "mail of %u requests", m.requests);
	rb_read_once(b->mails, mail + sizeof m, m.requests * sizeof *b->mails);
	for (uint32_t i = 0; i < m.requests; i++) {
		const rb_mail_request *q = &b->mails[i];
		rows += q->rows;
		if ((uint64_t)q->slot + q->rows > s->layout.slots || q->bell >= s->layout.slots || q->rows < 1 || rows > s->layout.max_batch)
			return rb_explain(RB_ERR_PROTOCOL, "mail names slot %u of %u", q->slot, s->layout.slots);
		for (uint32_t j = 0; j < s->layout.dims[RB_INPUT]; j++)
			if (q->dims[j] > s->layout.most[RB_INPUT][j])
				return rb_explain(RB_ERR_PROTOCOL, "mail of sizes beyond the maximum");
		if (!rb_board_open(&s->board, q->slot, q->gen)) /* canceled or expired */
			continue;
		b->order[live] = (uint64_t)q->slot << 32 | i;
		sorted &= !live || b->order[live - 1] < b->order[live];
		live++;
	}
	if (!sorted)
		qsort(b->order, live, sizeof *b->order, by_number);
	for (uint32_t i = 0; i < live; i++)
		add(b, &b->mails[(uint32_t)b->order[i]]);
	if (b->progress)
		rb_taken_begin(b);
	if (b->step)
		read_steps(b);
	/* canceled rows leave no padding behind */
	v->pad_to = b->worker->pads && m.pad_to > v->rows && m.pad_to <= RB_GO_MAX_BATCH_ROWS ? m.pad_to : v->rows;
	b->asked = 0;
	memset(b->asked_of, 0, v->rows * sizeof *b->asked_of);
	b->version = b->rounds = 0;
	b->started = rb_now();
	return RB_OK;
}

bool rb_taken_wanted(const rb_taken *b)
{
	for (uint32_t i = 0; i < b->shown.requests; i++)
		if (rb_board_open(&b->worker->session.board, b->answer[i].slot, b->answer[i].gen))
			return true;
	return false;
}

void rb_taken_fail(rb_taken *b, uint32_t i, int status, const char *text)
{
	free(b->answer[i].reason);
	b->answer[i].reason = strndup(text ? text : "", RB_GO_REASON_BYTES);
	b->answer[i].status = status;
	b->answer[i].whole = false;
}

void rb_taken_fail_all(rb_taken *b, int status, const char *text, bool whole)
{
	for (uint32_t i = 0; i < b->shown.requests; i++)
		if (!b->answer[i].status) {
			rb_taken_fail(b, i, status, text);
			b->answer[i].whole = whole;
		}
}

/* Writes record, reason and word of one request. If the request was canceled or has expired meanwhile, they belong to
 * the next one in the slot. */
static void answer(rb_taken *b, uint32_t i, int64_t finished)
{
	rb_board *board = &b->worker->session.board;
	const rb_answer *a = &b->answer[i];
	const rb_member *m = &b->member[i];
	if (!rb_board_open(board, a->slot, a->gen))
		return;
	rb_record *r = &board->records[a->slot];
	r->dispatched = b->mailed;
	r->started = b->started;
	r->finished = finished;
	r->reason_len = 0;
	r->version = b->version;
	for (uint32_t j = 0; b->dims && j < m->rows; j++)
		memcpy(r[j].dims, b->dims[m->row + j], sizeof r->dims);
	if (a->reason) {
		r->reason_len = (uint32_t)strlen(a->reason);
		memcpy(board->reasons + (size_t)a->slot * RB_GO_REASON_BYTES, a->reason, r->reason_len);
	}
	if (!a->whole)
		rb_board_end(board, a->slot, a->gen, a->status);
}

/*
 *  1. for each request: record, then its word (SYNC POINT "completion"). If another
 *     stage follows, only for failed requests: the broker hands the others on. A request
 *     that failed with its batch gets a record only: the broker runs it again, or ends it
 *  2. one ring per client: rows are sorted by slot and windows don't
 *     interleave, so a client's requests are neighbours
 *  3. the broker learns that this worker has room again
 *
 * In test/model: Complete, then the push of Done.
 */
void rb_taken_complete(rb_taken *b)
{
	rb_work *w = b->worker;
	rb_crew_leave(w, b->slot); /* after this the slots belong to other requests */
	int64_t now = rb_now();
	if (b->rounds)
		atomic_fetch_add_explicit(&w->mail->rounds, b->rounds, memory_order_relaxed);
	rb_done_entry done = {.batch = b->shown.id, .started = b->started, .finished = now};
	bool ended = false; /* a request of this client has */
	for (uint32_t i = 0; i < b->shown.requests; i++) {
		rb_answer *a = &b->answer[i];
		done.failed += a->status != RB_OK;
		if (a->status != RB_OK || !w->session.hands_on) {
			answer(b, i, now);
			ended |= !a->whole;
			done.whole |= a->whole;
		}
		if (i + 1 == b->shown.requests || b->answer[i + 1].bell != a->bell) {
			if (ended)
				rb_board_ring(&w->session.board, a->bell);
			ended = false;
		}
		free(a->reason);
		a->reason = NULL;
	}
	w->spin_for = rb_min(rb_max((now - b->started) / 4, LEAST_SPIN), MOST_SPIN);
	if (w->waiting_since) /* clients may send the next requests from now on */
		w->waiting_since = now;
	bool ring = false;
	rb_push(&w->done, &done, &ring); /* the ring holds twice the depth */
	if (ring || done.whole) /* requests of a failed batch wait for the broker */
		rb_eventfd_ring(w->session.doorbell);
	b->in_use = false;
	w->taken--;
}
