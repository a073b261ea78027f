/* SPDX-License-Identifier: Apache-2.0 */
/* Decodes a broker's reply. attach.c checks its numbers against one another. */
#include <inttypes.h>
#include <string.h>

#include "reply.h"

int rb_malformed(const char *what) { return rb_explain(RB_ERR_PROTOCOL, "the reply's %s", what); }

/* A key of a map, and where its value goes: a uint64_t, a text with its bytes, a bool, or a reader at the value. */
typedef struct {
	const char *key;
	enum { NUMBER, TEXT, FLAG, VALUE } kind;
	void *to;
	uint32_t *bytes;
} field;

static bool read_field(const field *f, rb_reader value)
{
	switch (f->kind) {
	case NUMBER:
		return rb_get_uint(&value, f->to);
	case TEXT:
		return rb_get_text(&value, f->to, f->bytes);
	case FLAG:
		*(bool *)f->to = *value.at == 0xc3;
		return true;
	case VALUE:
		*(rb_reader *)f->to = value;
	}
	return true;
}

/* Reads a map. Keys without a field, and values that are nil, are left out. */
static bool read_fields(rb_reader *r, const field *fields, size_t count)
{
	uint32_t pairs, bytes;
	const char *key;
	if (!rb_get_map(r, &pairs))
		return false;
	while (pairs--) {
		bool good = rb_get_text(r, &key, &bytes);
		rb_reader value = *r;
		if (!good || !rb_skip_value(r))
			return false;
		value.end = r->at;
		for (size_t i = 0; i < count && *value.at != 0xc0; i++)
			if (rb_is(key, bytes, fields[i].key) && !read_field(&fields[i], value))
				return false;
	}
	return true;
}

#define READ(reader, fields) read_fields(reader, fields, sizeof fields / sizeof *fields)

int rb_read_reply(const rb_frame *f, rb_reply *p)
{
	memset(p, 0, sizeof *p);
	rb_reader r = {f->body, f->body + f->bytes}, attached = {0}, needs = {0};
	const field reply[] = {
		{"code", NUMBER, &p->code, NULL}, {"version", NUMBER, &p->version, NULL}, {"epoch", NUMBER, &p->epoch, NULL},
		{"message", TEXT, &p->message, &p->message_bytes}, {"stats", TEXT, &p->stats, &p->stats_bytes},
		{"more", FLAG, &p->more, NULL}, {"attached", VALUE, &attached, NULL}, {"needs", VALUE, &needs, NULL},
		{"weights", VALUE, &p->weights, NULL},
	};
	const field session[] = {
		{"slots", NUMBER, &p->slots, NULL}, {"max_batch", NUMBER, &p->max_batch, NULL}, {"geometry", NUMBER, &p->geometry, NULL},
		{"planes_size", NUMBER, &p->planes_size, NULL}, {"board_size", NUMBER, &p->board_size, NULL},
		{"session_size", NUMBER, &p->session_size, NULL}, {"first_slot", NUMBER, &p->first_slot, NULL},
		{"window", NUMBER, &p->window, NULL}, {"first_gen", NUMBER, &p->first_gen, NULL}, {"depth", NUMBER, &p->depth, NULL},
		{"clock", NUMBER, &p->clock, NULL}, {"max_rows", NUMBER, &p->max_rows, NULL}, {"device_size", NUMBER, &p->device_size, NULL},
		{"times", FLAG, &p->times, NULL}, {"hands_on", FLAG, &p->hands_on, NULL}, {"isolates", FLAG, &p->isolates, NULL},
		{"model", TEXT, &p->model, &p->model_bytes}, {"gpu", TEXT, &p->gpu, &p->gpu_bytes},
		{"inputs", VALUE, &p->inputs, NULL}, {"outputs", VALUE, &p->outputs, NULL}, {"policy", VALUE, &p->policy, NULL},
		{"state", VALUE, &p->state, NULL}, {"notes", VALUE, &p->notes, NULL}, {"planes", VALUE, &p->planes, NULL},
	};
	const field device[] = {{"bytes", NUMBER, &p->needed, NULL}, {"device", NUMBER, &p->needed_on, NULL}};
	if (!rb_check_message(f->body, f->bytes))
		return rb_malformed("body is no message");
	if (!READ(&r, reply) || (attached.at && !READ(&attached, session)) || (needs.at && !READ(&needs, device)))
		return rb_malformed("values are of other kinds than expected");
	p->attached = attached.at;
	p->needs = needs.at;
	if (p->code) {
		int code = p->code < RB_STATUS_COUNT ? (int)p->code : RB_ERR_PROTOCOL;
		return p->message_bytes ? rb_fail(code, "%.*s", (int)p->message_bytes, p->message) : rb_say(code);
	}
	if (p->version < RB_GO_CONTROL_VERSION)
		return rb_explain(RB_ERR_VERSION, "the broker speaks control version %" PRIu64 ", this program %d; bring the broker up to date",
			p->version, (int)RB_GO_CONTROL_VERSION);
	return RB_OK;
}
