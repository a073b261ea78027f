/* SPDX-License-Identifier: Apache-2.0 */
/* peer plays honest clients and victims of test/cmd/chaos with the C library, as
 * roles.go does with the Go one:
 *
 *   peer load SOCKET MODEL SEED THREADS PAUSE_US TIMEOUT_MS   honest requests until SIGTERM
 *   peer victims SOCKET MODEL                                 for each line "\"STEP AFTER SEED\"" a client that dies there
 *   peer forks SOCKET MODEL client|worker SEED                ends a session in good order while a forked child lives on
 *
 * Its messages are lines of JSON, as testbed.Child writes them.
 */
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "ringbatch.h"

enum { WIDTH = 16 };

static const int64_t patience = 100000000000LL; /* for every expected event, on any machine */

static const char *socket_path, *model;

static int64_t clock_ns(clockid_t id) {
	struct timespec t;
	clock_gettime(id, &t);
	return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static uint64_t next_random(uint64_t *s) { /* splitmix64 */
	uint64_t z = (*s += 0x9e3779b97f4a7c15u);
	z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
	z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
	return z ^ (z >> 31);
}

/* testbed.Answer */
static int64_t answer(int64_t x, int j) { return (int64_t)((uint64_t)x * 0x9e3779b9u + (uint64_t)j * 0x85ebca6bu + (uint64_t)(x >> 7)); }

static void fill(int64_t *x, uint32_t rows, uint64_t *rng) {
	for (uint32_t i = 0; i < rows * WIDTH; i++) x[i] = i % WIDTH ? (int64_t)next_random(rng) : 0; /* 0: the command to answer */
}

static int right(const int64_t *x, const int64_t *y, uint32_t rows) {
	for (uint32_t i = 0; i < rows * WIDTH; i++)
		if (y[i] != answer(x[i], i % WIDTH)) return 0;
	return 1;
}

static void fail(const char *what, int status) {
	printf("{\"error\":\"%s: %s\"}\n", what, rb_status_name(status));
	fflush(stdout);
	exit(1);
}

static rb_client connect_to(uint32_t window) {
	rb_connect_options o = {.size = sizeof o, .window = window, .socket = socket_path, .wait = 1, .timeout = patience};
	rb_client c;
	int status = rb_connect(model, &o, &c);
	if (status) fail("connect", status);
	return c;
}

/* ---- load ---------------------------------------------------------------- */

static const int64_t grace = 100000000;
static volatile sig_atomic_t stopping;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static long ok_count, named[RB_STATUS_COUNT], wrong_count, late_count;
static int64_t stood, slowest; /* nanoseconds */

static void stop(int s) { (void)s; stopping = 1; }

/* watch adds up the time for which this process, or the machine, stood still. */
static void *watch(void *unused) {
	for (;;) {
		int64_t start = clock_ns(CLOCK_MONOTONIC);
		usleep(10000);
		int64_t took = clock_ns(CLOCK_MONOTONIC) - start;
		if (took > grace / 4) { /* a nap that lasted much longer */
			pthread_mutex_lock(&lock);
			stood += took;
			pthread_mutex_unlock(&lock);
		}
	}
	return unused;
}

struct load { rb_client client; uint64_t seed; int pause; int64_t timeout; };

/* by_steps does a request without copies. */
static int by_steps(rb_client c, uint32_t rows, const int64_t *x, int64_t *y, int64_t timeout) {
	rb_request r;
	rb_view v;
	int64_t end = clock_ns(CLOCK_MONOTONIC) + timeout;
	int status = rb_claim(c, rows, NULL, 0, timeout, &r);
	if (status) return status;
	if (!(status = rb_input(c, r.id, 0, &v))) memcpy(v.data, x, rows * WIDTH * 8);
	int64_t left = end - clock_ns(CLOCK_MONOTONIC);
	if (!status) status = rb_commit(c, r.id, left > 1 ? left : 1, 0);
	if (!status) status = rb_wait(c, r.id, -1);
	if (!status && !(status = rb_output(c, r.id, 0, &v))) memcpy(y, v.data, rows * WIDTH * 8);
	rb_release(c, r.id);
	return status;
}

static void *run_load(void *arg) {
	struct load l = *(struct load *)arg;
	int64_t x[3 * WIDTH], y[3 * WIDTH];
	while (!stopping) {
		uint32_t rows = 1 + next_random(&l.seed) % 3;
		fill(x, rows, &l.seed);
		memset(y, 0, sizeof y);
		const void *in[] = {x};
		void *out[] = {y};
		pthread_mutex_lock(&lock);
		int64_t before = stood;
		pthread_mutex_unlock(&lock);
		int64_t start = clock_ns(CLOCK_MONOTONIC);
		uint64_t request = 0;
		int64_t allowed = l.timeout + grace;
		int status;
		if (next_random(&l.seed) % 2) {
			status = by_steps(l.client, rows, x, y, l.timeout);
		} else {
			allowed += l.timeout; /* it may wait that long for room, and then for its answer */
			status = rb_infer(l.client, rows, in, out, l.timeout, l.timeout, &request);
			if (status == RB_ERR_TIMEOUT && request) {
				rb_wait(l.client, request, -1);
				status = rb_collect(l.client, request, out);
			}
		}
		int64_t took = clock_ns(CLOCK_MONOTONIC) - start;
		if (took > allowed) usleep(grace / 1000); /* the watcher may have stood still too */
		pthread_mutex_lock(&lock);
		if (status == RB_OK && !right(x, y, rows)) wrong_count++;
		else if (status == RB_OK) ok_count++;
		else named[status]++;
		if (took > allowed + stood - before) late_count++;
		if (took > slowest) slowest = took;
		pthread_mutex_unlock(&lock);
		if (l.pause) usleep(l.pause / 2 + next_random(&l.seed) % l.pause);
	}
	return NULL;
}

static int play_load(char **argv) {
	int threads = atoi(argv[1]);
	struct load l = {.seed = strtoull(argv[0], NULL, 10), .pause = atoi(argv[2]), .timeout = atoll(argv[3]) * 1000000};
	struct sigaction a = {.sa_handler = stop};
	sigaction(SIGTERM, &a, NULL);
	l.client = connect_to(3 * threads);
	pthread_t all[64], watcher;
	pthread_create(&watcher, NULL, watch, NULL);
	struct load each[64];
	for (int i = 0; i < threads && i < 64; i++) {
		each[i] = l;
		each[i].seed += i * 7919;
		pthread_create(&all[i], NULL, run_load, &each[i]);
	}
	printf("{\"name\":\"ready\"}\n");
	fflush(stdout);
	while (!stopping) usleep(5000);
	for (int i = 0; i < threads && i < 64; i++) pthread_join(all[i], NULL);
	pthread_mutex_lock(&lock);
	printf("{\"name\":\"tally\",\"data\":{\"OK\":%ld,\"Stood\":%lld,\"Slowest\":%lld,\"Named\":{", ok_count, (long long)stood,
		(long long)slowest);
	const char *comma = "";
	for (int s = 1; s < RB_STATUS_COUNT; s++)
		if (named[s]) printf("%s\"%s\":%ld", comma, rb_status_name(s), named[s]), comma = ",";
	printf("},\"Wrong\":[");
	if (wrong_count) printf("\"%ld answers of the C client have wrong bytes\"", wrong_count);
	printf("],\"Late\":[");
	if (late_count)
		printf("\"%ld requests of the C client ended late, the slowest after %lld ms\"", late_count, (long long)slowest / 1000000);
	printf("]}}\n");
	fflush(stdout);
	return rb_close(l.client) ? 1 : 0;
}

/* ---- victims ------------------------------------------------------------- */

/* dying is a victim's message to its parent: the time of its death, or the time
 * within which the parent should kill it. */
struct dying { int64_t at, within; };

static int to_parent;

static void die(void) {
	struct dying d = {.at = clock_ns(CLOCK_REALTIME)};
	if (write(to_parent, &d, sizeof d) == sizeof d) raise(SIGKILL);
	_exit(3);
}

static void be_killed_within(int64_t ns) {
	struct dying d = {.within = ns};
	if (write(to_parent, &d, sizeof d) != sizeof d) _exit(3);
}

static void victim(const char *label, int after, uint64_t seed) {
	int64_t x[3 * WIDTH];
	if (!strcmp(label, "dial")) be_killed_within(400000);
	uint32_t window = 1 + next_random(&seed) % 8;
	rb_client c = connect_to(window);
	for (;;) {
		int now = after-- <= 0;
#define AT(step) do { if (now && !strcmp(label, step)) die(); } while (0)
		if (now && !strcmp(label, "random")) be_killed_within(1500000), label = "";
		uint32_t rows = 1 + next_random(&seed) % (window < 3 ? window : 3);
		fill(x, rows, &seed);
		rb_request r;
		rb_view v;
		int status = rb_claim(c, rows, NULL, 0, -1, &r);
		if (status) fail("claim", status);
		AT("claim");
		if ((status = rb_input(c, r.id, 0, &v))) fail("input", status);
		memcpy(v.data, x, rows * WIDTH * 4);
		AT("write");
		memcpy(v.data, x, rows * WIDTH * 8);
		if ((status = rb_commit(c, r.id, -1, 0))) fail("commit", status);
		AT("commit");
		if (now && !strcmp(label, "wait")) be_killed_within(300000), label = "";
		if ((status = rb_wait(c, r.id, -1))) fail("wait", status);
		AT("read");
		if ((status = rb_output(c, r.id, 0, &v))) fail("output", status);
		if (!right(x, v.data, rows)) fail("wrong bytes", 0);
		if ((status = rb_release(c, r.id))) fail("release", status);
		AT("release");
	}
}

static int play_victims(void) {
	char label[32];
	int after;
	unsigned long long seed;
	printf("{\"name\":\"ready\"}\n");
	fflush(stdout);
	while (scanf(" \"%31s %d %llu\"", label, &after, &seed) == 3) {
		int p[2];
		if (pipe(p)) return 1;
		pid_t parent = getpid(), pid = fork();
		if (pid == 0) {
			prctl(PR_SET_PDEATHSIG, SIGKILL);
			if (getppid() != parent) _exit(3);
			close(p[0]);
			to_parent = p[1];
			victim(label, after, seed);
		}
		close(p[1]);
		struct dying d = {0};
		int64_t at = 0;
		if (read(p[0], &d, sizeof d) == sizeof d) {
			uint64_t rng = seed ^ 0x5eed;
			if (d.at == 0) {
				for (int64_t end = clock_ns(CLOCK_MONOTONIC) + (int64_t)(next_random(&rng) % d.within); clock_ns(CLOCK_MONOTONIC) < end;) {}
				d.at = clock_ns(CLOCK_REALTIME);
				kill(pid, SIGKILL);
			}
			at = d.at;
		}
		close(p[0]);
		int status;
		while (waitpid(pid, &status, 0) < 0 && errno == EINTR) {}
		printf("{\"name\":\"died\",\"data\":{\"Pid\":%d,\"At\":%lld}}\n", pid, (long long)(WIFSIGNALED(status) ? at : 0));
		fflush(stdout);
	}
	return 0;
}

/* ---- forks --------------------------------------------------------------- */

/* fork_child forks a child that inherits all descriptors and does nothing. It ends
 * with standard input. */
static pid_t fork_child(void) {
	pid_t pid = fork();
	if (pid == 0) {
		prctl(PR_SET_PDEATHSIG, SIGKILL); /* the kernel kills it when its parent dies */
		for (;;) pause();
	}
	return pid;
}

static int play_forks(const char *who, uint64_t seed) {
	pid_t child = 0;
	if (!strcmp(who, "client")) {
		rb_client c = connect_to(8);
		int64_t x[WIDTH], y[WIDTH];
		int before = next_random(&seed) % 3, forked_at = next_random(&seed) % (before + 1);
		for (int i = 0; i <= before; i++) {
			if (i == forked_at) child = fork_child();
			fill(x, 1, &seed);
			int status = by_steps(c, 1, x, y, patience);
			if (status) fail("request", status);
		}
		if (next_random(&seed) % 2) { /* end with a request in flight */
			rb_request r;
			if (!rb_claim(c, 2, NULL, 0, 0, &r)) rb_commit(c, r.id, -1, 0);
		}
		int status = rb_close(c);
		if (status) fail("close", status);
	} else {
		rb_worker_options o = {.size = sizeof o, .socket = socket_path, .timeout = patience};
		rb_worker w;
		int status = rb_worker_attach(model, "x:i64[16] -> y:i64[16]", &o, &w);
		if (status) fail("attach", status);
		int batches = 1 + next_random(&seed) % 4, forked_at = next_random(&seed) % batches;
		for (int i = 0; i < batches; i++) {
			rb_batch *b;
			if (i == forked_at) child = fork_child();
			if ((status = rb_worker_next(w, 2000000000LL, &b)) == RB_ERR_TIMEOUT) continue;
			if (status) fail("next", status);
			for (uint32_t row = 0; row < b->rows; row++) {
				void *x, *y;
				uint64_t bytes;
				if (rb_batch_row(b, RB_INPUT, 0, row, &x, &bytes) || rb_batch_row(b, RB_OUTPUT, 0, row, &y, &bytes)) fail("row", 0);
				for (int j = 0; j < WIDTH; j++) ((int64_t *)y)[j] = answer(((int64_t *)x)[j], j);
			}
			rb_batch_complete(b);
		}
		if ((status = rb_worker_close(w))) fail("close", status);
	}
	printf("{\"name\":\"ended\",\"data\":{\"Child\":%d,\"At\":%lld}}\n", child, (long long)clock_ns(CLOCK_REALTIME));
	fflush(stdout);
	char line[8];
	while (fgets(line, sizeof line, stdin)) {} /* this process lives on */
	kill(child, SIGKILL);
	return 0;
}

int main(int argc, char **argv) {
	if (argc < 4) return 2;
	socket_path = argv[2], model = argv[3];
	if (!strcmp(argv[1], "load") && argc == 8) return play_load(argv + 4);
	if (!strcmp(argv[1], "victims")) return play_victims();
	if (!strcmp(argv[1], "forks") && argc == 6) return play_forks(argv[4], strtoull(argv[5], NULL, 10));
	return 2;
}
