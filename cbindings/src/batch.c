/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>
#include <string.h>

#include "worker.h"

#define LEAST_SPIN (50 * MICROSECOND) /* the way of a request through client, broker and worker */
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
	free(b->answer);
	free(b->dims);
	free(b);
}

rb_taken *rb_work_spare(rb_work *w)
{
	for (uint32_t i = 0; i < w->batches; i++)
		if (!w->batch[i]->in_use)
			return w->batch[i];
	if (w->batches == sizeof w->batch / sizeof *w->batch)
		return NULL;
	uint32_t n = w->session.layout.max_batch, variable = w->session.layout.dims[RB_OUTPUT];
	rb_taken *b = calloc(1, sizeof *b);
	if (!b)
		return NULL;
	b->mails = calloc(n, sizeof *b->mails);
	b->order = calloc(n, sizeof *b->order);
	b->member = calloc(n, sizeof *b->member);
	b->slot = calloc(n, sizeof *b->slot);
	b->run = calloc(n, sizeof *b->run);
	b->answer = calloc(n, sizeof *b->answer);
	b->dims = variable ? calloc(n, sizeof *b->dims) : NULL;
	if (!b->mails || !b->order || !b->member || !b->slot || !b->run || !b->answer || (variable && !b->dims)) {
		rb_taken_free(b);
		return NULL;
	}
	b->worker = w;
	b->shown = (rb_batch){.worker = w->handle, .base = w->session.planes.at, .request = b->member, .slot = b->slot, .run = b->run, .place = w->batches, .ragged = w->session.ragged};
	w->batch[w->batches++] = b;
	return b;
}

static int by_number(const void *a, const void *b)
{
	uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
	return x < y ? -1 : x > y;
}

/* Lists a request's rows behind those before it. */
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
			memcpy(b->dims[v->rows], b->worker->session.layout.most[RB_OUTPUT], sizeof *b->dims);
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
			return rb_fail(RB_ERR_PROTOCOL, "%s: mail of sizes beyond the maximum", rb_status_text(RB_ERR_PROTOCOL));
	b->mailed = m.dispatched;
	if (m.requests > s->layout.max_batch)
		return rb_fail(RB_ERR_PROTOCOL, "%s: mail of %u requests", rb_status_text(RB_ERR_PROTOCOL), m.requests);
	rb_read_once(b->mails, mail + sizeof m, m.requests * sizeof *b->mails);
	for (uint32_t i = 0; i < m.requests; i++) {
		const rb_mail_request *q = &b->mails[i];
		if ((uint64_t)q->slot + q->rows > s->layout.slots || q->bell >= s->layout.slots || q->rows < 1 || (rows += q->rows) > s->layout.max_batch)
			return rb_fail(RB_ERR_PROTOCOL, "%s: mail names slot %u of %u", rb_status_text(RB_ERR_PROTOCOL), q->slot, s->layout.slots);
		for (uint32_t j = 0; j < s->layout.dims[RB_INPUT]; j++)
			if (q->dims[j] > s->layout.most[RB_INPUT][j])
				return rb_fail(RB_ERR_PROTOCOL, "%s: mail of sizes beyond the maximum", rb_status_text(RB_ERR_PROTOCOL));
		if (!rb_board_open(&s->board, q->slot, q->gen)) /* canceled or expired: work that nobody waits for */
			continue;
		b->order[live] = (uint64_t)q->slot << 32 | i;
		sorted &= !live || b->order[live - 1] < b->order[live];
		live++;
	}
	if (!sorted)
		qsort(b->order, live, sizeof *b->order, by_number);
	for (uint32_t i = 0; i < live; i++)
		add(b, &b->mails[(uint32_t)b->order[i]]);
	v->pad_to = b->worker->pads && m.pad_to > v->rows && m.pad_to <= RB_GO_MAX_BATCH_ROWS ? m.pad_to : v->rows; /* rows that were left out leave no padding behind */
	b->started = rb_now();
	return RB_OK;
}

static void fail(rb_taken *b, uint32_t i, int status, const char *text)
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
			fail(b, i, status, text);
			b->answer[i].whole = whole;
		}
}

/* Writes record, reason and word of one request, unless somebody else has ended
 * it meanwhile (expired, canceled): then they are no longer ours to write. */
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
 *  1. for each request: record, then its word (SYNC POINT "completion"); where
 *     another stage follows, only for those that failed: the broker hands the
 *     others on; a request that failed with its batch gets its record only: the
 *     broker runs it again, or ends it
 *  2. one ring per client: rows are sorted by slot and windows don't
 *     interleave, so a client's requests are neighbours
 *  3. the broker learns that this worker has room again
 *
 * In docs/model: Complete, then the push of Done.
 */
void rb_taken_complete(rb_taken *b)
{
	rb_work *w = b->worker;
	rb_crew_leave(w, b->slot); /* the slots are somebody else's from here on */
	int64_t now = rb_now();
	rb_done_entry done = {.batch = b->shown.id, .started = b->started, .finished = now};
	bool ended = false; /* something of this client */
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
	if (w->waiting_since) /* the clients may come back from now on; with several batches in flight it ran out of mails long before */
		w->waiting_since = now;
	bool ring = false;
	rb_push(&w->done, &done, &ring); /* it has room for twice the depth, unless the broker breaks the protocol */
	if (ring || done.whole) /* its requests wait for the broker */
		rb_eventfd_ring(w->session.doorbell);
	b->in_use = false;
	w->taken--;
}

/* ---- the functions of the header --------------------------------------------------- */

/* Finds the batch that a struct stands for. */
static int use(const rb_batch *given, rb_entry **e, rb_work **w, rb_taken **b)
{
	if (!given)
		return rb_missing();
	int status = rb_work_use(given->worker, e, w);
	if (status)
		return status;
	if (given->place >= (*w)->batches || &(*w)->batch[given->place]->shown != given || !(*w)->batch[given->place]->in_use) {
		rb_work_leave(*e, *w);
		return rb_fail(RB_ERR_RELEASED, "%s: no such batch, or it was completed", rb_status_text(RB_ERR_RELEASED));
	}
	*b = (*w)->batch[given->place];
	return RB_OK;
}

#define WITH(batch, result)                          \
	do {                                         \
		rb_entry *e;                         \
		rb_work *w;                          \
		rb_taken *b;                         \
		int status = use(batch, &e, &w, &b); \
		if (status)                          \
			return status;               \
		status = (result);                   \
		rb_work_leave(e, w);                 \
		return status;                       \
	} while (0)

/* A tensor, and the sizes that its rows have: what the batch's inputs share;
 * the maximum for outputs. */
static int column(rb_taken *b, int side, uint32_t k, const rb_tensor **t, const uint32_t **dims)
{
	uint32_t at;
	const rb_layout *l = &b->worker->session.layout;
	int status = rb_pick(l, side, k, t, &at);
	if (!status)
		*dims = (side == RB_INPUT ? b->shown.dims : l->most[RB_OUTPUT]) + at;
	return status;
}

static int request_of(rb_taken *b, uint32_t i)
{
	return i < b->shown.requests ? RB_OK : rb_fail(RB_ERR_INVALID, "%s: request %u of a batch of %u", rb_status_text(RB_ERR_INVALID), i, b->shown.requests);
}

/* Whether the rows of a column may differ in shape. */
static bool ragged(const rb_taken *b, int side, const rb_tensor *t) { return side == RB_INPUT && t->variable && b->shown.requests > 1 && b->shown.ragged; }

static int no_shape(const rb_tensor *t) { return rb_fail(RB_ERR_SHAPE, "%s: the batch is ragged: take \"%s\" row by row", rb_status_text(RB_ERR_SHAPE), t->name); }

/* The request that a row belongs to. */
static uint32_t owner(const rb_taken *b, uint32_t i)
{
	uint32_t low = 0, high = b->shown.requests;
	while (high - low > 1) {
		uint32_t middle = (low + high) / 2;
		*(b->member[middle].row <= i ? &low : &high) = middle;
	}
	return low;
}

static int run(rb_taken *b, int side, uint32_t k, uint32_t i, rb_view *v)
{
	const rb_tensor *t;
	const uint32_t *dims;
	int status = column(b, side, k, &t, &dims);
	if (status)
		return status;
	if (i >= b->shown.runs)
		return rb_fail(RB_ERR_INVALID, "%s: run %u of a batch of %u", rb_status_text(RB_ERR_INVALID), i, b->shown.runs);
	if (ragged(b, side, t))
		return no_shape(t);
	rb_fill_view(v, t, dims, rb_base_of(&b->worker->session, t), b->run[i].slot, b->run[i].rows);
	return RB_OK;
}

static int row(rb_taken *b, int side, uint32_t k, uint32_t i, void **data, uint64_t *bytes)
{
	const rb_tensor *t;
	const uint32_t *dims;
	int status = column(b, side, k, &t, &dims);
	if (status)
		return status;
	if (i >= b->shown.rows)
		return rb_fail(RB_ERR_ROWS, "%s: row %u of a batch of %u; padding has no memory", rb_status_text(RB_ERR_ROWS), i, b->shown.rows);
	if (ragged(b, side, t))
		dims = b->member[owner(b, i)].dims + (dims - b->shown.dims);
	*data = rb_base_of(&b->worker->session, t) + t->offset + b->slot[i] * t->stride;
	*bytes = rb_row_bytes(t, dims);
	return RB_OK;
}

static int shape(rb_taken *b, uint32_t i, uint32_t k, uint64_t out[RB_MAX_RANK])
{
	const rb_tensor *t;
	const uint32_t *dims;
	int status = column(b, RB_INPUT, k, &t, &dims);
	if (!status)
		status = request_of(b, i);
	if (status)
		return status;
	dims = b->member[i].dims + (dims - b->shown.dims);
	for (uint32_t j = 0; j < t->rank; j++)
		out[j] = t->variable >> j & 1 ? *dims++ : t->shape[j];
	return RB_OK;
}

/* Sets the sizes of some rows' outputs. */
static int set_dims(rb_taken *b, uint32_t first, uint32_t rows, const uint32_t *dims, uint32_t ndims)
{
	const rb_layout *l = &b->worker->session.layout;
	if (ndims != l->dims[RB_OUTPUT])
		return rb_fail(RB_ERR_SHAPE, "%s: the outputs have %u variable dimensions, %u sizes were given", rb_status_text(RB_ERR_SHAPE), l->dims[RB_OUTPUT], ndims);
	for (uint32_t i = 0; i < ndims; i++)
		if (dims[i] > l->most[RB_OUTPUT][i])
			return rb_fail(RB_ERR_SHAPE, "%s: variable output dimension %u is 0..%u, got %u", rb_status_text(RB_ERR_SHAPE), i, l->most[RB_OUTPUT][i], dims[i]);
	for (uint32_t j = 0; ndims && j < rows; j++)
		memcpy(b->dims[first + j], dims, ndims * sizeof *dims);
	return RB_OK;
}

static int set_output_dims(rb_taken *b, uint32_t i, const uint32_t *dims, uint32_t ndims)
{
	int status = request_of(b, i);
	return status ? status : set_dims(b, b->member[i].row, b->member[i].rows, dims, ndims);
}

static int set_row_dims(rb_taken *b, uint32_t i, const uint32_t *dims, uint32_t ndims)
{
	if (i >= b->shown.rows)
		return rb_fail(RB_ERR_ROWS, "%s: row %u of a batch of %u", rb_status_text(RB_ERR_ROWS), i, b->shown.rows);
	return set_dims(b, i, 1, dims, ndims);
}

/* Whether a request can end with it. */
static bool is_end(int status) { return (status >= RB_ERR_FAILED && status <= RB_ERR_BROKER_GONE) || status == RB_ERR_NO_WORKER || status == RB_ERR_OVERLOADED; }

static int fail_one(rb_taken *b, uint32_t i, int as, const char *text)
{
	int status = request_of(b, i);
	if (!status && !is_end(as))
		status = rb_fail(RB_ERR_INVALID, "%s: no request ends with status %d", rb_status_text(RB_ERR_INVALID), as);
	if (!status)
		fail(b, i, as, text);
	return status;
}

/* The rows of a column, one behind the other in room of so many bytes. */
static int rows_of(rb_taken *b, int side, uint32_t k, uint64_t bytes, rb_rows *r)
{
	const rb_tensor *t;
	const uint32_t *dims;
	int status = column(b, side, k, &t, &dims);
	if (!status)
		status = rb_check_on_host(t);
	if (status)
		return status;
	if (ragged(b, side, t))
		return no_shape(t);
	uint64_t size = rb_row_bytes(t, dims);
	if (bytes < size * b->shown.pad_to)
		return rb_fail(RB_ERR_SIZE, "%s: %u rows of %llu bytes, the buffer has %llu", rb_status_text(RB_ERR_SIZE), b->shown.pad_to, (unsigned long long)size, (unsigned long long)bytes);
	*r = (rb_rows){.plane = b->shown.base + t->offset, .slot = b->slot, .count = b->shown.rows, .size = size, .stride = t->stride};
	return RB_OK;
}

static int prefetch(rb_taken *b, uint32_t k, void *to, uint64_t bytes)
{
	rb_rows r;
	int status = rows_of(b, RB_INPUT, k, bytes, &r);
	if (!status)
		rb_crew_prefetch(b->worker, &r, to);
	return status;
}

static int gather(rb_taken *b, int side, uint32_t k, void *to, uint64_t bytes)
{
	rb_rows r;
	int status = rows_of(b, side, k, bytes, &r);
	if (status)
		return status;
	if (!rb_crew_gather(b->worker, &r, to))
		for (uint32_t i = 0; i < b->shown.runs; i++) {
			const rb_run *run = &b->run[i];
			uint8_t *at = (uint8_t *)to + run->row * r.size;
			if (r.size == r.stride)
				memcpy(at, r.plane + run->slot * r.stride, run->rows * r.size);
			else
				for (uint32_t j = 0; j < run->rows; j++)
					memcpy(at + j * r.size, r.plane + (run->slot + j) * r.stride, r.size);
		}
	memset((uint8_t *)to + r.count * r.size, 0, (b->shown.pad_to - r.count) * r.size);
	return RB_OK;
}

static int scatter(rb_taken *b, uint32_t k, const void *from, uint64_t bytes)
{
	const rb_tensor *t;
	const uint32_t *dims;
	int status = column(b, RB_OUTPUT, k, &t, &dims);
	if (!status)
		status = rb_check_on_host(t);
	if (status)
		return status;
	if (bytes < t->stride * b->shown.rows)
		return rb_fail(RB_ERR_SIZE, "%s: %u rows of %llu bytes, the buffer has %llu", rb_status_text(RB_ERR_SIZE), b->shown.rows, (unsigned long long)t->stride, (unsigned long long)bytes);
	for (uint32_t i = 0; i < b->shown.runs; i++)
		memcpy(b->shown.base + t->offset + b->run[i].slot * t->stride, (const uint8_t *)from + b->run[i].row * t->stride, b->run[i].rows * t->stride);
	return RB_OK;
}

static int waiting(rb_taken *b, uint32_t i)
{
	int status = request_of(b, i);
	if (!status && !rb_board_open(&b->worker->session.board, b->answer[i].slot, b->answer[i].gen))
		status = rb_say(RB_ERR_CANCELED);
	return status;
}

int rb_batch_run(const rb_batch *batch, int side, uint32_t k, uint32_t i, rb_view *v)
{
	if (!v)
		return rb_missing();
	WITH(batch, run(b, side, k, i, v));
}

int rb_batch_row(const rb_batch *batch, int side, uint32_t k, uint32_t i, void **data, uint64_t *bytes)
{
	if (!data || !bytes)
		return rb_missing();
	WITH(batch, row(b, side, k, i, data, bytes));
}

int rb_batch_shape(const rb_batch *batch, uint32_t i, uint32_t k, uint64_t out[RB_MAX_RANK])
{
	if (!out)
		return rb_missing();
	WITH(batch, shape(b, i, k, out));
}

int rb_batch_set_output_dims(rb_batch *batch, uint32_t i, const uint32_t *dims, uint32_t ndims)
{
	if (ndims && !dims)
		return rb_missing();
	WITH(batch, set_output_dims(b, i, dims, ndims));
}

int rb_batch_set_row_dims(rb_batch *batch, uint32_t i, const uint32_t *dims, uint32_t ndims)
{
	if (ndims && !dims)
		return rb_missing();
	WITH(batch, set_row_dims(b, i, dims, ndims));
}

int rb_batch_gather(const rb_batch *batch, int side, uint32_t k, void *to, uint64_t bytes)
{
	if (!to)
		return rb_missing();
	WITH(batch, gather(b, side, k, to, bytes));
}

int rb_batch_prefetch(const rb_batch *batch, uint32_t k, void *to, uint64_t bytes)
{
	if (!to)
		return rb_missing();
	WITH(batch, prefetch(b, k, to, bytes));
}

int rb_batch_scatter(rb_batch *batch, uint32_t k, const void *from, uint64_t bytes)
{
	if (!from)
		return rb_missing();
	WITH(batch, scatter(b, k, from, bytes));
}

int rb_batch_fail(rb_batch *batch, uint32_t i, const char *text) { WITH(batch, fail_one(b, i, RB_ERR_FAILED, text)); }
int rb_batch_fail_as(rb_batch *batch, uint32_t i, int as, const char *text) { WITH(batch, fail_one(b, i, as, text)); }
int rb_batch_fail_all(rb_batch *batch, const char *text)
{
	WITH(batch, (rb_taken_fail_all(b, RB_ERR_FAILED, text, b->worker->session.isolates), RB_OK));
}
int rb_batch_waiting(const rb_batch *batch, uint32_t i) { WITH(batch, waiting(b, i)); }
int rb_batch_complete(rb_batch *batch) { WITH(batch, (rb_taken_complete(b), RB_OK)); }
