/* SPDX-License-Identifier: Apache-2.0 */
/* Any mail that a broker can post, and any write to the board: a worker takes or refuses the mail, and stays inside its
 * memory. */
#include <string.h>

#include "../src/worker.h"

static uint32_t number(const uint8_t **at, const uint8_t *end)
{
	uint32_t n = 0;
	for (int i = 0; i < 4 && *at < end; i++)
		n |= (uint32_t)*(*at)++ << 8 * i;
	return n;
}

static void use(rb_taken *b, uint8_t choice)
{
	uint8_t buffer[4096];
	rb_view v;
	void *data;
	uint64_t bytes;
	for (int side = 0; side < 2; side++)
		for (uint32_t k = 0; k < 2; k++) {
			for (uint32_t i = 0; i < b->shown.runs; i++)
				rb_batch_run(&b->shown, side, k, i, &v);
			for (uint32_t i = 0; i <= b->shown.rows; i++)
				if (!rb_batch_row(&b->shown, side, k, i, &data, &bytes))
					memset(data, choice, bytes);
			rb_batch_gather(&b->shown, side, k, buffer, sizeof buffer);
		}
	rb_batch_scatter(&b->shown, 0, buffer, sizeof buffer);
	for (uint32_t i = 0; i <= b->shown.requests; i++) {
		uint32_t dims[] = {choice % 9, 2};
		rb_batch_set_row_dims(&b->shown, i, dims, choice % 2 + 1);
		if (choice & 4)
			rb_batch_fail(&b->shown, i, "no");
	}
	rb_batch_complete(&b->shown);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	rb_work w = {.session = {.socket = -1, .doorbell = -1, .depth = 2}, .holds = 1, .handle = UINT64_C(1) << 32};
	rb_session *s = &w.session;
	const uint8_t *at = data, *end = data + size;
	if (rb_parse_signature("x:f32[<=4,2] z:i8[3] -> y:f32[<=8] w:i64[2]", &s->layout) || rb_layout_place(&s->layout, 8, 4))
		__builtin_trap();
	uint64_t words = rb_worker_segment_size(2, 4);
	s->planes = (rb_segment){aligned_alloc(4096, s->layout.planes_size), s->layout.planes_size};
	s->board_segment = (rb_segment){aligned_alloc(4096, s->layout.board_size), s->layout.board_size};
	s->words = (rb_segment){aligned_alloc(4096, words), words};
	memset(s->planes.at, 0, s->planes.bytes);
	memset(s->board_segment.at, 0, s->board_segment.bytes);
	memset(s->words.at, 0, words);
	s->board = rb_board_at(&s->layout, s->board_segment.at);
	w.mail = (void *)(s->words.at + RB_GO_MAIL_WORDS);
	w.done = rb_ring_at(s->words.at, sizeof(rb_done_entry), rb_done_ring_size(2));
	rb_entry e = {.value = &w, .gen = 1};
	rb_workers.chunk[0] = &e;
	w.pads = size % 2;
	s->ragged = size % 3 == 0;
	while (at < end) {
		uint8_t choice = *at++;
		uint8_t *mail = s->words.at + rb_mails_at(2) + w.next % 2 * rb_mail_size(4);
		for (uint64_t i = 0; i < rb_mail_size(4) && i < 8u * (choice & 31); i += 4) {
			uint32_t n = number(&at, end);
			memcpy(mail + i, &n, 4);
		}
		if (choice & 32)
			s->board_segment.at[number(&at, end) % s->board_segment.bytes] = choice;
		if (choice & 64)
			((uint8_t *)w.done.words)[number(&at, end) % sizeof(rb_ring_words)] = choice;
		atomic_store(&w.mail->tail, choice & 128 ? number(&at, end) : w.next + 1);
		rb_batch *batch;
		for (int n = 0; n < 3 && !rb_worker_next(w.handle, 0, &batch); n++)
			use(w.batch[batch->place], choice);
		w.next = 0;
		w.mail->tail = 0;
	}
	rb_workers.chunk[0] = NULL;
	for (uint32_t i = 0; i < w.batches; i++)
		rb_taken_free(w.batch[i]);
	rb_layout_free(&s->layout);
	free(s->planes.at);
	free(s->board_segment.at);
	free(s->words.at);
	return 0;
}
