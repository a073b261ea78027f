/* SPDX-License-Identifier: Apache-2.0 */
/* A thread in rb_reap_wait gets the ended requests, even if another thread of the client parks on the bell. */
#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

#include "every.h"

static const float x[4] = {1, 2, 3, 4};

static uint64_t submit(rb_client c, int64_t timeout, uint32_t flags)
{
	const void *in[] = {x};
	uint64_t id;
	WANT(RB_OK, rb_submit(c, 1, in, BYTES(16), timeout, flags, &id));
	return id;
}

struct reaper {
	rb_client c;
	atomic_int ready, collected;
};

static void *reap_until_closed(void *arg)
{
	struct reaper *r = arg;
	uint64_t done[4];
	float y[4];
	void *out[] = {y};
	uint32_t n;
	r->ready = 1;
	for (int status; (status = rb_reap_wait(r->c, minute, done, 4, &n)) != RB_ERR_CLOSED;) {
		WANT(RB_OK, status);
		for (uint32_t i = 0; i < n; i++)
			WANT(RB_OK, rb_collect(r->c, done[i], out, BYTES(16)));
		r->collected += (int)n;
	}
	return NULL;
}

/* The library's thread, which takes the lead, starts at the same moment. */
static void beside_the_notifier(void)
{
	for (int round = 0; round < 20; round++) {
		struct reaper r = {.c = dial("double", 2)};
		pthread_t thread;
		int fd;
		pthread_create(&thread, NULL, reap_until_closed, &r);
		while (!r.ready)
			;
		WANT(RB_OK, rb_client_fd(r.c, &fd));
		submit(r.c, 0, RB_NOTIFY);
		for (int tries = 0; r.collected < 1 && tries < 60000; tries++)
			usleep(1000);
		CHECK(r.collected == 1);
		WANT(RB_OK, rb_close(r.c));
		pthread_join(thread, NULL);
	}
}

struct waiter {
	rb_client c;
	uint64_t request;
};

static void *wait_for_one(void *arg)
{
	struct waiter *w = arg;
	WANT(RB_OK, rb_wait(w->c, w->request, minute));
	return NULL;
}

/* Another thread leads, and waits for a slower request. */
static void beside_a_slow_request(void)
{
	struct waiter w = {.c = dial("double", 2)};
	pthread_t thread;
	uint64_t done[2];
	uint32_t n;
	WANT(RB_OK, rb_reap_wait(w.c, 0, done, 2, &n));
	held_back = 1;
	w.request = submit(w.c, 0, 0);
	pthread_create(&thread, NULL, wait_for_one, &w);
	usleep(2000); /* the thread should wait first; otherwise the test only checks less */
	uint64_t expires = submit(w.c, second / 1000, RB_NOTIFY);
	WANT(RB_OK, rb_reap_wait(w.c, minute, done, 2, &n));
	CHECK(n == 1 && done[0] == expires);
	WANT(RB_OK, rb_reap_wait(w.c, second / 1000, done, 2, &n)); /* it waits no longer than its timeout */
	CHECK(n == 0);
	held_back = 0;
	pthread_join(thread, NULL);
	WANT(RB_OK, rb_close(w.c));
}

void reaping(void)
{
	beside_the_notifier();
	beside_a_slow_request();
}
