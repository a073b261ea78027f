/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A session of a client or a worker, from the call of the broker to the end: attaching receives
 * the segments and checks everything, numbers against one another before memory is touched.
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "reply.h"

void rb_begin_request(rb_writer *w, uint32_t pairs, const char *op, const char *model, const char *name)
{
	rb_put_map(w, pairs + 4);
	rb_put_number(w, "version", RB_GO_CONTROL_VERSION);
	rb_put_word(w, "op", op);
	rb_put_word(w, "model", model);
	rb_put_word(w, "name", name);
}

static void put_side(rb_writer *w, const char *key, const rb_tensor *t, uint32_t count)
{
	rb_put_string(w, key);
	rb_put_array(w, count);
	for (uint32_t k = 0; k < count; k++) {
		char text[1024];
		rb_put_text(w, text, rb_format_tensor(&t[k], text, sizeof text));
	}
}

void rb_put_signature(rb_writer *w, const rb_layout *l)
{
	put_side(w, "inputs", l->tensor, l->inputs);
	put_side(w, "outputs", l->tensor + l->inputs, l->outputs);
	if (l->states)
		put_side(w, "state", rb_tensors_of(l, RB_STATE), l->states);
}

int rb_attach_begin(rb_attach *a, const char *socket, int64_t deadline, const rb_writer *request, bool worker, int offer)
{
	a->fd = -1;
	if (request->failed)
		return rb_say(RB_ERR_NO_MEMORY);
	int fd, status = rb_dial(socket, deadline, &fd);
	if (status)
		return status;
	int64_t asked = rb_now();
	/* A broker may refuse and hang up before it has read the request: its reply counts, not the broken pipe. */
	int64_t until = rb_min(deadline, rb_later(rb_now(), RB_CALL_TIMEOUT));
	int error = rb_send_frame(fd, until, request->data, request->length);
	if (!error && offer >= 0)
		error = rb_send_offer(fd, until, offer);
	if (error && error != EPIPE && error != ECONNRESET) {
		status = error == ETIMEDOUT ? rb_no_answer(fd) : rb_explain(RB_ERR_BROKER_GONE, "%s", strerror(error));
		rb_hang_up(fd, getpid());
		return status;
	}
	*a = (rb_attach){.fd = fd, .asked = asked, .owner = getpid(), .worker = worker, .deadline = rb_later(rb_now(), RB_CALL_TIMEOUT)};
	return RB_OK;
}

void rb_attach_cancel(rb_attach *a)
{
	if (a->fd >= 0)
		rb_hang_up(a->fd, a->owner);
	a->fd = -1;
}

/* Reads a list of at most `most` tensors. */
static int read_tensors(rb_reader r, const char *what, rb_tensor *to, uint32_t most, uint32_t *count)
{
	uint32_t bytes;
	const char *text;
	if (!r.at || !rb_get_array(&r, count) || *count > most)
		return rb_malformed(what);
	int status = RB_OK;
	for (uint32_t i = 0; i < *count && !status; i++)
		status = rb_get_text(&r, &text, &bytes) && bytes ? rb_parse_tensor(text, bytes, &to[i]) : rb_malformed(what);
	return status;
}

/* If the reply names the planes of the ring, places the tensors among them. */
#define MAX_PLANES (RB_GO_MAX_TENSORS + 1) /* the step words, too */
static int read_planes(rb_reader r, rb_layout *l)
{
	uint32_t n;
	if (!r.at)
		return l->states ? rb_malformed("list of planes") : RB_OK;
	rb_tensor *plane = calloc(MAX_PLANES, sizeof *plane);
	if (!plane)
		return rb_say(RB_ERR_NO_MEMORY);
	int status = read_tensors(r, "list of planes", plane, MAX_PLANES, &n);
	if (!status)
		status = rb_layout_among(l, plane, n);
	free(plane);
	return status;
}

static int read_notes(rb_reader r, rb_session *s)
{
	uint32_t n, bytes;
	const char *text;
	size_t length = 0;
	if (!r.at)
		return RB_OK;
	if (!rb_get_array(&r, &n) || !(s->notes = calloc(1, (size_t)(r.end - r.at) + 1)))
		return rb_malformed("notes");
	while (n--) {
		if (!rb_get_text(&r, &text, &bytes))
			return rb_malformed("notes");
		length += (size_t)sprintf(s->notes + length, "%s%.*s", length ? "\n" : "", (int)bytes, text);
	}
	return RB_OK;
}

/* SYNC POINT "header", acquire side. */
int rb_check_header(const rb_segment *segment, rb_header want, const char *model)
{
	rb_header got;
	want.magic = RB_GO_MAGIC, want.version = RB_GO_LAYOUT_VERSION, want.size = segment->bytes;
	if (atomic_load((_Atomic uint64_t *)(void *)segment->at) != RB_GO_MAGIC)
		return rb_explain(RB_ERR_LAYOUT, "not a ringbatch segment");
	rb_read_once(&got, segment->at, sizeof got);
	if (got.version != RB_GO_LAYOUT_VERSION)
		return rb_explain(RB_ERR_VERSION, "segment has version %u, this build speaks %d", got.version, (int)RB_GO_LAYOUT_VERSION);
	if (memcmp(&got, &want, sizeof got))
		return rb_explain(RB_ERR_LAYOUT, "the header of a segment of \"%s\" is not as expected", model);
	return RB_OK;
}

/* Checks the whole reply before memory is mapped. */
static int check_reply(const rb_reply *p, rb_session *s, bool worker)
{
	rb_layout *l = &s->layout;
	int status = read_tensors(p->inputs, "list of tensors", l->tensor, RB_GO_MAX_TENSORS, &l->inputs);
	if (!status)
		status = read_tensors(p->outputs, "list of tensors", l->tensor + l->inputs, RB_GO_MAX_TENSORS - l->inputs, &l->outputs);
	if (!status && p->state.at)
		status = read_tensors(p->state, "list of tensors", l->tensor + rb_tensors(l), RB_GO_MAX_TENSORS - rb_tensors(l), &l->states);
	if (status)
		return status;
	if (p->slots > UINT32_MAX || p->max_batch > UINT32_MAX || p->first_gen > UINT32_MAX)
		return rb_malformed("sizes");
	status = rb_layout_place(l, (uint32_t)p->slots, (uint32_t)p->max_batch);
	if (!status)
		status = read_planes(p->planes, l);
	if (status)
		return status;
	s->max_rows = p->max_rows && p->max_rows < l->max_batch ? (uint32_t)p->max_rows : l->max_batch;
	s->hands_on = p->hands_on;
	s->isolates = p->isolates;
	if (p->model_bytes > RB_MAX_NAME_BYTES)
		return rb_malformed("model");
	memcpy(s->model, p->model ? p->model : "", p->model_bytes);
	if (l->geometry != p->geometry || l->planes_size != p->planes_size || l->board_size != p->board_size)
		return rb_explain(RB_ERR_LAYOUT, "the broker lays %s out differently", s->model);
	for (uint32_t k = 0; worker && k < l->states; k++) /* a client needs no state in device memory */
		l->on_device |= rb_tensors_of(l, RB_STATE)[k].on_device;
	if (p->device_size != (l->on_device ? l->device_size : 0))
		return rb_explain(RB_ERR_LAYOUT, "%" PRIu64 " bytes of device memory, expected %" PRIu64, p->device_size, l->device_size);
	uint64_t size;
	if (worker) {
		if (p->depth < 1 || p->depth > RB_GO_MAX_MAIL_DEPTH)
			return rb_explain(RB_ERR_LAYOUT, "mailbox depth %" PRIu64, p->depth);
		s->depth = (uint32_t)p->depth;
		size = rb_worker_segment_size(s->depth, l->max_batch);
	} else {
		if (p->window < 1 || p->window > l->slots || p->first_slot > l->slots - p->window)
			return rb_explain(RB_ERR_LAYOUT, "window of %" PRIu64 " slots at %" PRIu64 " in a ring of %u", p->window, p->first_slot,
				l->slots);
		s->window = (uint32_t)p->window;
		s->first_slot = (uint32_t)p->first_slot;
		s->first_gen = (uint32_t)p->first_gen;
		size = rb_client_segment_size(s->window, p->times);
		s->times = p->times;
	}
	if (size != p->session_size)
		return rb_explain(RB_ERR_LAYOUT, "session segment of %" PRIu64 " bytes, expected %" PRIu64, p->session_size, size);
	s->epoch = p->epoch;
	status = rb_read_policy(p->policy, s);
	return status ? status : read_notes(p->notes, s);
}

/* A commit writes to the doorbell, which must neither block nor raise SIGPIPE: no pipe, no socket and no terminal. */
static int check_doorbell(int fd)
{
	struct stat st;
	int flags = fcntl(fd, F_GETFL);
	if (flags < 0 || fstat(fd, &st) || S_ISFIFO(st.st_mode) || S_ISSOCK(st.st_mode) || S_ISCHR(st.st_mode) || S_ISDIR(st.st_mode))
		return rb_explain(RB_ERR_LAYOUT, "the doorbell is no eventfd");
	if (!(flags & O_NONBLOCK) && fcntl(fd, F_SETFL, flags | O_NONBLOCK))
		return rb_explain(RB_ERR_LAYOUT, "the doorbell would block");
	return RB_OK;
}

/* Refuses a broker with another CLOCK_MONOTONIC: every deadline would be off by the difference. The broker read
 * its clock between `asked` and now. */
static int check_clock(const rb_reply *p, int64_t asked)
{
	int64_t now = rb_now(), clock = (int64_t)p->clock;
	if (clock >= asked && clock <= now)
		return RB_OK;
	return rb_explain(RB_ERR_NAMESPACE, "the broker's monotonic clock is %" PRId64 " s away from this process's: "
			  "they are in different time namespaces; start both in one", (clock - now) / SECOND);
}

int rb_open_device(rb_device *d, int fd, uint64_t bytes, const char *gpu, uint32_t gpu_bytes)
{
	char uuid[RB_GPU_BYTES] = "";
	int status = gpu_bytes < sizeof uuid ? RB_OK : rb_malformed("gpu");
	if (!status) {
		memcpy(uuid, gpu ? gpu : "", gpu_bytes);
		status = rb_device_import(d, fd, bytes, uuid);
	}
	close(fd);
	return status;
}

/* Checks the reply and maps the segments. Takes the descriptors of f over one by one. */
static int open_session(rb_frame *f, const rb_reply *p, rb_session *s, bool worker)
{
	if (!p->attached || f->nfds != (p->device_size ? RB_MAX_FDS : RB_MAX_FDS - 1))
		return rb_explain(RB_ERR_PROTOCOL, "attach reply has %d descriptors", f->nfds);
	s->layout.tensor = calloc(RB_GO_MAX_TENSORS, sizeof(rb_tensor));
	if (!s->layout.tensor)
		return rb_say(RB_ERR_NO_MEMORY);
	int status = check_reply(p, s, worker);
	if (status)
		return status;
	rb_tensor *fit = realloc(s->layout.tensor, rb_tensors(&s->layout) * sizeof(rb_tensor));
	s->layout.tensor = fit ? fit : s->layout.tensor;
	if (p->device_size && (status = rb_open_device(&s->device, f->fds[--f->nfds], p->device_size, p->gpu, p->gpu_bytes)))
		return status;
	s->doorbell = f->fds[--f->nfds];
	if ((status = check_doorbell(s->doorbell)))
		return status;
	const struct {
		rb_segment *to;
		uint64_t bytes;
		bool writable;
		uint32_t kind;
	} segments[] = {
		{&s->words, p->session_size, true, worker ? RB_KIND_WORKER : RB_KIND_CLIENT},
		{&s->board_segment, p->board_size, worker, RB_KIND_BOARD},
		{&s->planes, p->planes_size, true, RB_KIND_PLANES},
	};
	rb_header want = {.epoch = s->epoch, .geometry = s->layout.geometry, .slots = s->layout.slots, .max_batch = s->layout.max_batch};
	for (int i = 0; i < 3; i++) {
		want.kind = segments[i].kind;
		status = rb_segment_open(segments[i].to, f->fds[--f->nfds], segments[i].bytes, segments[i].writable);
		/* Any client can write into the planes, so their header proves nothing. */
		if (!status && segments[i].kind != RB_KIND_PLANES)
			status = rb_check_header(segments[i].to, want, s->model);
		if (status)
			return status;
	}
	s->board = rb_board_at(&s->layout, s->board_segment.at);
	return RB_OK;
}

/* ---- the end of a session -------------------------------------------------------- */

bool rb_session_judge(rb_session *s, short events)
{
	if (events & POLLIN) /* the byte stays where it is */
		s->again = true;
	return events & ~POLLIN;
}

bool rb_session_gone(rb_session *s)
{
	struct pollfd p = {.fd = s->socket, .events = s->again ? POLLRDHUP : POLLRDHUP | POLLIN};
	return p.fd < 0 || (poll(&p, 1, 0) > 0 && rb_session_judge(s, p.revents));
}

/* The broker leases the slots again as soon as it sees the end: the GPU must have stopped writing to them. */
void rb_session_hang_up(rb_session *s)
{
	rb_device_synchronize(&s->device);
	int fd = atomic_exchange(&s->socket, -1);
	if (fd >= 0)
		rb_hang_up(fd, s->owner);
}

void rb_session_leave(rb_session *s)
{
	rb_device_synchronize(&s->device);
	rb_say_goodbye(s->socket, s->owner);
	rb_session_hang_up(s);
}

static void free_session(rb_session *s)
{
	rb_layout_free(&s->layout);
	for (int i = 0; i < (int)RB_DIMS; i++) {
		free(s->bucket[i]);
		s->bucket[i] = NULL;
		s->buckets[i] = 0;
	}
	free(s->notes);
	s->notes = NULL;
}

void rb_session_close(rb_session *s)
{
	rb_session_hang_up(s);
	rb_close_fd(&s->doorbell);
	if (s->device.base)
		rb_device_close(&s->device);
	rb_segment_close(&s->planes);
	rb_segment_close(&s->board_segment);
	rb_segment_close(&s->words);
	free_session(s);
}

/* ---- the reply ------------------------------------------------------------------- */

int rb_attach_end(rb_attach *a, int64_t deadline, rb_session *s, bool *interrupted)
{
	/* Once a reply has begun, it is read as a whole; until then the next call may go on. */
	if (rb_await_readable(a->fd, rb_min(deadline, a->deadline), interrupted)) {
		int status = rb_no_answer(a->fd);
		if (rb_now() >= a->deadline)
			rb_attach_cancel(a);
		return status;
	}
	rb_frame f;
	rb_reply p;
	memset(s, 0, sizeof *s);
	s->doorbell = -1;
	s->device.ordinal = -1;
	s->socket = a->fd;
	s->owner = a->owner;
	int status = rb_receive_frame(a->fd, rb_min(deadline, a->deadline), &f);
	a->fd = -1;
	if (!status)
		status = rb_read_reply(&f, &p);
	if (!status && p.needs && a->worker) {
		a->needed = p.needed;
		a->needed_on = p.needed_on;
		status = RB_NEEDS_DEVICE;
	}
	if (!status && p.attached)
		status = check_clock(&p, a->asked);
	if (!status)
		status = open_session(&f, &p, s, a->worker);
	rb_frame_free(&f);
	if (status)
		rb_session_close(s);
	return status;
}
