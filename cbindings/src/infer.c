/* SPDX-License-Identifier: Apache-2.0 */
/* Whole requests in one call, for models without variable dimensions. */
#include <string.h>

#include "client.h"

/* Whether the tensors of a side can be copied: the caller gave memory for each, and all are on the host. */
static int check_side(const rb_conn *c, int side, const void *const *pointers)
{
	const char *what = side == RB_INPUT ? "input" : "output";
	if (!pointers)
		return rb_explain(RB_ERR_INVALID, "the %ss are NULL", what);
	for (uint32_t k = 0; k < (side == RB_INPUT ? c->inputs : c->outputs); k++)
		if (!pointers[k])
			return rb_explain(RB_ERR_INVALID, "%s %u is NULL", what, k);
	if (c->on_device[side])
		return rb_explain(RB_ERR_INVALID, "%s has %ss in device memory; claim a request, and take their rows in place", c->model, what);
	return RB_OK;
}

/* Whether the caller's memory has the size of so many rows: an array of another type has not. */
static int check_bytes(rb_conn *c, int side, uint32_t rows, const uint64_t *bytes)
{
	const char *what = side == RB_INPUT ? "input" : "output";
	int status = bytes ? RB_OK : rb_explain(RB_ERR_INVALID, "the sizes of the %ss are NULL", what);
	pthread_mutex_lock(&c->mu);
	const rb_tensor *t = side == RB_INPUT ? c->layout.tensor : rb_tensors_of(&c->layout, RB_OUTPUT);
	for (uint32_t k = 0; !status && c->sized && !c->on_device[side] && k < (side == RB_INPUT ? c->inputs : c->outputs); k++)
		if (bytes[k] != rows * t[k].row_bytes)
			status = rb_explain(RB_ERR_SIZE, "%s \"%s\": %u rows of %s have %llu bytes, %llu were given", what, t[k].name,
				rows, rb_dtype_name(t[k].dtype), (unsigned long long)(rows * t[k].row_bytes), (unsigned long long)bytes[k]);
	pthread_mutex_unlock(&c->mu);
	return status;
}

/* Sends a plain request, or with a sequence its next step. */
static int submit(rb_conn *c, rb_seq *q, uint32_t rows, const void *const *inputs, int64_t timeout, int64_t claim_for, uint32_t flags,
	rb_req *r)
{
	if (!c->sized)
		return rb_explain(RB_ERR_SHAPE, "%s has variable dimensions; claim with their sizes", c->model);
	int status = rb_check_flags(flags, RB_NOTIFY | RB_HOLD);
	if (!status)
		status = check_side(c, RB_INPUT, inputs);
	if (!status)
		status = q ? rb_seq_request(c, q, NULL, 0, claim_for, r) : rb_req_claim(c, rows, NULL, 0, claim_for, r);
	if (status)
		return status;
	const rb_tensor *t = r->link->session.layout.tensor;
	for (uint32_t k = 0; k < c->inputs; k++)
		memcpy(rb_req_rows(r, &t[k]), inputs[k], rows * t[k].stride);
	if (flags & RB_HOLD)
		return RB_OK;
	status = rb_req_commit(c, r, 1, timeout, flags);
	if (status)
		rb_req_release(r);
	return status;
}

static int collect(rb_conn *c, const rb_req *r, void *const *outputs)
{
	if (!c->sized)
		return rb_explain(RB_ERR_SHAPE, "%s has variable dimensions; read its outputs with rb_output", c->model);
	int status = check_side(c, RB_OUTPUT, (const void *const *)outputs);
	if (status)
		return status;
	if ((status = rb_req_poll(r)) && status != RB_ERR_NOT_DONE && status != RB_ERR_NOT_COMMITTED)
		rb_req_release(r);
	if (status)
		return status;
	const rb_tensor *t = rb_tensors_of(&r->link->session.layout, RB_OUTPUT);
	uint32_t rows = rb_req_slot(r)->rows;
	for (uint32_t k = 0; k < c->outputs; k++)
		memcpy(outputs[k], rb_req_rows(r, &t[k]), rows * t[k].stride);
	return rb_req_release(r);
}

/* bytes: the sizes of the inputs and of the outputs. */
static int infer(rb_conn *c, rb_seq *q, uint32_t rows, const void *const *inputs, void *const *outputs, const uint64_t *const *bytes,
	int64_t timeout, int64_t slice, uint64_t *request)
{
	rb_req r;
	int status = check_side(c, RB_OUTPUT, (const void *const *)outputs); /* before the request is sent */
	int64_t until = rb_until(slice, rb_now());
	for (int side = RB_INPUT; !status && side <= RB_OUTPUT; side++)
		status = check_bytes(c, side, rows, bytes[side]);
	if (!status)
		status = submit(c, q, rows, inputs, timeout, slice, 0, &r);
	if (status)
		return status;
	if (q)
		*request = rb_req_id(&r); /* also of a step that has ended: for rb_sequence_undo */
	status = rb_req_wait(&r, until); /* waiting for slots counted */
	if (status == RB_ERR_TIMEOUT) {
		*request = rb_req_id(&r);
		return status;
	}
	return collect(c, &r, outputs);
}

static int step(rb_conn *c, uint64_t sequence, const void *const *inputs, void *const *outputs, const uint64_t *const *bytes,
	int64_t timeout, int64_t slice, uint64_t *request)
{
	rb_entry *e;
	int status = rb_seq_enter(c, sequence, &e);
	if (status)
		return status;
	rb_seq *q = e->value;
	status = infer(c, q, q->rows, inputs, outputs, bytes, timeout, slice, request);
	rb_seq_leave(e);
	return status;
}

/* ---- the functions of the header ------------------------------------------------- */

int rb_infer(rb_client client, uint32_t rows, const void *const *inputs, const uint64_t *input_bytes, void *const *outputs,
	const uint64_t *output_bytes, int64_t timeout, int64_t slice, uint64_t *request)
{
	if (request)
		*request = 0;
	const uint64_t *bytes[] = {input_bytes, output_bytes};
	WITH_CLIENT(request, client, infer(c, NULL, rows, inputs, outputs, bytes, timeout, slice, request));
}

int rb_submit(rb_client client, uint32_t rows, const void *const *inputs, const uint64_t *input_bytes, int64_t timeout, uint32_t flags,
	uint64_t *request)
{
	rb_req r;
	WITH_CLIENT(request, client, (status = check_bytes(c, RB_INPUT, rows, input_bytes)) ? status
		: (status = submit(c, NULL, rows, inputs, timeout, 0, flags, &r)) ? status : (*request = rb_req_id(&r), RB_OK));
}

int rb_collect(rb_client client, uint64_t request, void *const *outputs, const uint64_t *output_bytes)
{
	WITH_REQUEST(true, client, request, (status = check_bytes(c, RB_OUTPUT, rb_req_slot(&r)->rows, output_bytes)) ? status
		: collect(c, &r, outputs));
}

int rb_step(rb_client client, uint64_t sequence, const void *const *inputs, const uint64_t *input_bytes, void *const *outputs,
	const uint64_t *output_bytes, int64_t timeout, int64_t slice, uint64_t *request)
{
	if (request)
		*request = 0;
	const uint64_t *bytes[] = {input_bytes, output_bytes};
	WITH_CLIENT(request, client, step(c, sequence, inputs, outputs, bytes, timeout, slice, request));
}
