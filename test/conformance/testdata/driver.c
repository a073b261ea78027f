/* SPDX-License-Identifier: Apache-2.0 */
/* A client or worker that reads commands, one a line, and prints their results. driver_test.go has the same in Go. */
#include <limits.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ringbatch_weights.h"

#define MS INT64_C(1000000)

static rb_client client;
static rb_worker worker;
static rb_request request[32];
static rb_batch *batch, *held[8];
static uint64_t sequence[8];

static void say(int status) { printf("%s\n", rb_status_name(status)); }

static int64_t timeout(const char *text) { return text[0] == '-' ? -1 : atoll(text) * MS; }

/* Cuts s at c: returns the part before c and moves s past it. */
static char *part(char **s, char c)
{
	char *from = *s ? *s : "", *at = *s ? strchr(*s, c) : NULL;
	if (at)
		*at++ = 0;
	*s = at;
	return from;
}

static void attach(char *rest)
{
	char *model = part(&rest, '|'), *signature = part(&rest, '|'), *policy = part(&rest, '|');
	char *version = part(&rest, '|');
	uint32_t lanes = rest ? (uint32_t)atoi(rest) : 0;
	rb_worker_options o = {.size = sizeof o, .policy = policy, .version = version, .lanes = lanes, .depth = lanes};
	say(rb_worker_attach(model, signature, &o, &worker));
}

static void connect_to(char *rest)
{
	char *model = part(&rest, ' ');
	rb_connect_options o = {.size = sizeof o, .window = (uint32_t)atoi(part(&rest, ' ')), .patience = 10000 * MS};
	say(rb_connect(model, &o, &client));
}

static void claim(rb_request *r, char *rest)
{
	uint32_t rows = (uint32_t)strtoul(part(&rest, ' '), NULL, 10), dims[8], ndims = 0;
	int64_t t = timeout(part(&rest, ' '));
	while (rest && *rest)
		dims[ndims++] = (uint32_t)atoi(part(&rest, ' '));
	say(rb_claim(client, rows, dims, ndims, t, r));
}

/* Claims until the client has moved to a model of that name, or a claim fails. */
static void moved(const char *to)
{
	rb_request r;
	rb_model m = {0};
	int status = RB_OK;
	for (int i = 0, there = 0; i < 10000 && !status && !there; i++) {
		rb_client_model(client, &m);
		there = !strcmp(m.name, to); /* before the claim: it may move between the two */
		status = rb_claim(client, 1, NULL, 0, 1000 * MS, &r);
		if (!status)
			rb_release(client, r.id);
		usleep(1000);
	}
	say(status);
}

static atomic_int enough;

static void *claim_rows(void *served)
{
	rb_request r;
	for (; !enough && !rb_claim(client, 1, NULL, 0, -1, &r); ++*(int *)served) {
		usleep(100);
		rb_release(client, r.id);
	}
	return NULL;
}

/* Claims those rows a few times beside threads that claim one row again and again. */
static void crowd(char *rest)
{
	pthread_t thread[16];
	int served[16] = {0}, least = INT_MAX, most = 0, status = RB_OK, threads = atoi(part(&rest, ' ')) % 16, claims = atoi(part(&rest, ' '));
	uint32_t rows = (uint32_t)atoi(part(&rest, ' '));
	rb_request r;
	for (int i = 0; i < threads; i++)
		pthread_create(&thread[i], NULL, claim_rows, &served[i]);
	for (int i = 0; i < claims; i++)
		if (!(status = rb_claim(client, rows, NULL, 0, timeout(rest), &r))) {
			usleep(1000);
			rb_release(client, r.id);
		}
	enough = 1;
	for (int i = 0; i < threads; i++) {
		pthread_join(thread[i], NULL);
		least = served[i] < least ? served[i] : least;
		most = served[i] > most ? served[i] : most;
	}
	enough = 0;
	if (!least || most > 10 * least)
		printf("starved: %d\n", least);
	else
		say(status);
}

static void fill(rb_request *r, float value)
{
	rb_view v;
	int status = rb_input(client, r->id, 0, &v);
	for (uint64_t row = 0; !status && row < v.shape[0]; row++)
		for (uint64_t i = 0; i < v.shape[1]; i++)
			((float *)((char *)v.data + row * v.stride))[i] = value;
	say(status);
}

/* stream r0 [once]: commits; once: it must not begin again. part r0: its next part. */
static bool once[32];

static void stream(rb_request *r, const char *rest)
{
	once[r - request] = !strcmp(rest, "once");
	say(rb_commit(client, r->id, 0, RB_PARTS));
}

static void next_part(const rb_request *r, const char *rest)
{
	float x[64];
	uint64_t bytes;
	uint32_t again = 0;
	int status = rb_next_part(client, r->id, x, sizeof x, timeout(rest), &bytes, once[r - request] ? NULL : &again);
	if (status) {
		say(status);
		return;
	}
	printf(!bytes && !again ? "End" : again ? "Again" : "OK");
	for (uint64_t i = 0; i < bytes / sizeof *x; i++)
		printf(" %g", x[i]);
	printf("\n");
}

static uint32_t shown[64];

/* show ROW STEPS VALUE: fills the row's steps up to there, and shows them. */
static void show(char *rest)
{
	uint32_t i = (uint32_t)atoi(part(&rest, ' ')) % 64, n = (uint32_t)atoi(part(&rest, ' '));
	void *y;
	uint64_t most;
	int status = rb_batch_row(batch, RB_OUTPUT, 0, i, &y, &most);
	for (uint64_t j = shown[i]; !status && j < n && j < most / 4; j++)
		((float *)y)[j] = (float)atof(rest);
	shown[i] = n;
	say(status ? status : rb_batch_show(batch, i, n));
}

/* Writes texts, one for each row, with | between them. */
static void text(rb_request *r, char *rest)
{
	rb_view v;
	int status = rb_input(client, r->id, 0, &v);
	char none[] = "";
	rest = rest ? rest : none;
	for (uint64_t row = 0; !status && rest; row++) {
		const char *each = part(&rest, '|');
		status = rb_text_write((char *)v.data + row * v.stride, v.shape[1], each, strlen(each));
	}
	say(status);
}

static void spoil(rb_request *r)
{
	rb_view v;
	int status = rb_input(client, r->id, 0, &v);
	if (!status)
		memcpy(v.data, "\xc3(", 2);
	say(status);
}

static void texts(rb_request *r)
{
	rb_view v;
	char all[256];
	int status = rb_output(client, r->id, 0, &v), n = 0;
	for (uint64_t row = 0; !status && row < v.shape[0]; row++) {
		const char *at = (char *)v.data + row * v.stride;
		uint64_t bytes;
		if (!(status = rb_text_size(at, v.shape[1], &bytes)))
			n += sprintf(all + n, "%s%.*s", row ? "|" : "", (int)bytes, at);
	}
	if (status)
		say(status);
	else
		printf("OK %s\n", all);
}

/* Answers each text with two marks behind it. */
static void exclaim(void)
{
	void *x, *y;
	char longer[64];
	uint64_t room, bytes;
	for (uint32_t i = 0; i < batch->rows; i++) {
		rb_batch_row(batch, RB_INPUT, 0, i, &x, &room);
		rb_text_size(x, room, &bytes);
		sprintf(longer, "%.*s!!", (int)bytes, (char *)x);
		rb_batch_row(batch, RB_OUTPUT, 0, i, &y, &room);
		for (uint32_t j = 0; rb_text_write(y, room, longer, bytes + 2) && j < batch->requests; j++)
			if (i >= batch->request[j].row && i < batch->request[j].row + batch->request[j].rows) {
				rb_batch_fail(batch, j, rb_error());
				break;
			}
	}
	say(rb_batch_complete(batch));
}

static int spoilt(void)
{
	void *y;
	uint64_t bytes;
	int status = RB_OK;
	for (uint32_t i = 0; i < batch->rows && !status; i++)
		if (!(status = rb_batch_row(batch, RB_OUTPUT, 0, i, &y, &bytes)))
			memcpy(y, "\xc3(", 2);
	return status;
}

static void out(rb_request *r)
{
	rb_view v;
	int status = rb_output(client, r->id, 0, &v);
	if (status)
		say(status);
	else
		printf("OK %llux%llu %g\n", (unsigned long long)v.shape[0], (unsigned long long)v.shape[1], v.shape[1] ? *(float *)v.data : 0);
}

/* Output = the first input's elements plus one, as far as there are some. */
static int row(uint32_t i)
{
	void *x, *y;
	uint64_t in, most;
	rb_batch_row(batch, RB_INPUT, 0, i, &x, &in);
	rb_batch_row(batch, RB_OUTPUT, 0, i, &y, &most);
	for (uint64_t j = 0; j < in / 4 && j < most / 4; j++)
		((float *)y)[j] = ((float *)x)[j] + 1;
	return RB_OK;
}

static void answer(void)
{
	for (uint32_t i = 0; i < batch->rows; i++)
		row(i);
	say(rb_batch_complete(batch));
}

static int run(uint32_t i)
{
	rb_view x, y;
	rb_batch_run(batch, RB_INPUT, 0, i, &x);
	int status = rb_batch_run(batch, RB_OUTPUT, 0, i, &y);
	for (uint64_t j = 0; j < y.bytes / 4; j++)
		((float *)y.data)[j] = *(float *)x.data + 1;
	return status;
}

static void next(char *rest)
{
	int status = rb_worker_next(worker, timeout(rest), &batch);
	memset(shown, 0, sizeof shown);
	if (status)
		say(status);
	else
		printf("OK %u requests %u rows\n", batch->requests, batch->rows);
}

/* Answers with the state plus the input, which is the next state. */
static void sum(void)
{
	void *x, *y, *h, *next;
	uint64_t bytes;
	for (uint32_t i = 0; i < batch->rows; i++) {
		rb_batch_row(batch, RB_INPUT, 0, i, &x, &bytes);
		rb_batch_row(batch, RB_OUTPUT, 0, i, &y, &bytes);
		rb_batch_row(batch, RB_STATE, 0, i, &h, &bytes);
		rb_batch_row(batch, RB_NEXT_STATE, 0, i, &next, &bytes);
		*(float *)y = *(float *)next = *(float *)h + *(float *)x;
	}
	say(rb_batch_complete(batch));
}

static void version(const rb_request *r)
{
	uint32_t v;
	int status = rb_request_version(client, r->id, &v);
	if (status)
		say(status);
	else
		printf("OK %u\n", v);
}

static void say_first(int status, void *const *x)
{
	if (status)
		say(status);
	else
		printf("OK %g\n", *(float *)*x);
}

/* A command about the sequence whose number it names first; false if it is another command. */
static bool do_sequence(const char *what, char *rest)
{
	uint32_t n[8] = {0}, count = 0; /* s0 r1 2: 0, 1, 2 */
	for (const char *at = rest; *at && count < 8; at += strcspn(at, " "), at += *at == ' ')
		n[count++] = (uint32_t)atoi(at + (*at == 's' || *at == 'r'));
	uint64_t *q = &sequence[n[0] % 8], sent;
	uint8_t fresh[64];
	float x = (float)n[1], y = 0;
	void *to = &y;
	rb_view v = {0};
	if (!strcmp(what, "open")) say(rb_sequence_open(client, n[1], 20000 * MS, q));
	else if (!strcmp(what, "begin")) say(rb_sequence_request(client, *q, NULL, 0, 20000 * MS, &request[n[1] % 32]));
	else if (!strcmp(what, "step")) say_first(rb_step(client, *q, (const void *[]){&x}, (uint64_t[]){4}, &to, (uint64_t[]){4}, 0, -1, &sent), &to);
	else if (!strcmp(what, "state")) say_first(rb_sequence_state(client, *q, 0, &v, fresh), &v.data);
	else if (!strcmp(what, "undo")) say(rb_sequence_undo(client, *q, 0));
	else if (!strcmp(what, "reset")) say(rb_sequence_reset(client, *q, count > 1 ? n + 1 : NULL, count - 1));
	else if (!strcmp(what, "copy")) say(rb_sequence_copy(client, *q, 20000 * MS, &sequence[n[1] % 8]));
	else if (!strcmp(what, "end")) say(rb_sequence_close(client, *q));
	else return false;
	return true;
}

/* Gives the rows of the first request a size. */
static int sizes(uint32_t n)
{
	int status = RB_OK;
	for (uint32_t i = 0; i < batch->request[0].rows && !status; i++)
		status = rb_batch_set_row_dims(batch, batch->request[0].row + i, &n, 1);
	return status;
}

/* Whether a client waits for the batch. */
static int wanted(void)
{
	rb_batch *found[8];
	uint32_t count;
	int status = rb_worker_unwanted(worker, found, 8, &count);
	for (uint32_t i = 0; !status && i < count; i++)
		if (found[i] == batch)
			status = RB_ERR_CANCELED;
	return status;
}

int main(void)
{
	char line[4096];
	while (fgets(line, sizeof line, stdin)) {
		line[strcspn(line, "\n")] = 0;
		char *rest = line, *what = part(&rest, ' ');
		rb_request *r = &request[0];
		if (rest && rest[0] == 'r' && rest[1] >= '0' && rest[1] <= '9')
			r = &request[atoi(part(&rest, ' ') + 1) % 32];
		uint32_t n = rest ? (uint32_t)atoi(rest) : 0;
		if (!strcmp(what, "connect")) connect_to(rest);
		else if (!strcmp(what, "claim")) claim(r, rest);
		else if (!strcmp(what, "crowd")) crowd(rest);
		else if (!strcmp(what, "moved")) moved(rest);
		else if (!strcmp(what, "fill")) fill(r, (float)atof(rest));
		else if (!strcmp(what, "text")) text(r, rest);
		else if (!strcmp(what, "spoil")) spoil(r);
		else if (!strcmp(what, "texts")) texts(r);
		else if (!strcmp(what, "exclaim")) exclaim();
		else if (!strcmp(what, "spoilt")) say(spoilt());
		else if (!strcmp(what, "level")) say(rb_set_priority(client, r->id, n));
		else if (!strcmp(what, "commit")) say(rb_commit(client, r->id, timeout(rest), 0));
		else if (!strcmp(what, "wait")) say(rb_wait(client, r->id, timeout(rest)));
		else if (!strcmp(what, "poll")) say(rb_poll(client, r->id));
		else if (!strcmp(what, "cancel")) say(rb_cancel(client, r->id));
		else if (!strcmp(what, "release")) say(rb_release(client, r->id));
		else if (!strcmp(what, "stream")) stream(r, rest ? rest : "");
		else if (!strcmp(what, "part")) next_part(r, rest);
		else if (!strcmp(what, "show")) show(rest);
		else if (!strcmp(what, "out")) out(r);
		else if (!strcmp(what, "reason")) printf("%s\n", (rb_wait(client, r->id, 0), rb_error()));
		else if (!strcmp(what, "close")) say(rb_close(client));
		else if (!strcmp(what, "attach")) attach(rest);
		else if (!strcmp(what, "next")) next(rest);
		else if (!strcmp(what, "answer")) answer();
		else if (!strcmp(what, "sum")) sum();
		else if (!strcmp(what, "version")) version(r);
		else if (!strcmp(what, "row")) say(row(n));
		else if (!strcmp(what, "run")) say(run(n));
		else if (!strcmp(what, "complete")) say(rb_batch_complete(batch));
		else if (!strcmp(what, "sizes")) say(sizes(n));
		else if (!strcmp(what, "rounds")) say(rb_batch_set_rounds(batch, (uint32_t)n));
		else if (!strcmp(what, "wanted")) say(wanted());
		else if (!strcmp(what, "hold")) held[n % 8] = batch, say(RB_OK);
		else if (!strcmp(what, "take")) batch = held[n % 8], say(RB_OK);
		else if (!strcmp(what, "fail")) say((rb_batch_fail_all(batch, rest), rb_batch_complete(batch)));
		else if (!strcmp(what, "detach")) say(rb_worker_close(worker));
		else if (!rest || !do_sequence(what, rest)) printf("no command %s\n", what);
		fflush(stdout);
	}
	return 0;
}
