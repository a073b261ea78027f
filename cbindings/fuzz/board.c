/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Workers and the broker write anything, at any moment, on the board and into the
 * words of a client's session: the client goes on and stays inside its memory. The
 * segments are heap blocks of exactly their size, guarded by AddressSanitizer.
 */
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "../src/client.h"

static const uint8_t *script;
static size_t left;

static uint8_t next(void) { return left ? (left--, *script++) : 0; }

/* Scribbles over some of a segment. */
static void scribble(rb_segment *s)
{
	uint64_t at = ((uint64_t)next() << 16 | (uint64_t)next() << 8 | next()) % s->bytes;
	for (unsigned n = next(); n && at < s->bytes; n--)
		s->at[at++] = next();
}

static void touch(const rb_view *v)
{
	uint64_t row = rb_dtype_size(v->dtype);
	for (uint32_t i = 1; i < v->rank; i++)
		row *= v->shape[i];
	for (uint64_t r = 0; r < v->shape[0]; r++)
		memset((uint8_t *)v->data + r * v->stride, 1, row);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	rb_session s = {.socket = -1, .doorbell = -1, .window = 4, .max_rows = 4, .first_slot = 2, .first_gen = 7, .levels = 2};
	int pair[2], status;
	script = data;
	left = size;
	if (rb_parse_signature("x:f32[<=4,2] z:i8[3] -> y:f32[<=8] w:i64[<=2,<=3]", &s.layout) || rb_layout_place(&s.layout, 8, 4))
		__builtin_trap();
	socketpair(AF_UNIX, SOCK_STREAM, 0, pair);
	s.socket = pair[0];
	s.planes = (rb_segment){aligned_alloc(4096, s.layout.planes_size), s.layout.planes_size};
	s.board_segment = (rb_segment){aligned_alloc(4096, s.layout.board_size), s.layout.board_size};
	s.words = (rb_segment){aligned_alloc(4096, rb_client_segment_size(4, false)), rb_client_segment_size(4, false)};
	memset(s.board_segment.at, 0, s.board_segment.bytes);
	memset(s.words.at, 0, s.words.bytes);
	s.board = rb_board_at(&s.layout, s.board_segment.at);
	rb_conn c = {.notify_fd = -1, .poke_fd = -1, .pending.fd = -1, .window = 4, .max_batch = 4,
		.socket = "/nonexistent", .model = "m", .name = ""};
	pthread_mutex_init(&c.mu, NULL);
	rb_segment planes = s.planes, board = s.board_segment, words = s.words;
	rb_link *l = rb_link_new(&c, &s, &status);
	if (!l)
		__builtin_trap();
	l->number = 1;
	l->refs++; /* no munmap of the heap */
	c.live = c.links = l;
	rb_entry e = {.value = &c, .gen = 1};
	rb_clients.chunk[0] = &e; /* handle 1 << 32 */
	const rb_client h = UINT64_C(1) << 32;
	uint64_t ids[8] = {0};
	while (left) {
		uint64_t *id = &ids[next() % 8];
		uint32_t dims[1] = {next() % 6};
		rb_request r;
		rb_view v;
		rb_timing t;
		switch (next() % 12) {
		case 0: case 1:
			if (!rb_claim(h, 1 + next() % 3, dims, 1, 0, &r))
				*id = r.id;
			break;
		case 2:
			if (!rb_input(h, *id, next() % 3, &v))
				touch(&v);
			break;
		case 3: case 4: rb_commit(h, *id, next(), 0); break;
		case 5: rb_poll(h, *id); break;
		case 6:
			if (!rb_output(h, *id, next() % 3, &v))
				touch(&v);
			if (!rb_output_row(h, *id, next() % 3, next() % 4, &v))
				touch(&v);
			break;
		case 7: rb_request_timing(h, *id, &t); break;
		case 8: rb_release(h, *id); break;
		case 9: rb_cancel(h, *id); break;
		case 10: scribble(&board); break;
		case 11: scribble(&words); break;
		}
	}
	for (uint32_t i = 0; i < l->window; i++) {
		rb_req q = {l, i, l->slots[i].handle};
		if (q.handle % 2)
			rb_req_release(&q);
	}
	rb_clients.chunk[0] = NULL;
	rb_layout_free(&l->session.layout);
	rb_layout_free(&c.layout);
	rb_close_fd(&l->session.socket);
	l->session.planes.at = l->session.board_segment.at = l->session.words.at = NULL;
	free(planes.at);
	free(board.at);
	free(words.at);
	rb_link_free(l);
	close(pair[1]);
	return 0;
}
