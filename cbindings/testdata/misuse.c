/*
 * What a program can do wrong, and what it does besides: the library answers
 * with an error and leaves the program's signals, threads and limits alone.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "every.h"

/* What a caller can get wrong ends in an error, not in a crash; and nothing was done. */
void wrong_arguments(void)
{
	rb_client c = dial("double", 4);
	float x[8] = {1, 2, 3, 4}, y[8];
	const void *in[] = {x}, *no_in[] = {NULL};
	void *out[] = {y}, *no_out[] = {NULL};
	uint64_t id, none;
	uint32_t n;
	char *json;
	rb_request r;
	rb_view v;
	rb_map map;
	WANT(RB_ERR_INVALID, rb_connect(NULL, NULL, &c));
	WANT(RB_ERR_INVALID, rb_connect("double", NULL, NULL));
	WANT(RB_ERR_INVALID, rb_client_model(c, NULL));
	WANT(RB_ERR_INVALID, rb_client_tensor(c, RB_INPUT, 0, NULL));
	WANT(RB_ERR_INVALID, rb_client_map(c, NULL));
	WANT(RB_ERR_INVALID, rb_client_fd(c, NULL));
	WANT(RB_ERR_INVALID, rb_reap(c, &id, 1, NULL));
	WANT(RB_ERR_INVALID, rb_reap(c, NULL, 1, &n));
	WANT(RB_ERR_INVALID, rb_stats(socket_path, second, NULL));
	WANT(RB_ERR_TIMEOUT, rb_stats(socket_path, 0, &json));
	WANT(RB_ERR_INVALID, rb_claim(c, 1, NULL, 0, 0, NULL));
	WANT(RB_ERR_INVALID, rb_claim(c, 1, NULL, 1, 0, &r));
	WANT(RB_OK, rb_claim(c, 1, NULL, 0, 0, &r));
	WANT(RB_ERR_INVALID, rb_input(c, r.id, 0, NULL));
	WANT(RB_ERR_INVALID, rb_output(c, r.id, 0, NULL));
	WANT(RB_ERR_INVALID, rb_request_map(c, r.id, NULL));
	WANT(RB_ERR_INVALID, rb_request_timing(c, r.id, NULL));
	WANT(RB_ERR_INVALID, rb_commit(c, r.id, 0, RB_HOLD));
	WANT(RB_ERR_INVALID, rb_commit(c, r.id, 0, 4));
	WANT(RB_ERR_INVALID, rb_commit_all(c, NULL, 1, 0, 0));
	WANT(RB_ERR_INVALID, rb_commit_all(c, &r.id, 1, 0, RB_HOLD));
	uint64_t two[] = {r.id, 77};
	WANT(RB_ERR_RELEASED, rb_commit_all(c, two, 2, 0, 0));
	WANT(RB_ERR_NOT_COMMITTED, rb_poll(c, r.id));

	/* the number of a slot that nobody has claimed */
	none = r.id + (UINT64_C(1) << 32) - 1;
	WANT(RB_ERR_RELEASED, rb_poll(c, none));
	WANT(RB_ERR_RELEASED, rb_wait(c, none, -1));
	WANT(RB_ERR_RELEASED, rb_output(c, none, 0, &v));
	WANT(RB_ERR_RELEASED, rb_collect(c, none, out));
	WANT(RB_ERR_RELEASED, rb_request_map(c, none, &map));
	WANT(RB_ERR_RELEASED, rb_release(c, none));

	/* timeouts that no clock reaches */
	WANT(RB_OK, rb_commit(c, r.id, INT64_MAX, 0));
	WANT(RB_OK, rb_wait(c, r.id, INT64_MAX));
	WANT(RB_OK, rb_release(c, r.id));
	WANT(RB_OK, rb_infer(c, 2, in, out, INT64_MAX, INT64_MAX, &id));

	/* the first time through Go, the others not */
	for (int i = 0; i < 3; i++) {
		WANT(RB_ERR_INVALID, rb_infer(c, 1, NULL, out, 0, -1, &id));
		WANT(RB_ERR_INVALID, rb_infer(c, 1, no_in, out, 0, -1, &id));
		WANT(RB_ERR_INVALID, rb_infer(c, 1, in, NULL, 0, -1, &id));
		WANT(RB_ERR_INVALID, rb_infer(c, 1, in, no_out, 0, -1, &id));
		WANT(RB_ERR_INVALID, rb_infer(c, 1, in, out, 0, -1, NULL));
		WANT(RB_OK, rb_infer(c, 1, in, out, INT64_MAX, INT64_MAX, &id));
	}
	WANT(RB_ERR_INVALID, rb_submit(c, 1, NULL, 0, 0, &id));
	WANT(RB_ERR_INVALID, rb_submit(c, 1, no_in, 0, 0, &id));
	WANT(RB_ERR_INVALID, rb_submit(c, 1, in, 0, 0, NULL));
	WANT(RB_ERR_INVALID, rb_submit(c, 1, in, 0, 4, &id));
	WANT(RB_ERR_INVALID, rb_infer_prepared(NULL));
	WANT(RB_ERR_INVALID, rb_submit_prepared(NULL));
	WANT(RB_ERR_INVALID, rb_collect_prepared(NULL));
	for (int i = 0; i < 4; i++) /* none of those kept a slot */
		WANT(RB_OK, rb_submit(c, 1, in, 0, 0, &id));
	WANT(RB_OK, rb_wait(c, id, -1));
	WANT(RB_ERR_INVALID, rb_collect(c, id, NULL));
	WANT(RB_ERR_INVALID, rb_collect(c, id, no_out));
	WANT(RB_OK, rb_collect(c, id, out));
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
	if (getenv("RB_SLOW")) /* valgrind has limits of its own */
		return;
	rb_connect_options o = {.size = sizeof o, .socket = socket_path, .wait = 1};
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


void errors_have_names(void)
{
	CHECK(rb_abi_version() == RB_ABI_VERSION && rb_version()[0]);
	for (int s = 0; s < RB_STATUS_COUNT; s++)
		CHECK(rb_status_name(s)[0] && rb_status_text(s)[0]);
	CHECK(rb_status_retryable(RB_ERR_BROKER_GONE) && !rb_status_retryable(RB_ERR_FAILED));
	CHECK(strcmp(rb_status_name(99), "Unknown") == 0);
	rb_connect_options o = {.size = sizeof o, .socket = socket_path};
	rb_client c;
	WANT(RB_ERR_UNKNOWN_MODEL, rb_connect("nothing", &o, &c));
	CHECK(strstr(rb_error(), "nothing"));
	/* texts are UTF-8, whatever is in them and where they are cut */
	char name[3002] = "";
	for (int i = 0; i < 2; i++) {
		for (int j = 0; j < 1500; j++)
			memcpy(name + i + 2 * j, "\xc3\xa4", 3);
		WANT(RB_ERR_UNKNOWN_MODEL, rb_connect(name, &o, &c));
		CHECK(strlen(rb_error()) > 1000 && mbstowcs(NULL, rb_error(), 0) != (size_t)-1);
		name[0] = 'a';
	}
	WANT(RB_ERR_UNKNOWN_MODEL, rb_connect("\xc3(\xff", &o, &c));
	CHECK(mbstowcs(NULL, rb_error(), 0) != (size_t)-1);
	o.socket = "/nonexistent/ringbatch.sock";
	WANT(RB_ERR_NO_BROKER, rb_connect("double", &o, &c));
	o.size = 7;
	WANT(RB_ERR_VERSION, rb_connect("double", &o, &c));
	char *json;
	WANT(RB_OK, rb_stats(socket_path, second, &json));
	CHECK(strstr(json, "\"double\""));
	rb_free(json);
	WANT(RB_ERR_NO_BROKER, rb_stats("/nonexistent/ringbatch.sock", second, &json));
}

/* Every function refuses in a forked child, at once, and the parent goes on. */
void forked(void)
{
	rb_client c = dial("double", 2);
	rb_request r;
	WANT(RB_OK, rb_claim(c, 1, NULL, 0, 0, &r));
	pid_t pid = fork();
	if (pid == 0) {
		rb_model m; rb_tensor t; rb_map map; rb_view v; rb_timing timing; rb_client c2; rb_worker w = 1; rb_batch b = {0}, *pb = &b;
		rb_inference inference = {.client = c, .slice = -1, .rows = 1};
		uint64_t u, shape[RB_MAX_RANK]; uint32_t n; int fd; void *p; char *json;
		struct timespec from, to;
		clock_gettime(CLOCK_MONOTONIC, &from);
		int codes[] = {
			rb_connect("double", NULL, &c2), rb_client_model(c, &m), rb_client_tensor(c, 0, 0, &t), rb_client_map(c, &map),
			rb_claim(c, 1, NULL, 0, -1, &r), rb_input(c, r.id, 0, &v), rb_output(c, r.id, 0, &v), rb_set_priority(c, r.id, 0),
			rb_commit(c, r.id, 0, 0), rb_commit_all(c, &r.id, 1, 0, 0), rb_wait(c, r.id, -1), rb_poll(c, r.id), rb_cancel(c, r.id), rb_request_map(c, r.id, &map),
			rb_request_timing(c, r.id, &timing), rb_infer(c, 1, NULL, NULL, 0, -1, &u), rb_infer_prepared(&inference), rb_submit_prepared(&inference), rb_collect_prepared(&inference), rb_submit(c, 1, NULL, 0, 0, &u),
			rb_collect(c, r.id, NULL), rb_client_fd(c, &fd), rb_reap(c, &u, 1, &n), rb_release(c, r.id), rb_close(c), rb_map_release(1),
			rb_worker_attach("m", "x:f32[1] -> y:f32[1]", NULL, &w), rb_worker_model(w, &m), rb_worker_tensor(w, 0, 0, &t),
			rb_worker_map(w, &map), rb_worker_next(w, -1, &pb), rb_batch_run(&b, 0, 0, 0, &v), rb_batch_row(&b, 0, 0, 0, &p, &u),
			rb_batch_shape(&b, 0, 0, shape), rb_batch_set_output_dims(&b, 0, NULL, 0), rb_batch_fail(&b, 0, ""), rb_batch_fail_all(&b, ""),
			rb_batch_complete(&b), rb_worker_close(w), rb_stats(NULL, -1, &json)};
		clock_gettime(CLOCK_MONOTONIC, &to);
		for (size_t i = 0; i < sizeof codes / sizeof *codes; i++)
			if (codes[i] != RB_ERR_FORKED)
				_exit(2);
		if (!strstr(rb_error(), "fork") || strcmp(rb_status_name(RB_ERR_FORKED), "Forked"))
			_exit(3);
		int64_t limit = getenv("RB_SLOW") ? 10 * second : second / 100; /* all of them together */
		_exit((to.tv_sec - from.tv_sec) * second + to.tv_nsec - from.tv_nsec < limit ? 0 : 4);
	}
	int status;
	CHECK(waitpid(pid, &status, 0) == pid && status == 0);
	WANT(RB_OK, rb_commit(c, r.id, 0, 0));
	WANT(RB_OK, rb_wait(c, r.id, 10 * second));
	WANT(RB_OK, rb_close(c));
}

static atomic_int handled, misplaced;

static void handler(int n)
{
	(void)n;
	stack_t own;
	if (sigaltstack(NULL, &own) || !(own.ss_flags & SS_ONSTACK))
		misplaced++;
	handled++;
}

/* The program's signals are its own. */
void signals(void)
{
	sigset_t blocked;
	sigemptyset(&blocked);
	sigaddset(&blocked, SIGTERM);
	pthread_sigmask(SIG_BLOCK, &blocked, NULL);
	kill(getpid(), SIGTERM); /* no thread of the library takes it */
	CHECK(sigtimedwait(&blocked, NULL, &(struct timespec){.tv_sec = 10}) == SIGTERM);
	pthread_sigmask(SIG_UNBLOCK, &blocked, NULL);

	/* A handler does not run on the stack of the Go code that it interrupts. */
	rb_worker_options o = {.size = sizeof o, .socket = socket_path};
	rb_worker w;
	rb_batch *b;
	signal(SIGALRM, handler);
	WANT(RB_OK, rb_worker_attach("interrupted", "x:f32[4] -> y:f32[4]", &o, &w));
	ualarm(10000, 10000);
	WANT(RB_ERR_TIMEOUT, rb_worker_next(w, second / 2, &b)); /* a signal does not end it */
	ualarm(0, 0);
	CHECK(handled > 0 && misplaced == 0);
	WANT(RB_OK, rb_worker_close(w));
	signal(SIGALRM, SIG_DFL);
}
