/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Client, broker and worker as threads of one process, with segments on the heap, so
 * that a thread sanitizer sees the accesses of all three. This broker only hands
 * committed requests over.
 *
 * Usage: heap REQUESTS; built with the library's sources.
 */
#include <inttypes.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "../src/client.h"
#include "../src/worker.h"

enum { SLOTS = 8, BATCH = 4, DEPTH = 2, CLIENTS = 3, ELEMENTS = 16 };

static rb_segment planes, board_segment, client_words, worker_words;
static rb_board board;
static int doorbell;
static int sockets[4];
static const rb_client client_handle = UINT64_C(1) << 32;
static rb_work worker = {.holds = 1, .handle = UINT64_C(1) << 32};
static unsigned long requests;
static _Atomic unsigned long answered;
static _Atomic bool over;

#define MUST(x) do { if (!(x)) { fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #x, rb_error()); exit(1); } } while (0)

static rb_segment heap(uint64_t bytes)
{
	rb_segment s = {aligned_alloc(4096, rb_round_up(bytes, 4096)), bytes};
	MUST(s.at);
	memset(s.at, 0, bytes);
	return s;
}

/* ---- the broker: SYNC POINTS "entry", "mail" and "done", its sides of them ---- */

static rb_ring_words *ring_of(rb_segment *s) { return (void *)(s->at + RB_GO_RING_WORDS); }

static void post(const rb_commit_entry *e, uint32_t n, uint64_t number)
{
	rb_mail_words *w = (void *)(worker_words.at + RB_GO_MAIL_WORDS);
	uint8_t *at = worker_words.at + rb_mails_at(DEPTH) + number % DEPTH * rb_mail_size(BATCH);
	rb_mail m = {.batch = number + 1, .dispatched = rb_now(), .requests = n, .rows = n};
	memcpy(at, &m, sizeof m);
	for (uint32_t i = 0; i < n; i++) {
		rb_mail_request q = {.slot = e[i].slot, .gen = e[i].gen, .rows = 1, .deadline = e[i].deadline, .committed = e[i].committed};
		memcpy(at + sizeof m + i * sizeof q, &q, sizeof q);
	}
	atomic_store(&w->tail, number + 1);
	atomic_fetch_add(&w->bell, 1);
	if (atomic_load(&w->parked))
		rb_futex_wake(&w->bell, 1, false);
}

static void *broker(void *unused)
{
	rb_ring_words *commits = ring_of(&client_words), *done = ring_of(&worker_words);
	uint64_t head = 0, finished = 0, posted = 0;
	(void)unused;
	while (!over) {
		bool worked = false;
		uint64_t tail = atomic_load(&done->tail);
		for (; finished != tail; finished++, worked = true) {
			rb_done_entry d;
			memcpy(&d, worker_words.at + RB_GO_SEGMENT_HEADER + finished % rb_done_ring_size(DEPTH) * sizeof d, sizeof d);
			MUST(d.batch == finished + 1 && !d.failed);
		}
		atomic_store(&done->head, finished);
		rb_commit_entry e[BATCH];
		uint32_t n = 0;
		tail = atomic_load(&commits->tail);
		for (; n < BATCH && head != tail && posted - finished < DEPTH; head++) {
			memcpy(&e[n], client_words.at + RB_GO_SEGMENT_HEADER + head % rb_commit_ring_size(SLOTS) * sizeof *e, sizeof *e);
			if (e[n].kind == RB_GO_KIND_COMMIT)
				n++;
		}
		atomic_store(&commits->head, head);
		if (n)
			post(e, n, posted++);
		if (worked || n)
			continue;
		/* Arm, then look again: one side sees the other. */
		atomic_store(&commits->armed_at, head);
		atomic_store(&done->armed_at, finished);
		if (atomic_load(&commits->tail) == head && atomic_load(&done->tail) == finished) {
			struct pollfd p = {.fd = doorbell, .events = POLLIN};
			uint64_t count;
			if (poll(&p, 1, 50) > 0)
				MUST(read(doorbell, &count, sizeof count) == sizeof count);
		}
	}
	return NULL;
}

/* ---- the others: the library ---------------------------------------------------- */

static void *serve(void *unused)
{
	float rows[BATCH * ELEMENTS];
	(void)unused;
	for (unsigned turn = 0; !over; turn++) {
		rb_batch *b;
		int status = rb_worker_next(worker.handle, 20 * MILLISECOND, &b);
		if (status == RB_ERR_TIMEOUT)
			continue;
		MUST(!status);
		MUST(!rb_batch_gather(b, 0, 0, rows, sizeof rows));
		for (uint32_t i = 0; i < b->rows * ELEMENTS; i++)
			rows[i] = 2 * rows[i] + 1;
		if (turn % 2) {
			MUST(!rb_batch_scatter(b, 0, rows, sizeof rows));
		} else {
			for (uint32_t i = 0; i < b->rows; i++) {
				void *row;
				uint64_t bytes;
				MUST(!rb_batch_row(b, 1, 0, i, &row, &bytes));
				memcpy(row, rows + i * ELEMENTS, bytes);
			}
		}
		MUST(!rb_batch_complete(b));
	}
	return NULL;
}

static void *produce(void *which)
{
	for (unsigned long i = 0; i < requests; i++) {
		rb_request r;
		rb_view v;
		rb_timing t;
		float base = (float)((uintptr_t)which * 100000 + i % 1000);
		MUST(!rb_claim(client_handle, 1, NULL, 0, -1, &r));
		MUST(!rb_input(client_handle, r.id, 0, &v));
		for (int k = 0; k < ELEMENTS; k++)
			((float *)v.data)[k] = base + (float)k;
		MUST(!rb_commit(client_handle, r.id, 0, 0));
		if (i % 4 == 3) { /* canceled before or while it runs: its slots come back */
			rb_cancel(client_handle, r.id);
			rb_release(client_handle, r.id);
			continue;
		}
		MUST(!rb_wait(client_handle, r.id, 60 * SECOND));
		MUST(!rb_output(client_handle, r.id, 0, &v));
		for (int k = 0; k < ELEMENTS; k++)
			MUST(((float *)v.data)[k] == 2 * (base + (float)k) + 1);
		MUST(!rb_request_timing(client_handle, r.id, &t));
		MUST(!rb_release(client_handle, r.id));
		atomic_fetch_add(&answered, 1);
	}
	return NULL;
}

static void use_heap(rb_session *s, rb_segment *words, int socket)
{
	MUST(!rb_parse_signature("x:f32[16] -> y:f32[16]", &s->layout) && !rb_layout_place(&s->layout, SLOTS, BATCH));
	s->planes = planes, s->board_segment = board_segment, s->words = *words;
	s->board = board;
	s->socket = socket;
	s->doorbell = doorbell;
}

int main(int argc, char **argv)
{
	rb_layout l;
	int status;
	MUST(argc == 2 && (requests = strtoul(argv[1], NULL, 10)) > 0);
	MUST(!rb_parse_signature("x:f32[16] -> y:f32[16]", &l) && !rb_layout_place(&l, SLOTS, BATCH));
	MUST((doorbell = eventfd(0, EFD_NONBLOCK)) >= 0);
	MUST(!socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) && !socketpair(AF_UNIX, SOCK_STREAM, 0, sockets + 2));
	planes = heap(l.planes_size);
	board_segment = heap(l.board_size);
	client_words = heap(rb_client_segment_size(SLOTS, false));
	worker_words = heap(rb_worker_segment_size(DEPTH, BATCH));
	board = rb_board_at(&l, board_segment.at);

	rb_session cs = {.window = SLOTS, .max_rows = BATCH, .levels = 2};
	use_heap(&cs, &client_words, sockets[0]);
	static rb_conn c = {.notify_fd = -1, .poke_fd = -1, .pending.fd = -1, .window = SLOTS, .max_batch = BATCH,
		.inputs = 1, .outputs = 1, .socket = "/nonexistent", .model = "m", .name = ""};
	pthread_mutex_init(&c.mu, NULL);
	rb_link *link = rb_link_new(&c, &cs, &status);
	MUST(link);
	link->number = 1;
	link->refs++; /* no munmap of the heap */
	c.live = c.links = link;
	rb_entry ce = {.value = &c, .gen = 1}, we = {.value = &worker, .gen = 1};
	rb_clients.chunk[0] = &ce;

	worker.session.depth = DEPTH;
	use_heap(&worker.session, &worker_words, sockets[2]);
	worker.mail = (void *)(worker_words.at + RB_GO_MAIL_WORDS);
	worker.done = rb_ring_at(worker_words.at, sizeof(rb_done_entry), rb_done_ring_size(DEPTH));
	rb_workers.chunk[0] = &we;

	pthread_t b, w, p[CLIENTS];
	pthread_create(&b, NULL, broker, NULL);
	pthread_create(&w, NULL, serve, NULL);
	for (uintptr_t i = 0; i < CLIENTS; i++)
		pthread_create(&p[i], NULL, produce, (void *)i);
	for (int i = 0; i < CLIENTS; i++)
		pthread_join(p[i], NULL);
	over = true;
	pthread_join(w, NULL);
	pthread_join(b, NULL);
	MUST(answered >= requests * CLIENTS / 2);
	printf("%lu answered\nok\n", answered);
	return 0;
}
