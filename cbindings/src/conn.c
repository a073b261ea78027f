/* SPDX-License-Identifier: Apache-2.0 */
/* A client's connection: its present link, and attaching again after that is lost. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "client.h"

#define LOOK_EVERY (5 * MILLISECOND) /* a claim checks the socket at most this often */

/* Attaches, or goes on attaching: RB_ERR_TIMEOUT if there is no reply yet. Only the thread that set `attaching` calls it. */
int rb_conn_attach(rb_conn *c, int64_t deadline, rb_link **link, bool *interrupted)
{
	int status = RB_OK;
	rb_session s;
	if (c->pending.fd < 0) {
		rb_writer w = {0};
		rb_begin_request(&w, 3 + c->device + (c->attached ? c->layout.states ? 3 : 2 : 0), "client", c->model, c->name);
		if (c->device)
			rb_put_true(&w, "device");
		rb_put_number(&w, "window", c->window_wanted);
		rb_put_true(&w, "follows");
		rb_put_true(&w, "times");
		if (c->attached) /* the caller knows its tensors: others are refused */
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
	if (!status && c->attached && !rb_same_tensors(&s.layout, &c->layout)) {
		rb_session_close(&s);
		status = rb_explain(RB_ERR_SIGNATURE_MISMATCH, "%s is not what it was when this client connected", c->model);
	}
	if (!status)
		*link = rb_link_new(c, &s, &status);
	return status;
}

/* Publishes that live or final has changed. */
void rb_conn_changed(rb_conn *c)
{
	atomic_fetch_add(&c->change, 1);
	rb_futex_wake(&c->change, INT32_MAX, true);
}

/* Replaces the present link, which ends with the last of its requests. next may be NULL. */
static void leave(rb_conn *c, rb_link *next)
{
	rb_link *before = atomic_exchange(&c->live, next);
	if (before) {
		c->left = true;
		rb_link_drop(before);
	}
}

/* A number for requests, which no attachment has whose requests or sequences live. */
static uint32_t next_number(rb_conn *c)
{
	for (uint32_t tries = 0; tries <= RB_LINK_MASK; tries++) {
		rb_link *l = c->links;
		c->attached++;
		while (l && (!l->refs || (l->number ^ c->attached) & RB_LINK_MASK))
			l = l->next;
		if (!l)
			break;
	}
	return c->attached;
}

/* Makes l the present link. The caller holds mu. */
bool rb_conn_use(rb_conn *c, rb_link *l)
{
	rb_session *s = &l->session;
	size_t bytes = rb_tensors(&s->layout) * sizeof(rb_tensor);
	/* Every attachment has as many tensors, and a child forked meanwhile reads this memory: it is used again. */
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
	l->number = next_number(c);
	l->next = c->links;
	c->links = l;
	c->why = 0;
	leave(c, l);
	return true;
}

void rb_conn_lost(rb_conn *c, rb_link *l)
{
	rb_link *present = l;
	/* First of all: a thread that learns that the link is dead must not find it here. */
	bool was = atomic_compare_exchange_strong(&c->live, &present, NULL);
	rb_link_fail(l);
	if (was) {
		rb_conn_changed(c);
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

/* Takes the outcome of a try to attach over. The caller holds mu. */
static void end_attach(rb_conn *c, int status, rb_link *l)
{
	c->attaching = false;
	if (!status && (c->final || !rb_conn_use(c, l))) { /* closed meanwhile, or no memory */
		rb_link_drop(l);
		rb_link_free(l);
	} else if (!status) {
		c->backoff = 0;
	} else if (status != RB_ERR_TIMEOUT || (c->pending.fd < 0 && rb_now() - c->unbegun > RB_CALL_TIMEOUT)) {
		snprintf(c->why_text, sizeof c->why_text, "%s", rb_error());
		c->why = status;
		c->next_try = rb_now() + rb_backoff(&c->backoff);
		if (status == RB_ERR_SIGNATURE_MISMATCH)
			leave(c, NULL);
	}
	rb_conn_changed(c);
}

/* Tries until the deadline; the next thread continues the attempt. */
static void try_attach(rb_conn *c, int64_t deadline, bool *interrupted)
{
	rb_link *l = NULL;
	int status = rb_conn_attach(c, deadline, &l, interrupted);
	pthread_mutex_lock(&c->mu);
	end_attach(c, status, l);
	pthread_mutex_unlock(&c->mu);
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
	try_attach(c, rb_later(now, patience), interrupted);
	if (c->live == held)
		return false;
	rb_link_stir(held); /* the reaper and claims move to the other link */
	return true;
}

/* A thread that finds no link attaches by itself, waits for the next try, or gives up if the model has other tensors. */
enum turn { ATTACH, WAIT, REFUSED };

static enum turn take_turn(rb_conn *c, int64_t now, bool may_attach, int64_t *due)
{
	pthread_mutex_lock(&c->mu);
	enum turn t = WAIT;
	if (!c->attaching && !c->live && !c->final && now >= c->next_try && may_attach)
		t = ATTACH;
	else if (c->why == RB_ERR_SIGNATURE_MISMATCH) /* other threads go on trying: the model may change back */
		t = REFUSED;
	*due = c->attaching ? INT64_MAX : c->next_try;
	c->attaching |= t == ATTACH;
	pthread_mutex_unlock(&c->mu);
	return t;
}

/* Why there is no link. */
static int no_link(rb_conn *c)
{
	pthread_mutex_lock(&c->mu);
	int status = c->why == RB_ERR_SIGNATURE_MISMATCH ? rb_fail(c->why, "%s", c->why_text)
		     : !c->why ? rb_explain(RB_ERR_TIMEOUT, "attaching")
			       : rb_explain(RB_ERR_BROKER_GONE, "attaching again: %s", c->why_text);
	pthread_mutex_unlock(&c->mu);
	return status;
}

int rb_conn_link(rb_conn *c, int64_t until, bool may_wait, rb_link **link, bool *interrupted)
{
	int64_t start = rb_now(), now = start, due;
	/* A caller that does not wait tries once, or leaves it to the reaper. */
	for (bool may_attach = may_wait || !c->reaping;; may_attach = may_wait, now = rb_now()) {
		if (c->final)
			return rb_say(c->final);
		if ((*link = rb_conn_live(c, now)))
			return RB_OK;
		uint32_t seen = c->change;
		switch (take_turn(c, now, may_attach, &due)) {
		case ATTACH:
			try_attach(c, rb_min(may_wait ? until : INT64_MAX, now + 100 * MILLISECOND), interrupted);
			break;
		case WAIT:
			if (may_wait && now < until)
				*interrupted |= rb_futex_wait(&c->change, seen, rb_min(rb_min(until, due) - now, 100 * MILLISECOND), true) == EINTR;
			break;
		case REFUSED:
			return no_link(c);
		}
		if (c->live || c->final)
			continue;
		if (*interrupted)
			until = rb_interrupted(until, start);
		if (!may_wait || rb_now() >= until)
			return no_link(c);
	}
}

#define FOLLOW_WAIT (100 * MILLISECOND) /* for attaching again at the broker's request; the next claim goes on */

int rb_conn_hold(rb_conn *c, int64_t until, bool may_wait, int64_t now, rb_link **link, bool *interrupted)
{
	for (;;) {
		int status = (*link = rb_conn_live(c, now)) ? RB_OK : rb_conn_link(c, until, may_wait, link, interrupted);
		/* A caller that does not wait leaves it to the reaper, if there is one. */
		if (status || !(*link)->session.again || (!may_wait && c->reaping))
			return status;
		if (!rb_conn_follow(c, *link, rb_min(FOLLOW_WAIT, rb_max(until - now, MILLISECOND)), interrupted))
			return RB_OK;
		rb_link_drop(*link);
	}
}

void rb_conn_look_at_left(rb_conn *c)
{
	rb_link *l = c->live;
	c->left = true;
	rb_eventfd_ring(c->poke_fd); /* the reaper may be idle */
	if (l && rb_link_hold(l)) {
		rb_link_stir(l);
		rb_link_drop(l);
	}
}
