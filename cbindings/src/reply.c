/* SPDX-License-Identifier: Apache-2.0 */
/* Reads what a broker replies. Whether its numbers hang together is checked in attach.c. */
#include <inttypes.h>
#include <string.h>

#include "reply.h"

int rb_malformed(const char *what) { return rb_explain(RB_ERR_PROTOCOL, "the reply's %s", what); }

/* Reads needs, a map. */
static bool read_needs(rb_reader *r, rb_reply *p)
{
	uint32_t pairs, bytes;
	const char *key;
	if (!rb_get_map(r, &pairs))
		return false;
	p->needs = true;
	while (pairs--) {
		bool good = rb_get_text(r, &key, &bytes);
		rb_reader value = *r;
		if (!good || !rb_skip_value(r))
			return false;
		value.end = r->at;
		if ((rb_is(key, bytes, "bytes") && !rb_get_uint(&value, &p->needed)) ||
		    (rb_is(key, bytes, "device") && !rb_get_uint(&value, &p->needed_on)))
			return false;
	}
	return true;
}

/* Reads attached, a map. */
static bool read_attached(rb_reader *r, rb_reply *p)
{
	const struct {
		const char *key;
		uint64_t *to;
	} numbers[] = {
		{"slots", &p->slots}, {"max_batch", &p->max_batch}, {"geometry", &p->geometry}, {"planes_size", &p->planes_size},
		{"board_size", &p->board_size}, {"session_size", &p->session_size}, {"first_slot", &p->first_slot}, {"window", &p->window},
		{"first_gen", &p->first_gen}, {"depth", &p->depth}, {"clock", &p->clock}, {"max_rows", &p->max_rows},
		{"device_size", &p->device_size},
	};
	const struct {
		const char *key;
		rb_reader *to;
	} values[] = {{"inputs", &p->inputs}, {"outputs", &p->outputs}, {"policy", &p->policy}, {"notes", &p->notes}, {"planes", &p->planes}};
	uint32_t pairs, bytes;
	const char *key;
	if (!rb_get_map(r, &pairs))
		return false;
	p->attached = true;
	while (pairs--) {
		if (!rb_get_text(r, &key, &bytes))
			return false;
		rb_reader value = *r;
		if (!rb_skip_value(r))
			return false;
		value.end = r->at;
		if (rb_is(key, bytes, "times"))
			p->times = value.at < value.end && *value.at == 0xc3;
		if (rb_is(key, bytes, "hands_on"))
			p->hands_on = value.at < value.end && *value.at == 0xc3;
		if (rb_is(key, bytes, "model") && !rb_get_text(&value, &p->model, &p->model_bytes))
			return false;
		if (rb_is(key, bytes, "gpu") && !rb_get_text(&value, &p->gpu, &p->gpu_bytes))
			return false;
		for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
			if (rb_is(key, bytes, numbers[i].key) && !rb_get_uint(&value, numbers[i].to))
				return false;
		for (size_t i = 0; i < sizeof values / sizeof *values; i++)
			if (rb_is(key, bytes, values[i].key))
				*values[i].to = value;
	}
	return true;
}

int rb_read_reply(const rb_frame *f, rb_reply *p)
{
	memset(p, 0, sizeof *p);
	rb_reader r = {f->body, f->body + f->bytes};
	uint32_t pairs, bytes;
	const char *key;
	if (!rb_check_message(f->body, f->bytes) || !rb_get_map(&r, &pairs))
		return rb_malformed("body is no message");
	while (pairs--) {
		bool good = rb_get_text(&r, &key, &bytes);
		rb_reader value = r;
		good = good && rb_skip_value(&r);
		value.end = r.at;
		if (good && rb_is(key, bytes, "code"))
			good = rb_get_uint(&value, &p->code);
		else if (good && rb_is(key, bytes, "version"))
			good = rb_get_uint(&value, &p->version);
		else if (good && rb_is(key, bytes, "epoch"))
			good = rb_get_uint(&value, &p->epoch);
		else if (good && rb_is(key, bytes, "message"))
			good = rb_get_text(&value, &p->message, &p->message_bytes);
		else if (good && rb_is(key, bytes, "stats") && value.at < value.end && *value.at != 0xc0)
			good = rb_get_text(&value, &p->stats, &p->stats_bytes);
		else if (good && rb_is(key, bytes, "more"))
			p->more = value.at < value.end && *value.at == 0xc3;
		else if (good && rb_is(key, bytes, "attached") && value.at < value.end && *value.at != 0xc0)
			good = read_attached(&value, p);
		else if (good && rb_is(key, bytes, "needs") && value.at < value.end && *value.at != 0xc0)
			good = read_needs(&value, p);
		if (!good)
			return rb_malformed("values are of other kinds than expected");
	}
	if (p->code) {
		int code = p->code < RB_STATUS_COUNT ? (int)p->code : RB_ERR_PROTOCOL;
		return p->message_bytes ? rb_fail(code, "%.*s", (int)p->message_bytes, p->message) : rb_say(code);
	}
	if (p->version != RB_GO_CONTROL_VERSION)
		return rb_explain(RB_ERR_VERSION, "broker speaks control version %" PRIu64 ", this build %d", p->version, (int)RB_GO_CONTROL_VERSION);
	return RB_OK;
}
