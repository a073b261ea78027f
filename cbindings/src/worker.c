/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "client.h"
#include "worker.h"

#define DEFAULT_DEPTH 2

int rb_work_use(rb_worker id, rb_entry **entry, rb_work **w)
{
	*entry = rb_table_enter(&rb_workers, id);
	if (!*entry)
		return rb_say(RB_ERR_CLOSED);
	*w = (*entry)->value;
	if ((*w)->parents) {
		rb_table_leave(*entry);
		return rb_fail(RB_ERR_FORKED, "this worker is the parent process's: a forked child attaches its own");
	}
	if (atomic_exchange(&(*w)->busy, true)) {
		rb_table_leave(*entry);
		return rb_explain(RB_ERR_INVALID, "another thread is using this worker");
	}
	return RB_OK;
}

void rb_work_leave(rb_entry *e, rb_work *w)
{
	w->busy = false;
	rb_table_leave(e);
}

/* ---- attaching --------------------------------------------------------------- */

static void put_worker(rb_writer *w, const rb_layout *l, const rb_worker_options *o)
{
	rb_put_string(w, "worker");
	bool version = o->version && *o->version;
	rb_put_map(w, 8 + (o->run_once != 0) + (l->states != 0) + version);
	rb_put_signature(w, l);
	rb_put_number(w, "depth", o->depth ? o->depth : DEFAULT_DEPTH);
	rb_put_number(w, "lanes", o->lanes);
	rb_put_number(w, "share", o->share);
	rb_put_word(w, "pad", o->pad_to ? "fixed" : o->pad_preferred ? "preferred" : "");
	rb_put_number(w, "pad_to", o->pad_to);
	rb_put_word(w, "gpu", o->gpu);
	if (o->run_once)
		rb_put_true(w, "run_once");
	if (version)
		rb_put_word(w, "program", o->version);
}

/* A worker's request; with the UUID of the GPU whose memory it offers. */
static int write_request(rb_writer *w, const char *model, const rb_layout *l, const rb_worker_options *o, const char *gpu)
{
	rb_begin_request(w, gpu ? 4 : 3, "worker", model, o->name);
	put_worker(w, l, o);
	rb_put_word(w, "pipeline", o->pipeline);
	if (gpu)
		rb_put_word(w, "gpu", gpu);
	return rb_put_policy(w, o->policy);
}

/* One try, with a descriptor of device memory and its GPU, or -1 and NULL. */
static int try_attach(rb_attach *a, const char *path, int64_t until, const char *model, const rb_layout *l,
	const rb_worker_options *o, int memory, const char *gpu, rb_session *s)
{
	bool interrupted;
	rb_writer w = {0};
	int status = write_request(&w, model, l, o, gpu);
	if (!status)
		status = rb_attach_begin(a, path, until, &w, true, memory);
	free(w.data);
	if (status)
		return status;
	do
		status = rb_attach_end(a, until, s, &interrupted);
	while (status == RB_ERR_TIMEOUT && a->fd >= 0 && rb_now() < until);
	rb_attach_cancel(a);
	return status;
}

/* Allocates the device memory that the ring needs, and asks again with it. If there is not enough, another worker may
 * have allocated it by now. */
static int offer(rb_attach *a, const char *path, int64_t until, const char *model, const rb_layout *l,
	const rb_worker_options *o, rb_session *s)
{
	char gpu[RB_GPU_BYTES], why[512];
	int memory = -1, lacking = rb_device_allocate(a->needed, a->needed_on, &memory, gpu);
	if (lacking && lacking != RB_ERR_NO_MEMORY)
		return lacking;
	snprintf(why, sizeof why, "%s", rb_error());
	int status = try_attach(a, path, until, model, l, o, memory, memory < 0 ? NULL : gpu, s);
	if (memory >= 0)
		close(memory);
	if (status == RB_NEEDS_DEVICE)
		status = lacking ? rb_fail(lacking, "%s", why) : rb_explain(RB_ERR_PROTOCOL, "the broker did not take the device memory");
	return status;
}

static int attach(const char *model, const char *signature, const rb_worker_options *o, rb_session *s)
{
	char path[4096];
	rb_layout l;
	rb_attach a;
	int64_t until = rb_until(o->patience ? o->patience : RB_CALL_TIMEOUT, rb_now());
	int status = rb_parse_signature(signature, &l);
	if (!status)
		status = rb_layout_place(&l, 1, 1); /* for its checks */
	if (!status)
		status = rb_socket_path(o->socket, path, sizeof path);
	if (!status)
		status = try_attach(&a, path, until, model, &l, o, -1, NULL, s);
	for (int i = 0; status == RB_ERR_BROKER_GONE && i < RB_SUCCESSORS; i++)
		status = try_attach(&a, path, until, model, &l, o, -1, NULL, s);
	for (int64_t backoff = 0; o->wait && rb_retry_attach(status) && rb_back_off(&backoff, until);)
		status = try_attach(&a, path, until, model, &l, o, -1, NULL, s);
	if (status == RB_NEEDS_DEVICE)
		status = offer(&a, path, until, model, &l, o, s);
	rb_layout_free(&l);
	return status;
}

static void drop(void *worker)
{
	rb_work *w = worker;
	if (atomic_fetch_sub(&w->holds, 1) > 1)
		return;
	rb_crew_end(w);
	rb_session_close(&w->session);
	for (uint32_t i = 0; i < w->batches; i++)
		rb_taken_free(w->batch[i]);
	free(w);
}

int rb_worker_attach(const char *model, const char *signature, const rb_worker_options *given, rb_worker *worker)
{
	if (!model || !signature || !worker)
		return rb_missing();
	rb_worker_options o;
	int status = rb_copy_options(&o, given, sizeof o);
	if (status)
		return status;
	rb_watch_forks();
	rb_work *w = calloc(1, sizeof *w);
	if (!w)
		return rb_say(RB_ERR_NO_MEMORY);
	status = attach(model, signature, &o, &w->session);
	if (status) {
		free(w);
		return status;
	}
	rb_session *s = &w->session;
	snprintf(w->model, sizeof w->model, "%s", model);
	w->holds = 1;
	w->pads = o.pad_to || o.pad_preferred;
	w->gather_threads = o.gather_threads;
	w->mail = (void *)(s->words.at + RB_GO_MAIL_WORDS);
	w->done = rb_ring_at(s->words.at, sizeof(rb_done_entry), rb_done_ring_size(s->depth));
	w->busy = true;
	w->handle = rb_table_put(&rb_workers, w);
	if (!w->handle) {
		drop(w);
		return rb_say(RB_ERR_NO_MEMORY);
	}
	*worker = w->handle;
	w->busy = false;
	return RB_OK;
}

int rb_worker_close(rb_worker id)
{
	rb_entry *e;
	rb_work *w;
	int status = rb_work_use(id, &e, &w);
	if (status == RB_ERR_FORKED && (e = rb_table_shut(&rb_workers, id))) { /* a child forgets its parent's worker */
		w = e->value;
		rb_table_remove(e);
		drop(w);
		return RB_OK;
	}
	if (status)
		return status;
	rb_table_shut(&rb_workers, id);
	int why = RB_ERR_FAILED;
	const char *text = "the worker was closed before it ran this request";
	if (rb_session_gone(&w->session)) { /* then clients may send their requests again */
		why = RB_ERR_BROKER_GONE;
		text = rb_status_text(why);
	}
	rb_device_synchronize(&w->session.device); /* its kernels may be writing outputs of these requests */
	for (uint32_t i = 0; i < w->batches; i++)
		if (w->batch[i]->in_use) {
			rb_taken_fail_all(w->batch[i], why, text, false);
			rb_taken_complete(w->batch[i]);
		}
	rb_session_hang_up(&w->session);
	rb_crew_end(w);
	rb_work_leave(e, w);
	rb_table_remove(e);
	drop(w);
	return RB_OK;
}

/* ---- about the model ------------------------------------------------------------ */

static void describe(const rb_work *w, rb_model *model)
{
	const rb_session *s = &w->session;
	*model = (rb_model){.inputs = s->layout.inputs, .outputs = s->layout.outputs, .max_batch_size = s->layout.max_batch,
		.slots = s->layout.slots,
			    .levels = s->levels, .wait_time = s->wait_time};
	memcpy(model->name, w->model, sizeof model->name);
}

static int tensor_of(rb_work *w, int side, uint32_t k, rb_tensor *tensor)
{
	const rb_tensor *t;
	uint32_t dims_at;
	int status = rb_pick(&w->session.layout, side, k, &t, &dims_at);
	if (status)
		return status;
	*tensor = *t;
	return RB_OK;
}

static int map_of(rb_work *w, rb_map *out)
{
	atomic_fetch_add(&w->holds, 1);
	w->direct = true;
	return rb_map_new(out, &w->session, 0, w, drop, rb_worker_in_child);
}

int rb_worker_model(rb_worker id, rb_model *model) { WITH_WORKER(model, id, (describe(w, model), RB_OK)); }
int rb_worker_notes(rb_worker id, const char **text)
{
	WITH_WORKER(text, id, (*text = w->session.notes ? w->session.notes : "", RB_OK));
}
int rb_worker_tensor(rb_worker id, int side, uint32_t k, rb_tensor *tensor)
{
	WITH_WORKER(tensor, id, tensor_of(w, side, k, tensor));
}
int rb_worker_map(rb_worker id, rb_map *out) { WITH_WORKER(out, id, map_of(w, out)); }

/* ---- the next batch ---------------------------------------------------------------- */

#define LOOK_EVERY (5 * MILLISECOND) /* a caller that does not wait checks the socket at most this often */

static int nothing(rb_work *w)
{
	int64_t now = rb_now();
	if (now - w->looked < LOOK_EVERY)
		return rb_say(RB_ERR_TIMEOUT);
	w->looked = now;
	return rb_say(rb_session_gone(&w->session) ? RB_ERR_BROKER_GONE : RB_ERR_TIMEOUT);
}

/* Not only acquire: park stores parked before this load. */
static bool has_mail(rb_work *w) { return atomic_load(&w->mail->tail) != w->next; }

/* Spins for mail before parking: waking a parked thread takes longer than the rest of a small request. Only if the last
 * wait was that short, and yielding the core. */
static bool spin(rb_work *w, int64_t now, int64_t until)
{
	if (!w->waiting_since)
		w->waiting_since = now;
	if (!w->spin_pays || now < w->spin_rest)
		return false;
	for (int64_t end = rb_min(w->waiting_since + w->spin_for, until); now < end;) {
		if (has_mail(w))
			return true;
		if (!rb_yield(&now, &w->spin_rest))
			return has_mail(w);
	}
	return false;
}

/* Parks until the bell rings, or for a slice; a signal's handler may move *until. In test/model: park. */
static int park(rb_work *w, uint32_t seen, int64_t now, int64_t start, int64_t *until)
{
	int error = 0;
	atomic_exchange(&w->mail->parked, 1); /* a full barrier, as in rb_push */
	/* Store parked, then load tail; the broker stores tail, then loads parked: one sees the other. */
	if (!has_mail(w))
		error = rb_futex_wait(&w->mail->bell, seen, rb_min(*until - now, PARK_SLICE), false);
	atomic_store(&w->mail->parked, 0);
	if (error == EINTR)
		*until = rb_interrupted(*until, start);
	return error == ETIMEDOUT && !has_mail(w) && rb_session_gone(&w->session) ? rb_say(RB_ERR_BROKER_GONE) : RB_OK;
}

/* Takes the next mail, if there is one: a batch, or NULL. */
static int try_next(rb_work *w, rb_taken **out)
{
	rb_session *s = &w->session;
	*out = NULL;
	/* SYNC POINT "mail", acquire side. At most one mailbox at a time: endless empty mails must not outlast the timeout. */
	for (uint32_t n = 0; n < s->depth && has_mail(w); n++) {
		if (w->waiting_since) {
			w->spin_pays = rb_now() - w->waiting_since < w->spin_for;
			w->waiting_since = 0;
		}
		/* Only a broker that breaks the protocol hands over more. */
		if (w->taken > s->depth || atomic_load_explicit(&w->mail->tail, memory_order_relaxed) - w->next > s->depth)
			return rb_explain(RB_ERR_PROTOCOL, "more than %u batches at once", s->depth);
		rb_taken *b = rb_work_spare(w);
		if (!b)
			return rb_say(RB_ERR_NO_MEMORY);
		const uint8_t *mail = s->words.at + rb_mails_at(s->depth) + w->next % s->depth * rb_mail_size(s->layout.max_batch);
		int status = rb_taken_read(b, mail);
		atomic_store(&w->mail->taken, ++w->next);
		if (status)
			return status;
		w->taken++;
		b->in_use = true;
		if (b->shown.requests) {
			*out = b;
			return RB_OK;
		}
		rb_taken_complete(b); /* every request was canceled or has expired */
	}
	return RB_OK;
}

int rb_worker_wait(rb_worker id, int64_t timeout)
{
	rb_entry *e = rb_table_enter(&rb_workers, id);
	if (!e)
		return rb_say(RB_ERR_CLOSED);
	rb_work *w = e->value;
	int status = w->parents ? rb_fail(RB_ERR_FORKED, "this worker is the parent process's: a forked child attaches its own") : RB_OK;
	int64_t start = rb_now(), until = rb_until(timeout, start);
	while (!status) {
		uint32_t seen = w->mail->bell;
		if (has_mail(w))
			break;
		int64_t now = rb_now();
		if (now < until)
			status = park(w, seen, now, start, &until);
		else
			status = rb_say(rb_session_gone(&w->session) ? RB_ERR_BROKER_GONE : RB_ERR_TIMEOUT);
	}
	rb_table_leave(e);
	return status;
}

static int unwanted(rb_work *w, rb_batch **batches, uint32_t max, uint32_t *count)
{
	*count = 0;
	for (uint32_t i = 0; i < w->batches && *count < max; i++)
		if (w->batch[i]->in_use && !rb_taken_wanted(w->batch[i]))
			batches[(*count)++] = &w->batch[i]->shown;
	return RB_OK;
}

static int next(rb_work *w, int64_t timeout, rb_batch **batch)
{
	rb_ask_short_slice();
	int64_t start = timeout ? rb_now() : 0, until = rb_until(timeout, start);
	for (;;) {
		rb_taken *b;
		uint32_t seen = w->mail->bell;
		int status = try_next(w, &b);
		if (b)
			*batch = &b->shown;
		if (status || b)
			return status;
		int64_t now = timeout ? rb_now() : until;
		if (now >= until)
			return nothing(w);
		if (!spin(w, now, until) && (status = park(w, seen, now, start, &until)))
			return status;
	}
}

int rb_worker_next(rb_worker id, int64_t timeout, rb_batch **batch) { WITH_WORKER(batch, id, next(w, timeout, batch)); }

int rb_worker_unwanted(rb_worker id, rb_batch **batches, uint32_t max, uint32_t *count)
{
	WITH_WORKER(count && (batches || !max), id, unwanted(w, batches, max, count));
}
