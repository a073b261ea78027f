/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A model whose state is a hash of all inputs of its sequence, for state_test.go:
 *
 *	hashing worker N   serves it; the N-th batch kills the worker, after it has spoilt the next state
 *	hashing client     runs sequences and checks every answer
 *	hashing restart    says "ready", and checks after a line of input that the state was lost
 *
 * The broker is that of RINGBATCH_SOCKET.
 */
#define _GNU_SOURCE
#include <signal.h>
#include <string.h>
#include <unistd.h>

#include "every.h"

#define WORDS 100

static uint64_t hash(uint64_t h, uint64_t x) { return (h ^ x) * UINT64_C(0x100000001b3) + 1; }

static void serve(int batches)
{
	rb_worker w;
	rb_batch *b;
	WANT(RB_OK, rb_worker_attach("hash", "x:i64[] -> y:i64[] state h:i64[100]", NULL, &w));
	for (int n = 1; rb_worker_next(w, -1, &b) == RB_OK; n++) {
		for (uint32_t i = 0; i < b->rows; i++) {
			void *x, *y, *h, *next;
			uint64_t bytes;
			WANT(RB_OK, rb_batch_row(b, RB_INPUT, 0, i, &x, &bytes));
			WANT(RB_OK, rb_batch_row(b, RB_OUTPUT, 0, i, &y, &bytes));
			WANT(RB_OK, rb_batch_row(b, RB_STATE, 0, i, &h, &bytes));
			WANT(RB_OK, rb_batch_row(b, RB_NEXT_STATE, 0, i, &next, &bytes));
			for (int j = 0; j < WORDS; j++) {
				if (n == batches && j == WORDS / 2)
					raise(SIGKILL);
				((uint64_t *)next)[j] = n == batches ? 1 : hash(((uint64_t *)h)[j], *(uint64_t *)x);
			}
			*(uint64_t *)y = ((uint64_t *)next)[WORDS - 1];
		}
		WANT(RB_OK, rb_batch_complete(b));
	}
}

static rb_client dial_hash(void)
{
	rb_connect_options o = {.size = sizeof o, .window = 8, .patience = minute, .wait = 1};
	rb_client c;
	WANT(RB_OK, rb_connect("hash", &o, &c));
	return c;
}

static int step(rb_client c, uint64_t q, uint64_t rows, const uint64_t *x, uint64_t *y)
{
	uint64_t request;
	return rb_step(c, q, (const void *const[]){x}, BYTES(8 * rows), (void *const[]){y}, BYTES(8 * rows), 0, minute, &request);
}

/* Two sequences, of one row and of three, with a step of each under way at once. */
static void run_client(void)
{
	rb_client c = dial_hash();
	uint64_t one, three, expected[4] = {0}, x[4], y[4];
	WANT(RB_OK, rb_sequence_open(c, 1, minute, &one));
	WANT(RB_OK, rb_sequence_open(c, 3, minute, &three));
	for (uint64_t n = 1, end = (uint64_t)now() + second; n <= 1000 || (uint64_t)now() < end; n++) {
		for (uint64_t i = 0; i < 4; i++)
			x[i] = 4 * n + i;
		if (n % 10 == 0) {
			WANT(RB_OK, rb_sequence_reset(c, three, (uint32_t[]){(uint32_t)(n / 10 % 3)}, 1));
			expected[1 + n / 10 % 3] = 0;
		}
		rb_request r;
		rb_view v;
		WANT(RB_OK, rb_sequence_request(c, three, NULL, 0, minute, &r));
		WANT(RB_OK, rb_input(c, r.id, 0, &v));
		memcpy(v.data, x + 1, 24);
		WANT(RB_OK, rb_commit(c, r.id, 0, 0));
		WANT(RB_OK, step(c, one, 1, x, y));
		WANT(RB_OK, rb_wait(c, r.id, minute));
		WANT(RB_OK, rb_output(c, r.id, 0, &v));
		memcpy(y + 1, v.data, 24);
		for (int i = 0; i < 4; i++) {
			expected[i] = hash(expected[i], x[i]);
			CHECK(y[i] == expected[i]);
		}
	}
	WANT(RB_OK, rb_close(c));
}

static void run_restart(void)
{
	rb_client c = dial_hash();
	uint64_t q, x[2] = {5, 6}, y[2];
	uint32_t row = 1;
	rb_view v;
	rb_request r;
	WANT(RB_OK, rb_sequence_open(c, 2, minute, &q));
	WANT(RB_OK, step(c, q, 2, x, y));
	CHECK(y[0] == hash(0, 5));
	puts("ready");
	fflush(stdout);
	CHECK(getchar() == '\n');
	usleep(20000); /* a client looks at its socket every 5 ms at most */
	for (int i = 0; i < 2; i++)
		WANT_ALL(RB_ERR_STATE_LOST, step(c, q, 2, x, y), rb_sequence_state(c, q, 0, &v, NULL), rb_sequence_reset(c, q, &row, 1),
			rb_sequence_request(c, q, NULL, 0, 0, &r));
	WANT(RB_OK, rb_sequence_reset(c, q, NULL, 0));
	WANT(RB_OK, step(c, q, 2, x, y));
	CHECK(y[0] == hash(0, 5) && y[1] == hash(0, 6));
	WANT(RB_OK, rb_close(c));
}

int main(int argc, char **argv)
{
	CHECK(argc > 1);
	if (!strcmp(argv[1], "worker"))
		serve(atoi(argv[2]));
	else if (!strcmp(argv[1], "client"))
		run_client();
	else
		run_restart();
	puts("ok");
	return 0;
}
