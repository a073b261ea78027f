/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <string.h>

#include "internal.h"

#define MAX_ROW_BYTES (UINT64_C(1) << 36)

static const struct {
	const char *name, *other; /* NumPy's name is accepted too */
	uint8_t bytes;
} dtypes[] = {
	[RB_BOOL] = {"bool", "bool", 1},
	[RB_U8] = {"u8", "uint8", 1},
	[RB_I8] = {"i8", "int8", 1},
	[RB_I16] = {"i16", "int16", 2},
	[RB_I32] = {"i32", "int32", 4},
	[RB_I64] = {"i64", "int64", 8},
	[RB_F16] = {"f16", "float16", 2},
	[RB_BF16] = {"bf16", "bfloat16", 2},
	[RB_F32] = {"f32", "float32", 4},
	[RB_F64] = {"f64", "float64", 8},
	[RB_STR] = {"str", "str", 1},
	[RB_F8E4M3FN] = {"f8e4m3fn", "float8_e4m3fn", 1},
	[RB_F8E5M2] = {"f8e5m2", "float8_e5m2", 1},
};

uint64_t rb_dtype_size(uint32_t dtype) { return dtypes[dtype].bytes; }
const char *rb_dtype_name(uint32_t dtype) { return dtypes[dtype].other; }

/* Whether a dimension may have that name. */
static bool valid_dim_name(const char *name, size_t bytes)
{
	for (size_t i = 0; i < bytes; i++) {
		bool letter = (name[i] | 0x20) >= 'a' && (name[i] | 0x20) <= 'z';
		if (!letter && (i == 0 || !((name[i] >= '0' && name[i] <= '9') || name[i] == '_')))
			return false;
	}
	return bytes <= RB_MAX_DIM_NAME_BYTES;
}

static int bad(const char *text, size_t bytes, const char *why)
{
	return rb_explain(RB_ERR_INVALID, "tensor \"%.*s\": %s (want name:dtype[dims], like x:f32[3,224,224] or tokens:i32[<=512])",
		(int)(bytes < 200 ? bytes : 200), text, why);
}

/* Whether a tensor may have that name. The broker checks that Unicode is printable. */
static bool valid_name(const char *name, size_t bytes)
{
	if (bytes == 0 || bytes > RB_MAX_NAME_BYTES || !rb_valid_utf8(name, bytes))
		return false;
	for (size_t i = 0; i < bytes; i++)
		if ((unsigned char)name[i] <= ' ' || name[i] == 0x7f || strchr(":[],", name[i]))
			return false;
	return true;
}

/* Reads the memory of a tensor: 0 for the host, else 1 + the number of the GPU. */
static bool parse_memory(const char *text, size_t bytes, uint8_t *on_device)
{
	uint32_t n = 0;
	if (rb_is(text, (uint32_t)bytes, "host") || rb_is(text, (uint32_t)bytes, "device")) {
		*on_device = text[0] == 'd';
		return true;
	}
	if (bytes < 8 || bytes > 10 || memcmp(text, "device:", 7))
		return false;
	for (size_t i = 7; i < bytes; i++) {
		if (text[i] < '0' || text[i] > '9')
			return false;
		n = 10 * n + (uint32_t)(text[i] - '0');
	}
	*on_device = (uint8_t)(1 + n);
	return n < RB_GO_MAX_DEVICES;
}

int rb_parse_tensor(const char *text, size_t bytes, rb_tensor *t)
{
	memset(t, 0, sizeof *t);
	const char *end = text + bytes, *colon = memchr(text, ':', bytes);
	if (!colon)
		return bad(text, bytes, "no colon");
	const char *open = memchr(colon, '[', (size_t)(end - colon));
	const char *at_memory = open ? memmem(open, (size_t)(end - open), "]@", 2) : NULL;
	if (at_memory) {
		if (!parse_memory(at_memory + 2, (size_t)(end - at_memory - 2), &t->on_device))
			return bad(text, bytes, "behind @ stands host, device or device:N, N below 64");
		end = at_memory + 1;
	}
	if (!open || end[-1] != ']')
		return bad(text, bytes, "no [dims]");
	if (!valid_name(text, (size_t)(colon - text)))
		return bad(text, bytes, "a name has 1..128 bytes, printable, without : [ ] , or blanks");
	memcpy(t->name, text, (size_t)(colon - text));
	uint32_t dtype_bytes = (uint32_t)(open - colon - 1);
	for (uint32_t d = RB_BOOL; d <= RB_F8E5M2; d++)
		if (rb_is(colon + 1, dtype_bytes, dtypes[d].name) || rb_is(colon + 1, dtype_bytes, dtypes[d].other))
			t->dtype = d;
	if (!t->dtype)
		return bad(text, bytes, "unknown dtype");
	uint64_t size = dtypes[t->dtype].bytes; /* a dimension of 0 counts as 1 */
	bool empty = false;
	const char *at = open + 1, *last = end - 1;
	while (at < last) {
		if (t->rank == RB_MAX_RANK)
			return bad(text, bytes, "more than 8 dimensions");
		while (at < last && rb_blank(*at))
			at++;
		const char *comma = memchr(at, ',', (size_t)(last - at)), *most = memmem(at, (size_t)((comma ? comma : last) - at), "<=", 2);
		if (most) {
			t->variable |= 1u << t->rank;
			const char *name_end = most;
			while (name_end > at && rb_blank(name_end[-1]))
				name_end--;
			if (!valid_dim_name(at, (size_t)(name_end - at)))
				return bad(text, bytes, "a dimension's name is a letter, then letters, digits and _, 31 at most");
			memcpy(t->dim[t->rank], at, (size_t)(name_end - at));
			for (at = most + 2; at < last && rb_blank(*at);)
				at++;
		}
		uint64_t n = 0;
		const char *digits = at;
		for (; at < last && *at >= '0' && *at <= '9' && n <= MAX_ROW_BYTES; at++)
			n = 10 * n + (uint64_t)(*at - '0');
		if (at == digits)
			return bad(text, bytes, "a dimension is not a number");
		while (at < last && rb_blank(*at))
			at++;
		if (n < 1 && t->variable >> t->rank & 1)
			return bad(text, bytes, "a dimension is 0, must be at least 1");
		if (n > MAX_ROW_BYTES / size)
			return bad(text, bytes, "a row is larger than 68719476736 bytes");
		if (t->variable >> t->rank & 1 && n > UINT32_MAX) /* sizes travel as u32 */
			return bad(text, bytes, "a variable dimension is at most 4294967295");
		t->shape[t->rank++] = n;
		size *= n ? n : 1;
		empty |= !n;
		if (at < last && (*at++ != ',' || at == last))
			return bad(text, bytes, "a dimension is not a number");
	}
	if (t->dtype == RB_STR && (!t->rank || t->variable != 1u << (t->rank - 1) || *t->dim[t->rank - 1] || t->on_device))
		return bad(text, bytes, "a str has its most bytes last, and only them with <=: str[<=256]; it is in host memory");
	if (t->dtype == RB_STR)
		t->variable = 0; /* its memory is fixed */
	if (t->on_device && t->variable)
		return bad(text, bytes, "a tensor in device memory has no variable dimensions");
	t->stride = t->row_bytes = empty ? 0 : size;
	return RB_OK;
}

size_t rb_format_tensor(const rb_tensor *t, char *to, size_t room)
{
	size_t n = (size_t)snprintf(to, room, "%s:%s[", t->name, dtypes[t->dtype].name);
	for (uint32_t i = 0; i < t->rank; i++)
		n += (size_t)snprintf(n < room ? to + n : NULL, n < room ? room - n : 0, "%s%s%s%llu", i ? "," : "", t->dim[i],
				      t->variable >> i & 1 || (t->dtype == RB_STR && i + 1 == t->rank) ? "<=" : "",
				      (unsigned long long)t->shape[i]);
	n += (size_t)snprintf(n < room ? to + n : NULL, n < room ? room - n : 0, "]");
	if (t->on_device)
		n += (size_t)snprintf(n < room ? to + n : NULL, n < room ? room - n : 0, "@device:%d", t->on_device - 1);
	return n;
}

/* Reads the tensors of one side, separated by blanks. Behind the outputs, the word state begins the states. */
static int parse_side(const char *at, const char *end, rb_layout *l, uint32_t *count)
{
	for (;;) {
		while (at < end && rb_blank(*at))
			at++;
		if (at == end)
			return RB_OK;
		const char *from = at;
		while (at < end && !rb_blank(*at))
			at++;
		if (count == &l->outputs && rb_is(from, (uint32_t)(at - from), "state")) {
			count = &l->states;
			continue;
		}
		if (rb_tensors(l) == RB_GO_MAX_TENSORS)
			return rb_explain(RB_ERR_INVALID, "a model has at most %d tensors", (int)RB_GO_MAX_TENSORS);
		int status = rb_parse_tensor(from, (size_t)(at - from), &l->tensor[rb_tensors(l)]);
		if (status)
			return status;
		++*count;
	}
}

int rb_parse_signature(const char *text, rb_layout *l)
{
	memset(l, 0, sizeof *l);
	const char *arrow = strstr(text, "->");
	if (!arrow)
		return rb_explain(RB_ERR_INVALID, "signature \"%.200s\" has no \"->\"", text);
	l->tensor = calloc(RB_GO_MAX_TENSORS, sizeof *l->tensor);
	if (!l->tensor)
		return rb_say(RB_ERR_NO_MEMORY);
	int status = parse_side(text, arrow, l, &l->inputs);
	return status ? status : parse_side(arrow + 2, text + strlen(text), l, &l->outputs);
}

int rb_pick(const rb_layout *l, int side, uint32_t k, const rb_tensor **t, uint32_t *dims_at)
{
	if (side < RB_INPUT || side > RB_NEXT_STATE)
		return rb_explain(RB_ERR_INVALID, "side %d, must be RB_INPUT, RB_OUTPUT, RB_STATE or RB_NEXT_STATE", side);
	uint32_t count = side == RB_INPUT ? l->inputs : side == RB_OUTPUT ? l->outputs : l->states;
	if (k >= count)
		return rb_explain(RB_ERR_INVALID, "tensor %u of %u", k, count);
	*t = rb_tensors_of(l, side) + k;
	*dims_at = l->dims_at[*t - l->tensor];
	return RB_OK;
}

int rb_check_on_host(const rb_tensor *t)
{
	if (!t->on_device)
		return RB_OK;
	return rb_explain(RB_ERR_INVALID, "\"%s\" lies in device memory: take its rows in place", t->name);
}

uint64_t rb_row_bytes(const rb_tensor *t, const uint32_t *dims)
{
	uint64_t n = dtypes[t->dtype].bytes;
	for (uint32_t i = 0; i < t->rank; i++)
		n *= t->variable >> i & 1 ? *dims++ : t->shape[i];
	return n;
}

void rb_fill_view(rb_view *v, const rb_tensor *t, const uint32_t *dims, uint8_t *base, uint32_t slot, uint32_t rows)
{
	*v = (rb_view){.data = base + t->offset + slot * t->stride, .bytes = rows * t->stride, .stride = t->stride,
		.dtype = t->dtype, .rank = 1 + t->rank};
	v->shape[0] = rows;
	for (uint32_t i = 0; i < t->rank; i++)
		v->shape[1 + i] = t->variable >> i & 1 ? *dims++ : t->shape[i];
}

/* ---- texts ------------------------------------------------------------------------ */

#define TEXT_END 0xff /* not a byte of UTF-8 */

int rb_text_write(void *to, uint64_t most, const char *text, uint64_t bytes)
{
	if (!to || !text)
		return rb_explain(RB_ERR_INVALID, "the text, or the memory for it, is NULL");
	if (bytes > most)
		return rb_explain(RB_ERR_SIZE, "a text of %llu bytes, at most %llu: shorten it, or declare str[<=%llu]", (unsigned long long)bytes,
			(unsigned long long)most, (unsigned long long)bytes);
	if (!rb_valid_utf8(text, bytes))
		return rb_explain(RB_ERR_DTYPE, "a text that is not UTF-8; bytes of other kinds are u8");
	memmove(to, text, bytes);
	memset((uint8_t *)to + bytes, TEXT_END, most - bytes);
	return RB_OK;
}

int rb_text_size(const void *from, uint64_t most, uint64_t *bytes)
{
	if (!from || !bytes)
		return rb_explain(RB_ERR_INVALID, "the text, or the memory for its size, is NULL");
	const uint8_t *end = memchr(from, TEXT_END, most);
	*bytes = end ? (uint64_t)(end - (const uint8_t *)from) : most;
	return rb_valid_utf8(from, *bytes) ? RB_OK : rb_explain(RB_ERR_DTYPE, "the text is not UTF-8");
}

int rb_check_texts(const char *what, const rb_tensor *t, const uint8_t *rows, uint32_t count, uint64_t *longest)
{
	uint64_t size, most = t->shape[t->rank - 1];
	for (uint64_t at = 0; at < count * t->row_bytes; at += most) {
		if (rb_text_size(rows + at, most, &size))
			return rb_fail(RB_ERR_DTYPE, "%s \"%s\", row %llu: %s: the text is not UTF-8", what, t->name,
				(unsigned long long)(at / t->row_bytes), rb_status_text(RB_ERR_DTYPE));
		*longest = size > *longest ? size : *longest;
	}
	return RB_OK;
}
