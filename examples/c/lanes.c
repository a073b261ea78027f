/* SPDX-License-Identifier: Apache-2.0
 *
 * A worker with lanes in C: rows that need different numbers of rounds. A row is a number, and its answer is the path
 * of n → n/2 or 3n+1 down to 1. Each round adds a number to every path. A path that is done is answered alone, and
 * clients that take parts see each number at once.
 *
 *   cc -o lanes lanes.c $(pkg-config --cflags --libs ringbatch)
 *   ./lanes
 */
#include <ringbatch.h>
#include <stdio.h>

enum { LANES = 16, MOST = 512 };

typedef struct {
	rb_batch *batch; /* NULL: the lane is free */
	int64_t *path;   /* in the slot: nothing is copied */
	uint32_t size, rounds;
} lane;

/* A new row takes the lane. */
static void start(lane *l, rb_batch *batch)
{
	void *n, *path;
	uint64_t bytes;
	*l = (lane){.batch = batch};
	if (rb_batch_row(batch, RB_INPUT, 0, 0, &n, &bytes) != RB_OK || rb_batch_row(batch, RB_OUTPUT, 0, 0, &path, &bytes) != RB_OK)
		return; /* step ends it */
	l->path = path;
	l->path[l->size++] = *(int64_t *)n;
}

/* One round; true if the row is done. */
static int step(lane *l)
{
	l->rounds++;
	if (rb_batch_waiting(l->batch, 0) != RB_OK)
		return 1; /* canceled or late: nobody reads the answer */
	if (!l->path || l->path[0] < 1 || l->path[l->size - 1] > INT64_MAX / 4 || l->size == MOST) {
		rb_batch_fail(l->batch, 0, "want a number from 1 on whose path has at most 512 numbers");
		return 1;
	}
	int64_t n = l->path[l->size - 1];
	if (n > 1)
		l->path[l->size++] = n % 2 ? 3 * n + 1 : n / 2;
	rb_batch_show(l->batch, 0, l->size); /* also the size of the answer */
	return l->path[l->size - 1] == 1;
}

int main(void)
{
	/* One row more than lanes waits in the mailbox, so that a lane is free for no round. */
	rb_worker_options options = {.size = sizeof options, .lanes = LANES, .depth = LANES + 1, .policy = "max_batch_size=1", .wait = 1};
	lane lanes[LANES] = {{0}};
	int busy = 0;
	rb_worker worker;
	if (rb_worker_attach("collatz", "n:i64[] -> path:i64[<=512]", &options, &worker) != RB_OK)
		goto failed;
	for (;;) {
		for (int k = 0; k < LANES; k++) {
			rb_batch *batch;
			if (lanes[k].batch)
				continue;
			int status = rb_worker_next(worker, busy ? 0 : -1, &batch); /* waits only if no lane is busy */
			if (status == RB_ERR_TIMEOUT)
				break;
			if (status != RB_OK)
				goto failed;
			start(&lanes[k], batch);
			busy++;
		}
		for (int k = 0; k < LANES; k++)
			if (lanes[k].batch && step(&lanes[k])) {
				rb_batch_set_rounds(lanes[k].batch, lanes[k].rounds); /* for ringbatch stats */
				rb_batch_complete(lanes[k].batch);
				lanes[k].batch = NULL;
				busy--;
			}
	}
failed: /* or the broker went: a worker that stays attaches again */
	fprintf(stderr, "%s\n", rb_error());
	return 1;
}
