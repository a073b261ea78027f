/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A model's policy as it travels: texts by key. The broker knows the keys and
 * checks the texts (Go's package policy). The library splits a worker's policy
 * into keys and texts, and reads the few texts that it needs itself.
 */
#include <string.h>

#include "internal.h"

/* One key=value of a text; without a key at its end. */
typedef struct {
	const char *key, *value;
	size_t key_bytes, value_bytes;
} pair;

static int next_pair(const char **text, pair *p)
{
	while (rb_blank(**text))
		++*text;
	const char *from = *text, *equals = NULL;
	for (; **text && !rb_blank(**text); ++*text)
		if (**text == '=') /* the last one: a tensor's name may contain "=" */
			equals = *text;
	*p = (pair){.key = from};
	if (from == *text)
		return RB_OK;
	if (!equals || equals == from)
		return rb_explain(RB_ERR_INVALID, "\"%.*s\" is not key=value", (int)(*text - from), from);
	*p = (pair){from, equals + 1, (size_t)(equals - from), (size_t)(*text - equals - 1)};
	return RB_OK;
}

int rb_put_policy(rb_writer *w, const char *text)
{
	uint32_t count = 0;
	pair p, q;
	const char *at = text ? text : "";
	for (int status;; count++) {
		if ((status = next_pair(&at, &p)))
			return status;
		if (!p.key_bytes)
			break;
		const char *before = text;
		for (uint32_t i = 0; i < count; i++) {
			next_pair(&before, &q);
			if (q.key_bytes == p.key_bytes && !memcmp(q.key, p.key, p.key_bytes))
				return rb_explain(RB_ERR_INVALID, "%.*s is set twice", (int)p.key_bytes, p.key);
		}
	}
	rb_put_string(w, "policy");
	rb_put_map(w, count);
	for (at = text ? text : ""; count--;) {
		next_pair(&at, &p);
		rb_put_text(w, p.key, p.key_bytes);
		rb_put_text(w, p.value, p.value_bytes);
	}
	return RB_OK;
}

static int malformed(const char *key, uint32_t bytes)
{
	return rb_explain(RB_ERR_PROTOCOL, "the policy's %.*s", (int)bytes, key);
}

/* Reads digits; false if there is none, or more than 18. */
static bool number(const char **at, const char *end, uint64_t *n)
{
	const char *from = *at;
	for (*n = 0; *at < end && **at >= '0' && **at <= '9'; ++*at)
		if (*at - from == 18)
			return false;
		else
			*n = 10 * *n + (uint64_t)(**at - '0');
	return *at > from;
}

/* A whole number with one unit, as the broker writes it; 0 for any other text. */
static int64_t duration(const char *text, uint32_t bytes)
{
	static const struct {
		const char *name;
		int64_t ns;
	} units[] = {{"s", SECOND}, {"ms", MILLISECOND}, {"us", MICROSECOND}, {"ns", 1}};
	const char *at = text, *end = text + bytes;
	uint64_t n;
	int64_t ns;
	if (!number(&at, end, &n))
		return 0;
	for (size_t i = 0; i < sizeof units / sizeof *units; i++)
		if (rb_is(at, (uint32_t)(end - at), units[i].name) && !__builtin_mul_overflow((int64_t)n, units[i].ns, &ns))
			return ns;
	return 0;
}

/* Finds the variable input dimension NAME.DIMENSION. */
static bool find_dimension(const rb_layout *l, const char *name, uint32_t bytes, uint32_t *index)
{
	const char *end = name + bytes, *dot = memrchr(name, '.', bytes), *at = dot ? dot + 1 : NULL;
	uint64_t dimension;
	if (!dot || !number(&at, end, &dimension) || at != end)
		return false;
	*index = 0;
	for (uint32_t k = 0; k < l->inputs; k++) {
		const rb_tensor *t = &l->tensor[k];
		bool this = rb_is(name, (uint32_t)(dot - name), t->name);
		for (uint32_t i = 0; i < t->rank; i++) {
			if (!(t->variable >> i & 1))
				continue;
			if (this && i == dimension)
				return true;
			++*index;
		}
	}
	return false;
}

/* Reads sizes with commas between them, none beyond the dimension's maximum. */
static bool read_buckets(rb_session *s, uint32_t i, const char *text, uint32_t bytes)
{
	const char *at = text, *end = text + bytes;
	uint64_t n;
	uint32_t *sizes = calloc(bytes / 2 + 1, sizeof *sizes), count = 0;
	free(s->bucket[i]);
	s->bucket[i] = sizes;
	s->buckets[i] = 0;
	while (sizes && at < end) {
		if (!number(&at, end, &n) || n > s->layout.most[RB_INPUT][i] || (at < end && *at++ != ','))
			return false;
		sizes[count++] = (uint32_t)n;
	}
	s->buckets[i] = count;
	return sizes != NULL;
}

int rb_read_policy(rb_reader r, rb_session *s)
{
	uint32_t pairs, bytes, length, i;
	const char *key, *text;
	s->levels = 1;
	if (!r.at)
		return RB_OK;
	if (!rb_get_map(&r, &pairs))
		return malformed("shape", 5);
	while (pairs--) {
		if (!rb_get_text(&r, &key, &bytes) || !rb_get_text(&r, &text, &length))
			return malformed("values", 6);
		if (rb_is(key, bytes, "wait_time"))
			s->wait_time = rb_is(text, length, "auto") ? -1 : duration(text, length);
		if (rb_is(key, bytes, "ragged"))
			s->ragged = rb_is(text, length, "true");
		if (rb_is(key, bytes, "priorities")) {
			const char *at = text;
			uint64_t n;
			if (!number(&at, text + length, &n) || n < 1 || n > INT8_MAX)
				return malformed(key, bytes);
			s->levels = (uint32_t)n;
		}
		bool buckets = bytes > 8 && !memcmp(key, "buckets.", 8);
		if (buckets && (!find_dimension(&s->layout, key + 8, bytes - 8, &i) || !read_buckets(s, i, text, length)))
			return malformed(key, bytes);
	}
	return RB_OK;
}
