/* SPDX-License-Identifier: Apache-2.0 */
/* Sequences. Client and worker are one thread here, so each step ends as the test wants. See every.c. */
#define _GNU_SOURCE
#include <pthread.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "every.h"

static rb_worker w;
static rb_client c;

enum ending { WELL, FAILED, UNWRITTEN };

/* Runs a batch: h' = 10 h + x, y = h', n' = n + 1. */
static void run(rb_batch *b, enum ending how)
{
	rb_view v;
	void *x, *y, *h, *n, *next;
	uint64_t bytes;
	int64_t old[8], new[8];
	uint32_t rows = b->rows;
	WANT_ALL(RB_ERR_INVALID, rb_batch_run(b, RB_STATE, 0, 0, &v), rb_batch_gather(b, RB_NEXT_STATE, 0, new, sizeof new),
		rb_batch_row(b, RB_STATE, 2, 0, &h, &bytes), rb_batch_set_state(b, 2, new, sizeof new), rb_batch_set_state(b, 0, NULL, 8));
	WANT(RB_OK, rb_batch_gather(b, RB_STATE, 0, old, sizeof old));
	for (uint32_t i = 0; i < rows; i++) {
		WANT(RB_OK, rb_batch_row(b, RB_INPUT, 0, i, &x, &bytes));
		WANT(RB_OK, rb_batch_row(b, RB_OUTPUT, 0, i, &y, &bytes));
		WANT(RB_OK, rb_batch_row(b, RB_STATE, 0, i, &h, &bytes));
		CHECK(bytes == 8 && *(int64_t *)h == old[i] && (!(b->step[i] & 2) || !old[i]));
		new[i] = *(int64_t *)y = 10 * old[i] + *(int64_t *)x;
		if (how == UNWRITTEN)
			continue;
		WANT(RB_OK, rb_batch_row(b, RB_STATE, 1, i, &n, &bytes));
		WANT(RB_OK, rb_batch_row(b, RB_NEXT_STATE, 1, i, &next, &bytes));
		CHECK(bytes == 12 && ((int32_t *)n)[0] == ((int32_t *)n)[2]);
		for (int j = 0; j < 3; j++)
			((int32_t *)next)[j] = ((int32_t *)n)[j] + 1;
	}
	WANT(RB_ERR_SIZE, rb_batch_set_state(b, 0, new, 8 * rows - 1));
	WANT(RB_OK, rb_batch_set_state(b, 0, new, sizeof new));
	if (how == FAILED)
		WANT(RB_OK, rb_batch_fail(b, 0, "on purpose"));
	WANT(how == UNWRITTEN ? RB_ERR_FAILED : RB_OK, rb_batch_complete(b));
	CHECK(how != UNWRITTEN || strstr(rb_error(), "state \"n\""));
}

static void serve(enum ending how)
{
	rb_batch *b;
	WANT(RB_OK, rb_worker_next(w, minute, &b));
	run(b, how);
}

/* The broker may have sent a step that was canceled. */
static void drop_canceled(void)
{
	rb_batch *b;
	while (rb_worker_next(w, second / 50, &b) == RB_OK) {
		WANT(RB_OK, rb_batch_fail_all(b, "canceled"));
		WANT(RB_OK, rb_batch_complete(b));
	}
}

static rb_request commit(uint64_t sequence, int64_t number, int64_t timeout)
{
	rb_request r;
	rb_view x;
	WANT(RB_OK, rb_sequence_request(c, sequence, NULL, 0, minute, &r));
	WANT(RB_OK, rb_input(c, r.id, 0, &x));
	*(int64_t *)x.data = number;
	WANT(RB_OK, rb_commit(c, r.id, timeout, 0));
	return r;
}

static int64_t ended(rb_request r)
{
	rb_view y;
	WANT(RB_OK, rb_wait(c, r.id, minute));
	WANT(RB_OK, rb_output(c, r.id, 0, &y));
	return *(int64_t *)y.data;
}

static int64_t state_of(uint64_t sequence)
{
	rb_view h, n;
	uint8_t fresh;
	WANT(RB_OK, rb_sequence_state(c, sequence, 0, &h, &fresh));
	WANT(RB_OK, rb_sequence_state(c, sequence, 1, &n, &fresh));
	CHECK(h.rank == 1 && h.stride == 16 && n.rank == 2 && n.shape[1] == 3 && n.stride == 24);
	CHECK(!fresh || !*(int64_t *)h.data);
	return *(int64_t *)h.data;
}

/* Steps that end badly leave the state; test/conformance has the others. */
static void bad_ends(uint64_t q)
{
	rb_request r = commit(q, 1, 0), before = r;
	rb_view v;
	uint8_t fresh = 0;
	serve(WELL);
	CHECK(ended(r) == 1 && state_of(q) == 1);
	for (enum ending how = FAILED; how <= UNWRITTEN; how++) {
		r = commit(q, 2, 0);
		WANT(RB_ERR_RELEASED, rb_wait(c, before.id, 0));
		serve(how);
		WANT(RB_ERR_FAILED, rb_wait(c, r.id, minute));
		CHECK(r.slot == before.slot);
	}
	r = commit(q, 9, second / 2); /* expires while a worker has it */
	rb_batch *b;
	WANT(RB_OK, rb_worker_next(w, minute, &b));
	WANT(RB_ERR_EXPIRED, rb_wait(c, r.id, minute));
	WANT(RB_ERR_NOT_DONE, rb_sequence_state(c, q, 0, &v, NULL));
	WANT(RB_ERR_TIMEOUT, rb_sequence_request(c, q, NULL, 0, second / 50, &before));
	WANT(RB_OK, rb_batch_set_state(b, 0, (int64_t[1]){99}, 8));
	WANT(RB_OK, rb_batch_fail_all(b, "too late"));
	WANT(RB_OK, rb_batch_complete(b));
	r = commit(q, 9, 0); /* canceled by a release */
	WANT(RB_OK, rb_release(c, r.id));
	WANT(RB_ERR_RELEASED, rb_wait(c, r.id, 0));
	drop_canceled();
	for (int look = 0; look < 3; look++) { /* the caller does not learn of the answer */
		r = commit(q, 9, 0);
		serve(WELL);
		if (look == 1)
			WANT(RB_OK, rb_cancel(c, r.id));
		if (look)
			WANT(RB_OK, rb_release(c, r.id));
		CHECK(state_of(q) == 1);
	}
	r = commit(q, 2, 0);
	WANT(RB_OK, rb_sequence_reset(c, q, NULL, 0)); /* after this step */
	serve(WELL);
	CHECK(ended(r) == 12 && state_of(q) == 0);
	WANT(RB_OK, rb_sequence_state(c, q, 0, &v, &fresh));
	CHECK(fresh); /* also for the next step, although the caller has looked */
	WANT(RB_OK, rb_sequence_state(c, q, 0, &v, NULL));
	*(int64_t *)v.data = 77;
	r = commit(q, 1, 0);
	serve(WELL);
	CHECK(ended(r) == 771);
	WANT(RB_OK, rb_release(c, r.id)); /* this thread is done with the sequence */
}

static uint64_t shared, begun; /* a sequence of two threads, and its request */

static void *step_elsewhere(void *slice)
{
	int64_t in = 7, out = 0;
	int status = rb_step(c, shared, (const void *[]){&in}, BYTES(8), (void *[]){&out}, BYTES(8), 0, *(int64_t *)slice, &begun);
	CHECK(*(int64_t *)slice < 0 ? status == RB_OK && out == 7 : status == RB_ERR_TIMEOUT && begun);
	return NULL;
}

/* A thread that uses a sequence keeps others out: in a call, and between the calls for one step. */
static void two_threads(uint64_t q)
{
	int64_t in = 1, out = 0;
	shared = q;
	for (int64_t slice = -1; slice < 2; slice += 2) {
		pthread_t other;
		uint64_t request;
		rb_batch *b;
		rb_view v;
		WANT(RB_OK, rb_sequence_reset(c, q, NULL, 0));
		CHECK(!pthread_create(&other, NULL, step_elsewhere, &slice));
		WANT(RB_OK, rb_worker_next(w, minute, &b));
		if (slice > 0)
			pthread_join(other, NULL);
		WANT_ALL(RB_ERR_NOT_DONE, rb_sequence_reset(c, q, NULL, 0), rb_sequence_state(c, q, 0, &v, NULL), rb_sequence_close(c, q),
			rb_sequence_copy(c, q, 0, &request), rb_sequence_undo(c, q, 0),
			rb_step(c, q, (const void *[]){&in}, BYTES(8), (void *[]){&out}, BYTES(8), 0, -1, &request));
		CHECK(strstr(rb_error(), "another thread"));
		run(b, WELL);
		if (slice < 0) {
			pthread_join(other, NULL);
			continue;
		}
		WANT(RB_OK, rb_wait(c, begun, minute)); /* a request may change threads */
		WANT(RB_OK, rb_collect(c, begun, (void *[]){&out}, BYTES(8)));
	}
	CHECK(out == 7 && state_of(q) == 7);
}

/* A child has none of its parent's sequences. */
static void in_child(uint64_t q)
{
	pid_t child = getenv("RB_NO_FORK") ? -1 : fork();
	int how = 0;
	rb_view v;
	if (!child) {
		WANT_ALL(RB_ERR_FORKED, rb_sequence_state(c, q, 0, &v, NULL), rb_sequence_reset(c, q, NULL, 0));
		WANT(RB_OK, rb_sequence_close(c, q));
		_exit(0);
	}
	CHECK(child < 0 || (waitpid(child, &how, 0) == child && !how));
}

void sequences(void)
{
	rb_worker_options o = {.size = sizeof o, .socket = socket_path, .policy = "max_batch_size=4 wait_time=0s"};
	WANT_ALL(RB_ERR_INVALID, rb_worker_attach("ten", "x:i64[] -> y:i64[] state x:i64[]", &o, &w),
		rb_worker_attach("ten", "x:i64[] -> y:i64[] state h:i64[<=2]", &o, &w));
	WANT(RB_OK, rb_worker_attach("ten", "x:i64[] -> y:i64[] state h:i64[] n:i32[3]", &o, &w));
	c = dial("ten", 4);
	rb_tensor t;
	WANT(RB_OK, rb_worker_tensor(w, RB_STATE, 1, &t));
	CHECK(!strcmp(t.name, "n") && t.rank == 1 && t.row_bytes == 12 && t.stride == 24);
	WANT(RB_OK, rb_client_tensor(c, RB_STATE, 0, &t));
	CHECK(!strcmp(t.name, "h") && t.rank == 0 && t.stride == 16);
	WANT_ALL(RB_ERR_INVALID, rb_client_tensor(c, RB_STATE, 2, &t), rb_client_tensor(c, 4, 0, &t));

	uint64_t one, two, three;
	rb_view v;
	rb_client other = dial("double", 1);
	WANT(RB_ERR_INVALID, rb_sequence_open(other, 1, minute, &one)); /* without state */
	WANT(RB_OK, rb_sequence_open(c, 1, minute, &one));
	WANT(RB_OK, rb_sequence_open(c, 2, minute, &two));
	WANT(RB_ERR_ROWS, rb_sequence_open(c, 0, 0, &three));
	WANT(RB_ERR_FULL, rb_sequence_open(c, 2, 0, &three));
	WANT_ALL(RB_ERR_INVALID, rb_sequence_open(c, 1, 0, NULL), rb_sequence_request(c, one, NULL, 0, 0, NULL),
		rb_sequence_reset(c, one, NULL, 1), rb_sequence_state(c, one, 0, NULL, NULL), rb_sequence_state(c, one, 2, &v, NULL),
		rb_step(c, one, NULL, NULL, NULL, NULL, 0, 0, NULL));
	WANT_ALL(RB_ERR_RELEASED, rb_sequence_reset(other, one, NULL, 0), rb_sequence_close(other, one), rb_sequence_state(c, 12345, 0, &v, NULL));
	WANT(RB_OK, rb_close(other));
	bad_ends(one);
	in_child(one);
	two_threads(one);
	commit(two, 1, 0);
	WANT(RB_OK, rb_sequence_close(c, two)); /* with a step under way */
	drop_canceled();
	WANT_ALL(RB_ERR_RELEASED, rb_sequence_close(c, two), rb_sequence_reset(c, two, NULL, 0));
	WANT(RB_OK, rb_sequence_open(c, 3, minute, &three)); /* its slots come back */
	WANT(RB_OK, rb_close(c));
	WANT(RB_ERR_CLOSED, rb_sequence_close(c, one));
	WANT(RB_OK, rb_worker_close(w));
}
