/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Clients and workers of a model with tensors in device memory, on the stub driver of
 * hack/cuda/stub or on a real one. device_test.go runs them as processes.
 *
 *	device worker SOCKET MODEL SIGNATURE [PIPELINE]   serves until it is killed or the broker hangs up for good
 *	device client SOCKET MODEL REQUESTS HOW           HOW: stream, hasty (does not wait for its stream), patient (synchronises)
 *	device connect SOCKET MODEL | attach SOCKET MODEL SIGNATURE | fork SOCKET MODEL   print the status
 *	device closing | broken | written | busy SOCKET MODEL   see below
 */
#include <dirent.h>
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "ringbatch_cuda.h"

#define WIDTH 1024 /* elements of x and y */
#define ROW (WIDTH * sizeof(float))
#define WINDOW 4

static int (*cuStreamCreate)(void **, unsigned), (*cuStreamSynchronize)(void *),
	(*cuMemcpyAsync)(uint64_t, uint64_t, size_t, void *);
static int (*cuMemAlloc)(uint64_t *, size_t), (*cuMemFree)(uint64_t), (*cuMemcpyHtoD)(uint64_t, const void *, size_t),
	(*cuMemcpyDtoH)(void *, uint64_t, size_t), (*cuCtxSetCurrent)(void *), (*cuInit)(unsigned);

#define MUST(call) must(call, #call, __LINE__)
#define CHECK(condition) must(!(condition), "not so: " #condition, __LINE__)

static void must(int status, const char *what, int line)
{
	if (status) {
		printf("%d: %s: %d %s\n", line, what, status, rb_error());
		exit(1);
	}
}

static void load(void)
{
	const char *path = getenv("RINGBATCH_LIBCUDA");
	void *lib = dlopen(path ? path : "libcuda.so.1", RTLD_NOW);
	const struct {
		void *to;
		const char *name;
	} all[] = {
		{&cuStreamCreate, "cuStreamCreate"}, {&cuStreamSynchronize, "cuStreamSynchronize"},
		{&cuMemcpyAsync, "cuMemcpyAsync"},
		{&cuMemAlloc, "cuMemAlloc_v2"}, {&cuMemFree, "cuMemFree_v2"}, {&cuMemcpyHtoD, "cuMemcpyHtoD_v2"},
		{&cuMemcpyDtoH, "cuMemcpyDtoH_v2"}, {&cuCtxSetCurrent, "cuCtxSetCurrent"}, {&cuInit, "cuInit"},
	};
	for (size_t i = 0; lib && i < sizeof all / sizeof *all; i++) {
		void *f = dlsym(lib, all[i].name);
		CHECK(f);
		memcpy(all[i].to, &f, sizeof f);
	}
	CHECK(lib);
}

/* Counts this process's descriptors and mappings of the stub's device memory. */
static int held(void)
{
	int n = 0;
	char line[4096], path[300], target[300];
	FILE *maps = fopen("/proc/self/maps", "r");
	while (maps && fgets(line, sizeof line, maps))
		n += strstr(line, "stub-cuda-") != NULL;
	if (maps)
		fclose(maps);
	DIR *d = opendir("/proc/self/fd");
	for (struct dirent *e; d && (e = readdir(d));) {
		snprintf(path, sizeof path, "/proc/self/fd/%s", e->d_name);
		ssize_t k = readlink(path, target, sizeof target - 1);
		target[k > 0 ? k : 0] = 0;
		n += strstr(target, "stub-cuda-") != NULL;
	}
	if (d)
		closedir(d);
	return n;
}

static void touch(const char *path)
{
	FILE *f = path ? fopen(path, "w") : NULL;
	if (f)
		fclose(f);
}

static void say(int status) { printf("%s: %s\n", rb_status_name(status), status ? rb_error() : ""); }

static int connect_to(const char *socket, const char *model, uint32_t device, rb_client *c)
{
	rb_connect_options o = {.size = sizeof o, .socket = socket, .window = WINDOW, .device = device, .wait = getenv("WAIT") != NULL};
	return rb_connect(model, &o, c);
}

static void *stream;
static uint64_t in, out; /* this process's device memory: rows for more requests than a stream has at once, and for a window */
#define PLACES 64

/* Enters the context of the client's device, and makes the stream and the rows once. */
static rb_device enter_device(rb_client c, rb_map *map)
{
	rb_device d = {.size = sizeof d};
	MUST(rb_client_map(c, map));
	MUST(rb_map_device(map->id, &d));
	MUST(cuCtxSetCurrent(d.context));
	if (!in) {
		MUST(cuStreamCreate(&stream, 1));
		MUST(cuMemAlloc(&in, PLACES * ROW));
		MUST(cuMemAlloc(&out, WINDOW * ROW));
	}
	return d;
}

/* ---- the worker: y = x + 1, sum = x[0]; x is one number, WIDTH times --------------- */

static int serve(rb_worker w)
{
	rb_batch *b;
	int status;
	while (!(status = rb_worker_next(w, -1, &b))) {
		if (getenv("DIE"))
			raise(SIGKILL);
		static float row[WIDTH];
		for (uint32_t i = 0; i < b->rows; i++) {
			void *x, *y, *sum;
			uint64_t bytes;
			MUST(rb_batch_row(b, RB_INPUT, 0, i, &x, &bytes));
			CHECK(bytes == ROW);
			MUST(cuMemcpyDtoH(row, (uint64_t)(uintptr_t)x, ROW));
			for (int j = 1; j < WIDTH; j++)
				if (row[j] != row[0]) {
					MUST(rb_batch_fail_all(b, "half a row"));
					break;
				}
			MUST(rb_batch_row(b, RB_OUTPUT, 1, i, &sum, &bytes));
			*(float *)sum = row[0];
			for (int j = 0; j < WIDTH; j++)
				row[j] += 1;
			MUST(rb_batch_row(b, RB_OUTPUT, 0, i, &y, &bytes));
			MUST(cuMemcpyHtoD((uint64_t)(uintptr_t)y, row, ROW));
		}
		MUST(cuStreamSynchronize(NULL)); /* the outputs have arrived */
		CHECK(rb_batch_gather(b, RB_INPUT, 0, row, sizeof row) == RB_ERR_INVALID);
		CHECK(getenv("ANSWERS_ON_HOST") || rb_batch_scatter(b, 0, row, sizeof row) == RB_ERR_INVALID);
		MUST(rb_batch_complete(b));
	}
	return status;
}

static int worker(const char *socket, const char *model, const char *signature)
{
	for (int tries = 0; tries < 6000; tries++) {
		rb_worker w;
		rb_worker_options o = {.size = sizeof o, .socket = socket, .policy = "max_batch_size=4 wait_time=0s slots=16 max_attempts=3"};
		int status = rb_worker_attach(model, signature, &o, &w);
		if (!status) {
			rb_map map;
			rb_device d = {.size = sizeof d};
			MUST(rb_worker_map(w, &map));
			MUST(rb_map_device(map.id, &d));
			MUST(rb_map_release(map.id));
			cuCtxSetCurrent(d.context);
			printf("attached %s %d\n", d.gpu, held());
			status = serve(w);
			rb_worker_close(w);
			printf("left %d\n", held());
		}
		if (status != RB_ERR_BROKER_GONE && status != RB_ERR_NO_BROKER && status != RB_ERR_DRAINING) {
			say(status);
			return 1;
		}
		usleep(10000);
	}
	return 1;
}

/* ---- the client --------------------------------------------------------------------- */

typedef struct {
	uint64_t id;
	float value;
} asked;

static int wrong; /* answers to an earlier row */

static void ask(rb_client c, asked *q, float value, const char *how)
{
	static int place;
	place = (place + 1) % PLACES;
	rb_request r;
	rb_view x;
	static float row[WIDTH];
	q->value = value;
	MUST(rb_claim(c, 1, NULL, 0, -1, &r));
	q->id = r.id;
	MUST(rb_input(c, r.id, 0, &x));
	for (int j = 0; j < WIDTH; j++)
		row[j] = value;
	MUST(cuMemcpyHtoD(in + (uint64_t)place * ROW, row, ROW));
	MUST(cuStreamSynchronize(NULL)); /* a large copy from pageable memory returns before it has arrived */
	MUST(cuMemcpyAsync((uint64_t)(uintptr_t)x.data, in + (uint64_t)place * ROW, ROW, stream));
	if (!strcmp(how, "stream")) {
		MUST(rb_commit_on_stream(c, &r.id, 1, stream, 0, 0));
		CHECK(rb_input(c, r.id, 0, &x) == RB_ERR_COMMITTED);
		CHECK(rb_commit(c, r.id, 0, 0) == RB_ERR_COMMITTED);
		CHECK(rb_commit_on_stream(c, &r.id, 1, stream, 0, 0) == RB_ERR_COMMITTED);
		return;
	}
	if (!strcmp(how, "patient"))
		MUST(cuStreamSynchronize(stream));
	MUST(rb_commit(c, r.id, 0, 0));
}

/* The status of the request's end. The stream reads the outputs after the release. */
static int answer(rb_client c, const asked *q, int place)
{
	rb_view y, sum;
	int status = rb_wait(c, q->id, -1);
	if (status) {
		MUST(rb_release(c, q->id));
		return status;
	}
	if (!rb_output(c, q->id, 1, &sum)) /* not every model has it */
		wrong += *(float *)sum.data != q->value;
	MUST(rb_output(c, q->id, 0, &y));
	MUST(cuMemcpyAsync(out + (uint64_t)place * ROW, (uint64_t)(uintptr_t)y.data, ROW, stream));
	MUST(rb_release_on_stream(c, q->id, stream));
	CHECK(rb_poll(c, q->id) == RB_ERR_RELEASED);
	return RB_OK;
}

static void check_out(int place, float value)
{
	static float row[WIDTH];
	MUST(cuMemcpyDtoH(row, out + (uint64_t)place * ROW, ROW));
	for (int j = 0; j < WIDTH; j++)
		if (row[j] != value + 1) {
			wrong++;
			return;
		}
}

static int client(const char *socket, const char *model, int count, const char *how)
{
	rb_client c;
	rb_map map;
	rb_tensor t;
	asked q[WINDOW];
	float value = 1;
	MUST(connect_to(socket, model, 1, &c));
	rb_device d = enter_device(c, &map);
	MUST(rb_client_tensor(c, RB_INPUT, 0, &t));
	CHECK(t.on_device == 1 && d.ordinal >= 0 && d.base && d.bytes >= t.offset + 16 * t.stride);
	CHECK(rb_client_tensor(c, RB_OUTPUT, 1, &t) || !t.on_device);
	const void *host[] = {q, q};
	void *into[] = {q, q};
	const uint64_t bytes[] = {ROW, sizeof(float)};
	uint64_t id;
	CHECK(rb_infer(c, 1, host, bytes, into, bytes, 0, 0, &id) == RB_ERR_INVALID);
	CHECK(rb_submit(c, 1, host, bytes, 0, 0, &id) == RB_ERR_INVALID);
	int torn = 0, gone = 0;
	printf("connected\n");
	for (int n = 0; n < count;) {
		bool good[WINDOW];
		for (int i = 0; i < WINDOW; i++)
			ask(c, &q[i], value++, how);
		for (int i = 0; i < WINDOW; i++) {
			int status = answer(c, &q[i], i);
			torn += status == RB_ERR_FAILED && !strcmp(rb_error(), "half a row");
			gone += status == RB_ERR_BROKER_GONE;
			good[i] = !status;
			n += !status || status == RB_ERR_FAILED;
			CHECK(!status || status == RB_ERR_FAILED || status == RB_ERR_BROKER_GONE);
		}
		touch(getenv("STUB_CUDA_GATE")); /* the answers came while the stream stood still */
		MUST(cuStreamSynchronize(stream));
		for (int i = 0; i < WINDOW; i++)
			if (good[i])
				check_out(i, q[i].value);
		if (n == WINDOW && getenv("PAUSE")) { /* the test goes on here */
			printf("paused\n");
			getchar();
		}
	}
	MUST(cuStreamSynchronize(stream));
	MUST(cuMemFree(in));
	MUST(cuMemFree(out));
	MUST(rb_close(c));
	CHECK(getenv("PAUSE") || !getenv("RINGBATCH_LIBCUDA") || held() == 1); /* the map's */
	MUST(rb_map_release(map.id));
	CHECK(rb_map_device(map.id, &d) == RB_ERR_RELEASED);
	CHECK(held() == 0);
	printf("torn %d, wrong %d, gone %d\nok\n", torn, wrong, gone);
	return 0;
}

/* Clients that are closed, and requests that are released or canceled, before the stream has got to the commits. */
static int closing(const char *socket, const char *model)
{
	for (int round = 0; round < 6; round++) {
		rb_client c;
		rb_map map;
		asked q[WINDOW];
		MUST(connect_to(socket, model, 1, &c));
		rb_device d = enter_device(c, &map);
		CHECK(rb_commit_on_stream(c, NULL, 1, stream, 0, 0) == RB_ERR_INVALID);
		CHECK(rb_commit_on_stream(c, &d.base, 1, stream, 0, RB_HOLD) == RB_ERR_INVALID);
		for (int i = 0; i < WINDOW; i++)
			ask(c, &q[i], (float)i, "stream");
		for (int i = 0; round == 1 && i < WINDOW; i++) /* released requests keep all slots until they have ended */
			MUST(i & 1 ? rb_release(c, q[i].id) : rb_release_on_stream(c, q[i].id, NULL));
		for (int i = 0; round == 1 && i < WINDOW; i++) {
			ask(c, &q[i], (float)i, "stream");
			MUST(rb_wait(c, q[i].id, -1));
		}
		if (round == 2)
			for (int i = 0; i < WINDOW; i++) {
				MUST(rb_cancel(c, q[i].id));
				int status = rb_wait(c, q[i].id, -1);
				CHECK(status == RB_OK || status == RB_ERR_CANCELED);
			}
		if (round == 3) /* the stream does not exist: the request stays as it was */
			for (int i = 0; i < WINDOW; i++) {
				rb_request r;
				MUST(rb_wait(c, q[i].id, -1));
				CHECK(rb_release_on_stream(c, q[i].id, &r) == RB_ERR_INVALID);
				MUST(rb_release(c, q[i].id));
				MUST(rb_claim(c, 1, NULL, 0, -1, &r));
				CHECK(rb_commit_on_stream(c, &r.id, 1, &r, 0, 0) == RB_ERR_INVALID);
				MUST(rb_commit(c, r.id, 0, 0));
				MUST(rb_wait(c, r.id, -1));
				MUST(rb_release(c, r.id));
			}
		if (round == 4) { /* ends that the notifier reports */
			int fd;
			rb_request r;
			uint64_t ended[WINDOW];
			uint32_t n = 0, all = 0;
			MUST(rb_client_fd(c, &fd));
			for (int i = 0; i < WINDOW; i++) {
				MUST(rb_wait(c, q[i].id, -1));
				MUST(rb_release_on_stream(c, q[i].id, stream));
				MUST(rb_claim(c, 1, NULL, 0, -1, &r));
				MUST(rb_commit_on_stream(c, &r.id, 1, stream, 1000000000000, RB_NOTIFY));
			}
			for (; all < WINDOW; all += n)
				MUST(rb_reap(c, ended, WINDOW, &n));
		}
		if (round % 2)
			MUST(rb_map_release(map.id));
		MUST(rb_close(c));
		if (round % 2 == 0)
			MUST(rb_map_release(map.id));
		if (round == 5)
			MUST(cuStreamSynchronize(stream)); /* the rest is in its host functions */
	}
	rb_client c; /* the next client unmaps it */
	MUST(connect_to(socket, model, 1, &c));
	MUST(rb_close(c));
	MUST(cuMemFree(in));
	CHECK(held() == 0);
	printf("ok\n");
	return 0;
}

static void *close_client(void *client)
{
	MUST(rb_close(*(rb_client *)client));
	return NULL;
}

/* Connects a client that takes all slots as soon as they are free. If that takes long, opens the gate. */
static rb_client connect_to_all(const char *socket, const char *model, const char *gate)
{
	rb_client c = 0;
	rb_connect_options all = {.size = sizeof all, .socket = socket, .window = 16, .device = 1};
	int status = RB_ERR_RING_FULL;
	for (int tries = 0; tries < 6000 && status == RB_ERR_RING_FULL; tries++) {
		if (tries == 200)
			touch(gate);
		usleep(1000);
		status = rb_connect(model, &all, &c);
	}
	MUST(status);
	return c;
}

/* A client is closed while its stream writes the input of a claimed request: the next client gets the slot after the
 * stream has stopped, even while the first client's map is held. */
static int written(const char *socket, const char *model)
{
	static float row[WIDTH];
	const char *gate = getenv("STUB_CUDA_GATE");
	for (int keep = 0; keep < 2; keep++) {
		rb_client c = connect_to_all(socket, model, NULL);
		rb_map map;
		rb_request r;
		rb_view x;
		pthread_t closer;
		enter_device(c, &map);
		MUST(rb_claim(c, 1, NULL, 0, -1, &r));
		MUST(rb_input(c, r.id, 0, &x));
		MUST(cuMemcpyAsync((uint64_t)(uintptr_t)x.data, in, ROW, stream)); /* zeros; stops at half of them */
		if (!keep)
			MUST(rb_map_release(map.id));
		MUST(pthread_create(&closer, NULL, close_client, &c));
		rb_client next = connect_to_all(socket, model, gate);
		MUST(rb_claim(next, 1, NULL, 0, -1, &r));
		MUST(rb_input(next, r.id, 0, &x));
		for (int j = 0; j < WIDTH; j++)
			row[j] = 7;
		MUST(cuMemcpyHtoD((uint64_t)(uintptr_t)x.data, row, ROW));
		touch(gate);
		pthread_join(closer, NULL);
		MUST(cuMemcpyDtoH(row, (uint64_t)(uintptr_t)x.data, ROW));
		for (int j = 0; j < WIDTH; j++)
			CHECK(row[j] == 7);
		MUST(rb_close(next));
		if (keep)
			MUST(rb_map_release(map.id));
		MUST(unlink(gate));
	}
	printf("ok\n");
	return 0;
}

/* A stream that fails before it gets to the commit. */
static int broken(const char *socket, const char *model)
{
	rb_client c;
	rb_map map;
	asked q;
	MUST(connect_to(socket, model, 1, &c));
	enter_device(c, &map);
	ask(c, &q, 1, "stream");
	touch(getenv("STUB_CUDA_BROKEN"));
	CHECK(rb_wait(c, q.id, -1) == RB_ERR_FAILED);
	CHECK(strstr(rb_error(), "stream failed"));
	CHECK(rb_poll(c, q.id) == RB_ERR_FAILED);
	MUST(rb_release(c, q.id));
	MUST(rb_close(c));
	printf("ok\n");
	return 0;
}

/* A busy stream keeps no slot whose request was committed and has ended with answers on the host. */
static int busy_release(const char *socket, const char *model)
{
	rb_client c;
	rb_map map;
	rb_request r, more;
	asked q[WINDOW];
	const char *gate = getenv("STUB_CUDA_GATE");
	touch(gate);
	MUST(connect_to(socket, model, 1, &c));
	enter_device(c, &map);
	for (int i = 0; i < WINDOW; i++)
		ask(c, &q[i], (float)i, "stream");
	for (int i = 0; i < WINDOW; i++)
		MUST(rb_wait(c, q[i].id, -1));
	MUST(unlink(gate)); /* from here on the stream stops */
	MUST(cuMemcpyAsync(in, in + ROW, ROW, stream));
	for (int i = 0; i < WINDOW; i++)
		MUST(rb_release_on_stream(c, q[i].id, stream));
	if (getenv("ANSWERS_ON_HOST")) {
		MUST(rb_claim(c, 1, NULL, 0, 1, &r));
		/* The stream may still write to a request that was not committed. */
		MUST(rb_release_on_stream(c, r.id, stream));
		for (int i = 0; i < WINDOW - 1; i++)
			MUST(rb_claim(c, 1, NULL, 0, 1, &more));
	}
	CHECK(rb_claim(c, 1, NULL, 0, 1, &more) != RB_OK);
	touch(gate);
	MUST(rb_claim(c, 1, NULL, 0, -1, &more));
	MUST(rb_close(c));
	printf("ok\n");
	return 0;
}

/* A sequence whose state is in device memory: a step changes halves, a reset clears them. */
static int state(const char *socket, const char *model)
{
	rb_worker_options o = {.size = sizeof o, .socket = socket, .policy = "slots=16 max_batch_size=4"};
	rb_worker w;
	rb_client c;
	rb_map map;
	rb_request r;
	rb_view before, after;
	rb_batch *b;
	uint64_t q, bytes;
	void *h, *next, *y;
	float row[4] = {7, 7, 7, 7};
	MUST(rb_worker_attach(model, "x:f32[4]@device:0 -> y:f32[] state h:f32[4]@device:0", &o, &w));
	MUST(connect_to(socket, model, 1, &c));
	enter_device(c, &map);
	MUST(rb_sequence_open(c, 1, -1, &q));
	MUST(rb_sequence_state(c, q, 0, &before, NULL));
	MUST(rb_sequence_request(c, q, NULL, 0, -1, &r));
	MUST(rb_commit(c, r.id, 0, 0));
	MUST(rb_worker_next(w, -1, &b));
	MUST(rb_batch_row(b, RB_OUTPUT, 0, 0, &y, &bytes));
	MUST(rb_batch_row(b, RB_STATE, 0, 0, &h, &bytes));
	MUST(rb_batch_row(b, RB_NEXT_STATE, 0, 0, &next, &bytes));
	CHECK(bytes == sizeof row && !*b->step && (uint8_t *)next - (uint8_t *)h == sizeof row); /* the worker's addresses are others */
	CHECK(rb_batch_set_state(b, 0, row, sizeof row) == RB_ERR_INVALID);
	MUST(cuMemcpyHtoD((uint64_t)(uintptr_t)next, row, sizeof row));
	MUST(rb_batch_complete(b));
	MUST(rb_wait(c, r.id, -1));
	MUST(rb_sequence_state(c, q, 0, &after, NULL));
	CHECK((uint8_t *)after.data - (uint8_t *)before.data == sizeof row);
	for (float want = 7; want >= 0; want -= 7) { /* as written, then reset */
		MUST(rb_sequence_state(c, q, 0, &after, NULL));
		MUST(cuMemcpyDtoH(row, (uint64_t)(uintptr_t)after.data, sizeof row));
		CHECK(row[0] == want && row[3] == want);
		MUST(rb_sequence_reset(c, q, NULL, 0));
	}
	MUST(rb_close(c));
	MUST(rb_worker_close(w));
	printf("ok\n");
	return 0;
}

static int forked(const char *socket, const char *model)
{
	int how = 0;
	MUST(cuInit(0));
	pid_t child = fork();
	if (!child) {
		rb_client c;
		say(connect_to(socket, model, 1, &c));
		_exit(0);
	}
	waitpid(child, &how, 0);
	return how;
}

int main(int argc, char **argv)
{
	rb_client c;
	rb_worker w;
	const char *role = argc > 3 ? argv[1] : "";
	setvbuf(stdout, NULL, _IOLBF, 0); /* the test reads it line by line */
	if (!strcmp(role, "connect")) {
		say(connect_to(argv[2], argv[3], !getenv("HOST_ONLY"), &c));
		return 0;
	}
	if (!strcmp(role, "attach") && argc > 4) {
		rb_worker_options o = {.size = sizeof o, .socket = argv[2], .policy = argc > 5 ? argv[5] : "slots=16 max_batch_size=4"};
		say(rb_worker_attach(argv[3], argv[4], &o, &w));
		return 0;
	}
	load();
	if (!strcmp(role, "worker") && argc > 4)
		return worker(argv[2], argv[3], argv[4]);
	if (!strcmp(role, "client") && argc > 5)
		return client(argv[2], argv[3], atoi(argv[4]), argv[5]);
	static const struct {
		const char *name;
		int (*play)(const char *socket, const char *model);
	} roles[] = {{"closing", closing}, {"broken", broken}, {"written", written}, {"busy", busy_release}, {"state", state},
		{"fork", forked}};
	for (size_t i = 0; i < sizeof roles / sizeof *roles; i++)
		if (!strcmp(role, roles[i].name))
			return roles[i].play(argv[2], argv[3]);
	return 2;
}
