/* SPDX-License-Identifier: Apache-2.0 */
/* A client's view of a request: its tensors, its timing and its mapping. */
#include <string.h>

#include "client.h"

void rb_req_row_dims(const rb_req *r, uint32_t row, uint32_t dims[RB_DIMS])
{
	const rb_layout *l = &r->link->session.layout;
	rb_record record;
	rb_read_once(&record, &r->link->session.board.records[r->link->first + r->at + row], sizeof record);
	for (uint32_t i = 0; i < l->dims[RB_OUTPUT]; i++)
		dims[i] = record.dims[i] < l->most[RB_OUTPUT][i] ? record.dims[i] : l->most[RB_OUTPUT][i];
}

/* Whether all rows of an output have the same sizes. */
static bool same_size(const rb_req *r, const rb_tensor *t, uint32_t dims_at, const uint32_t *dims)
{
	uint32_t other[RB_DIMS], count = (uint32_t)__builtin_popcount(t->variable);
	for (uint32_t row = 1; count && row < rb_req_slot(r)->rows; row++) {
		rb_req_row_dims(r, row, other);
		if (memcmp(other + dims_at, dims + dims_at, count * sizeof *dims))
			return false;
	}
	return true;
}

static int view(const rb_req *r, int side, uint32_t k, rb_view *v)
{
	const rb_tensor *t;
	uint32_t dims_at, dims[RB_DIMS];
	rb_slot *s = rb_req_slot(r);
	const rb_layout *l = &r->link->session.layout;
	int status = rb_pick(l, side, k, &t, &dims_at);
	if (status)
		return status;
	if (side == RB_INPUT) {
		if (s->state != RB_SLOT_CLAIMED)
			return rb_say(RB_ERR_COMMITTED);
		rb_link_padded(r->link, s, dims);
	} else {
		if ((status = rb_req_poll(r)))
			return status;
		rb_req_row_dims(r, 0, dims);
		if (!same_size(r, t, dims_at, dims))
			return rb_explain(RB_ERR_SHAPE, "the rows of output \"%s\" differ in size; take them with rb_output_row", t->name);
	}
	rb_fill_view(v, t, dims + dims_at, rb_base_of(&r->link->session, t), r->link->first + r->at, s->rows);
	return RB_OK;
}

static int output_row(const rb_req *r, uint32_t k, uint32_t row, rb_view *v)
{
	const rb_tensor *t;
	uint32_t dims_at, dims[RB_DIMS];
	int status = rb_pick(&r->link->session.layout, RB_OUTPUT, k, &t, &dims_at);
	if (!status)
		status = rb_req_poll(r);
	if (status)
		return status;
	if (row >= rb_req_slot(r)->rows)
		return rb_explain(RB_ERR_ROWS, "row %u of a request of %u", row, rb_req_slot(r)->rows);
	rb_req_row_dims(r, row, dims);
	rb_fill_view(v, t, dims + dims_at, rb_base_of(&r->link->session, t), r->link->first + r->at + row, 1);
	return RB_OK;
}

/* Where a request's time went. Of a failed request only this side's times are known. */
static int timing(const rb_req *r, rb_timing *t)
{
	rb_slot *s = rb_req_slot(r);
	rb_record record;
	if (s->state == RB_SLOT_CLAIMED || !rb_link_ended(r->link, r->at))
		return rb_say(RB_ERR_NOT_DONE);
	*t = (rb_timing){.claim = s->claim_took, .write = rb_max(0, s->committed - s->claimed)};
	if (s->status) {
		t->queue = rb_max(0, s->seen - s->committed);
		return RB_OK;
	}
	rb_read_once(&record, &r->link->session.board.records[r->link->first + r->at], sizeof record);
	int64_t times[] = {s->committed, record.dispatched, record.started, record.finished, s->seen};
	int64_t *spans[] = {&t->queue, &t->dispatch, &t->compute, &t->wake};
	for (int i = 0; i < 4; i++) {
		int64_t span;
		*spans[i] = __builtin_sub_overflow(times[i + 1], times[i], &span) ? 0 : rb_max(0, span);
	}
	return RB_OK;
}

static int request_map(const rb_req *r, rb_map *out)
{
	atomic_fetch_add(&r->link->refs, 1); /* the request holds one already */
	return rb_link_map(r->link, out);
}

/* ---- the functions of the header ------------------------------------------------- */

int rb_input(rb_client client, uint64_t request, uint32_t k, rb_view *v)
{
	WITH_REQUEST(v, client, request, view(&r, RB_INPUT, k, v));
}

int rb_output(rb_client client, uint64_t request, uint32_t k, rb_view *v)
{
	WITH_REQUEST(v, client, request, view(&r, RB_OUTPUT, k, v));
}

int rb_output_row(rb_client client, uint64_t request, uint32_t k, uint32_t row, rb_view *v)
{
	WITH_REQUEST(v, client, request, output_row(&r, k, row, v));
}

int rb_request_map(rb_client client, uint64_t request, rb_map *out) { WITH_REQUEST(out, client, request, request_map(&r, out)); }
int rb_request_timing(rb_client client, uint64_t request, rb_timing *t) { WITH_REQUEST(t, client, request, timing(&r, t)); }
