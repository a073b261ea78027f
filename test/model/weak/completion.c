/* SPDX-License-Identifier: Apache-2.0 */
/* SYNC POINT "completion": a client that sees the word sees the output. One of two
 * (here a worker and the broker that expires the request) ends a generation. A client
 * that saw an old bell and an open word does not sleep through the ring. */
#include "world.h"

static rb_bell bell;
static _Atomic uint64_t word;
static uint64_t output;
static rb_board board;
static _Bool ended_by_worker, ended_by_broker;

static void *worker(void *unused)
{
	output = 42;
	ended_by_worker = rb_board_end(&board, 0, 1, 1);
	atomic_fetch_add(&board.bells[0].count, 1); /* rb_board_ring; it always wakes */
	return unused;
}

static void *broker(void *unused)
{
	ended_by_broker = rb_board_end(&board, 0, 1, 2);
	atomic_fetch_add(&board.bells[0].count, 1);
	return unused;
}

/* lead in cbindings/src/waiting.c */
static void *client(void *unused)
{
#ifdef SEEN_LATE
	uint64_t w = rb_board_word(&board, 0);
	uint32_t seen = atomic_load_explicit(&board.bells[0].count, memory_order_acquire);
#else
	uint32_t seen = atomic_load_explicit(&board.bells[0].count, memory_order_acquire);
	uint64_t w = rb_board_word(&board, 0);
#endif
	if (rb_word_gen(w) == 1) {
		if (rb_word_status(w) == 1)
			assert(output == 42);
	} else {
		/* A lost wake-up: the word is open, and both rang before the client saw the bell. */
		assert(seen < 2);
	}
	return unused;
}

int main(void)
{
	pthread_t a, b, c;
	board = (rb_board){.bells = &bell, .words = &word};
	pthread_create(&a, NULL, worker, NULL);
	pthread_create(&b, NULL, broker, NULL);
	pthread_create(&c, NULL, client, NULL);
	pthread_join(a, NULL);
	pthread_join(b, NULL);
	pthread_join(c, NULL);
	assert(ended_by_worker != ended_by_broker);
}
