/* SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "internal.h"

/* ---- writing ------------------------------------------------------------ */

static void put(rb_writer *w, const void *data, size_t bytes)
{
	if (w->length + bytes > w->room) {
		size_t room = 2 * (w->length + bytes) + 256;
		uint8_t *more = w->failed ? NULL : realloc(w->data, room);
		if (!more) {
			w->failed = true;
			return;
		}
		w->data = more;
		w->room = room;
	}
	memcpy(w->data + w->length, data, bytes);
	w->length += bytes;
}

/* A kind, and a big-endian number of that many bytes. */
static void put_head(rb_writer *w, uint8_t kind, uint64_t n, int bytes)
{
	uint8_t head[9] = {kind};
	for (int i = 0; i < bytes; i++)
		head[1 + i] = (uint8_t)(n >> 8 * (bytes - 1 - i));
	put(w, head, 1 + (size_t)bytes);
}

void rb_put_map(rb_writer *w, uint32_t pairs) { pairs < 16 ? put_head(w, (uint8_t)(0x80 | pairs), 0, 0) : put_head(w, 0xdf, pairs, 4); }
void rb_put_array(rb_writer *w, uint32_t n) { n < 16 ? put_head(w, (uint8_t)(0x90 | n), 0, 0) : put_head(w, 0xdd, n, 4); }

void rb_put_text(rb_writer *w, const char *text, size_t bytes)
{
	bytes < 32 ? put_head(w, (uint8_t)(0xa0 | bytes), 0, 0) : put_head(w, 0xdb, bytes, 4);
	put(w, text, bytes);
}

void rb_put_string(rb_writer *w, const char *text) { rb_put_text(w, text, strlen(text)); }

void rb_put_word(rb_writer *w, const char *key, const char *text)
{
	rb_put_string(w, key);
	rb_put_string(w, text ? text : "");
}

void rb_put_number(rb_writer *w, const char *key, int64_t n)
{
	rb_put_string(w, key);
	n >= 0 && n < 128 ? put_head(w, (uint8_t)n, 0, 0) : put_head(w, 0xd3, (uint64_t)n, 8);
}

void rb_put_true(rb_writer *w, const char *key)
{
	rb_put_string(w, key);
	put_head(w, 0xc3, 0, 0);
}

/* ---- reading ------------------------------------------------------------ */

#define MAX_NESTING 8

static bool number(rb_reader *r, int bytes, uint64_t *n)
{
	if (r->end - r->at < bytes)
		return false;
	*n = 0;
	for (; bytes--; r->at++)
		*n = *n << 8 | *r->at;
	return true;
}

/* Kinds from 0xc0 on. A length of these bytes follows the kind; without one it counts as 0. */
static const struct {
	uint8_t length;
	uint8_t more;   /* bytes of the value beyond the length */
	uint8_t values; /* of a collection: values for each element */
} kinds[32] = {
	[0x04] = {.length = 1}, {.length = 2}, {.length = 4},                                /* binary */
	[0x07] = {.length = 1, .more = 1}, {.length = 2, .more = 1}, {.length = 4, .more = 1}, /* ext, with a type */
	[0x0a] = {.more = 4}, {.more = 8},                                                   /* floats */
	[0x0c] = {.more = 1}, {.more = 2}, {.more = 4}, {.more = 8},                         /* unsigned integers */
	[0x10] = {.more = 1}, {.more = 2}, {.more = 4}, {.more = 8},                         /* integers */
	[0x14] = {.more = 2}, {.more = 3}, {.more = 5}, {.more = 9}, {.more = 17},           /* fixext, with a type */
	[0x19] = {.length = 1}, {.length = 2}, {.length = 4},                                /* texts */
	[0x1c] = {.length = 2, .values = 1}, {.length = 4, .values = 1},                     /* arrays */
	[0x1e] = {.length = 2, .values = 2}, {.length = 4, .values = 2},                     /* maps */
};

/* Reads the kind and the length: the value goes on with that many bytes, then with that many values. */
static bool value_head(rb_reader *r, uint64_t *bytes, uint64_t *values)
{
	*bytes = *values = 0;
	if (r->at == r->end)
		return false;
	uint8_t kind = *r->at++;
	if (kind <= 0x7f || kind >= 0xe0) /* small integers */
		return true;
	if (kind <= 0x8f)
		*values = 2 * (kind & 0x0f);
	else if (kind <= 0x9f)
		*values = kind & 0x0f;
	else if (kind <= 0xbf)
		*bytes = kind & 0x1f;
	if (kind <= 0xbf)
		return true;
	uint64_t n = 0;
	kind -= 0xc0;
	if (kind == 1 || !number(r, kinds[kind].length, &n)) /* 0xc1 begins no value */
		return false;
	if (kinds[kind].values)
		*values = n * kinds[kind].values;
	else
		*bytes = n + kinds[kind].more;
	return true;
}

static bool skip(rb_reader *r, int depth)
{
	uint64_t bytes, values;
	if (depth == 0 || !value_head(r, &bytes, &values))
		return false;
	uint64_t left = (uint64_t)(r->end - r->at);
	if (bytes > left || values > left) /* a value is no longer than the message */
		return false;
	r->at += bytes;
	while (values--)
		if (!skip(r, depth - 1))
			return false;
	return true;
}

bool rb_skip_value(rb_reader *r) { return skip(r, MAX_NESTING); }

bool rb_check_message(const uint8_t *data, size_t bytes)
{
	rb_reader r = {data, data + bytes};
	return rb_skip_value(&r) && r.at == r.end;
}

static uint8_t next_kind(const rb_reader *r) { return r->at < r->end ? *r->at : 0; }

static bool collection(rb_reader *r, uint8_t fix, uint8_t wide, uint32_t each, uint32_t *n)
{
	uint64_t bytes, values;
	uint8_t kind = next_kind(r);
	if (((kind & 0xf0) != fix && kind != wide && kind != wide + 1) || !value_head(r, &bytes, &values))
		return false;
	*n = (uint32_t)(values / each);
	return true;
}

bool rb_get_map(rb_reader *r, uint32_t *pairs) { return collection(r, 0x80, 0xde, 2, pairs); }
bool rb_get_array(rb_reader *r, uint32_t *n) { return collection(r, 0x90, 0xdc, 1, n); }

bool rb_get_text(rb_reader *r, const char **text, uint32_t *bytes)
{
	uint64_t n, values;
	uint8_t kind = next_kind(r);
	if ((kind & 0xe0) != 0xa0 && (kind < 0xd9 || kind > 0xdb) && (kind < 0xc4 || kind > 0xc6))
		return false;
	if (!value_head(r, &n, &values) || n > (uint64_t)(r->end - r->at))
		return false;
	*text = (const char *)r->at;
	*bytes = (uint32_t)n;
	r->at += n;
	return true;
}

/* An integer of any width; a negative one is refused. */
bool rb_get_uint(rb_reader *r, uint64_t *n)
{
	uint8_t kind = next_kind(r);
	if (r->at++ == r->end || (kind > 0x7f && (kind < 0xcc || kind > 0xd3)))
		return false;
	*n = kind;
	int bytes = 1 << kind % 4; /* 0xcc and 0xd0: one byte */
	return kind <= 0x7f || (number(r, bytes, n) && (kind < 0xd0 || !(*n >> (8 * bytes - 1) & 1)));
}
