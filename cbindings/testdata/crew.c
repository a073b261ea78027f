/* SPDX-License-Identifier: Apache-2.0 */
/* The gathering crew against a plain loop: jobs in turn, two and three at a time, into the same memory, and abandoned.
 * And the counts of cores and pages. */
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "src/worker.h"

#define SLOTS 64u
#define SIZE (96u << 10)
#define STRIDE (100u << 10)
#define MOST_ROWS 32u
#define BATCHES 3u

#define FAIL(...) (printf(__VA_ARGS__), exit(1))

static uint8_t plane[SLOTS * STRIDE], gathered[BATCHES][MOST_ROWS * SIZE];
static uint32_t slots[BATCHES][MOST_ROWS];
static uint64_t starts[BATCHES][MOST_ROWS + 1];
static uint32_t seed;

static uint32_t below(uint32_t n)
{
	seed = seed * 1664525u + 1013904223u;
	return (seed >> 8) % n;
}

/* Random rows, enough of them for the crew; of one size, or each of its own and some empty. */
static rb_rows some_rows(uint32_t batch)
{
	rb_rows r = {.plane = plane, .slot = slots[batch], .count = 16 + below(MOST_ROWS - 15), .size = SIZE, .stride = STRIDE};
	r.start = below(2) ? starts[batch] : NULL;
	for (uint32_t i = 0; i < r.count; i++) {
		slots[batch][i] = below(SLOTS);
		starts[batch][i + 1] = starts[batch][i] + (i % 8 == 3 ? 0 : SIZE - below(8 << 10));
	}
	memset(gathered[batch], 0, sizeof gathered[batch]);
	return r;
}

/* Where a row is in the copy. */
static uint64_t start_of(const rb_rows *r, uint32_t row) { return r->start ? r->start[row] : row * SIZE; }

static void check(const rb_rows *r, const uint8_t *to, const char *what)
{
	for (uint32_t i = 0; i < r->count; i++)
		if (memcmp(to + start_of(r, i), plane + r->slot[i] * STRIDE, start_of(r, i + 1) - start_of(r, i)))
			FAIL("%s: row %u of %u is another's\n", what, i, (uint32_t)r->count);
}

static void gather(rb_work *w, const rb_rows *r, uint8_t *to, const char *what)
{
	if (!rb_crew_gather(w, r, to))
		FAIL("%s: no thread helped\n", what);
	check(r, to, what);
}

/* How many cores a CPU quota is worth, and this process has. */
static void check_cores(void)
{
	static const struct {
		const char *cpu_max;
		uint32_t cores;
	} quotas[] = {
		{"max 100000\n", UINT32_MAX}, {"400000 100000\n", 4}, {"150000 100000\n", 2}, {"1000 100000\n", 1}, {"50000 50000", 1},
		{"9223372036854775807 1000", UINT32_MAX}, {"-1 100000", UINT32_MAX} /* version 1, without a quota */,
		{"100000 0", UINT32_MAX}, {"100000", UINT32_MAX}, {"", UINT32_MAX}, {"cores", UINT32_MAX},
	};
	for (size_t i = 0; i < sizeof quotas / sizeof *quotas; i++)
		if (rb_quota_cores(quotas[i].cpu_max) != quotas[i].cores)
			FAIL("\"%s\": %u, want %u\n", quotas[i].cpu_max, rb_quota_cores(quotas[i].cpu_max), quotas[i].cores);
	cpu_set_t set;
	if (sched_getaffinity(0, sizeof set, &set) || rb_cores() < 1 || rb_cores() > (uint32_t)CPU_COUNT(&set))
		FAIL("%u cores\n", rb_cores());
}

/* Ranges of a segment, widened to the pages of kernels with 4 and with 64 KiB. */
static void check_pages(void)
{
	static const struct {
		rb_range range;
		uint64_t page, size;
		rb_range want;
	} cases[] = {
		{{5000, 10}, 4096, 1 << 20, {4096, 4096}},
		{{5000, 10}, 65536, 1 << 20, {0, 65536}},
		{{65536 + 4096, 65536}, 65536, 1 << 20, {65536, 2 * 65536}},
		{{65536 + 4096, 4096}, 65536, 65536 + 8192, {65536, 8192}}, /* the segment ends inside a page */
	};
	for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
		rb_range got = rb_whole_pages(cases[i].range, cases[i].page, cases[i].size);
		if (memcmp(&got, &cases[i].want, sizeof got))
			FAIL("range %zu: %llu, %llu bytes\n", i, (unsigned long long)got.offset, (unsigned long long)got.bytes);
	}
}

int main(int argc, char **argv)
{
	check_cores();
	check_pages();
	uint32_t rounds = argc > 1 ? (uint32_t)atoi(argv[1]) : 100;
	for (uint32_t i = 0; i < sizeof plane; i++)
		plane[i] = (uint8_t)(i / STRIDE * 31 + i);
	for (uint32_t threads = 2; threads <= 6; threads += 2) {
		rb_work w = {.gather_threads = threads};
		for (uint32_t round = 0; round < rounds; round++) {
			rb_rows a = some_rows(0), b = some_rows(1), c = some_rows(2);
			gather(&w, &a, gathered[0], "alone");
			a = some_rows(0);
			rb_crew_prefetch(&w, &a, gathered[0]);
			rb_crew_prefetch(&w, &b, gathered[1]);
			gather(&w, &a, gathered[0], "the first of two");
			a = some_rows(0);
			rb_crew_prefetch(&w, &a, gathered[0]);
			if (round % 2)
				rb_crew_prefetch(&w, &c, gathered[2]); /* finishes one of them */
			gather(&w, &c, gathered[2], "beside two others");
			gather(&w, &b, gathered[1], "the second of two");
			rb_crew_leave(&w, slots[0]); /* its batch is answered */
			check(&a, gathered[0], "left alone");
			b = some_rows(1);
			rb_crew_prefetch(&w, &b, gathered[1]);
			c = some_rows(2);
			gather(&w, &c, gathered[1], "into memory of one that was begun");
			b = some_rows(1);
			rb_crew_prefetch(&w, &b, gathered[1]);
			c = some_rows(2);
			c.count = 3;
			if (rb_crew_gather(&w, &c, gathered[1])) /* the caller copies so few by itself */
				return 1;
			for (uint32_t i = 0; i < c.count; i++)
				memcpy(gathered[1] + start_of(&c, i), plane + c.slot[i] * STRIDE, start_of(&c, i + 1) - start_of(&c, i));
			rb_crew_leave(&w, slots[1]);
			check(&c, gathered[1], "few rows into memory of one that was begun");
		}
		rb_crew_end(&w);
	}
	rb_work alone = {.gather_threads = 1};
	rb_rows r = some_rows(0);
	rb_crew_prefetch(&alone, &r, gathered[0]);
	if (rb_crew_gather(&alone, &r, gathered[0]))
		return 1;
	puts("ok");
	return 0;
}
