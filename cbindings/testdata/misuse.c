/* SPDX-License-Identifier: Apache-2.0 */
/* A program's mistakes end in errors, and the library leaves the program's signals, threads and limits alone. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../ringbatch_cuda.h"
#include "every.h"

/* Wrong arguments end in an error, and nothing is done. */
void wrong_arguments(void)
{
	rb_client c = dial("double", 4);
	float x[8] = {1, 2, 3, 4}, y[8];
	const void *in[] = {x}, *no_in[] = {NULL};
	void *out[] = {y}, *no_out[] = {NULL};
	const uint64_t n[] = {16};
	uint64_t id, none;
	uint32_t count;
	char *json;
	rb_request r;
	rb_view v;
	rb_map map;
	uint64_t u;
	WANT_ALL(RB_ERR_INVALID, rb_connect(NULL, NULL, &c), rb_connect("double", NULL, NULL), rb_client_model(c, NULL),
		rb_client_tensor(c, RB_INPUT, 0, NULL), rb_client_map(c, NULL), rb_client_fd(c, NULL), rb_reap(c, &id, 1, NULL),
		rb_reap(c, NULL, 1, &count), rb_reap_wait(c, 0, &id, 1, NULL), rb_reap_wait(c, 0, NULL, 1, &count), rb_stats(socket_path, second, NULL),
		rb_claim(c, 1, NULL, 0, 0, NULL), rb_claim(c, 1, NULL, 1, 0, &r));
	WANT(RB_ERR_TIMEOUT, rb_stats(socket_path, 0, &json));
	WANT(RB_OK, rb_claim(c, 1, NULL, 0, 0, &r));
	WANT_ALL(RB_ERR_INVALID, rb_input(c, r.id, 0, NULL), rb_output(c, r.id, 0, NULL), rb_request_map(c, r.id, NULL),
		rb_request_timing(c, r.id, NULL), rb_commit(c, r.id, 0, RB_HOLD), rb_commit(c, r.id, 0, 8), rb_commit_all(c, NULL, 1, 0, 0),
		rb_commit_all(c, &r.id, 1, 0, RB_HOLD), rb_commit(c, r.id, 0, RB_PARTS), rb_next_part(c, r.id, NULL, 8, 0, &u, NULL),
		rb_next_part(c, r.id, &u, 8, 0, NULL, NULL));
	WANT(RB_ERR_NOT_COMMITTED, rb_next_part(c, r.id, &u, 8, 0, &u, NULL));
	uint64_t two[] = {r.id, 77};
	WANT(RB_ERR_RELEASED, rb_commit_all(c, two, 2, 0, 0));
	WANT(RB_ERR_NOT_COMMITTED, rb_poll(c, r.id));
	two[1] = r.id; /* listed twice: none is committed */
	WANT(RB_ERR_COMMITTED, rb_commit_all(c, two, 2, 0, 0));
	WANT(RB_ERR_NOT_COMMITTED, rb_poll(c, r.id));

	/* the number of a slot that was never claimed */
	none = r.id + (UINT64_C(1) << 32) - 1;
	WANT_ALL(RB_ERR_RELEASED, rb_poll(c, none), rb_wait(c, none, -1), rb_output(c, none, 0, &v), rb_collect(c, none, out, BYTES(16)),
		rb_request_map(c, none, &map), rb_release(c, none));

	/* timeouts that no clock reaches */
	WANT(RB_OK, rb_commit(c, r.id, INT64_MAX, 0));
	WANT(RB_OK, rb_wait(c, r.id, INT64_MAX));
	WANT(RB_OK, rb_release(c, r.id));
	WANT(RB_OK, rb_infer(c, 2, in, BYTES(32), out, BYTES(32), INT64_MAX, INT64_MAX, &id));

	for (int i = 0; i < 3; i++) {
		WANT_ALL(RB_ERR_INVALID, rb_infer(c, 1, NULL, n, out, n, 0, -1, &id), rb_infer(c, 1, no_in, n, out, n, 0, -1, &id),
			rb_infer(c, 1, in, n, NULL, n, 0, -1, &id), rb_infer(c, 1, in, n, no_out, n, 0, -1, &id),
			rb_infer(c, 1, in, n, out, n, 0, -1, NULL));
		WANT(RB_OK, rb_infer(c, 1, in, n, out, n, INT64_MAX, INT64_MAX, &id));
	}
	WANT_ALL(RB_ERR_INVALID, rb_submit(c, 1, NULL, n, 0, 0, &id), rb_submit(c, 1, no_in, n, 0, 0, &id), rb_submit(c, 1, in, n, 0, 0, NULL),
		rb_submit(c, 1, in, n, 0, 4, &id));
	for (int i = 0; i < 4; i++) /* no refused call has kept a slot */
		WANT(RB_OK, rb_submit(c, 1, in, BYTES(16), 0, 0, &id));
	WANT(RB_OK, rb_wait(c, id, -1));
	WANT(RB_ERR_INVALID, rb_collect(c, id, NULL, BYTES(16)));
	WANT(RB_ERR_INVALID, rb_collect(c, id, no_out, BYTES(16)));
	WANT(RB_OK, rb_collect(c, id, out, BYTES(16)));
	WANT(RB_OK, rb_close(c));
}

/* A destructor may come after the library's own. */
static void too_late(void *arg)
{
	(void)arg;
	WANT(RB_ERR_CLOSED, rb_close(12345));
	CHECK(strcmp(rb_error(), "closed") == 0);
}

static void *leave_a_value(void *arg)
{
	pthread_setspecific(*(pthread_key_t *)arg, "");
	WANT(RB_ERR_RELEASED, rb_map_release(12345)); /* this thread has a text */
	return NULL;
}

void thread_ends(void)
{
	pthread_key_t key;
	pthread_t t;
	pthread_key_create(&key, too_late);
	pthread_create(&t, NULL, leave_a_value, &key);
	pthread_join(t, NULL);
	pthread_key_delete(key);
}

/* Too few descriptors are this process's fault, not the broker's. */
void no_descriptors(void)
{
	if (getenv("RB_SLOW")) /* valgrind sets its own limits */
		return;
	rb_connect_options o = {.size = sizeof o, .socket = socket_path};
	struct rlimit all, few;
	CHECK(getrlimit(RLIMIT_NOFILE, &all) == 0);
	int next = dup(0), status;
	CHECK(next >= 0 && close(next) == 0);
	for (int more = 0; more < 5; more++) {
		few = (struct rlimit){.rlim_cur = (rlim_t)(next + more), .rlim_max = all.rlim_max};
		CHECK(setrlimit(RLIMIT_NOFILE, &few) == 0);
		rb_client c;
		status = rb_connect("double", &o, &c);
		CHECK(setrlimit(RLIMIT_NOFILE, &all) == 0);
		WANT(RB_ERR_NO_DESCRIPTORS, status);
		CHECK(strstr(rb_error(), "too many open files"));
	}
}

/* Structs of programs that were compiled with an older header, or with a newer one. */
void structs_grow(void)
{
	rb_client c;
	rb_worker w;
	rb_map map;
	const char *nowhere = "/nonexistent/ringbatch.sock", *signature = "x:f32[4] -> y:f32[4]";
	rb_connect_options o = {.size = offsetof(rb_connect_options, name), .socket = socket_path, .patience = 1}; /* not long enough */
	WANT(RB_OK, rb_connect("double", &o, &c));
	WANT(RB_OK, rb_client_map(c, &map));
	WANT(RB_OK, rb_close(c));
	for (int i = 0; i < 3; i++) { /* not set, too short, not set */
		o.size = (const uint32_t[]){0, 3, 1 << 20}[i];
		WANT(RB_ERR_VERSION, rb_connect("double", &o, &c));
	}
	struct {
		rb_connect_options known;
		const void *newer;
	} longer = {{.size = sizeof longer, .socket = socket_path}, NULL};
	WANT(RB_OK, rb_connect("double", &longer.known, &c));
	WANT(RB_OK, rb_close(c));
	longer.newer = &c;
	WANT(RB_ERR_VERSION, rb_connect("double", &longer.known, &c));
	rb_worker_options older = {.size = offsetof(rb_worker_options, policy), .socket = socket_path, .policy = "no policy"};
	WANT(RB_OK, rb_worker_attach("grown", signature, &older, &w));
	WANT(RB_OK, rb_worker_close(w));
	struct {
		rb_worker_options known;
		uint64_t newer;
	} later = {{.size = sizeof later, .socket = nowhere}, 1};
	WANT(RB_ERR_VERSION, rb_worker_attach("grown", signature, &later.known, &w));
	later.newer = 0;
	WANT(RB_ERR_NO_BROKER, rb_worker_attach("grown", signature, &later.known, &w));
	struct {
		rb_device known;
		uint64_t newer;
	} d = {{.size = sizeof d}, 1};
	WANT(RB_OK, rb_map_device(map.id, &d.known));
	CHECK(d.known.size == sizeof d && d.known.ordinal == -1 && !d.newer);
	d.known = (rb_device){.size = offsetof(rb_device, bytes), .bytes = 7};
	WANT(RB_OK, rb_map_device(map.id, &d.known));
	CHECK(d.known.ordinal == -1 && d.known.bytes == 7); /* beyond its size nothing is written */
	WANT(RB_OK, rb_map_release(map.id));
}

void errors_have_names(void)
{
	CHECK(rb_abi_version() == RB_ABI_VERSION && rb_version()[0] && rb_cores() > 0);
	for (int s = 0; s < RB_STATUS_COUNT; s++)
		CHECK(rb_status_name(s)[0] && rb_status_text(s)[0]);
	CHECK(rb_status_retryable(RB_ERR_BROKER_GONE) && !rb_status_retryable(RB_ERR_FAILED));
	CHECK(strcmp(rb_status_name(99), "Unknown") == 0);
	rb_connect_options o = {.size = sizeof o, .socket = socket_path};
	rb_client c;
	WANT(RB_ERR_UNKNOWN_MODEL, rb_connect("nothing", &o, &c));
	CHECK(strstr(rb_error(), "nothing"));
	/* texts are valid UTF-8, however they are cut */
	char name[3002] = "";
	for (int i = 0; i < 2; i++) {
		for (int j = 0; j < 1500; j++)
			memcpy(name + i + 2 * j, "\xc3\xa4", 3);
		WANT(RB_ERR_INVALID, rb_connect(name, &o, &c));
		CHECK(strlen(rb_error()) > 10 && mbstowcs(NULL, rb_error(), 0) != (size_t)-1);
		name[0] = 'a';
	}
	WANT(RB_ERR_UNKNOWN_MODEL, rb_connect("\xc3(\xff", &o, &c));
	CHECK(mbstowcs(NULL, rb_error(), 0) != (size_t)-1);
	o.socket = "/nonexistent/ringbatch.sock";
	WANT(RB_ERR_NO_BROKER, rb_connect("double", &o, &c));
	char *json;
	WANT(RB_OK, rb_stats(socket_path, minute, &json));
	CHECK(strstr(json, "\"double\""));
	rb_free(json);
	WANT(RB_ERR_NO_BROKER, rb_stats("/nonexistent/ringbatch.sock", second, &json));
}

/* A forked child attaches for itself; its parent's requests, workers and batches are refused. */
static int child(rb_client c, rb_request r, rb_map map, rb_worker w, rb_batch *b)
{
	rb_client c2;
	rb_model m;
	rb_tensor t;
	rb_map own;
	rb_view v;
	rb_timing timing;
	float x[4] = {1, 2, 3, 4}, y[4] = {0};
	const void *in[] = {x};
	void *out[] = {y}, *p;
	uint64_t u;
	uint32_t n;
	WANT_ALL(RB_ERR_FORKED,
		rb_input(c, r.id, 0, &v), rb_output(c, r.id, 0, &v), rb_set_priority(c, r.id, 0), rb_set_cost(c, r.id, 0),
		rb_commit(c, r.id, 0, 0),
		rb_commit_all(c, &r.id, 1, 0, 0),
		rb_wait(c, r.id, -1), rb_poll(c, r.id), rb_cancel(c, r.id), rb_request_map(c, r.id, &own), rb_request_timing(c, r.id, &timing),
		rb_collect(c, r.id, out, BYTES(16)), rb_release(c, r.id), rb_worker_model(w, &m), rb_worker_tensor(w, 0, 0, &t), rb_worker_map(w, &own),
		rb_worker_next(w, -1, &b), rb_batch_run(b, 0, 0, 0, &v), rb_batch_row(b, 0, 0, 0, &p, &u),
		rb_batch_set_row_dims(b, 0, NULL, 0), rb_batch_fail(b, 0, ""), rb_batch_fail_as(b, 0, RB_ERR_EXPIRED, ""),
		rb_next_part(c, r.id, &u, 8, 0, &u, NULL), rb_batch_show(b, 0, 1), rb_batch_set_rounds(b, 1), rb_batch_fail_all(b, ""), rb_batch_waiting(b, 0), rb_batch_gather(b, 0, 0, x, 16),
		rb_batch_scatter(b, 0, x, 16), rb_batch_pack(b, 0, x, 16, NULL), rb_batch_unpack(b, 0, x, 16),
		rb_worker_unwanted(w, &b, 1, &n), rb_batch_complete(b));
	if (!strstr(rb_error(), "fork"))
		return 2;
	if (map.base[4096] != 0) /* the parent's slots are not here */
		return 3;
	WANT(RB_OK, rb_map_release(map.id));
	/* a slice that is over before it has begun to attach says nothing about the broker */
	WANT(RB_ERR_TIMEOUT, rb_infer(c, 1, in, BYTES(16), out, BYTES(16), 0, 1, &u));
	WANT(RB_OK, rb_infer(c, 1, in, BYTES(16), out, BYTES(16), 0, minute, &u));
	CHECK(y[3] == 8);
	int fd;
	WANT(RB_OK, rb_client_fd(c, &fd));
	WANT(RB_OK, rb_client_map(c, &own));
	WANT(RB_OK, rb_close(c));
	WANT(RB_OK, rb_map_release(own.id));
	WANT(RB_OK, rb_worker_close(w));
	c2 = dial("double", 2);
	WANT(RB_OK, rb_infer(c2, 1, in, BYTES(16), out, BYTES(16), 0, minute, &u));
	WANT(RB_OK, rb_close(c2));
	return 0;
}

void forked(void)
{
	rb_client c = dial("double", 2);
	rb_worker_options o = {.size = sizeof o, .socket = socket_path};
	rb_worker w;
	rb_batch *b;
	rb_request r, q;
	rb_map map;
	WANT(RB_OK, rb_worker_attach("forked", "x:f32[4] -> y:f32[4]", &o, &w));
	rb_client f = dial("forked", 2);
	WANT(RB_OK, rb_claim(f, 1, NULL, 0, 0, &q));
	WANT(RB_OK, rb_commit(f, q.id, 0, 0));
	WANT(RB_OK, rb_worker_next(w, minute, &b));
	WANT(RB_OK, rb_claim(c, 1, NULL, 0, 0, &r));
	WANT(RB_OK, rb_client_map(c, &map));
	rb_view v;
	WANT(RB_OK, rb_input(c, r.id, 0, &v));
	memset(v.data, 0x40, v.bytes);
	pid_t pid = fork();
	if (pid == 0)
		_exit(child(c, r, map, w, b));
	int status;
	CHECK(waitpid(pid, &status, 0) == pid);
	CHECK(status == 0);
	/* A child made without the fork handler closes its copies: the parent's sessions go on. */
	pid = (pid_t)syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
	if (pid == 0)
		_exit(rb_close(c) || rb_close(f));
	CHECK(waitpid(pid, &status, 0) == pid);
	WANT(RB_OK, rb_batch_scatter(b, 0, (float[4]){0}, 16));
	WANT(RB_OK, rb_batch_complete(b));
	WANT(RB_OK, rb_wait(f, q.id, minute));
	WANT(RB_OK, rb_close(f));
	WANT(RB_OK, rb_worker_close(w));
	WANT(RB_OK, rb_commit(c, r.id, 0, 0));
	WANT(RB_OK, rb_wait(c, r.id, minute));
	WANT(RB_OK, rb_close(c));
	WANT(RB_OK, rb_map_release(map.id));
}

static atomic_int handled;

static void handler(int n)
{
	(void)n;
	handled++;
}

/* The program's signals are its own. */
void signals(void)
{
	sigset_t blocked, before, after;
	sigemptyset(&blocked);
	sigaddset(&blocked, SIGTERM);
	pthread_sigmask(SIG_BLOCK, &blocked, NULL);
	kill(getpid(), SIGTERM); /* no thread of the library takes it */
	CHECK(sigtimedwait(&blocked, NULL, &(struct timespec){.tv_sec = 60}) == SIGTERM);
	pthread_sigmask(SIG_UNBLOCK, &blocked, NULL);

	rb_worker_options o = {.size = sizeof o, .socket = socket_path};
	rb_worker w;
	rb_batch *b;
	signal(SIGALRM, handler);
	struct sigaction was[32], is;
	for (int n = 1; n < 32; n++)
		sigaction(n, NULL, &was[n]);
	pthread_sigmask(SIG_BLOCK, NULL, &before);
	WANT(RB_OK, rb_worker_attach("interrupted", "x:f32[4] -> y:f32[4]", &o, &w));
	rb_client c = dial("interrupted", 1), alone = dial("interrupted", 1);
	int fd;
	WANT(RB_OK, rb_client_fd(c, &fd)); /* the library's thread too */
	pthread_sigmask(SIG_BLOCK, NULL, &after);
	for (int n = 1; n < 32; n++) /* no handler, no flag of one, no mask */
		CHECK(sigismember(&before, n) == sigismember(&after, n) && !sigaction(n, NULL, &is) && is.sa_handler == was[n].sa_handler &&
			is.sa_flags == was[n].sa_flags);
	rb_request r;
	WANT(RB_OK, rb_claim(c, 1, NULL, 0, 0, &r));
	WANT(RB_OK, rb_commit(c, r.id, 0, 0));
	WANT(RB_OK, rb_worker_next(w, minute, &b));

	/* after a handler has run, a wait with a timeout ends, so that the caller can handle the signal */
	int64_t from = now();
	ualarm(10000, 10000);
	WANT(RB_ERR_TIMEOUT, rb_worker_next(w, minute, &b));
	WANT(RB_ERR_TIMEOUT, rb_wait(c, r.id, minute));
	rb_request none;
	WANT(RB_ERR_FULL, rb_claim(c, 1, NULL, 0, minute, &none));
	for (int reaper = 0; reaper < 2; reaper++) { /* in its thread, or for the library's */
		uint64_t ended;
		uint32_t count;
		WANT(RB_OK, rb_reap_wait(reaper ? c : alone, minute, &ended, 1, &count));
		CHECK(count == 0);
	}
	CHECK(handled >= 2 && now() - from < 30 * second);
	ualarm(0, 0);
	WANT(RB_OK, rb_worker_close(w)); /* its batch fails */
	WANT(RB_ERR_FAILED, rb_wait(c, r.id, -1));
	WANT_ALL(RB_OK, rb_close(c), rb_close(alone));
	signal(SIGALRM, SIG_DFL);
}

/* A worker that completes a batch without having asked for one of its outputs; test/conformance has single rows. */
void unwritten(void)
{
	rb_worker_options o = {.size = sizeof o, .socket = socket_path};
	rb_worker w;
	WANT(RB_OK, rb_worker_attach("unwritten", "x:f32[4] -> y:f32[4] boxes:f32[<=2]", &o, &w));
	rb_client c = dial("unwritten", 1);
	for (int how = 0; how < 8; how++) {
		rb_batch *b;
		rb_request r;
		rb_view v;
		rb_tensor t;
		rb_map map;
		void *row;
		uint64_t bytes;
		uint32_t none = 0;
		WANT(RB_OK, rb_claim(c, 1, NULL, 0, minute, &r));
		WANT(RB_OK, rb_commit(c, r.id, 0, 0));
		WANT(RB_OK, rb_worker_next(w, minute, &b));
		WANT(RB_OK, rb_batch_run(b, RB_OUTPUT, 0, 0, &v));
		if (how == 1)
			WANT(RB_OK, rb_batch_fail(b, 0, "on purpose"));
		if (how == 2) {
			WANT_ALL(RB_ERR_INVALID, rb_batch_set_row_dims(NULL, 0, &none, 1), rb_batch_set_row_dims(b, 0, NULL, 1));
			WANT(RB_ERR_SHAPE, rb_batch_set_row_dims(b, 0, &none, 2));
			WANT(RB_ERR_ROWS, rb_batch_set_row_dims(b, 1, &none, 1));
			WANT(RB_OK, rb_batch_set_row_dims(b, 0, &none, 1)); /* no box: nothing to write */
		}
		if (how == 3)
			WANT(RB_OK, rb_batch_scatter(b, 1, (float[2]){0}, 8));
		if (how == 4)
			WANT(RB_ERR_SIZE, rb_batch_scatter(b, 1, (float[2]){0}, 7));
		if (how == 5) /* a read, and a description */
			WANT_ALL(RB_OK, rb_batch_gather(b, RB_OUTPUT, 1, (float[2]){0}, 8), rb_worker_tensor(w, RB_OUTPUT, 1, &t));
		if (how == 6)
			WANT(RB_OK, rb_batch_row(b, RB_OUTPUT, 1, 0, &row, &bytes));
		if (how == 7) { /* from now on the worker may write there directly */
			WANT(RB_OK, rb_worker_map(w, &map));
			WANT(RB_OK, rb_map_release(map.id));
		}
		int caught = how == 0 || how == 4 || how == 5;
		WANT(caught ? RB_ERR_FAILED : RB_OK, rb_batch_complete(b));
		WANT(caught || how == 1 ? RB_ERR_FAILED : RB_OK, rb_wait(c, r.id, minute));
		CHECK(!caught || strstr(rb_error(), "\"boxes\" of row 0 in a batch of 1"));
		CHECK(how != 1 || strstr(rb_error(), "on purpose"));
		WANT(RB_OK, rb_release(c, r.id));
	}
	WANT(RB_OK, rb_close(c));
	WANT(RB_OK, rb_worker_close(w));
}

/* Rows of different sizes, packed one after the other: inputs, and outputs that have their sizes. */
void packed(void)
{
	rb_worker_options o = {.size = sizeof o, .socket = socket_path, .policy = "ragged=true max_batch_size=4 wait_time=1m"};
	rb_worker w;
	WANT(RB_OK, rb_worker_attach("packed", "x:u8[<=8,2] k:i16[2] in:u8[4,<=4] -> y:u8[<=8,2] n:i32[] few:u8[<=2]", &o, &w));
	rb_client c = dial("packed", 4);
	rb_batch *b;
	rb_request r[3];
	rb_view v;
	const uint32_t size[3] = {3, 0, 2};
	const char *text[3] = {"aabbcc", "", "dddd"}; /* the last one twice */
	for (uint32_t i = 0; i < 3; i++) {
		WANT(RB_OK, rb_claim(c, 1 + i / 2, (uint32_t[]){size[i], 1}, 2, minute, &r[i]));
		WANT(RB_OK, rb_input(c, r[i].id, 0, &v));
		for (uint32_t row = 0; row < r[i].rows; row++)
			memcpy((char *)v.data + row * v.stride, text[i], 2 * size[i]);
	}
	WANT(RB_OK, rb_commit_all(c, (uint64_t[]){r[0].id, r[1].id, r[2].id}, 3, 0, 0));
	WANT(RB_OK, rb_worker_next(w, minute, &b));
	char x[16] = "";
	int32_t at[5] = {-1};
	WANT_ALL(RB_ERR_INVALID, rb_batch_pack(NULL, 0, x, 16, at), rb_batch_pack(b, 0, NULL, 0, NULL), rb_batch_pack(b, 3, x, 16, at),
		rb_batch_unpack(NULL, 0, x, 16), rb_batch_unpack(b, 0, NULL, 0), rb_batch_unpack(b, 3, x, 16));
	WANT_ALL(RB_ERR_SIZE, rb_batch_pack(b, 0, x, 13, at), rb_batch_unpack(b, 0, x, 13), rb_batch_unpack(b, 1, x, 15));
	WANT_ALL(RB_ERR_SHAPE, rb_batch_pack(b, 2, x, 16, at), rb_batch_unpack(b, 2, x, 16)); /* an inner dimension; rows of 3 */
	CHECK(at[0] == -1);
	WANT(RB_OK, rb_batch_pack(b, 1, x, 16, at));
	CHECK(!memcmp(at, (int32_t[]){0, 2, 4, 6, 8}, sizeof at));
	WANT(RB_OK, rb_batch_pack(b, 0, NULL, 0, at));
	CHECK(!memcmp(at, (int32_t[]){0, 3, 3, 5, 7}, sizeof at));
	WANT(RB_OK, rb_batch_pack(b, 0, x, 14, NULL));
	CHECK(!memcmp(x, "aabbccdddddddd", 14));
	WANT(RB_OK, rb_batch_unpack(b, 0, x, 14));
	WANT(RB_OK, rb_batch_unpack(b, 1, (int32_t[]){7, 8, 9, 10}, 16));
	rb_batch *idle[2];
	uint32_t count = 9;
	WANT_ALL(RB_ERR_INVALID, rb_worker_unwanted(w, NULL, 1, &count), rb_worker_unwanted(w, idle, 2, NULL));
	WANT(RB_OK, rb_worker_unwanted(w, idle, 2, &count));
	CHECK(count == 0);
	for (uint32_t i = 0; i < b->runs; i++) /* a failed unpack writes nothing */
		WANT(RB_OK, rb_batch_run(b, RB_OUTPUT, 2, i, &v));
	WANT(RB_OK, rb_batch_complete(b));
	WANT(RB_OK, rb_wait(c, r[2].id, minute));
	WANT(RB_OK, rb_output(c, r[2].id, 0, &v));
	CHECK(v.shape[0] == 2 && v.shape[1] == 2 && !memcmp((char *)v.data + v.stride, "dddd", 4));
	WANT(RB_OK, rb_output_row(c, r[2].id, 0, 1, &v));
	CHECK(v.shape[0] == 1 && v.shape[1] == 2 && !memcmp(v.data, "dddd", 4));
	WANT(RB_ERR_ROWS, rb_output_row(c, r[2].id, 0, 2, &v));
	WANT_ALL(RB_ERR_INVALID, rb_output_row(c, r[2].id, 3, 0, &v), rb_output_row(c, r[2].id, 0, 0, NULL));
	WANT(RB_OK, rb_output(c, r[2].id, 1, &v));
	CHECK(((int32_t *)v.data)[1] == 10);
	WANT(RB_OK, rb_close(c));
	WANT(RB_OK, rb_worker_close(w));
}
