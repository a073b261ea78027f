/* SPDX-License-Identifier: Apache-2.0
 *
 * A stage of a pipeline in C: scales bytes to 0..1. The other stage, mean, is
 * another process, in any language.
 *
 *   cc -o stage stage.c $(pkg-config --cflags --libs ringbatch)
 *   ./stage                                 # then: ringbatch stats
 *
 * The pipeline is the declaration of docs/pipelines.md. Every worker sends it, and
 * the first one makes the ring; a broker whose configuration has the pipeline needs
 * none. The client's bytes and the output of this stage are in one slot.
 */
#include <ringbatch.h>
#include <stdio.h>

static const char pipeline[] =
	"{\"inputs\": [\"x:u8[64]\"], \"stages\": ["
	"{\"name\": \"scale\", \"inputs\": [\"x\"], \"outputs\": [\"h:f32[64]\"], \"policy\": {\"max_batch_size\": \"8\"}},"
	"{\"name\": \"mean\", \"inputs\": [\"h\"], \"outputs\": [\"y:f32[]\"]}]}";

static int scale(const rb_batch *batch)
{
	for (uint32_t i = 0; i < batch->rows; i++) {
		void *x, *h;
		uint64_t bytes, room;
		if (rb_batch_row(batch, RB_INPUT, 0, i, &x, &bytes) != RB_OK || rb_batch_row(batch, RB_OUTPUT, 0, i, &h, &room) != RB_OK)
			return -1;
		for (uint64_t k = 0; k < bytes; k++)
			((float *)h)[k] = ((const uint8_t *)x)[k] / 255.0f;
	}
	return 0;
}

int main(void)
{
	rb_worker_options options = {.size = sizeof options, .pipeline = pipeline, .wait = 1};
	rb_worker worker;
	rb_batch *batch;
	if (rb_worker_attach("brightness/scale", "x:u8[64] -> h:f32[64]", &options, &worker) != RB_OK)
		goto failed;
	while (rb_worker_next(worker, -1, &batch) == RB_OK) {
		if (scale(batch) != 0)
			rb_batch_fail_all(batch, "a row is not there");
		if (rb_batch_complete(batch) != RB_OK)
			break;
	}
failed: /* or the broker went: a worker that stays attaches again */
	fprintf(stderr, "%s\n", rb_error());
	return 1;
}
