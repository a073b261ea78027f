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

/* A byte that says what follows, and a big-endian number of so many bytes. */
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

/* What a value is made of: so many bytes, then so many values. */
static bool value_head(rb_reader *r, uint64_t *bytes, uint64_t *values)
{
	*bytes = *values = 0;
	if (r->at == r->end)
		return false;
	uint8_t kind = *r->at++;
	if (kind <= 0x7f || kind >= 0xe0) /* small integers */
		return true;
	if (kind <= 0x8f) {
		*values = 2 * (kind & 0x0f);
		return true;
	}
	if (kind <= 0x9f) {
		*values = kind & 0x0f;
		return true;
	}
	if (kind <= 0xbf) {
		*bytes = kind & 0x1f;
		return true;
	}
	switch (kind) {
	case 0xc0: case 0xc2: case 0xc3: /* nil, false, true */
		return true;
	case 0xcc: case 0xd0:
		*bytes = 1;
		return true;
	case 0xcd: case 0xd1:
		*bytes = 2;
		return true;
	case 0xca: case 0xce: case 0xd2:
		*bytes = 4;
		return true;
	case 0xcb: case 0xcf: case 0xd3:
		*bytes = 8;
		return true;
	case 0xd4: case 0xd5: case 0xd6: case 0xd7: case 0xd8: /* fixext, with its type */
		*bytes = 1 + (UINT64_C(1) << (kind - 0xd4));
		return true;
	case 0xc4: case 0xd9: /* a length follows */
		return number(r, 1, bytes);
	case 0xc5: case 0xda:
		return number(r, 2, bytes);
	case 0xc6: case 0xdb:
		return number(r, 4, bytes);
	case 0xc7: case 0xc8: case 0xc9: /* ext: its type too */
		return number(r, 1 << (kind - 0xc7), bytes) && ++*bytes;
	case 0xdc:
		return number(r, 2, values);
	case 0xdd:
		return number(r, 4, values);
	case 0xde: case 0xdf:
		if (!number(r, kind == 0xde ? 2 : 4, values))
			return false;
		*values *= 2;
		return true;
	}
	return false; /* 0xc1 begins no value */
}

static bool skip(rb_reader *r, int depth)
{
	uint64_t bytes, values;
	if (depth == 0 || !value_head(r, &bytes, &values))
		return false;
	uint64_t left = (uint64_t)(r->end - r->at);
	if (bytes > left || values > left) /* what is promised must fit what has arrived */
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

static bool collection(rb_reader *r, uint8_t fix, uint8_t wide, uint32_t *n)
{
	uint64_t count;
	if (r->at == r->end)
		return false;
	uint8_t kind = *r->at;
	if ((kind & 0xf0) == fix) {
		r->at++;
		*n = kind & 0x0f;
		return true;
	}
	if (kind != wide && kind != wide + 1)
		return false;
	r->at++;
	if (!number(r, kind == wide ? 2 : 4, &count))
		return false;
	*n = (uint32_t)count;
	return true;
}

bool rb_get_map(rb_reader *r, uint32_t *pairs) { return collection(r, 0x80, 0xde, pairs); }
bool rb_get_array(rb_reader *r, uint32_t *n) { return collection(r, 0x90, 0xdc, n); }

bool rb_get_text(rb_reader *r, const char **text, uint32_t *bytes)
{
	uint64_t n;
	if (r->at == r->end)
		return false;
	uint8_t kind = *r->at++;
	if ((kind & 0xe0) == 0xa0)
		n = kind & 0x1f;
	else if (kind == 0xd9 || kind == 0xc4	? !number(r, 1, &n)
		 : kind == 0xda || kind == 0xc5 ? !number(r, 2, &n)
						: (kind != 0xdb && kind != 0xc6) || !number(r, 4, &n))
		return false;
	if (n > (uint64_t)(r->end - r->at))
		return false;
	*text = (const char *)r->at;
	*bytes = (uint32_t)n;
	r->at += n;
	return true;
}

/* An integer of any width, and whether it is below zero. */
static bool integer(rb_reader *r, uint64_t *n, bool *negative)
{
	if (r->at == r->end)
		return false;
	uint8_t kind = *r->at++;
	*negative = false;
	if (kind <= 0x7f) {
		*n = kind;
	} else if (kind >= 0xe0) {
		*n = (uint64_t)(int64_t)(int8_t)kind;
		*negative = true;
	} else if (kind >= 0xcc && kind <= 0xcf) {
		return number(r, 1 << (kind - 0xcc), n);
	} else if (kind >= 0xd0 && kind <= 0xd3) {
		int bits = 8 << (kind - 0xd0);
		if (!number(r, bits / 8, n))
			return false;
		*negative = *n >> (bits - 1) & 1;
		if (*negative && bits < 64)
			*n |= ~UINT64_C(0) << bits;
	} else {
		return false;
	}
	return true;
}

bool rb_get_uint(rb_reader *r, uint64_t *n)
{
	bool negative;
	return integer(r, n, &negative) && !negative;
}
