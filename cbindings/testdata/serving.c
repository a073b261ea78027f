/* SPDX-License-Identifier: Apache-2.0 */
/* The worker of the program: y = 2x. See every.c. */
#define _GNU_SOURCE
#include <string.h>
#include <unistd.h>

#include "every.h"

atomic_int stop;
atomic_int held_back;

static void serve_double(rb_batch *b)
{
	uint32_t rows = 0;
	for (uint32_t i = 0; i < b->runs; i++) {
		rb_view x, y;
		WANT(RB_OK, rb_batch_run(b, RB_INPUT, 0, i, &x));
		WANT(RB_OK, rb_batch_run(b, RB_OUTPUT, 0, i, &y));
		CHECK(x.shape[0] == b->run[i].rows && x.rank == 2 && x.shape[1] == 4 && x.dtype == RB_F32);
		float *in = x.data, *out = y.data;
		for (uint64_t j = 0; j < x.shape[0] * 4; j++)
			out[j] = 2 * in[j];
		rows += b->run[i].rows;
	}
	CHECK(rows == b->rows);
	for (uint32_t i = 0; i < b->requests; i++) {
		void *row;
		uint64_t bytes;
		WANT(RB_OK, rb_batch_row(b, RB_INPUT, 0, b->request[i].row, &row, &bytes));
		CHECK(b->request[i].deadline >= 0 && b->request[i].committed > 0);
		CHECK(bytes == 16 && (uint8_t *)row == b->base + 4096 + 16 * b->slot[b->request[i].row]);
		if (*(float *)row == -1)
			WANT(RB_OK, rb_batch_fail(b, i, "minus one is refused"));
		if (*(float *)row == -2)
			WANT(RB_OK, rb_batch_fail_all(b, "the whole batch is refused"));
		if (*(float *)row == -3)
			WANT(RB_OK, rb_batch_fail_as(b, i, RB_ERR_QUEUE_FULL, "another server's queue is full"));
	}
	void *row;
	uint64_t bytes;
	WANT(RB_ERR_ROWS, rb_batch_row(b, RB_INPUT, 0, b->rows, &row, &bytes));
	WANT_ALL(RB_ERR_INVALID, rb_batch_waiting(b, b->requests), rb_batch_fail(b, b->requests, ""),
		rb_batch_fail_as(b, b->requests, RB_ERR_QUEUE_FULL, ""), rb_batch_fail_as(b, 0, RB_OK, ""),
		rb_batch_fail_as(b, 0, RB_ERR_SHAPE, ""));

	/* pointers that must not be NULL */
	rb_view v;
	WANT_ALL(RB_ERR_INVALID, rb_batch_run(NULL, RB_INPUT, 0, 0, &v), rb_batch_run(b, RB_INPUT, 0, 0, NULL),
		rb_batch_row(NULL, RB_INPUT, 0, 0, &row, &bytes), rb_batch_row(b, RB_INPUT, 0, 0, NULL, &bytes),
		rb_batch_row(b, RB_INPUT, 0, 0, &row, NULL), rb_batch_fail(NULL, 0, ""),
		rb_batch_fail_as(NULL, 0, RB_ERR_FAILED, ""), rb_batch_fail_all(NULL, ""), rb_batch_waiting(NULL, 0), rb_batch_complete(NULL));
}

void *run_worker(void *none)
{
	(void)none;
	rb_worker_options o = {.size = sizeof o, .socket = socket_path, .name = "every",
		.policy = "max_batch_size=4 wait_time=1ms\nslots=256  lease=60 preferred_batch_sizes=2,4"};
	rb_worker w;
	const char *good = "x:f32[4] -> y:f32[4]";
	WANT_ALL(RB_ERR_INVALID, rb_worker_attach("double", "x:f32[4]", &o, &w), rb_worker_attach("double", "x:f99[4] -> y:f32[4]", &o, &w),
		rb_worker_attach(NULL, good, &o, &w), rb_worker_attach("double", NULL, &o, &w), rb_worker_attach("double", good, &o, NULL));
	const char *wrong[][2] = { /* and a part of the message */
		{"max_batch_size", "key=value"},
		{"=4", "key=value"},
		{"slots=8 slots=8", "twice"},
		{"wait_tme=1ms", "wait_time"},
		{"wait_time=soon", "wait_time=soon"},
		{"buckets=8", "buckets.INPUT.DIMENSION"},
		{"buckets.t.1=8", "t.0"},
	};
	for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
		rb_worker_options bad = {.size = sizeof bad, .socket = socket_path, .policy = wrong[i][0]};
		WANT(RB_ERR_INVALID, rb_worker_attach("wrong", "t:i32[<=64] -> u:i32[<=64]", &bad, &w));
		CHECK(strstr(rb_error(), wrong[i][1]) != NULL);
	}
	WANT(RB_OK, rb_worker_attach("double", good, &o, &w));
	const char *notes;
	WANT(RB_OK, rb_worker_notes(w, &notes));
	CHECK(strcmp(notes, "") == 0);
	rb_model m;
	WANT(RB_OK, rb_worker_model(w, &m));
	CHECK(m.inputs == 1 && m.outputs == 1 && m.max_batch_size == 4 && m.slots == 256 && m.wait_time == second / 1000);
	rb_tensor t;
	WANT(RB_OK, rb_worker_tensor(w, RB_OUTPUT, 0, &t));
	CHECK(strcmp(t.name, "y") == 0 && t.rank == 1 && t.variable == 0);
	WANT_ALL(RB_ERR_INVALID, rb_worker_tensor(w, RB_OUTPUT, 1, &t), rb_worker_tensor(w, RB_OUTPUT, 0, NULL), rb_worker_model(w, NULL),
		rb_worker_map(w, NULL), rb_worker_next(w, 0, NULL), rb_worker_notes(w, NULL));
	rb_map map;
	WANT(RB_OK, rb_worker_map(w, &map));
	rb_batch *b = NULL, *ahead;
	uint64_t served = 0;
	while (!stop) {
		int status = rb_worker_wait(w, second / 100);
		if (status == RB_OK)
			status = rb_worker_next(w, 0, &b);
		if (status == RB_ERR_TIMEOUT)
			continue;
		WANT(RB_OK, status);
		float gathered[64 * 4];
		WANT(RB_ERR_SIZE, rb_batch_gather(b, RB_INPUT, 0, gathered, 3));
		WANT(RB_ERR_SIZE, rb_batch_prefetch(b, 0, gathered, 3));
		WANT(RB_OK, rb_batch_prefetch(b, 0, gathered, sizeof gathered));
		WANT(RB_OK, rb_batch_gather(b, RB_INPUT, 0, gathered, sizeof gathered));
		void *first;
		uint64_t bytes;
		WANT(RB_OK, rb_batch_row(b, RB_INPUT, 0, b->rows - 1, &first, &bytes));
		CHECK(!memcmp((char *)gathered + (b->rows - 1) * bytes, first, bytes));
		WANT(RB_ERR_SIZE, rb_batch_scatter(b, 0, gathered, 3));
		WANT(RB_OK, rb_batch_scatter(b, 0, gathered, sizeof gathered)); /* and written over below */
		CHECK(b->base == map.base && b->worker == w && b->pad_to == b->rows);
		while (held_back)
			usleep(500);
		serve_double(b);
		/* The next batch may be taken before this one is answered. */
		status = rb_worker_next(w, 0, &ahead);
		WANT(RB_OK, rb_batch_complete(b));
		WANT(RB_ERR_RELEASED, rb_batch_complete(b));
		served++;
		if (status == RB_OK) {
			serve_double(ahead);
			WANT(RB_OK, rb_batch_complete(ahead));
		} else {
			WANT(RB_ERR_TIMEOUT, status);
		}
	}
	CHECK(served > 0);
	WANT(RB_OK, rb_worker_close(w));
	WANT_ALL(RB_ERR_CLOSED, rb_worker_close(w), rb_worker_next(w, 0, &b), rb_worker_wait(w, 0));
	CHECK(map.base[4096] == map.base[4096]); /* still mapped */
	WANT(RB_OK, rb_map_release(map.id));
	WANT(RB_ERR_RELEASED, rb_map_release(map.id));
	return NULL;
}
