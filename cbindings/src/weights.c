/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Live weights: what publisher.c and follower.c share. Go's shm/weights.go has the
 * picture of the segment and the protocol.
 */
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "reply.h"
#include "weights.h"

/* ---- links ------------------------------------------------------------------- */

static void put_peer(rb_writer *to, const rb_weights *w, const char *gpu)
{
	rb_begin_request(to, 1 + w->device + (gpu != NULL), "weights", w->model, w->name);
	if (w->device)
		rb_put_true(to, "device");
	if (gpu)
		rb_put_word(to, "gpu", gpu);
	rb_put_string(to, "weights");
	if (!w->texts) {
		rb_put_map(to, w->waits);
		if (w->waits)
			rb_put_true(to, "wait");
		return;
	}
	rb_put_map(to, 2 + (w->links != NULL));
	if (w->links) /* its workers may come later than it comes again */
		rb_put_true(to, "again");
	uint32_t n = 0;
	for (const char *at = w->texts + strspn(w->texts, " "); *at; n++) {
		at += strcspn(at, " ");
		at += strspn(at, " ");
	}
	rb_put_true(to, "publish");
	rb_put_string(to, "tensors");
	rb_put_array(to, n);
	for (const char *at = w->texts; n--; at += strcspn(at, " ")) {
		at += strspn(at, " ");
		rb_put_text(to, at, strcspn(at, " "));
	}
}

int rb_weights_begin(rb_weights *w, int64_t deadline, int memory, const char *gpu)
{
	rb_writer request = {0};
	put_peer(&request, w, gpu);
	int status = rb_attach_begin(&w->pending, w->socket, deadline, &request, false, memory);
	free(request.data);
	return status;
}

/* Places the tensors one after the other; as Go's NewWeightsLayout. */
static int place(rb_tensor *t, uint32_t count, uint64_t *bytes, uint64_t *geometry)
{
	char text[1024];
	uint64_t h = UINT64_C(0xcbf29ce484222325);
	int n = snprintf(text, sizeof text, "ringbatch weights %d", (int)RB_GO_LAYOUT_VERSION);
	*bytes = 0;
	for (uint32_t k = 0;; k++) {
		for (int i = 0; i < n; i++)
			h = (h ^ (uint8_t)text[i]) * UINT64_C(0x100000001b3);
		if (k == count)
			break;
		t[k].offset = *bytes;
		*bytes = rb_round_up(*bytes + t[k].row_bytes, RB_GO_CACHE_LINE);
		if (t[k].variable || t[k].on_device != t->on_device || *bytes > RB_GO_MAX_WEIGHT_BYTES)
			return rb_malformed("weights");
		text[0] = ' ';
		n = 1 + (int)rb_format_tensor(&t[k], text + 1, sizeof text - 1);
	}
	*bytes = rb_round_up(*bytes, RB_GO_PAGE);
	*geometry = h;
	return RB_OK;
}

static int read_texts(rb_reader r, rb_tensor **tensor, uint32_t *count)
{
	const char *text;
	uint32_t bytes;
	if (*tensor || !rb_get_array(&r, count) || *count < 1 || *count > RB_GO_MAX_WEIGHT_TENSORS)
		return rb_malformed("weights");
	if (!(*tensor = calloc(*count, sizeof **tensor)))
		return rb_say(RB_ERR_NO_MEMORY);
	int status = RB_OK;
	for (uint32_t i = 0; i < *count && !status; i++)
		status = rb_get_text(&r, &text, &bytes) ? rb_parse_tensor(text, bytes, *tensor + i) : rb_malformed("weights");
	return status;
}

typedef struct {
	rb_tensor *tensor;
	uint32_t tensors;
	uint64_t follower, bytes, geometry; /* bytes: of a buffer */
	const char *gpu;
	uint32_t gpu_bytes;
} told;

/* Reads the reply's map of the segment. follower stays as it is for a publisher. */
static int read_weights(rb_reader r, told *to)
{
	uint32_t pairs, bytes;
	const char *key;
	int status = r.at && rb_get_map(&r, &pairs) ? RB_OK : rb_malformed("weights");
	while (!status && pairs--) {
		bool good = rb_get_text(&r, &key, &bytes);
		rb_reader value = r;
		if (!good || !rb_skip_value(&r))
			return rb_malformed("weights");
		if (rb_is(key, bytes, "tensors"))
			status = read_texts(value, &to->tensor, &to->tensors);
		else if (rb_is(key, bytes, "follower"))
			rb_get_uint(&value, &to->follower);
		else if (rb_is(key, bytes, "gpu") && !rb_get_text(&value, &to->gpu, &to->gpu_bytes))
			return rb_malformed("gpu");
	}
	return status || to->tensor ? status : rb_malformed("weights");
}

/* Maps the segment and checks its header. SYNC POINT "header", acquire side. */
static int open_segment(const rb_weights *w, rb_frame *f, const rb_reply *p, rb_weights_link *l, const told *t)
{
	bool on_device = t->tensor->on_device;
	if (f->nfds != 1 + on_device)
		return rb_malformed("number of descriptors");
	int status = on_device ? rb_open_device(&l->device, f->fds[--f->nfds],
		rb_round_up(RB_GO_WEIGHT_BUFFERS * t->bytes, RB_GO_DEVICE_GRAIN), t->gpu, t->gpu_bytes) : RB_OK;
	uint64_t bytes = RB_GO_WEIGHT_DATA + (on_device ? 0 : RB_GO_WEIGHT_BUFFERS * t->bytes);
	if (!status)
		status = rb_segment_open(&l->segment, f->fds[--f->nfds], bytes, true);
	if (status)
		return status;
	status = rb_check_header(&l->segment, (rb_header){.kind = RB_GO_KIND_WEIGHTS, .epoch = p->epoch, .geometry = t->geometry,
		.slots = RB_GO_WEIGHT_BUFFERS, .max_batch = RB_GO_WEIGHT_FOLLOWERS}, w->model);
	if (status)
		return status;
	l->words = (void *)(l->segment.at + RB_GO_WEIGHT_WORDS);
	l->followers = (void *)(l->segment.at + RB_GO_WEIGHT_FOLLOWER_WORDS);
	l->follower = (uint32_t)t->follower;
	return RB_OK;
}

static int open_link(rb_weights *w, rb_frame *f, const rb_reply *p, rb_weights_link *l)
{
	told t = {.follower = RB_GO_WEIGHT_FOLLOWERS};
	int status = read_weights(p->weights, &t);
	if (!status)
		status = place(t.tensor, t.tensors, &t.bytes, &t.geometry);
	if (!status && !w->texts && t.follower >= RB_GO_WEIGHT_FOLLOWERS)
		status = rb_malformed("follower");
	if (!status && w->tensor && t.geometry != w->geometry)
		status = rb_explain(RB_ERR_SIGNATURE_MISMATCH, "the weights of \"%s\" have other tensors now", w->model);
	if (!status)
		status = open_segment(w, f, p, l, &t);
	if (!status && !w->tensor) {
		w->tensor = t.tensor;
		w->tensors = t.tensors;
		w->buffer_bytes = t.bytes;
		w->geometry = t.geometry;
		t.tensor = NULL;
	}
	free(t.tensor);
	return status;
}

static int receive_reply(rb_weights *w, int64_t deadline, rb_frame *f, rb_reply *p)
{
	int status = rb_receive_frame(w->pending.fd, rb_min(deadline, w->pending.deadline), f);
	return status ? status : rb_read_reply(f, p);
}

/* Allocates the device memory that the publisher's tensors need, and asks again with it. */
static int offer_memory(rb_weights *w, int64_t deadline, rb_frame *f, rb_reply *p)
{
	char gpu[RB_GPU_BYTES];
	int memory, status = rb_device_allocate(p->needed, p->needed_on, &memory, gpu);
	rb_frame_free(f);
	*f = (rb_frame){0};
	rb_attach_cancel(&w->pending);
	if (status)
		return status;
	status = rb_weights_begin(w, deadline, memory, gpu);
	close(memory);
	if (!status)
		status = receive_reply(w, deadline, f, p);
	return !status && p->needs ? rb_explain(RB_ERR_PROTOCOL, "the broker did not take the device memory") : status;
}

static void free_link(rb_weights_link *l)
{
	if (l->device.base)
		rb_device_close(&l->device);
	rb_segment_close(&l->segment);
	free(l);
}

int rb_weights_end(rb_weights *w, int64_t deadline)
{
	rb_frame f;
	rb_reply p;
	rb_weights_link *l = calloc(1, sizeof *l);
	int status = receive_reply(w, deadline, &f, &p);
	if (!status && p.needs && w->texts)
		status = offer_memory(w, deadline, &f, &p);
	if (!status)
		status = l ? open_link(w, &f, &p, l) : rb_say(RB_ERR_NO_MEMORY);
	rb_frame_free(&f);
	if (status) {
		rb_attach_cancel(&w->pending);
		if (l)
			free_link(l);
		return status;
	}
	l->socket = w->pending.fd;
	l->owner = w->pending.owner;
	w->pending.fd = -1;
	l->next = w->links;
	w->links = w->live = l;
	w->waits = true; /* when it attaches again */
	w->backoff = 0;
	return RB_OK;
}

/* Attaches for the first time. A follower that waits is answered when there is a publisher. */
static int first_attach(rb_weights *w, int64_t until, bool wait)
{
	w->waits = wait;
	for (int64_t backoff = 0, tries = 0;; tries++) {
		int status = rb_weights_begin(w, until, -1, NULL);
		if (!status && wait && !w->texts)
			w->pending.deadline = until;
		if (!status)
			status = rb_weights_end(w, until);
		if (status == RB_ERR_BROKER_GONE && tries < RB_SUCCESSORS)
			continue;
		if (!rb_retry_attach(status) || !wait || !rb_back_off(&backoff, until))
			return status;
	}
}

bool rb_weights_gone(const rb_weights_link *l)
{
	struct pollfd p = {.fd = l->socket, .events = POLLRDHUP};
	return p.fd < 0 || poll(&p, 1, 0) > 0;
}

void rb_weights_retire(rb_weights *w)
{
	for (rb_weights_link *l = w->links; l; l = l->next) {
		bool needed = l == w->live || l == w->before || l == w->begun.link || (w->running && l == w->now.link);
		if (needed || l->retired)
			continue;
		l->retired = rb_segment_detach(&l->segment);
		if (l->device.base)
			rb_device_close(&l->device);
		int fd = atomic_exchange(&l->socket, -1);
		if (fd >= 0)
			rb_hang_up(fd, l->owner);
	}
}

void rb_weights_free(rb_weights *w)
{
	rb_attach_cancel(&w->pending);
	for (rb_weights_link *l = w->links, *next; l; l = next) {
		next = l->next;
		if (l->socket >= 0) {
			rb_say_goodbye(l->socket, l->owner); /* after that another peer may have the role */
			rb_hang_up(l->socket, l->owner);
		}
		free_link(l);
	}
	free(w->model);
	free(w->name);
	free(w->texts);
	free(w->tensor);
	pthread_mutex_destroy(&w->mu);
	pthread_cond_destroy(&w->left);
	free(w);
}

/* ---- handles --------------------------------------------------------------------- */

int rb_weights_open(const char *model, const char *texts, const rb_connect_options *o, rb_weights **out, int64_t until)
{
	rb_watch_forks();
	rb_weights *w = calloc(1, sizeof *w);
	if (!w)
		return rb_say(RB_ERR_NO_MEMORY);
	w->pending.fd = -1;
	w->device = o->device || texts; /* the publisher's tensors say it */
	pthread_mutex_init(&w->mu, NULL);
	pthread_cond_init(&w->left, NULL);
	w->model = strdup(model);
	w->name = strdup(o->name ? o->name : "");
	w->texts = texts ? strdup(texts) : NULL;
	int status = w->model && w->name && (w->texts || !texts) ? rb_socket_path(o->socket, w->socket, sizeof w->socket) :
								   rb_say(RB_ERR_NO_MEMORY);
	if (!status)
		status = first_attach(w, until, o->wait);
	if (status)
		rb_weights_free(w);
	*out = w;
	return status;
}

int rb_weights_handle(rb_table *table, rb_weights *w, uint64_t *handle)
{
	if ((*handle = rb_table_put(table, w)))
		return RB_OK;
	rb_weights_free(w);
	return rb_say(RB_ERR_NO_MEMORY);
}

int rb_weights_close(rb_table *table, uint64_t handle)
{
	rb_entry *e = rb_table_shut(table, handle);
	if (!e)
		return rb_say(RB_ERR_CLOSED);
	rb_weights *w = e->value;
	rb_table_remove(e);
	rb_weights_free(w);
	return RB_OK;
}

int rb_weights_tensor(const rb_weights *w, uint32_t k, rb_tensor *t)
{
	if (k >= w->tensors)
		return rb_explain(RB_ERR_INVALID, "tensor %u of %u", k, w->tensors);
	*t = w->tensor[k];
	return RB_OK;
}

int rb_weights_device(const rb_weights *w, rb_device *d)
{
	return rb_give_device(d, w->live->device.base ? &w->live->device : &(rb_device){.ordinal = -1});
}
