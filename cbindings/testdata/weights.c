/* SPDX-License-Identifier: Apache-2.0 */
/* A publisher, a worker that follows, and wrong calls; weights_test.go starts them. */
#include <pthread.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../ringbatch_cuda.h"
#include "../ringbatch_weights.h"
#include "every.h"

#define TENSORS "a:i64[600] b.c:i64[]"

static rb_connect_options options;

/* The stub's device pointers are addresses. */
static const char *tensors(void) { return getenv("TENSORS") ? getenv("TENSORS") : TENSORS; }

/* Publishes each number of its input: all weights have it. "half" begins and writes half of a buffer; "check" attaches again;
 * "withdrawn" prints the latest version that was withdrawn. */
static int publisher(void)
{
	rb_publisher p;
	rb_tensor t[2];
	char line[64];
	int status = rb_publish_open("m", tensors(), &options, &p);
	puts(status ? rb_status_name(status) : "open");
	rb_device d = {.size = sizeof d};
	for (uint32_t k = 0; k < 2 && !status; k++)
		WANT(RB_OK, rb_publish_tensor(p, k, &t[k]));
	if (!status) {
		WANT(RB_OK, rb_publish_device(p, &d));
		CHECK(!d.base == !t[0].on_device && (d.ordinal >= 0) == t[0].on_device);
	}
	while (!status && fgets(line, sizeof line, stdin)) {
		void *buffer;
		uint32_t version;
		if (line[0] == 'c') {
			puts(rb_status_name(rb_publish_check(p)));
			continue;
		}
		if (line[0] == 'w') {
			char reason[64];
			WANT(RB_OK, rb_publish_withdrawn(p, &version, reason, sizeof reason));
			printf("withdrawn %u %s\n", version, reason);
			continue;
		}
		WANT(RB_OK, rb_publish_begin(p, minute, &buffer));
		for (int k = 0; k < 2; k++)
			for (uint64_t i = 0; i < t[k].row_bytes / (line[0] == 'h' ? 16 : 8); i++)
				((int64_t *)((char *)buffer + t[k].offset))[i] = atoll(line);
		if (line[0] == 'h')
			puts("half");
		else if (rb_publish_commit(p, &version))
			printf("error %s\n", rb_error());
		else
			printf("version %u\n", version);
	}
	return status;
}

/* Loads the version in force; refuses weights below 0. */
static int enter(rb_follower f, uint32_t *version, const void **buffer)
{
	uint32_t changed;
	for (;;) {
		int status = rb_follow_enter(f, version, buffer, &changed);
		if (status || !changed)
			return status;
		if (*(const int64_t *)*buffer >= 0)
			return rb_follow_loaded(f);
		if ((status = rb_follow_refuse(f, "weights below 0")))
			return status;
	}
}

/* Answers with the least and the most of its weights. */
static void answer(rb_follower f, const rb_tensor *t, rb_batch *b)
{
	uint32_t version;
	const void *buffer;
	rb_view y[2];
	int64_t least = INT64_MAX, most = INT64_MIN;
	if (enter(f, &version, &buffer)) {
		WANT(RB_OK, rb_batch_fail_all(b, rb_error()));
		return;
	}
	for (int k = 0; k < 4; k++) /* twice: a writer beside it would be seen */
		for (uint64_t i = 0; i < t[k % 2].row_bytes / 8; i++) {
			int64_t n = ((const volatile int64_t *)((const char *)buffer + t[k % 2].offset))[i];
			least = n < least ? n : least;
			most = n > most ? n : most;
		}
	for (uint32_t i = 0; i < b->runs; i++) {
		for (uint32_t k = 0; k < 2; k++)
			WANT(RB_OK, rb_batch_run(b, RB_OUTPUT, k, i, &y[k]));
		for (uint32_t j = 0; j < b->run[i].rows; j++) {
			((int64_t *)y[0].data)[j] = least;
			((int64_t *)y[1].data)[j] = most;
		}
	}
	WANT(RB_OK, rb_batch_set_version(b, version));
	WANT(RB_OK, rb_follow_exit(f));
}

static void worker(void)
{
	rb_follower f;
	rb_tensor t[2];
	options.wait = 1;
	options.device = 0;
	if (getenv("TENSORS"))
		WANT(RB_ERR_INVALID, rb_follow_open("m", &options, &f));
	options.device = 1;
	WANT(RB_OK, rb_follow_open("m", &options, &f));
	for (uint32_t k = 0; k < 2; k++)
		WANT(RB_OK, rb_follow_tensor(f, k, &t[k]));
	for (;;) {
		rb_worker w;
		rb_batch *b;
		rb_worker_options o = {.size = sizeof o, .socket = options.socket};
		if (rb_worker_attach("m", "x:u8[1] -> least:i64[1] most:i64[1]", &o, &w)) {
			usleep(1000);
			continue;
		}
		puts("attached");
		while (!rb_worker_next(w, -1, &b)) {
			answer(f, t, b);
			rb_batch_complete(b);
		}
		WANT(RB_OK, rb_worker_close(w));
	}
}

static atomic_int entered;

static void *enter_again(void *follower)
{
	uint32_t version;
	const void *buffer;
	WANT(RB_OK, enter(*(rb_follower *)follower, &version, &buffer));
	entered = (int)version;
	WANT(RB_OK, rb_follow_exit(*(rb_follower *)follower));
	return NULL;
}

/* Another thread joins a batch of the same version, and waits for batches of an older one. */
static void threads(rb_publisher p, rb_follower f)
{
	pthread_t thread[2];
	uint32_t version;
	void *buffer;
	const void *seen;
	WANT(RB_OK, enter(f, &version, &seen));
	for (int i = 0; i < 2; i++) {
		entered = 0;
		pthread_create(&thread[i], NULL, enter_again, &f);
		if (i == 0) {
			pthread_join(thread[0], NULL);
			CHECK(entered == (int)version);
			WANT(RB_OK, rb_publish_begin(p, 0, &buffer));
			WANT(RB_OK, rb_publish_commit(p, &version));
		}
	}
	usleep(20000);
	CHECK(entered == 0);
	WANT(RB_OK, rb_follow_exit(f));
	pthread_join(thread[1], NULL);
	CHECK(entered == (int)version);
}

static void misuse(void)
{
	rb_publisher p;
	rb_follower f;
	rb_tensor t;
	void *buffer;
	const void *seen;
	uint32_t v, changed;
	WANT(RB_ERR_UNKNOWN_MODEL, rb_follow_open("m", &options, &f));
	WANT(RB_ERR_INVALID, rb_publish_open("m", "a:i64[<=600]", &options, &p));
	WANT(RB_ERR_UNKNOWN_MODEL, rb_publish_open("typo", TENSORS, &options, &p));
	WANT_ALL(RB_ERR_VERSION, rb_publish_open("m", TENSORS, &(rb_connect_options){0}, &p), rb_follow_open("m", &(rb_connect_options){0}, &f));
	WANT(RB_OK, rb_publish_open("m", TENSORS, &options, &p));
	WANT(RB_ERR_TIMEOUT, rb_follow_open("m", &options, &f));
	WANT_ALL(RB_ERR_INVALID, rb_publish_tensor(p, 2, &t), rb_publish_commit(p, &v), rb_publish_begin(p, 0, NULL));
	WANT(RB_OK, rb_publish_begin(p, 0, &buffer));
	WANT(RB_OK, rb_publish_commit(p, &v));
	WANT(RB_OK, rb_follow_open("m", &options, &f));
	rb_device d = {.size = sizeof d};
	WANT(RB_OK, rb_follow_device(f, &d));
	CHECK(d.ordinal == -1 && !d.base);
	d.size = 1;
	WANT(RB_ERR_VERSION, rb_follow_device(f, &d));
	WANT_ALL(RB_ERR_INVALID, rb_follow_exit(f), rb_follow_loaded(f), rb_follow_refuse(f, "no"), rb_follow_tensor(f, 2, &t));
	WANT(RB_OK, rb_follow_enter(f, &v, &seen, &changed));
	uint32_t current = 0;
	WANT(RB_OK, rb_follow_current(f, &current));
	CHECK(current == v);
	WANT(RB_ERR_INVALID, rb_follow_current(f, NULL));
	CHECK(v == 1 && changed);
	WANT(RB_ERR_FAILED, rb_follow_refuse(f, "no")); /* there is no version before */
	WANT(RB_ERR_FAILED, rb_follow_enter(f, &v, &seen, &changed));
	WANT(RB_ERR_INVALID, rb_request_version(0, 0, NULL));
	WANT(RB_OK, rb_publish_begin(p, 0, &buffer));
	WANT(RB_OK, rb_publish_commit(p, &v));
	char reason[2];
	WANT(RB_OK, rb_publish_withdrawn(p, &v, reason, sizeof reason));
	CHECK(v == 1 && !strcmp(reason, "n"));
	threads(p, f);
	pid_t child = fork();
	if (!child) {
		CHECK(*(volatile char *)buffer == 0); /* private zeros */
		WANT_ALL(RB_ERR_FORKED, rb_publish_check(p), rb_follow_exit(f));
		_exit(0);
	}
	int ended;
	CHECK(waitpid(child, &ended, 0) == child && ended == 0);
	WANT_ALL(RB_OK, rb_publish_check(p), rb_publish_close(p), rb_follow_close(f));
	WANT_ALL(RB_ERR_CLOSED, rb_publish_check(p), rb_publish_close(p), rb_follow_exit(f));
	puts("ok");
}

int main(int argc, char **argv)
{
	if (argc != 3)
		return 2;
	setlinebuf(stdout);
	options = (rb_connect_options){.size = sizeof options, .socket = argv[2], .patience = minute};
	if (argv[1][0] == 'p')
		return publisher();
	argv[1][0] == 'w' ? worker() : misuse();
	return 0;
}
