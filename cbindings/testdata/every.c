/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Uses every function of ringbatch.h, together with serving.c, misuse.c, sequences.c and reaping.c,
 * against the broker at argv[1]. A worker thread and clients share this process. Exit
 * status 0 and "ok" is success; anything else says where it went wrong.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <locale.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

#include "every.h"

const char *socket_path;

static int entries(const char *folder)
{
	DIR *d = opendir(folder);
	int n = 0;
	while (readdir(d))
		n++;
	closedir(d);
	return n;
}

rb_client dial(const char *model, uint32_t window)
{
	rb_connect_options o = {.size = sizeof o, .window = window, .socket = socket_path, .name = "every", .patience = minute, .wait = 1};
	rb_client c;
	WANT(RB_OK, rb_connect(model, &o, &c));
	return c;
}

static void step_by_step(void)
{
	rb_client c = dial("double", 8);
	rb_model m;
	WANT(RB_OK, rb_client_model(c, &m));
	CHECK(strcmp(m.name, "double") == 0 && m.window == 8 && m.levels == 1);
	rb_tensor t;
	WANT(RB_OK, rb_client_tensor(c, RB_INPUT, 0, &t));
	CHECK(t.dtype == RB_F32 && t.shape[0] == 4 && t.row_bytes == 16 && t.stride == 16 && t.variable == 0);
	WANT(RB_ERR_INVALID, rb_client_tensor(c, 2, 0, &t));
	rb_map map;
	WANT(RB_OK, rb_client_map(c, &map));

	rb_request r;
	rb_view v;
	WANT(RB_ERR_TOO_LARGE, rb_claim(c, 5, NULL, 0, 0, &r));
	WANT(RB_ERR_ROWS, rb_claim(c, 0, NULL, 0, 0, &r));
	WANT(RB_OK, rb_claim(c, 2, NULL, 0, RB_AT_ONCE, &r));
	CHECK(r.rows == 2 && r.base == map.base && r.attachment == map.attachment);
	WANT(RB_OK, rb_input(c, r.id, 0, &v));
	CHECK((uint8_t *)v.data == r.base + t.offset + r.slot * t.stride && v.shape[0] == 2 && v.shape[1] == 4);
	for (int i = 0; i < 8; i++)
		((float *)v.data)[i] = (float)i;
	WANT(RB_ERR_NOT_COMMITTED, rb_wait(c, r.id, 0));
	WANT(RB_ERR_NO_LEVEL, rb_set_priority(c, r.id, 9));
	WANT(RB_OK, rb_set_priority(c, r.id, 0));
	WANT(RB_ERR_INVALID, rb_set_cost(c, r.id, 65536));
	WANT(RB_OK, rb_set_cost(c, r.id, 65535));
	WANT(RB_OK, rb_commit(c, r.id, minute, 0));
	WANT_ALL(RB_ERR_COMMITTED, rb_commit(c, r.id, 0, 0), rb_set_cost(c, r.id, 1));
	WANT(RB_OK, rb_wait(c, r.id, minute));
	WANT(RB_OK, rb_poll(c, r.id));
	WANT(RB_OK, rb_output(c, r.id, 0, &v));
	for (int i = 0; i < 8; i++)
		CHECK(((float *)v.data)[i] == 2 * (float)i);
	rb_timing timing;
	WANT(RB_OK, rb_request_timing(c, r.id, &timing));
	CHECK(timing.queue >= 0 && timing.compute >= 0);
	rb_map second_map;
	WANT(RB_OK, rb_request_map(c, r.id, &second_map));
	CHECK(second_map.base == map.base && second_map.id != map.id);
	WANT(RB_OK, rb_map_release(second_map.id));
	WANT(RB_OK, rb_release(c, r.id));
	WANT(RB_ERR_RELEASED, rb_release(c, r.id));
	WANT(RB_ERR_RELEASED, rb_output(c, r.id, 0, &v));
	WANT(RB_ERR_RELEASED, rb_wait(c, r.id + 12345, 0));

	/* canceled; test/conformance has the other ends of a request, and full windows */
	held_back = 1;
	WANT(RB_OK, rb_claim(c, 1, NULL, 0, 0, &r));
	WANT(RB_OK, rb_commit(c, r.id, 0, 0));
	WANT(RB_ERR_NOT_DONE, rb_poll(c, r.id));
	WANT(RB_OK, rb_cancel(c, r.id));
	WANT(RB_ERR_CANCELED, rb_wait(c, r.id, minute));
	WANT(RB_OK, rb_release(c, r.id));
	held_back = 0;
	WANT(RB_OK, rb_close(c));
	WANT(RB_ERR_CLOSED, rb_close(c));
	WANT(RB_ERR_CLOSED, rb_claim(c, 1, NULL, 0, 0, &r));
	CHECK(map.base[4096] == map.base[4096]); /* still mapped */
	WANT(RB_OK, rb_map_release(map.id));
}

static void in_one_call(void)
{
	rb_client c = dial("double", 4);
	float x[16] = {1, 2, 3, 4, 5, 6, 7, 8}, y[16] = {0};
	const void *in[] = {x};
	void *out[] = {y};
	uint64_t r;
	rb_view view;
	for (uint32_t i = 0; i < 200; i++) {
		x[3] = (float)i;
		uint64_t bytes = 16 * (1 + i % 2);
		WANT(RB_OK, rb_infer(c, 1 + i % 2, in, &bytes, out, &bytes, i % 5 ? minute : 0, i % 3 ? minute : -1, &r));
		CHECK(r == 0 && y[0] == 2 && y[3] == 2 * (float)i && (i % 2 == 0 || y[7] == 16));
	}
	for (uint32_t rows = 1; rows <= 2; rows++) {
		uint64_t bytes = 16 * rows;
		WANT(RB_OK, rb_submit(c, rows, in, &bytes, 0, 0, &r));
		WANT(RB_OK, rb_wait(c, r, minute));
		y[3] = 0;
		WANT(RB_OK, rb_collect(c, r, out, &bytes));
		CHECK(y[3] == 2 * x[3]);
	}
	/* an array of another type, or of other rows, is refused before a byte is read or written */
	WANT_ALL(RB_ERR_SIZE, rb_infer(c, 1, in, BYTES(32), out, BYTES(16), 0, minute, &r), rb_infer(c, 1, in, BYTES(16), out, BYTES(32), 0, minute, &r),
		rb_infer(c, 2, in, BYTES(16), out, BYTES(32), 0, minute, &r), rb_submit(c, 1, in, BYTES(32), 0, 0, &r));
	CHECK(strstr(rb_error(), "input \"x\": 1 rows of float32 have 16 bytes, 32 were given"));
	WANT_ALL(RB_ERR_INVALID, rb_infer(c, 1, in, NULL, out, BYTES(16), 0, minute, &r), rb_submit(c, 1, in, NULL, 0, 0, &r));
	x[0] = -1;
	WANT(RB_ERR_FAILED, rb_infer(c, 1, in, BYTES(16), out, BYTES(16), 0, minute, &r));
	CHECK(strcmp(rb_error(), "minus one is refused") == 0);
	x[0] = -3;
	WANT(RB_ERR_QUEUE_FULL, rb_infer(c, 1, in, BYTES(16), out, BYTES(16), 0, minute, &r));
	x[0] = -2;
	WANT(RB_ERR_FAILED, rb_infer(c, 1, in, BYTES(16), out, BYTES(16), 0, minute, &r));
	CHECK(strcmp(rb_error(), "the whole batch is refused") == 0);
	x[0] = 3;
	held_back = 1;
	WANT(RB_ERR_TIMEOUT, rb_infer(c, 1, in, BYTES(16), out, BYTES(16), 0, second / 1000, &r));
	WANT(RB_ERR_NOT_DONE, rb_collect(c, r, out, BYTES(16)));
	held_back = 0;
	WANT(RB_OK, rb_wait(c, r, minute));
	WANT(RB_ERR_SIZE, rb_collect(c, r, out, BYTES(32))); /* and the request stays */
	WANT(RB_OK, rb_collect(c, r, out, BYTES(16)));
	CHECK(y[0] == 6);
	WANT(RB_ERR_RELEASED, rb_collect(c, r, out, BYTES(16)));
	WANT(RB_ERR_TOO_LARGE, rb_submit(c, 5, in, BYTES(80), 0, 0, &r));

	/* requests in flight: first reaped by the program's thread, then through the library's descriptor */
	WANT(RB_ERR_INVALID, rb_submit(c, 1, in, BYTES(16), 0, RB_NOTIFY, &r)); /* no notifier yet */
	int fd = -1;
	for (int round = 0; round < 40; round++) {
		uint64_t ids[4], done[3];
		uint32_t n, got = 0;
		if (round == 0)
			WANT(RB_OK, rb_reap_wait(c, 0, done, 3, &n));
		if (round == 20)
			WANT(RB_OK, rb_client_fd(c, &fd));
		for (int i = 0; i < 4; i++)
			WANT(RB_OK, rb_submit(c, 1, in, BYTES(16), 0, RB_NOTIFY, &ids[i]));
		WANT(RB_ERR_FULL, rb_submit(c, 1, in, BYTES(16), 0, RB_NOTIFY, &r));
		for (; got < 4; got += n) {
			struct pollfd p = {.fd = fd, .events = POLLIN};
			CHECK(fd < 0 || poll(&p, 1, 60000) == 1 || errno == EINTR);
			WANT(RB_OK, fd < 0 ? rb_reap_wait(c, minute, done, 3, &n) : rb_reap(c, done, 3, &n));
			CHECK(fd >= 0 || n > 0);
			for (uint32_t i = 0; i < n; i++) { /* a reaped request has ended */
				WANT(RB_OK, rb_output(c, done[i], 0, &view));
				WANT(RB_OK, rb_collect(c, done[i], out, BYTES(16)));
			}
		}
	}
	uint64_t held[3];
	for (int i = 0; i < 3; i++)
		WANT(RB_OK, rb_submit(c, 1, in, BYTES(16), 0, RB_HOLD, &held[i]));
	WANT(RB_ERR_NOT_COMMITTED, rb_poll(c, held[0]));
	WANT(RB_OK, rb_commit_all(c, held, 3, minute, 0));
	WANT(RB_ERR_COMMITTED, rb_commit_all(c, held, 3, 0, 0));
	for (int i = 0; i < 3; i++) {
		WANT(RB_OK, rb_wait(c, held[i], minute));
		WANT(RB_OK, rb_collect(c, held[i], out, BYTES(16)));
	}
	WANT(RB_ERR_RELEASED, rb_commit_all(c, held, 3, 0, 0));
	WANT(RB_OK, rb_submit(c, 1, in, BYTES(16), 0, RB_NOTIFY, &r)); /* closing releases it */
	WANT(RB_OK, rb_close(c));
}

static void texts(void)
{
	char row[4];
	uint64_t bytes;
	WANT(RB_OK, rb_text_write(row, sizeof row, "ab", 2));
	WANT(RB_OK, rb_text_size(row, sizeof row, &bytes));
	CHECK(bytes == 2 && !memcmp(row, "ab\xff\xff", 4));
	WANT(RB_OK, rb_text_write(row, sizeof row, "abcd", 4));
	WANT(RB_OK, rb_text_size(row, sizeof row, &bytes));
	CHECK(bytes == 4);
	WANT(RB_ERR_SIZE, rb_text_write(row, sizeof row, "abcde", 5));
	CHECK(strstr(rb_error(), "a text of 5 bytes, at most 4"));
	WANT(RB_ERR_DTYPE, rb_text_write(row, sizeof row, "\xc3(", 2));
	WANT(RB_ERR_INVALID, rb_text_write(NULL, sizeof row, "a", 1));
	WANT(RB_ERR_INVALID, rb_text_size(NULL, sizeof row, &bytes));
	memcpy(row, "\xc3(", 2);
	WANT(RB_ERR_DTYPE, rb_text_size(row, sizeof row, &bytes));
}

static void *wait_until_closed(void *arg)
{
	rb_client c = *(rb_client *)arg;
	rb_request r;
	int status = rb_claim(c, 1, NULL, 0, -1, &r);
	if (status == RB_OK)
		status = rb_commit(c, r.id, 0, 0);
	while (status == RB_OK)
		status = rb_wait(c, r.id, -1);
	CHECK(status == RB_ERR_CLOSED || status == RB_ERR_BROKER_GONE || status == RB_ERR_CANCELED || status == RB_ERR_RELEASED);
	return NULL;
}

/* Threads that wait while their client is closed come back. */
static void closing(void)
{
	rb_client c = dial("double", 2);
	pthread_t threads[4];
	held_back = 1;
	for (int i = 0; i < 4; i++)
		pthread_create(&threads[i], NULL, wait_until_closed, &c);
	usleep(5000);
	WANT(RB_OK, rb_close(c));
	for (int i = 0; i < 4; i++)
		pthread_join(threads[i], NULL);
	held_back = 0;
}

static void everything(void)
{
	stop = 0;
	pthread_t a;
	pthread_create(&a, NULL, run_worker, NULL);
	step_by_step();
	in_one_call();
	wrong_arguments();
	thread_ends();
	texts();
	no_descriptors(); /* the worker has its own: it has answered */
	packed();
	closing();
	reaping();
	errors_have_names();
	structs_grow();
	unwritten();
	sequences();
	if (!getenv("RB_NO_FORK"))
		forked();
	stop = 1;
	pthread_join(a, NULL);
}

int main(int argc, char **argv)
{
	socket_path = argv[1];
	CHECK(setlocale(LC_CTYPE, "C.UTF-8"));
	int rounds = argc > 2 ? atoi(argv[2]) : 3;
	signals();
	everything();
	int fds = entries("/proc/self/fd"), threads = entries("/proc/self/task");
	for (int i = 0; i < rounds; i++)
		everything();
	int fds_now, threads_now, tries = 0;
	do { /* the kernel lists a thread for a moment after it was joined */
		fds_now = entries("/proc/self/fd"), threads_now = entries("/proc/self/task");
	} while ((fds_now > fds || threads_now > threads) && tries++ < 3000 && !usleep(10000));
	if (fds_now > fds || threads_now > threads) {
		fprintf(stderr, "descriptors %d -> %d, threads %d -> %d\n", fds, fds_now, threads, threads_now);
		return 1;
	}
	puts("ok");
	return 0;
}
