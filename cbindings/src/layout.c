/* SPDX-License-Identifier: Apache-2.0 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "internal.h"

static int check_side(rb_layout *l, int side, uint32_t count)
{
	const rb_tensor *t = rb_tensors_of(l, side);
	for (uint32_t k = 0; k < count; k++) {
		for (uint32_t j = 0; j < k; j++)
			if (!strcmp(t[j].name, t[k].name))
				return rb_explain(RB_ERR_INVALID, "tensor \"%s\" appears twice", t[k].name);
		l->dims_at[&t[k] - l->tensor] = (uint8_t)l->dims[side];
		l->on_device |= t[k].on_device;
		if (!t[k].row_bytes)
			return rb_explain(RB_ERR_INVALID, "tensor \"%s\": a dimension is 0, must be at least 1: only a state may be empty", t[k].name);
		for (uint32_t i = 0; i < t[k].rank; i++) {
			if (!(t[k].variable >> i & 1))
				continue;
			if (l->dims[side] == RB_DIMS)
				return rb_explain(RB_ERR_INVALID, "more than %d variable dimensions on one side", (int)RB_DIMS);
			l->most[side][l->dims[side]++] = (uint32_t)t[k].shape[i];
		}
	}
	return RB_OK;
}

/* The variable dimension of a side with that index, and its tensor. */
static const char *dim_name(const rb_layout *l, int side, uint32_t index, const rb_tensor **t)
{
	for (*t = rb_tensors_of(l, side);; ++*t)
		for (uint32_t i = 0; i < (*t)->rank; i++)
			if ((*t)->variable >> i & 1 && index-- == 0)
				return (*t)->dim[i];
}

/* The first dimension of a side, below end, with that name, or other. */
static uint32_t first_named(const rb_layout *l, int side, uint32_t end, const char *name, uint32_t other)
{
	const rb_tensor *t;
	for (uint32_t i = 0; *name && i < end; i++)
		if (!strcmp(dim_name(l, side, i, &t), name))
			return i;
	return other;
}

static int tie(rb_layout *l)
{
	const rb_tensor *t, *other;
	memset(&l->ties, 0, sizeof l->ties);
	for (int side = RB_INPUT; side <= RB_OUTPUT; side++)
		for (uint32_t i = 0; i < l->dims[side]; i++) {
			const char *name = dim_name(l, side, i, &t);
			uint32_t j = first_named(l, side, i, name, i), from = first_named(l, RB_INPUT, l->dims[RB_INPUT], name, UINT8_MAX);
			l->ties.same[side][i] = (uint8_t)j;
			if (side == RB_OUTPUT) {
				l->ties.from[i] = (int8_t)(uint8_t)from;
				l->ties.named |= from != UINT8_MAX;
			}
			int of = side == RB_OUTPUT && from != UINT8_MAX ? RB_INPUT : side;
			uint32_t at = of != side ? from : j;
			dim_name(l, of, at, &other);
			if (l->most[of][at] != l->most[side][i])
				return rb_explain(RB_ERR_INVALID, "%s has at most %u in \"%s\" and %u in \"%s\": tensors that share a dimension's name share "
					"its maximum", name, l->most[of][at], other->name, l->most[side][i], t->name);
		}
	return RB_OK;
}

static int differ(const rb_layout *l, int a, uint32_t i, uint32_t size, int b, uint32_t j, uint32_t other)
{
	static const char *const what[] = {"input", "output"};
	const rb_tensor *t, *u;
	const char *name = dim_name(l, a, i, &t);
	dim_name(l, b, j, &u);
	return rb_explain(RB_ERR_SHAPE, "%s \"%s\" has %u %s, %s \"%s\" has %u", what[a], t->name, size, name, what[b], u->name, other);
}

int rb_check_sizes(const rb_layout *l, const uint32_t *dims)
{
	for (uint32_t i = 0; i < l->dims[RB_INPUT]; i++)
		if (dims[i] != dims[l->ties.same[RB_INPUT][i]])
			return differ(l, RB_INPUT, l->ties.same[RB_INPUT][i], dims[l->ties.same[RB_INPUT][i]], RB_INPUT, i, dims[i]);
	return RB_OK;
}

int rb_check_output_sizes(const rb_layout *l, const uint32_t *given, const uint32_t *dims)
{
	for (uint32_t i = 0; i < l->dims[RB_OUTPUT]; i++) {
		int from = l->ties.from[i];
		uint32_t j = l->ties.same[RB_OUTPUT][i];
		if (from >= 0 && dims[i] != given[from])
			return differ(l, RB_INPUT, (uint32_t)from, given[from], RB_OUTPUT, i, dims[i]);
		if (dims[i] != dims[j])
			return differ(l, RB_OUTPUT, j, dims[j], RB_OUTPUT, i, dims[i]);
	}
	return RB_OK;
}

static int check_states(rb_layout *l)
{
	const rb_tensor *t = rb_tensors_of(l, RB_STATE), *other = l->tensor;
	for (uint32_t k = 0; k < l->states; k++) {
		while (other < &t[k] && strcmp(other->name, t[k].name))
			other++;
		if (other < &t[k])
			return rb_explain(RB_ERR_INVALID, "the state \"%s\" needs a name that no other tensor has", t[k].name);
		if (t[k].variable || t[k].rank == RB_MAX_RANK)
			return rb_explain(RB_ERR_INVALID, "the state \"%s\" has a variable dimension, or more than %d", t[k].name, RB_MAX_RANK - 1);
		other = l->tensor;
	}
	return RB_OK;
}

/* FNV-1a 64 over everything that the layout depends on. "->" comes before tensor `arrow`. */
static uint64_t geometry(const rb_layout *l, const rb_tensor *t, uint32_t count, uint32_t arrow)
{
	char text[2048];
	uint64_t h = UINT64_C(0xcbf29ce484222325);
	int n = snprintf(text, sizeof text, "ringbatch %d slots=%u max_batch=%u", (int)RB_GO_LAYOUT_VERSION, l->slots, l->max_batch);
	for (uint32_t k = 0;; k++) {
		for (int i = 0; i < n; i++)
			h = (h ^ (uint8_t)text[i]) * UINT64_C(0x100000001b3);
		if (k == count)
			return h;
		n = sprintf(text, "%s ", k == arrow ? " ->" : "");
		n += (int)rb_format_tensor(&t[k], text + n, sizeof text - 16);
	}
}

/* Lays tensors out one after the other. */
static int place_planes(rb_layout *l, rb_tensor *t, uint32_t count)
{
	l->planes_size = RB_GO_SEGMENT_HEADER;
	l->device_size = 0;
	for (uint32_t k = 0; k < count; k++) {
		uint64_t *at = t[k].on_device ? &l->device_size : &l->planes_size;
		if (t[k].stride > ((uint64_t)INT64_MAX - *at - RB_GO_DEVICE_GRAIN) / l->slots)
			return rb_explain(RB_ERR_INVALID, "%u slots of %" PRIu64 " bytes do not fit an address space", l->slots, t[k].stride);
		t[k].offset = *at;
		*at += t[k].stride * l->slots;
		*at = rb_round_up(*at ? *at : 1, RB_GO_PAGE); /* not 0, even if all on the device are empty */
	}
	l->device_size = rb_round_up(l->device_size, RB_GO_DEVICE_GRAIN);
	return RB_OK;
}

static bool same_tensor(const rb_tensor *a, const rb_tensor *b)
{
	char x[1024], y[1024];
	size_t n = rb_format_tensor(a, x, sizeof x);
	return n == rb_format_tensor(b, y, sizeof y) && !memcmp(x, y, rb_min((int64_t)n, sizeof x - 1));
}

bool rb_same_tensors(const rb_layout *a, const rb_layout *b)
{
	bool same = a->inputs == b->inputs && a->outputs == b->outputs && a->states == b->states;
	for (uint32_t k = 0; same && k < rb_tensors(a); k++)
		same = same_tensor(&a->tensor[k], &b->tensor[k]);
	return same;
}

static const rb_tensor step_words = {.name = "@step", .dtype = RB_U8, .rank = 1, .shape = {RB_STEP_BYTES}};

static int find_plane(const rb_tensor *plane, uint32_t planes, const rb_tensor *t, uint64_t *offset)
{
	for (uint32_t i = 0; i < planes; i++)
		if (same_tensor(&plane[i], t)) {
			*offset = plane[i].offset;
			return RB_OK;
		}
	return rb_explain(RB_ERR_LAYOUT, "the ring has no tensor \"%s\"", t->name);
}

int rb_layout_among(rb_layout *l, rb_tensor *plane, uint32_t planes)
{
	int status = place_planes(l, plane, planes);
	if (status)
		return status;
	for (uint32_t k = 0; k < rb_tensors(l) && !status; k++) {
		rb_tensor t = l->tensor[k];
		if (k >= l->inputs + l->outputs) { /* two halves: h:f32[64] is the plane h:f32[2,64] */
			memmove(t.shape + 1, t.shape, t.rank++ * sizeof *t.shape);
			t.shape[0] = 2;
			l->tensor[k].stride = 2 * t.row_bytes;
		}
		status = find_plane(plane, planes, &t, &l->tensor[k].offset);
	}
	if (!status && l->states)
		status = find_plane(plane, planes, &step_words, &l->steps_at);
	if (status)
		return status;
	l->geometry = geometry(l, plane, planes, planes);
	return RB_OK;
}

int rb_layout_place(rb_layout *l, uint32_t slots, uint32_t max_batch)
{
	if (!l->inputs || !l->outputs || rb_tensors(l) > RB_GO_MAX_TENSORS)
		return rb_explain(RB_ERR_INVALID, "a model needs at least one input and one output, %d tensors at most", (int)RB_GO_MAX_TENSORS);
	l->dims[0] = l->dims[1] = 0;
	l->on_device = false;
	int status = check_side(l, RB_INPUT, l->inputs);
	if (!status)
		status = check_side(l, RB_OUTPUT, l->outputs);
	if (!status)
		status = check_states(l);
	if (!status)
		status = tie(l);
	if (status)
		return status;
	if (slots < 1 || slots > RB_GO_MAX_SLOTS)
		return rb_explain(RB_ERR_INVALID, "slots is %u, must be 1..%d", slots, (int)RB_GO_MAX_SLOTS);
	if (max_batch < 1 || max_batch > RB_GO_MAX_BATCH_ROWS)
		return rb_explain(RB_ERR_INVALID, "max_batch_size is %u, must be 1..%d", max_batch, (int)RB_GO_MAX_BATCH_ROWS);
	l->slots = slots;
	l->max_batch = max_batch;
	if ((status = place_planes(l, l->tensor, l->inputs + l->outputs)))
		return status;
	l->words_at = rb_round_up(RB_GO_SEGMENT_HEADER + (uint64_t)slots * sizeof(rb_bell), RB_GO_PAGE);
	l->records_at = rb_round_up(l->words_at + (uint64_t)slots * 8, RB_GO_PAGE);
	l->reasons_at = rb_round_up(l->records_at + (uint64_t)slots * sizeof(rb_record), RB_GO_PAGE);
	l->board_size = rb_round_up(l->reasons_at + (uint64_t)slots * RB_GO_REASON_BYTES, RB_GO_PAGE);
	l->geometry = geometry(l, l->tensor, l->inputs + l->outputs, l->inputs);
	return RB_OK;
}

const rb_tensor *rb_growing(const rb_layout *l, uint32_t *dim)
{
	for (uint32_t k = l->inputs; k < l->inputs + l->outputs; k++)
		if (l->tensor[k].variable == 1 && !l->tensor[k].on_device) {
			*dim = l->dims_at[k];
			return &l->tensor[k];
		}
	return NULL;
}

int rb_no_growing(void)
{
	return rb_explain(RB_ERR_INVALID, "no output of the model can grow: declare one whose first dimension alone varies (text:u8[<=64])");
}

void rb_layout_free(rb_layout *l)
{
	free(l->tensor);
	l->tensor = NULL;
}

static uint64_t power_of_two(uint64_t n)
{
	uint64_t p = 1;
	while (p < n)
		p *= 2;
	return p;
}

uint64_t rb_commit_ring_size(uint32_t window) { return power_of_two(4 * (uint64_t)window); }
uint64_t rb_times_at(uint32_t window) { return RB_GO_SEGMENT_HEADER + rb_commit_ring_size(window) * sizeof(rb_commit_entry); }
uint64_t rb_client_segment_size(uint32_t window, bool times)
{
	return rb_round_up(rb_times_at(window) + (times ? 2 * (uint64_t)window * sizeof(rb_times) : 0), RB_GO_PAGE);
}
uint64_t rb_done_ring_size(uint32_t depth) { return power_of_two(2 * (uint64_t)depth); }
uint64_t rb_mails_at(uint32_t depth)
{
	return rb_round_up(RB_GO_SEGMENT_HEADER + rb_done_ring_size(depth) * sizeof(rb_done_entry), RB_GO_CACHE_LINE);
}
uint64_t rb_mail_size(uint32_t max_batch) { return sizeof(rb_mail) + sizeof(rb_mail_request) * (uint64_t)max_batch; }
uint64_t rb_worker_segment_size(uint32_t depth, uint32_t max_batch)
{
	return rb_round_up(rb_mails_at(depth) + depth * rb_mail_size(max_batch), RB_GO_PAGE);
}
