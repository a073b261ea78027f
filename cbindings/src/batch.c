/* SPDX-License-Identifier: Apache-2.0 */
/* A batch as a worker's function uses it. */
#include <string.h>

#include "worker.h"

/* Records that the worker gets the memory of some rows, or has written them. */
static void ask(rb_taken *b, int side, uint32_t k, uint32_t row, uint32_t rows)
{
	if (side != RB_OUTPUT && side != RB_NEXT_STATE)
		return;
	uint64_t bit = UINT64_C(1) << (side == RB_OUTPUT ? k : b->worker->session.layout.outputs + k);
	if (rows == b->shown.rows)
		b->asked |= bit;
	else
		for (uint32_t i = row; i < row + rows; i++)
			b->asked_of[i] |= bit;
}

/* Whether a row of an output has no elements. */
static bool is_empty(const rb_taken *b, uint32_t row, uint32_t k)
{
	const rb_layout *l = &b->worker->session.layout;
	uint32_t n = (uint32_t)__builtin_popcount(rb_tensors_of(l, RB_OUTPUT)[k].variable);
	for (uint32_t j = 0; j < n; j++)
		if (!b->dims[row][l->dims_at[l->inputs + k] + j])
			return true;
	return false;
}

/* Fails a request if a row of it lacks one of these outputs and next states. */
static int check_request(rb_taken *b, uint32_t i, uint64_t missing)
{
	const rb_layout *l = &b->worker->session.layout;
	const rb_member *m = &b->member[i];
	for (uint32_t row = m->row; row < m->row + m->rows; row++) {
		if (b->progress && rb_taken_took_back(b, row)) {
			rb_taken_fail(b, i, RB_ERR_FAILED, rb_error());
			return RB_ERR_FAILED;
		}
		for (uint64_t left = missing & ~b->asked_of[row]; left; left &= left - 1) {
			uint32_t k = (uint32_t)__builtin_ctzll(left);
			if (k < l->outputs ? is_empty(b, row, k) : !rb_tensors_of(l, RB_OUTPUT)[k].row_bytes)
				continue;
			rb_fail(RB_ERR_FAILED, "the worker did not write %s \"%s\" of row %u in a batch of %u: write every row, or fail its request",
				k < l->outputs ? "output" : "state", rb_tensors_of(l, RB_OUTPUT)[k].name, row, b->shown.rows);
			rb_taken_fail(b, i, RB_ERR_FAILED, rb_error());
			return RB_ERR_FAILED;
		}
	}
	return RB_OK;
}

/* Fails the requests with rows of which the worker cannot have written an output, or the next state, or took steps back. */
static int check_written(rb_taken *b)
{
	const rb_layout *l = &b->worker->session.layout;
	uint32_t n = l->outputs + l->states;
	uint64_t missing = (n < 64 ? (UINT64_C(1) << n) - 1 : UINT64_MAX) & ~b->asked;
	int status = RB_OK;
	if (b->worker->direct)
		missing = 0;
	if (!missing && !b->progress)
		return RB_OK;
	for (uint32_t i = b->shown.requests; i-- > 0;) /* rb_error has the first one in the end */
		if (!b->answer[i].status && rb_board_open(&b->worker->session.board, b->answer[i].slot, b->answer[i].gen) &&
			check_request(b, i, missing))
			status = RB_ERR_FAILED;
	return status;
}

/* Fails the requests with a text in an output that is not UTF-8. */
static int check_texts(rb_taken *b)
{
	const rb_layout *l = &b->worker->session.layout;
	const rb_tensor *t = rb_tensors_of(l, RB_OUTPUT);
	uint64_t longest = 0;
	int status = RB_OK;
	for (uint32_t k = 0; k < l->outputs; k++)
		for (uint32_t i = 0; t[k].dtype == RB_STR && i < b->shown.requests; i++) {
			const rb_member *m = &b->member[i];
			if (b->answer[i].status || !rb_board_open(&b->worker->session.board, b->answer[i].slot, b->answer[i].gen) ||
				!rb_check_texts("the worker wrote output", &t[k], b->shown.base + t[k].offset + b->slot[m->row] * t[k].stride,
					m->rows, &longest))
				continue;
			status = RB_ERR_FAILED;
			rb_taken_fail(b, i, status, rb_error());
		}
	return status;
}

static int complete(rb_taken *b)
{
	int status = check_written(b);
	int texts = check_texts(b);
	status = status ? status : texts;
	rb_taken_complete(b);
	return status;
}

/* Finds the batch behind a struct. */
static int find_batch(rb_work *w, const rb_batch *given, rb_taken **b)
{
	if (given->place >= w->batches || &w->batch[given->place]->shown != given || !w->batch[given->place]->in_use)
		return rb_explain(RB_ERR_RELEASED, "no such batch, or it was completed");
	*b = w->batch[given->place];
	return RB_OK;
}

/* Body of a function of the header; result may use b, the batch. */
#define WITH(given, batch, result)                                                                                   \
	do {                                                                                                         \
		rb_taken *b = NULL;                                                                                  \
		WITH_WORKER((batch) && (given), (batch)->worker, (status = find_batch(w, batch, &b)) ? status : (result)); \
	} while (0)

/* A tensor, and the sizes of its rows: of inputs the batch's, of others the maximum. */
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
	return i < b->shown.requests ? RB_OK : rb_explain(RB_ERR_INVALID, "request %u of a batch of %u", i, b->shown.requests);
}

/* Whether the rows of a column may differ in shape. */
static bool ragged(const rb_taken *b, int side, const rb_tensor *t)
{
	return side == RB_INPUT && t->variable && b->shown.requests > 1 && b->shown.ragged;
}

static int no_shape(const rb_tensor *t) { return rb_explain(RB_ERR_SHAPE, "the batch is ragged: take \"%s\" row by row", t->name); }

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
	if (side >= RB_STATE)
		return rb_explain(RB_ERR_INVALID, "the state \"%s\" has no runs: take it row by row", t->name);
	if (i >= b->shown.runs)
		return rb_explain(RB_ERR_INVALID, "run %u of a batch of %u", i, b->shown.runs);
	if (ragged(b, side, t))
		return no_shape(t);
	rb_fill_view(v, t, dims, rb_base_of(&b->worker->session, t), b->run[i].slot, b->run[i].rows);
	ask(b, side, k, b->run[i].row, b->run[i].rows);
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
		return rb_explain(RB_ERR_ROWS, "row %u of a batch of %u; padding has no memory", i, b->shown.rows);
	if (ragged(b, side, t))
		dims = b->member[owner(b, i)].dims + (dims - b->shown.dims);
	uint64_t at = side >= RB_STATE ? (b->half[i] ^ (side == RB_NEXT_STATE)) * t->row_bytes : b->slot[i] * t->stride;
	*data = rb_base_of(&b->worker->session, t) + t->offset + at;
	*bytes = rb_row_bytes(t, dims);
	ask(b, side, k, i, 1);
	return RB_OK;
}

static int set_row_dims(rb_taken *b, uint32_t i, const uint32_t *dims, uint32_t ndims)
{
	const rb_layout *l = &b->worker->session.layout;
	if (i >= b->shown.rows)
		return rb_explain(RB_ERR_ROWS, "row %u of a batch of %u", i, b->shown.rows);
	if (ndims != l->dims[RB_OUTPUT])
		return rb_explain(RB_ERR_SHAPE, "the outputs have %u variable dimensions, %u sizes were given", l->dims[RB_OUTPUT], ndims);
	for (uint32_t j = 0; j < ndims; j++)
		if (dims[j] > l->most[RB_OUTPUT][j])
			return rb_explain(RB_ERR_SHAPE, "variable output dimension %u is 0..%u, got %u", j, l->most[RB_OUTPUT][j], dims[j]);
	int status = rb_check_output_sizes(l, b->member[owner(b, i)].dims, dims);
	if (ndims && !status)
		memcpy(b->dims[i], dims, ndims * sizeof *dims);
	return status;
}

/* Whether a request can end with it. */
static bool is_end(int status)
{
	return (status >= RB_ERR_FAILED && status <= RB_ERR_BROKER_GONE) || status == RB_ERR_NO_WORKER || status == RB_ERR_OVERLOADED;
}

static int fail_one(rb_taken *b, uint32_t i, int as, const char *text)
{
	int status = request_of(b, i);
	if (!status && !is_end(as))
		status = rb_explain(RB_ERR_INVALID, "no request ends with status %d", as);
	if (!status)
		rb_taken_fail(b, i, as, text);
	return status;
}

/* The rows of a column, if they fit into that many bytes. */
static int rows_of(rb_taken *b, int side, uint32_t k, uint64_t bytes, rb_rows *r)
{
	const rb_tensor *t;
	const uint32_t *dims;
	int status = column(b, side, k, &t, &dims);
	if (!status)
		status = rb_check_on_host(t);
	if (status)
		return status;
	if (side == RB_NEXT_STATE)
		return rb_explain(RB_ERR_INVALID, "the next state of \"%s\" is to be written: rb_batch_set_state", t->name);
	if (ragged(b, side, t))
		return no_shape(t);
	uint64_t size = rb_row_bytes(t, dims);
	if (bytes < size * b->shown.pad_to)
		return rb_explain(RB_ERR_SIZE, "%u rows of %llu bytes, the buffer has %llu", b->shown.pad_to, (unsigned long long)size,
			(unsigned long long)bytes);
	*r = (rb_rows){.plane = b->shown.base + t->offset, .slot = b->slot, .count = b->shown.rows, .size = size, .stride = t->stride};
	if (side == RB_STATE) { /* halves instead of slots */
		r->slot = b->half;
		r->stride = size;
	}
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
	if (rb_crew_gather(b->worker, &r, to)) {
	} else if (side == RB_STATE) {
		for (uint64_t i = 0; i < r.count; i++)
			memcpy((uint8_t *)to + i * r.size, r.plane + r.slot[i] * r.stride, r.size);
	} else {
		for (uint32_t i = 0; i < b->shown.runs; i++) {
			const rb_run *run = &b->run[i];
			uint8_t *at = (uint8_t *)to + run->row * r.size;
			if (r.size == r.stride)
				memcpy(at, r.plane + run->slot * r.stride, run->rows * r.size);
			else
				for (uint32_t j = 0; j < run->rows; j++)
					memcpy(at + j * r.size, r.plane + (run->slot + j) * r.stride, r.size);
		}
	}
	memset((uint8_t *)to + r.count * r.size, 0, (b->shown.pad_to - r.count) * r.size);
	return RB_OK;
}

/* Copies rows of the buffer to the slots of an output, or to the next state. */
static int scatter(rb_taken *b, int side, uint32_t k, const void *from, uint64_t bytes)
{
	const rb_tensor *t;
	const uint32_t *dims;
	int status = column(b, side, k, &t, &dims);
	if (!status)
		status = rb_check_on_host(t);
	if (status)
		return status;
	if (bytes < t->row_bytes * b->shown.rows)
		return rb_explain(RB_ERR_SIZE, "%u rows of %llu bytes, the buffer has %llu", b->shown.rows, (unsigned long long)t->row_bytes,
			(unsigned long long)bytes);
	ask(b, side, k, 0, b->shown.rows);
	for (uint32_t i = 0; side == RB_NEXT_STATE && i < b->shown.rows; i++)
		memcpy(b->shown.base + t->offset + (b->half[i] ^ 1) * t->row_bytes, (const uint8_t *)from + i * t->row_bytes, t->row_bytes);
	if (side == RB_NEXT_STATE)
		return RB_OK;
	for (uint32_t i = 0; i < b->shown.runs; i++)
		memcpy(b->shown.base + t->offset + b->run[i].slot * t->stride, (const uint8_t *)from + b->run[i].row * t->stride,
			b->run[i].rows * t->stride);
	return RB_OK;
}

/* Finds where the packed rows of a tensor begin; step is the size of one step of the first dimension. An output's
 * rows are as long as those of the input that has its dimension, or else of the first variable input. */
static int packed_rows(rb_taken *b, int side, uint32_t k, uint64_t bytes, rb_rows *r, uint64_t *step)
{
	const rb_tensor *t;
	const uint32_t *dims;
	int status = column(b, side, k, &t, &dims);
	if (!status)
		status = rb_check_on_host(t);
	if (status)
		return status;
	if (t->variable > 1 || (t->variable && !b->worker->session.layout.dims[RB_INPUT]))
		return rb_explain(RB_ERR_SHAPE, "the rows of \"%s\" cannot be packed: only the first dimension may vary, as that of an input does",
			t->name);
	const rb_layout *l = &b->worker->session.layout;
	int from = side == RB_OUTPUT && t->variable ? l->ties.from[l->dims_at[t - l->tensor]] : -1;
	uint64_t at = side == RB_INPUT ? (uint64_t)(dims - b->shown.dims) : from > 0 ? (uint64_t)from : 0, most = t->rank ? t->shape[0] : 1, next = 0;
	*step = t->row_bytes / most;
	for (uint32_t i = 0, row = 0; i < b->shown.requests; i++) {
		uint64_t size = t->variable ? b->member[i].dims[at] : most;
		if (size > most)
			return rb_explain(RB_ERR_SHAPE, "output \"%s\" has at most %llu, request %u has rows of %llu", t->name,
				(unsigned long long)most, i, (unsigned long long)size);
		for (uint32_t j = 0; j < b->member[i].rows; j++, next += size * *step)
			b->start[row++] = next;
	}
	b->start[b->shown.rows] = next;
	if (bytes < next)
		return rb_explain(RB_ERR_SIZE, "%u packed rows have %llu bytes, the buffer has %llu", b->shown.rows, (unsigned long long)next,
			(unsigned long long)bytes);
	*r = (rb_rows){.plane = b->shown.base + t->offset, .slot = b->slot, .count = b->shown.rows, .stride = t->stride, .start = b->start};
	return RB_OK;
}

static int pack(rb_taken *b, uint32_t k, uint8_t *to, uint64_t bytes, int32_t *offsets)
{
	rb_rows r;
	uint64_t step;
	int status = packed_rows(b, RB_INPUT, k, to ? bytes : UINT64_MAX, &r, &step);
	if (!status && offsets && r.start[r.count] / step > INT32_MAX)
		status = rb_explain(RB_ERR_SIZE, "the packed rows are too long for offsets of 32 bits");
	if (status)
		return status;
	for (uint64_t i = 0; offsets && i <= r.count; i++)
		offsets[i] = (int32_t)(r.start[i] / step);
	if (to && !rb_crew_gather(b->worker, &r, to))
		for (uint64_t i = 0; i < r.count; i++)
			memcpy(to + r.start[i], r.plane + r.slot[i] * r.stride, r.start[i + 1] - r.start[i]);
	return RB_OK;
}

static int unpack(rb_taken *b, uint32_t k, const uint8_t *from, uint64_t bytes)
{
	rb_rows r;
	uint64_t step;
	const rb_layout *l = &b->worker->session.layout;
	int status = packed_rows(b, RB_OUTPUT, k, bytes, &r, &step);
	if (status)
		return status;
	const rb_tensor *t = &rb_tensors_of(l, RB_OUTPUT)[k];
	ask(b, RB_OUTPUT, k, 0, b->shown.rows);
	for (uint64_t i = 0; i < r.count; i++) {
		uint64_t size = r.start[i + 1] - r.start[i];
		memcpy(b->shown.base + t->offset + r.slot[i] * t->stride, from + r.start[i], size);
		if (t->variable)
			b->dims[i][l->dims_at[l->inputs + k]] = (uint32_t)(size / step);
	}
	return RB_OK;
}

static int waiting(rb_taken *b, uint32_t i)
{
	int status = request_of(b, i);
	if (!status && !rb_board_open(&b->worker->session.board, b->answer[i].slot, b->answer[i].gen))
		status = rb_say(RB_ERR_CANCELED);
	return status;
}

int rb_batch_run(const rb_batch *batch, int side, uint32_t k, uint32_t i, rb_view *v) { WITH(v, batch, run(b, side, k, i, v)); }

int rb_batch_row(const rb_batch *batch, int side, uint32_t k, uint32_t i, void **data, uint64_t *bytes)
{
	WITH(data && bytes, batch, row(b, side, k, i, data, bytes));
}

int rb_batch_set_row_dims(rb_batch *batch, uint32_t i, const uint32_t *dims, uint32_t ndims)
{
	WITH(dims || !ndims, batch, set_row_dims(b, i, dims, ndims));
}

int rb_batch_show(rb_batch *batch, uint32_t row, uint32_t steps) { WITH(true, batch, rb_taken_show(b, row, steps)); }

int rb_batch_gather(const rb_batch *batch, int side, uint32_t k, void *to, uint64_t bytes)
{
	WITH(to, batch, gather(b, side, k, to, bytes));
}
int rb_batch_prefetch(const rb_batch *batch, uint32_t k, void *to, uint64_t bytes) { WITH(to, batch, prefetch(b, k, to, bytes)); }
int rb_batch_scatter(rb_batch *batch, uint32_t k, const void *from, uint64_t bytes)
{
	WITH(from, batch, scatter(b, RB_OUTPUT, k, from, bytes));
}
int rb_batch_set_state(rb_batch *batch, uint32_t k, const void *from, uint64_t bytes)
{
	WITH(from, batch, scatter(b, RB_NEXT_STATE, k, from, bytes));
}
int rb_batch_pack(const rb_batch *batch, uint32_t k, void *to, uint64_t bytes, int32_t *offsets)
{
	WITH(to || offsets, batch, pack(b, k, to, bytes, offsets));
}
int rb_batch_unpack(rb_batch *batch, uint32_t k, const void *from, uint64_t bytes) { WITH(from, batch, unpack(b, k, from, bytes)); }
int rb_batch_fail(rb_batch *batch, uint32_t i, const char *text) { WITH(true, batch, fail_one(b, i, RB_ERR_FAILED, text)); }
int rb_batch_fail_as(rb_batch *batch, uint32_t i, int as, const char *text) { WITH(true, batch, fail_one(b, i, as, text)); }
int rb_batch_fail_all(rb_batch *batch, const char *text)
{
	WITH(true, batch, (rb_taken_fail_all(b, RB_ERR_FAILED, text, b->worker->session.isolates), RB_OK));
}
int rb_batch_waiting(const rb_batch *batch, uint32_t i) { WITH(true, batch, waiting(b, i)); }
int rb_batch_set_version(rb_batch *batch, uint32_t version) { WITH(true, batch, (b->version = version, RB_OK)); }
int rb_batch_set_rounds(rb_batch *batch, uint32_t rounds) { WITH(true, batch, (b->rounds = rounds, RB_OK)); }
int rb_batch_complete(rb_batch *batch) { WITH(true, batch, complete(b)); }
