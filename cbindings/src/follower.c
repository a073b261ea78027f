/* SPDX-License-Identifier: Apache-2.0 */
/* Live weights: the follower. */
#include <poll.h>
#include <stdio.h>
#include <string.h>

#include "weights.h"

#define LOOK_EVERY MILLISECOND
#define REPLY_WAIT (2 * MILLISECOND) /* of a follower that attaches again before a batch */

/* Takes the version in force; its version is 0 if there is none. SYNC POINT "weights", acquire side. */
static rb_weights_view acquire(rb_weights_link *l)
{
	_Atomic uint32_t *in_use = &l->followers[l->follower].in_use;
	for (;;) {
		uint64_t word = rb_weights_in_force(l);
		if (!rb_version_of(word)) {
			atomic_store(in_use, 0);
			return (rb_weights_view){0};
		}
		atomic_store(in_use, rb_buffer_of(word) + 1);
		if (rb_weights_in_force(l) == word)
			return (rb_weights_view){l, rb_version_of(word), rb_buffer_of(word)};
	}
}

static void refuse(rb_weights_view v, const char *reason)
{
	rb_weight_words *words = v.link->words;
	uint32_t before = atomic_load(&words->refused[v.buffer]), reasoned = atomic_load(&words->reasoned);
	if (before >= v.version)
		return; /* a peer refused it */
	if (reasoned < v.version && atomic_compare_exchange_strong(&words->reasoned, &reasoned, v.version)) {
		size_t n = strnlen(reason, RB_GO_WEIGHT_REASON_BYTES); /* of several peers, one gives the reason */
		atomic_store(&words->reason_len, 0);
		memcpy(v.link->segment.at + RB_GO_WEIGHT_REASON, reason, n);
		atomic_store(&words->reason_len, (uint32_t)n);
	}
	atomic_compare_exchange_strong(&words->refused[v.buffer], &before, v.version);
}

/* Keeps an error after which the worker would go on with old weights for ever. */
static void keep_refusal(rb_weights *w, int status)
{
	bool lasts = status && !rb_retry_attach(status);
	w->why = lasts ? status : RB_OK;
	if (lasts)
		snprintf(w->why_text, sizeof w->why_text, "%s", rb_error());
}

/* Attaches again if the broker went away. Never waits for a broker, and only briefly for its reply. */
static void follow_broker(rb_weights *w)
{
	int64_t now = rb_now();
	int status = RB_OK, patience = 0;
	if (now - w->looked < LOOK_EVERY)
		return;
	w->looked = now;
	if (w->pending.fd < 0) {
		if (!rb_weights_gone(w->live) || now < w->next_try)
			return;
		w->next_try = now + rb_backoff(&w->backoff);
		status = rb_weights_begin(w, now + REPLY_WAIT, -1, NULL);
		w->pending.deadline = INT64_MAX;
		patience = REPLY_WAIT / MILLISECOND;
	}
	rb_weights_link *before = w->live;
	struct pollfd p = {.fd = w->pending.fd, .events = POLLIN};
	if (!status && poll(&p, 1, patience) > 0)
		status = rb_weights_end(w, now + SECOND);
	if (w->live != before && !w->before)
		w->before = before;
	if (w->live != before || status)
		keep_refusal(w, status);
}

/* Takes the version in force. While a new broker has none, that of the broker before. */
static rb_weights_view take(rb_weights *w)
{
	rb_weights_view v = acquire(w->live);
	if (!v.version && w->before)
		return acquire(w->before);
	w->before = NULL;
	return v;
}

/* Whether a thread may join the threads that run: they have the version in force, and it is loaded. */
static bool may_join(const rb_weights *w)
{
	uint64_t word = rb_weights_in_force(w->now.link);
	return w->loaded && (w->now.link == w->live || w->now.link == w->before) && rb_version_of(word) == w->now.version &&
	       (w->now.link == w->live || !rb_version_of(rb_weights_in_force(w->live)));
}

static int enter(rb_weights *w, uint32_t *version, const void **buffer, uint32_t *changed)
{
	follow_broker(w);
	if (w->why)
		return rb_fail(w->why, "after a restart of the broker: %s", w->why_text);
	while (w->running && !may_join(w))
		pthread_cond_wait(&w->left, &w->mu);
	if (!w->running) {
		rb_weights_view v = take(w);
		if (!v.version) {
			int n;
			const char *reason = rb_weights_reason(w->live, &n);
			rb_weights_view k = w->kept;
			*version = k.link && rb_weights_stand(k.link, (uint64_t)k.version << 8 | k.buffer) ? k.version : 0;
			return rb_fail(RB_ERR_FAILED, "no version of the weights of \"%s\" is in force: %.*s", w->model, n, reason);
		}
		w->loaded = w->loaded && w->now.link == v.link && w->now.version == v.version;
		w->now = v;
	}
	w->running++;
	*version = w->now.version;
	*buffer = rb_weights_buffer(w, w->now.link, w->now.buffer);
	*changed = !w->loaded;
	return RB_OK;
}

static int loaded(rb_weights *w)
{
	if (!w->running)
		return rb_explain(RB_ERR_INVALID, "rb_follow_enter comes first");
	w->loaded = true;
	w->kept = w->now;
	atomic_store(&w->now.link->followers[w->now.link->follower].loaded, w->now.version);
	pthread_cond_broadcast(&w->left);
	return RB_OK;
}

static int leave(rb_weights *w)
{
	if (!w->running)
		return rb_explain(RB_ERR_INVALID, "rb_follow_enter comes first");
	if (!--w->running) {
		atomic_store(&w->now.link->followers[w->now.link->follower].in_use, 0);
		rb_weights_retire(w);
	}
	pthread_cond_broadcast(&w->left);
	return RB_OK;
}

static int refuse_now(rb_weights *w, const char *reason)
{
	rb_weights_view v = w->now;
	if (!w->running || w->loaded)
		return rb_explain(RB_ERR_INVALID, "only a version that is not loaded can be refused");
	refuse(v, reason);
	uint32_t other = rb_version_of(rb_weights_in_force(v.link));
	leave(w);
	if (other && other != v.version)
		return RB_OK;
	return rb_fail(RB_ERR_FAILED, "version %u of the weights of \"%s\" cannot be loaded: %s", v.version, w->model, reason);
}

/* Waits for the first version; RB_ERR_BROKER_GONE if the segment was replaced meanwhile, or the broker went away. */
static int await_version(const rb_weights *w, int64_t until, bool wait)
{
	while (!rb_version_of(rb_weights_in_force(w->live))) {
		if (rb_weights_gone(w->live))
			return RB_ERR_BROKER_GONE;
		if (!wait || rb_now() >= until)
			return rb_fail(RB_ERR_TIMEOUT, "no version of the weights of \"%s\" was published yet", w->model);
		rb_sleep(MILLISECOND);
	}
	return RB_OK;
}

int rb_follow_open(const char *model, const rb_connect_options *options, rb_follower *follower)
{
	if (!model || !follower)
		return rb_missing();
	rb_connect_options o;
	int status = rb_copy_options(&o, options, sizeof o);
	for (int64_t until = rb_weights_until(&o);;) {
		rb_weights *w;
		if (!status)
			status = rb_weights_open(model, NULL, &o, &w, until);
		if (status)
			return status;
		status = await_version(w, until, o.wait);
		if (!status)
			return rb_weights_handle(&rb_followers, w, follower);
		rb_weights_free(w);
		if (status != RB_ERR_BROKER_GONE)
			return status;
	}
}

int rb_follow_tensor(rb_follower f, uint32_t k, rb_tensor *t) { RB_WITH_WEIGHTS(&rb_followers, t, f, rb_weights_tensor(w, k, t)); }
int rb_follow_device(rb_follower f, rb_device *d) { RB_WITH_WEIGHTS(&rb_followers, d, f, rb_weights_device(w, d)); }
int rb_follow_enter(rb_follower f, uint32_t *version, const void **buffer, uint32_t *changed)
{
	RB_WITH_WEIGHTS(&rb_followers, version && buffer && changed, f, enter(w, version, buffer, changed));
}
int rb_follow_current(rb_follower f, uint32_t *version)
{
	RB_WITH_WEIGHTS(&rb_followers, version, f, (*version = rb_version_of(rb_weights_in_force(w->live)), RB_OK));
}
int rb_follow_loaded(rb_follower f) { RB_WITH_WEIGHTS(&rb_followers, true, f, loaded(w)); }
int rb_follow_refuse(rb_follower f, const char *reason) { RB_WITH_WEIGHTS(&rb_followers, reason, f, refuse_now(w, reason)); }
int rb_follow_exit(rb_follower f) { RB_WITH_WEIGHTS(&rb_followers, true, f, leave(w)); }
int rb_follow_close(rb_follower f) { return rb_weights_close(&rb_followers, f); }
