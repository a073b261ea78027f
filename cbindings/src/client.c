/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "client.h"

#define FIRST_RETRY (5 * MILLISECOND)
#define LAST_RETRY (500 * MILLISECOND)
#define LOOK_EVERY (5 * MILLISECOND) /* at the socket, by who claims */

/* ---- attaching ------------------------------------------------------------ */

static bool same_tensors(const rb_layout *a, const rb_layout *b)
{
	if (a->inputs != b->inputs || a->outputs != b->outputs)
		return false;
	for (uint32_t k = 0; k < a->inputs + a->outputs; k++) {
		const rb_tensor *x = &a->tensor[k], *y = &b->tensor[k];
		if (strcmp(x->name, y->name) || x->dtype != y->dtype || x->rank != y->rank || x->variable != y->variable || x->on_device != y->on_device || memcmp(x->shape, y->shape, sizeof x->shape))
			return false;
	}
	return true;
}

/* Attaches, or goes on with it: RB_ERR_TIMEOUT if there is no reply yet. Only
 * the thread that set attaching calls it. */
static int attach(rb_conn *c, int64_t deadline, rb_link **link, bool *interrupted)
{
	int status = RB_OK;
	rb_session s;
	if (c->pending.fd < 0) {
		rb_writer w = {0};
		rb_begin_request(&w, 3 + c->device + (c->attached ? 2 : 0), "client", c->model, c->name);
		if (c->device) {
			rb_put_string(&w, "device");
			rb_put_true(&w);
		}
		rb_put_string(&w, "window");
		rb_put_int(&w, c->window_wanted);
		rb_put_string(&w, "follows");
		rb_put_true(&w);
		rb_put_string(&w, "times");
		rb_put_true(&w);
		if (c->attached) /* the caller has seen its tensors, and will not have others */
			rb_put_signature(&w, &c->layout);
		status = rb_attach_begin(&c->pending, c->socket, deadline, &w, false, -1);
		free(w.data);
		if (status != RB_ERR_TIMEOUT)
			c->unbegun = 0;
		else if (!c->unbegun)
			c->unbegun = rb_now();
	}
	if (!status)
		status = rb_attach_end(&c->pending, deadline, &s, interrupted);
	if (!status && c->attached && !same_tensors(&s.layout, &c->layout)) {
		rb_session_close(&s);
		status = rb_fail(RB_ERR_SIGNATURE_MISMATCH, "%s: %s is not what it was when this client connected", rb_status_text(RB_ERR_SIGNATURE_MISMATCH), c->model);
	}
	if (!status)
		*link = rb_link_new(c, &s, &status);
	return status;
}

/* Publishes that live or final has changed. */
static void changed(rb_conn *c)
{
	atomic_fetch_add(&c->change, 1);
	rb_futex_wake(&c->change, INT32_MAX, true);
}

/* Another link, or none, instead of the present one, which ends with the last of
 * its requests. */
static void leave(rb_conn *c, rb_link *next)
{
	rb_link *before = atomic_exchange(&c->live, next);
	if (before) {
		c->left = true;
		rb_link_drop(before);
	}
}

/* Makes l the present link. The caller holds mu. */
static bool use(rb_conn *c, rb_link *l)
{
	rb_session *s = &l->session;
	size_t bytes = (s->layout.inputs + s->layout.outputs) * sizeof(rb_tensor);
	/* The same memory for every attachment: their number does not change, and a
	 * child that is forked in the midst of this finds something to read. */
	rb_tensor *copy = c->layout.tensor ? c->layout.tensor : calloc(1, bytes);
	if (!copy)
		return false;
	memcpy(copy, s->layout.tensor, bytes);
	rb_layout whole = s->layout;
	whole.tensor = copy;
	c->layout = whole;
	c->info = (rb_model){.inputs = s->layout.inputs, .outputs = s->layout.outputs, .max_batch_size = s->max_rows, .slots = s->layout.slots,
			     .window = s->window, .levels = s->levels, .wait_time = s->wait_time};
	memcpy(c->info.name, s->model, sizeof c->info.name);
	c->window = s->window;
	c->max_batch = s->max_rows;
	l->number = ++c->attached;
	l->next = c->links;
	c->links = l;
	c->why = 0;
	leave(c, l);
	return true;
}

void rb_conn_lost(rb_conn *c, rb_link *l)
{
	rb_link *present = l;
	/* Away first: who learns that the link is dead does not find it here. */
	bool was = atomic_compare_exchange_strong(&c->live, &present, NULL);
	rb_link_fail(l);
	if (was) {
		changed(c);
		rb_link_drop(l);
	}
}

rb_link *rb_conn_live(rb_conn *c, int64_t now)
{
	rb_link *l = c->live;
	if (!l || !rb_link_hold(l))
		return NULL;
	if (!rb_link_lost(l, now, LOOK_EVERY))
		return l;
	rb_conn_lost(c, l);
	rb_link_drop(l);
	return NULL;
}

/* What a try to attach has come to. The caller holds mu. */
static void attached(rb_conn *c, int status, rb_link *l)
{
	c->attaching = false;
	if (!status && (c->final || !use(c, l))) { /* closed meanwhile, or no memory */
		rb_link_drop(l);
		rb_link_free(l);
	} else if (!status) {
		c->delay = FIRST_RETRY;
	} else if (status != RB_ERR_TIMEOUT || (c->pending.fd < 0 && rb_now() - c->unbegun > RB_CALL_TIMEOUT)) {
		snprintf(c->why_text, sizeof c->why_text, "%s", rb_error());
		c->why = status;
		c->next_try = rb_now() + c->delay;
		c->delay = rb_min(2 * c->delay, LAST_RETRY);
		if (status == RB_ERR_SIGNATURE_MISMATCH)
			leave(c, NULL);
	}
	changed(c);
}

bool rb_conn_follow(rb_conn *c, rb_link *held, int64_t patience, bool *interrupted)
{
	int64_t now = rb_now();
	pthread_mutex_lock(&c->mu);
	bool mine = !c->attaching && !c->final && now >= c->next_try && c->live == held;
	c->attaching |= mine;
	pthread_mutex_unlock(&c->mu);
	if (!mine)
		return c->live != held;
	rb_link *l = NULL;
	int status = attach(c, rb_later(now, patience), &l, interrupted);
	pthread_mutex_lock(&c->mu);
	attached(c, status, l);
	pthread_mutex_unlock(&c->mu);
	if (c->live == held)
		return false;
	pthread_mutex_lock(&held->mu); /* the reaper is to serve the other one */
	rb_link_wake_reaper(held);
	if (held->reapers_waiting)
		rb_link_pass_turn(held);
	pthread_mutex_unlock(&held->mu);
	rb_link_kick(held);
	return true;
}

int rb_conn_link(rb_conn *c, int64_t until, bool may_wait, rb_link **link, bool *interrupted)
{
	int64_t start = rb_now();
	for (bool tried = false;; tried = true) {
		int64_t now = rb_now();
		if (c->final)
			return rb_say(c->final);
		if ((*link = rb_conn_live(c, now)))
			return RB_OK;
		uint32_t seen = c->change;
		pthread_mutex_lock(&c->mu);
		/* Who does not wait leaves it to the reaper, if there is one. */
		bool mine = !c->attaching && !c->live && !c->final && now >= c->next_try && (may_wait || (!tried && !c->reaping));
		int64_t next = c->attaching ? INT64_MAX : c->next_try;
		c->attaching |= mine;
		/* It may be again what it was: others try now and then. */
		int refused = !mine && c->why == RB_ERR_SIGNATURE_MISMATCH ? rb_fail(c->why, "%s", c->why_text) : RB_OK;
		pthread_mutex_unlock(&c->mu);
		if (refused)
			return refused;
		if (mine) {
			rb_link *l = NULL;
			/* The next one goes on with what was begun. */
			int status = attach(c, rb_min(may_wait ? until : INT64_MAX, now + 100 * MILLISECOND), &l, interrupted);
			pthread_mutex_lock(&c->mu);
			attached(c, status, l);
			pthread_mutex_unlock(&c->mu);
		} else if (may_wait && now < until) {
			int error = rb_futex_wait(&c->change, seen, rb_min(rb_min(until, next) - now, 100 * MILLISECOND), true);
			*interrupted |= error == EINTR;
		}
		if (c->live || c->final)
			continue;
		if (*interrupted)
			until = rb_interrupted(until, start);
		if (!may_wait || rb_now() >= until) {
			pthread_mutex_lock(&c->mu);
			int status = c->why == RB_ERR_SIGNATURE_MISMATCH ? rb_fail(c->why, "%s", c->why_text)
			             : !c->why ? rb_fail(RB_ERR_TIMEOUT, "%s: attaching", rb_status_text(RB_ERR_TIMEOUT))
					     : rb_fail(RB_ERR_BROKER_GONE, "%s: attaching again: %s", rb_status_text(RB_ERR_BROKER_GONE), c->why_text);
			pthread_mutex_unlock(&c->mu);
			return status;
		}
	}
}

/* ---- connecting ------------------------------------------------------------ */

/* Whether a broker that is about to come, or its first worker, may change that;
 * one that drains is being replaced. */
static bool worth_waiting(int status)
{
	return status == RB_ERR_UNKNOWN_MODEL || status == RB_ERR_NO_BROKER || status == RB_ERR_BROKER_GONE || status == RB_ERR_DRAINING ||
	       status == RB_ERR_NO_WORKER; /* none has allocated its device memory yet */
}

static void pause_for(int64_t ns)
{
	struct timespec t = {ns / SECOND, ns % SECOND};
	nanosleep(&t, NULL);
}

static void free_conn(rb_conn *c)
{
	while (c->links) {
		rb_link *l = c->links;
		c->links = l->next;
		rb_link_disown(l);
	}
	rb_attach_cancel(&c->pending);
	rb_layout_free(&c->layout);
	free(c->model);
	free(c->name);
	free(c);
}

static int first_attach(rb_conn *c, int64_t timeout, bool wait)
{
	int64_t start = rb_now(), until = rb_until(timeout, start), delay = FIRST_RETRY;
	int last = RB_OK;
	char text[512];
	rb_link *l;
	for (;;) {
		bool interrupted = false;
		int status = attach(c, until, &l, &interrupted);
		for (int i = 0; status == RB_ERR_BROKER_GONE && i < RB_SUCCESSORS; i++)
			status = attach(c, until, &l, &interrupted);
		if (!status) {
			c->inputs = l->session.layout.inputs;
			c->outputs = l->session.layout.outputs;
			c->sized = !l->session.layout.dims[RB_INPUT] && !l->session.layout.dims[RB_OUTPUT];
			for (uint32_t k = 0; k < c->inputs + c->outputs; k++)
				c->on_device[k >= c->inputs] |= l->session.layout.tensor[k].on_device;
			if (use(c, l))
				return RB_OK;
			rb_link_drop(l);
			rb_link_free(l);
			return rb_say(RB_ERR_NO_MEMORY);
		}
		if (status == RB_ERR_TIMEOUT && interrupted) {
			until = rb_interrupted(until, start);
			if (rb_now() < until)
				continue;
		}
		if (status == RB_ERR_TIMEOUT && last)
			return rb_fail(last, "%s", text);
		if (!wait || !worth_waiting(status))
			return status;
		last = status;
		snprintf(text, sizeof text, "%s", rb_error());
		if (rb_now() + delay >= until)
			return rb_fail(last, "%s (%s)", text, rb_status_text(RB_ERR_TIMEOUT));
		pause_for(delay);
		delay = rb_min(2 * delay, LAST_RETRY);
	}
}

int rb_connect(const char *model, const rb_connect_options *given, rb_client *client)
{
	if (!model || !client)
		return rb_missing();
	if (given && given->size != sizeof *given)
		return rb_fail(RB_ERR_VERSION, "%s: rb_connect_options.size is %u, expected %zu", rb_status_text(RB_ERR_VERSION), given->size, sizeof *given);
	rb_connect_options o = given ? *given : (rb_connect_options){0};
	if (o.window > RB_GO_MAX_SLOTS)
		return rb_fail(RB_ERR_INVALID, "%s: window of %u slots, must be 1..%d", rb_status_text(RB_ERR_INVALID), o.window, (int)RB_GO_MAX_SLOTS);
	rb_watch_forks();
	rb_conn *c = calloc(1, sizeof *c);
	if (!c)
		return rb_say(RB_ERR_NO_MEMORY);
	c->notify_fd = -1;
	c->poke_fd = -1;
	c->pending.fd = -1;
	c->own_from = 1;
	c->delay = FIRST_RETRY;
	c->window_wanted = o.window;
	c->device = o.device;
	c->model = strdup(model);
	c->name = strdup(o.name ? o.name : "");
	pthread_mutex_init(&c->mu, NULL);
	int status = c->model && c->name ? rb_socket_path(o.socket, c->socket, sizeof c->socket) : rb_say(RB_ERR_NO_MEMORY);
	if (!status)
		status = first_attach(c, o.timeout ? o.timeout : RB_CALL_TIMEOUT, o.wait);
	if (!status && !(*client = rb_table_put(&rb_clients, c))) {
		rb_link_drop(c->live);
		status = rb_say(RB_ERR_NO_MEMORY);
	}
	if (status)
		free_conn(c);
	return status;
}

/* Releases every request of all attachments. Nobody else is inside. */
static void release_all(rb_conn *c)
{
	for (rb_link *l = c->links; l; l = l->next)
		for (uint32_t at = 0; at < l->window && !l->parents; at++) {
			rb_slot *s = &l->slots[at];
			if (s->state == RB_SLOT_CLAIMED || s->state == RB_SLOT_COMMITTED || s->state == RB_SLOT_ENDED) {
				s->state = RB_SLOT_FREE;
				rb_link_drop(l);
			}
		}
}

/* The broker has the window back when this returns, also while maps keep the
 * memory: pointers into it reach private zeros from now on. A session with device
 * memory ends with its last map, since a GPU may still write there. */
static void leave_broker(rb_conn *c)
{
	for (rb_link *l = c->links; l; l = l->next)
		if (!l->parents && rb_link_hold(l)) {
			if (!l->session.device.base && rb_segment_detach(&l->session.planes))
				rb_session_leave(&l->session);
			rb_link_drop(l);
		}
}

int rb_close(rb_client client)
{
	rb_entry *e = rb_table_shut(&rb_clients, client);
	if (!e)
		return rb_say(RB_ERR_CLOSED);
	rb_conn *c = e->value;
	pthread_mutex_lock(&c->mu);
	c->final = RB_ERR_CLOSED;
	c->closing = true;
	pthread_mutex_unlock(&c->mu);
	rb_link *l = c->live, *last = l && rb_link_hold(l) ? l : NULL;
	if (last) /* wakes everybody who waits */
		rb_conn_lost(c, last);
	for (l = c->links; l; l = l->next) /* also who waits for requests of earlier attachments */
		if (!l->parents && !l->dead && rb_link_hold(l)) {
			rb_link_fail(l);
			rb_link_drop(l);
		}
	changed(c);
	rb_notifier_stop(c);
	while (atomic_load(&e->users))
		usleep(50);
	rb_close_fd(&c->notify_fd); /* not before: who was inside may have been about to ring it */
	rb_close_fd(&c->poke_fd);
	release_all(c);
	leave_broker(c);
	if (last)
		rb_link_drop(last);
	rb_table_remove(e);
	free_conn(c);
	return RB_OK;
}

/* ---- about the model --------------------------------------------------------- */

#define ENTER(client)                                          \
	rb_entry *entry = rb_table_enter(&rb_clients, client); \
	if (!entry)                                            \
		return rb_say(RB_ERR_CLOSED);                  \
	rb_conn *c = entry->value
#define LEAVE(status)           \
	do {                    \
		int left_with = (status); \
		rb_table_leave(entry);    \
		return left_with; \
	} while (0)

int rb_client_model(rb_client client, rb_model *model)
{
	if (!model)
		return rb_missing();
	ENTER(client);
	pthread_mutex_lock(&c->mu);
	*model = c->info;
	pthread_mutex_unlock(&c->mu);
	LEAVE(RB_OK);
}

int rb_client_tensor(rb_client client, int side, uint32_t k, rb_tensor *tensor)
{
	if (!tensor)
		return rb_missing();
	ENTER(client);
	const rb_tensor *t;
	uint32_t dims_at;
	pthread_mutex_lock(&c->mu);
	int status = rb_pick(&c->layout, side, k, &t, &dims_at);
	if (!status)
		*tensor = *t;
	pthread_mutex_unlock(&c->mu);
	LEAVE(status);
}

int rb_client_map(rb_client client, rb_map *out)
{
	if (!out)
		return rb_missing();
	ENTER(client);
	rb_link *l;
	bool interrupted = false;
	int status = rb_conn_link(c, rb_later(rb_now(), RB_CALL_TIMEOUT), true, &l, &interrupted);
	if (!status)
		status = rb_link_map(l, out);
	LEAVE(status);
}

int rb_client_fd(rb_client client, int *fd)
{
	if (!fd)
		return rb_missing();
	ENTER(client);
	int status = c->final ? rb_say(c->final) : rb_notifier_start(c);
	if (!status)
		*fd = c->notify_fd;
	LEAVE(status);
}
