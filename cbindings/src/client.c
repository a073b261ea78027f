/* SPDX-License-Identifier: Apache-2.0 */
/* A client from rb_connect to rb_close, and its model. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "client.h"

/* ---- connecting ------------------------------------------------------------ */

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
	int64_t start = rb_now(), until = rb_until(timeout, start), backoff = 0;
	int last = RB_OK;
	char text[512];
	rb_link *l;
	for (;;) {
		bool interrupted = false;
		int status = rb_conn_attach(c, until, &l, &interrupted);
		for (int i = 0; status == RB_ERR_BROKER_GONE && i < RB_SUCCESSORS; i++)
			status = rb_conn_attach(c, until, &l, &interrupted);
		if (!status) {
			c->inputs = l->session.layout.inputs;
			c->outputs = l->session.layout.outputs;
			c->states = l->session.layout.states;
			c->input_dims = l->session.layout.dims[RB_INPUT];
			c->sized = !l->session.layout.dims[RB_INPUT] && !l->session.layout.dims[RB_OUTPUT];
			for (uint32_t k = 0; k < c->inputs + c->outputs; k++)
				c->on_device[k >= c->inputs] |= l->session.layout.tensor[k].on_device;
			if (rb_conn_use(c, l))
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
		if (!wait || !rb_retry_attach(status))
			return status;
		last = status;
		snprintf(text, sizeof text, "%s", rb_error());
		if (!rb_back_off(&backoff, until))
			return rb_fail(last, "%s (%s)", text, rb_status_text(RB_ERR_TIMEOUT));
	}
}

int rb_connect(const char *model, const rb_connect_options *given, rb_client *client)
{
	if (!model || !client)
		return rb_missing();
	rb_connect_options o;
	int status = rb_copy_options(&o, given, sizeof o);
	if (status)
		return status;
	if (o.window > RB_GO_MAX_SLOTS)
		return rb_explain(RB_ERR_INVALID, "window of %u slots, must be 1..%d", o.window, (int)RB_GO_MAX_SLOTS);
	rb_watch_forks();
	rb_conn *c = calloc(1, sizeof *c);
	if (!c)
		return rb_say(RB_ERR_NO_MEMORY);
	c->notify_fd = -1;
	c->poke_fd = -1;
	c->pending.fd = -1;
	c->window_wanted = o.window;
	c->device = o.device;
	c->model = strdup(model);
	c->name = strdup(o.name ? o.name : "");
	pthread_mutex_init(&c->mu, NULL);
	status = c->model && c->name ? rb_socket_path(o.socket, c->socket, sizeof c->socket) : rb_say(RB_ERR_NO_MEMORY);
	if (!status)
		status = first_attach(c, o.patience ? o.patience : RB_CALL_TIMEOUT, o.wait);
	if (!status && !(*client = rb_table_put(&rb_clients, c))) {
		rb_link_drop(c->live);
		status = rb_say(RB_ERR_NO_MEMORY);
	}
	if (status)
		free_conn(c);
	return status;
}

/* Releases every request of all attachments. No other thread is inside. */
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

/* Gives the window back to the broker, even while maps keep the memory: pointers into host memory then reach private
 * zeros, and the GPU has stopped writing to device memory. */
static void leave_broker(rb_conn *c)
{
	for (rb_link *l = c->links; l; l = l->next)
		if (!l->parents && rb_link_hold(l)) {
			if (rb_segment_detach(&l->session.planes))
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
	if (last) /* wakes every waiting thread */
		rb_conn_lost(c, last);
	for (l = c->links; l; l = l->next) /* waits for requests of earlier attachments end, too */
		if (!l->parents && !l->dead && rb_link_hold(l)) {
			rb_link_fail(l);
			rb_link_drop(l);
		}
	rb_conn_changed(c);
	rb_notifier_stop(c);
	while (atomic_load(&e->users))
		usleep(50);
	rb_close_fd(&c->notify_fd); /* only now: a thread inside might have rung it */
	rb_close_fd(&c->poke_fd);
	release_all(c);
	leave_broker(c);
	if (last)
		rb_link_drop(last);
	rb_table_remove(e);
	rb_seqs_free(c);
	free_conn(c);
	return RB_OK;
}

/* ---- about the model --------------------------------------------------------- */

static int model_of(rb_conn *c, rb_model *model)
{
	pthread_mutex_lock(&c->mu);
	*model = c->info;
	pthread_mutex_unlock(&c->mu);
	return RB_OK;
}

static int tensor_of(rb_conn *c, int side, uint32_t k, rb_tensor *tensor)
{
	const rb_tensor *t;
	uint32_t dims_at;
	pthread_mutex_lock(&c->mu);
	int status = rb_pick(&c->layout, side, k, &t, &dims_at);
	if (!status)
		*tensor = *t;
	pthread_mutex_unlock(&c->mu);
	return status;
}

static int map_of(rb_conn *c, rb_map *out)
{
	rb_link *l;
	bool interrupted = false;
	int status = rb_conn_link(c, rb_later(rb_now(), RB_CALL_TIMEOUT), true, &l, &interrupted);
	return status ? status : rb_link_map(l, out);
}

int rb_client_model(rb_client client, rb_model *model) { WITH_CLIENT(model, client, model_of(c, model)); }
int rb_client_tensor(rb_client client, int side, uint32_t k, rb_tensor *tensor)
{
	WITH_CLIENT(tensor, client, tensor_of(c, side, k, tensor));
}
int rb_client_map(rb_client client, rb_map *out) { WITH_CLIENT(out, client, map_of(c, out)); }
