/* SPDX-License-Identifier: Apache-2.0 */
/* Live weights: the publisher. */
#include <stdio.h>
#include <string.h>

#include "weights.h"

#define PUBLISHER_WAIT SECOND /* of a publisher that attaches again */
#define PAUSE (100 * MICROSECOND)

/* A buffer that the publisher may write: neither one of the last two good versions, nor one that followers read; -1: none. */
static int free_buffer(const rb_weights_link *l)
{
	uint64_t words[] = {atomic_load(&l->words->current), atomic_load(&l->words->good)};
	uint32_t taken = 0;
	for (int i = 0; i < 2; i++)
		if (rb_version_of(words[i]))
			taken |= 1u << rb_buffer_of(words[i]);
	for (uint32_t i = 0; i < RB_GO_WEIGHT_FOLLOWERS; i++) {
		uint32_t in_use = atomic_load(&l->followers[i].in_use);
		if (in_use)
			taken |= 1u << (in_use - 1) % RB_GO_WEIGHT_BUFFERS;
	}
	for (int b = 0; b < (int)RB_GO_WEIGHT_BUFFERS; b++)
		if (!(taken >> b & 1))
			return b;
	return -1;
}

/* SYNC POINT "weights", release side. */
static void publish(rb_weights_link *l, uint32_t buffer, uint32_t version)
{
	rb_weight_words *words = l->words;
	uint64_t before = atomic_load(&words->current);
	if (atomic_load(&words->last) < version)
		atomic_store(&words->last, version);
	atomic_store(&words->published, rb_now());
	atomic_store(&words->current, (uint64_t)version << 8 | buffer);
	if (rb_weights_stand(l, before)) /* it may be refused later still: rb_weights_in_force looks */
		atomic_store(&words->good, before);
}

/* The latest version that was refused. */
static uint32_t last_refused(const rb_weights_link *l)
{
	uint32_t version = 0;
	for (int b = 0; b < (int)RB_GO_WEIGHT_BUFFERS; b++)
		version = (uint32_t)rb_max(version, atomic_load(&l->words->refused[b]));
	return version;
}

static int full(const rb_weights *w)
{
	return rb_explain(RB_ERR_FULL, "slow workers of \"%s\" read older versions, and no buffer is free", w->model);
}

/* Copies a buffer of the broker before into a free one of this broker. */
static int copy_buffer(rb_weights *w, const rb_weights_link *from, uint32_t buffer, uint32_t *to)
{
	int b = free_buffer(w->live);
	if (b < 0)
		return full(w);
	*to = (uint32_t)b;
	uint8_t *target = rb_weights_buffer(w, w->live, *to), *source = rb_weights_buffer(w, from, buffer);
	if (from->device.base)
		return rb_device_copy(&w->live->device, target, source, w->buffer_bytes);
	memcpy(target, source, w->buffer_bytes);
	return RB_OK;
}

/* Publishes the version in force at the broker before, unless another publisher was there first. */
static int carry_over(rb_weights *w, const rb_weights_link *from)
{
	uint32_t b;
	uint64_t word = rb_weights_in_force(from);
	w->version = (uint32_t)rb_max(w->version, atomic_load(&from->words->last));
	if (!rb_version_of(word) || atomic_load(&w->live->words->last))
		return RB_OK;
	int status = copy_buffer(w, from, rb_buffer_of(word), &b);
	if (status)
		return status;
	atomic_store(&w->live->words->last, w->version);
	publish(w->live, b, rb_version_of(word));
	atomic_store(&w->live->words->published, atomic_load(&from->words->published));
	return RB_OK;
}

static int check(rb_weights *w)
{
	int64_t now = rb_now();
	rb_weights_link *from = w->live;
	if (!rb_weights_gone(from))
		return RB_OK;
	if (now < w->next_try)
		return rb_fail(w->why, "%s", w->why_text);
	w->next_try = now + rb_backoff(&w->backoff);
	int status = rb_weights_begin(w, now + PUBLISHER_WAIT, -1, NULL);
	if (!status)
		status = rb_weights_end(w, now + PUBLISHER_WAIT);
	if (!status) {
		w->next_try = 0;
		status = carry_over(w, from);
		rb_weights_retire(w);
	}
	if (status)
		snprintf(w->why_text, sizeof w->why_text, "%s", rb_error());
	return w->why = status;
}

/* Without a broker the publisher goes on: workers may still read the old segment, and check carries the version over. */
static int check_or_go_on(rb_weights *w)
{
	int status = check(w);
	bool absent = status == RB_ERR_NO_BROKER || status == RB_ERR_BROKER_GONE || status == RB_ERR_DRAINING || status == RB_ERR_TIMEOUT;
	return absent ? RB_OK : status;
}

static int begin(rb_weights *w, int64_t timeout, void **buffer)
{
	for (int64_t until = rb_until(timeout, rb_now());;) {
		int status = check_or_go_on(w), b = free_buffer(w->live);
		if (status)
			return status;
		if (b >= 0) {
			w->begun = (rb_weights_view){.link = w->live, .buffer = (uint32_t)b};
			*buffer = rb_weights_buffer(w, w->live, (uint32_t)b);
			return RB_OK;
		}
		if (rb_now() >= until)
			return full(w);
		pthread_mutex_unlock(&w->mu);
		rb_sleep(PAUSE);
		pthread_mutex_lock(&w->mu);
	}
}

static int withdrawn(const rb_weights *w, uint32_t *version, char *reason, uint32_t room)
{
	int n;
	const char *text = rb_weights_reason(w->live, &n);
	*version = last_refused(w->live);
	if (*version <= w->earlier)
		*version = 0;
	if (reason && room)
		snprintf(reason, room, "%.*s", *version ? n : 0, text);
	return RB_OK;
}

static int commit(rb_weights *w, uint32_t *version)
{
	if (!w->begun.link)
		return rb_explain(RB_ERR_INVALID, "rb_publish_begin comes first");
	int status = check_or_go_on(w);
	if (status)
		return status;
	if (w->begun.link != w->live) { /* the broker was restarted */
		if ((status = copy_buffer(w, w->begun.link, w->begun.buffer, &w->begun.buffer)))
			return status;
	}
	uint32_t last = (uint32_t)rb_max(w->version, atomic_load(&w->live->words->last));
	if (last == UINT32_MAX)
		return rb_fail(RB_ERR_INVALID, "version %u of the weights of \"%s\" was the last: versions begin again with 1 after its publisher, "
			"workers and clients have ended", last, w->model);
	w->version = last + 1;
	publish(w->live, w->begun.buffer, w->version);
	w->begun.link = NULL;
	*version = w->version;
	rb_weights_retire(w);
	return RB_OK;
}

int rb_publish_open(const char *model, const char *tensors, const rb_connect_options *options, rb_publisher *publisher)
{
	rb_weights *w;
	if (!model || !tensors || !publisher)
		return rb_missing();
	rb_connect_options o;
	int status = rb_copy_options(&o, options, sizeof o);
	if (!status)
		status = rb_weights_open(model, tensors, &o, &w, rb_weights_until(&o));
	if (status)
		return status;
	w->earlier = last_refused(w->live);
	return rb_weights_handle(&rb_publishers, w, publisher);
}

int rb_publish_tensor(rb_publisher p, uint32_t k, rb_tensor *t) { RB_WITH_WEIGHTS(&rb_publishers, t, p, rb_weights_tensor(w, k, t)); }
int rb_publish_device(rb_publisher p, rb_device *d) { RB_WITH_WEIGHTS(&rb_publishers, d, p, rb_weights_device(w, d)); }
int rb_publish_begin(rb_publisher p, int64_t timeout, void **buffer) { RB_WITH_WEIGHTS(&rb_publishers, buffer, p, begin(w, timeout, buffer)); }
int rb_publish_commit(rb_publisher p, uint32_t *version) { RB_WITH_WEIGHTS(&rb_publishers, version, p, commit(w, version)); }
int rb_publish_withdrawn(rb_publisher p, uint32_t *version, char *reason, uint32_t room)
{
	RB_WITH_WEIGHTS(&rb_publishers, version, p, withdrawn(w, version, reason, room));
}
int rb_publish_check(rb_publisher p) { RB_WITH_WEIGHTS(&rb_publishers, true, p, check(w)); }
int rb_publish_close(rb_publisher p) { return rb_weights_close(&rb_publishers, p); }

