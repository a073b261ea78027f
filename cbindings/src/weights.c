/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Live weights: the publisher and the followers of a model. Go's shm/weights.go has the
 * picture of the segment and the protocol.
 *
 *  1. links: attach, and again after a restart of the broker
 *  2. the words of a segment: acquire, publish, refuse
 *  3. the publisher
 *  4. the follower
 */
#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "reply.h"
#include "weights.h"

#define RETRY_EVERY (100 * MILLISECOND)
#define LOOK_EVERY MILLISECOND
#define REPLY_WAIT (2 * MILLISECOND)   /* of a follower that attaches again before a batch */
#define PUBLISHER_WAIT SECOND          /* of a publisher that attaches again */
#define PAUSE (100 * MICROSECOND)

static void pause_for(int64_t ns) { nanosleep(&(struct timespec){ns / SECOND, ns % SECOND}, NULL); }

/* ---- links ------------------------------------------------------------------- */

static void put_peer(rb_writer *to, const rb_weights *w)
{
	rb_begin_request(to, 1, "weights", w->model, w->name);
	rb_put_string(to, "weights");
	rb_put_map(to, w->texts ? 2 : 0);
	if (!w->texts)
		return;
	uint32_t n = 0;
	for (const char *at = w->texts; *at; at += strcspn(at, " "), n++)
		at += strspn(at, " ");
	rb_put_true(to, "publish");
	rb_put_string(to, "tensors");
	rb_put_array(to, n);
	for (const char *at = w->texts; n--; at += strcspn(at, " ")) {
		at += strspn(at, " ");
		rb_put_text(to, at, strcspn(at, " "));
	}
}

static int begin_attach(rb_weights *w, int64_t deadline)
{
	rb_writer request = {0};
	put_peer(&request, w);
	int status = rb_attach_begin(&w->pending, w->socket, deadline, &request, false, -1);
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
		if (t[k].variable || t[k].on_device || *bytes > RB_GO_MAX_WEIGHT_BYTES)
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

/* Reads the tensors of the segment, and the number of the follower, which stays as it is for a publisher. */
static int read_weights(rb_reader r, rb_tensor **tensor, uint32_t *count, uint64_t *follower)
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
			status = read_texts(value, tensor, count);
		else if (rb_is(key, bytes, "follower"))
			rb_get_uint(&value, follower);
	}
	return status || *tensor ? status : rb_malformed("weights");
}

/* Maps the segment and checks its header. SYNC POINT "header", acquire side. */
static int open_link(rb_weights *w, rb_frame *f, const rb_reply *p, rb_weights_link *l)
{
	rb_tensor *t = NULL;
	uint32_t count = 0;
	uint64_t bytes = 0, geometry = 0, follower = RB_GO_WEIGHT_FOLLOWERS;
	int status = f->nfds == 1 ? read_weights(p->weights, &t, &count, &follower) : rb_malformed("number of descriptors");
	if (!status)
		status = place(t, count, &bytes, &geometry);
	if (!status && !w->texts && follower >= RB_GO_WEIGHT_FOLLOWERS)
		status = rb_malformed("follower");
	if (!status && w->tensor && geometry != w->geometry)
		status = rb_explain(RB_ERR_SIGNATURE_MISMATCH, "the weights of \"%s\" have other tensors now", w->model);
	if (!status)
		status = rb_segment_open(&l->segment, f->fds[--f->nfds], RB_GO_WEIGHT_DATA + RB_GO_WEIGHT_BUFFERS * bytes, true);
	if (!status) {
		rb_header got, want = {.magic = RB_GO_MAGIC, .version = RB_GO_LAYOUT_VERSION, .kind = RB_GO_KIND_WEIGHTS, .size = l->segment.bytes,
			.epoch = p->epoch, .geometry = geometry, .slots = RB_GO_WEIGHT_BUFFERS, .max_batch = RB_GO_WEIGHT_FOLLOWERS};
		atomic_thread_fence(memory_order_acquire);
		rb_read_once(&got, l->segment.at, sizeof got);
		if (memcmp(&got, &want, sizeof got))
			status = rb_explain(RB_ERR_LAYOUT, "the header of the weights of \"%s\" is not as expected", w->model);
	}
	if (!status && !w->tensor) {
		w->tensor = t;
		w->tensors = count;
		w->buffer_bytes = bytes;
		w->geometry = geometry;
		t = NULL;
	}
	free(t);
	l->words = (void *)(l->segment.at + RB_GO_WEIGHT_WORDS);
	l->followers = (void *)(l->segment.at + RB_GO_WEIGHT_FOLLOWER_WORDS);
	l->follower = (uint32_t)follower;
	return status;
}

/* Waits for the reply; the new link is live. */
static int end_attach(rb_weights *w, int64_t deadline)
{
	rb_frame f;
	rb_reply p;
	rb_weights_link *l = calloc(1, sizeof *l);
	int status = rb_receive_frame(w->pending.fd, rb_min(deadline, w->pending.deadline), &f);
	if (!status)
		status = rb_read_reply(&f, &p);
	if (!status)
		status = l ? open_link(w, &f, &p, l) : rb_say(RB_ERR_NO_MEMORY);
	rb_frame_free(&f);
	if (status) {
		rb_attach_cancel(&w->pending);
		if (l)
			rb_segment_close(&l->segment);
		free(l);
		return status;
	}
	l->socket = w->pending.fd;
	l->owner = w->pending.owner;
	w->pending.fd = -1;
	l->next = w->links;
	w->links = w->live = l;
	return RB_OK;
}

/* Attaches for the first time. */
static int first_attach(rb_weights *w, int64_t until, bool wait)
{
	for (int64_t delay = 5 * MILLISECOND, tries = 0;; tries++) {
		int status = begin_attach(w, until);
		if (!status)
			status = end_attach(w, until);
		if (status == RB_ERR_BROKER_GONE && tries < RB_SUCCESSORS)
			continue;
		bool worth = status == RB_ERR_NO_BROKER || status == RB_ERR_BROKER_GONE || status == RB_ERR_DRAINING ||
			     (status == RB_ERR_UNKNOWN_MODEL && !w->texts);
		if (!worth || !wait || rb_now() + delay >= until)
			return status;
		pause_for(delay);
		delay = rb_min(2 * delay, RETRY_EVERY);
	}
}

static bool gone(const rb_weights_link *l)
{
	struct pollfd p = {.fd = l->socket, .events = POLLRDHUP};
	return p.fd < 0 || poll(&p, 1, 0) > 0;
}

/* Gives back the memory of links that are not needed. */
static void retire_links(rb_weights *w)
{
	for (rb_weights_link *l = w->links; l; l = l->next) {
		bool needed = l == w->live || l == w->before || l == w->begun.link || (w->running && l == w->now.link);
		if (needed || l->retired)
			continue;
		l->retired = rb_segment_detach(&l->segment);
		int fd = atomic_exchange(&l->socket, -1);
		if (fd >= 0)
			rb_hang_up(fd, l->owner);
	}
}

static void free_weights(rb_weights *w)
{
	rb_attach_cancel(&w->pending);
	for (rb_weights_link *l = w->links, *next; l; l = next) {
		next = l->next;
		if (l->socket >= 0)
			rb_hang_up(l->socket, l->owner);
		rb_segment_close(&l->segment);
		free(l);
	}
	free(w->model);
	free(w->name);
	free(w->texts);
	free(w->tensor);
	pthread_mutex_destroy(&w->mu);
	pthread_cond_destroy(&w->left);
	free(w);
}

/* ---- the words ------------------------------------------------------------------ */

static uint32_t version_of(uint64_t word) { return (uint32_t)(word >> 8); }
static uint32_t buffer_of(uint64_t word) { return (word & 0xff) % RB_GO_WEIGHT_BUFFERS; }

static uint8_t *buffer_at(const rb_weights *w, const rb_weights_link *l, uint32_t buffer)
{
	return l->segment.at + RB_GO_WEIGHT_DATA + buffer * w->buffer_bytes;
}

static bool stands(const rb_weights_link *l, uint64_t word)
{
	return version_of(word) > atomic_load(&l->words->refused[buffer_of(word)]);
}

/* The word that followers use: current, or good if current was refused; 0 if both were. */
static uint64_t in_force(const rb_weights_link *l)
{
	uint64_t word = atomic_load(&l->words->current);
	if (stands(l, word))
		return word;
	word = atomic_load(&l->words->good);
	return stands(l, word) ? word : 0;
}

/* Takes the version in force; its version is 0 if there is none. SYNC POINT "weights", acquire side. */
static rb_weights_view acquire(rb_weights_link *l)
{
	_Atomic uint32_t *in_use = &l->followers[l->follower].in_use;
	for (;;) {
		uint64_t word = in_force(l);
		if (!version_of(word)) {
			atomic_store(in_use, 0);
			return (rb_weights_view){0};
		}
		atomic_store(in_use, buffer_of(word) + 1);
		if (in_force(l) == word)
			return (rb_weights_view){l, version_of(word), buffer_of(word)};
	}
}

/* A buffer that the publisher may write; -1 while followers read all of them. */
static int free_buffer(const rb_weights_link *l)
{
	uint64_t words[] = {atomic_load(&l->words->current), atomic_load(&l->words->good)};
	uint32_t taken = 0;
	for (int i = 0; i < 2; i++)
		if (version_of(words[i]))
			taken |= 1u << buffer_of(words[i]);
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
	if (stands(l, before)) /* it may be refused later still: in_force looks */
		atomic_store(&words->good, before);
}

static void refuse(rb_weights_link *l, uint32_t version, const char *reason)
{
	uint64_t word = atomic_load(&l->words->current);
	_Atomic uint32_t *refused = &l->words->refused[buffer_of(word)];
	uint32_t before = atomic_load(refused);
	if (version_of(word) != version || before >= version)
		return; /* another one is current, or a peer refused it */
	size_t n = strnlen(reason, RB_GO_WEIGHT_REASON_BYTES);
	memcpy(l->segment.at + RB_GO_WEIGHT_REASON, reason, n);
	atomic_store(&l->words->reason_len, (uint32_t)n);
	atomic_compare_exchange_strong(refused, &before, version);
}

/* The latest version that was refused. */
static uint32_t last_refused(const rb_weights_link *l)
{
	uint32_t version = 0;
	for (int b = 0; b < (int)RB_GO_WEIGHT_BUFFERS; b++)
		version = (uint32_t)rb_max(version, atomic_load(&l->words->refused[b]));
	return version;
}

/* ---- opening and closing ----------------------------------------------------------- */

static int open_weights(const char *model, const char *texts, const rb_connect_options *given, rb_weights **out, int64_t *until)
{
	if (given && given->size != sizeof *given)
		return rb_explain(RB_ERR_VERSION, "rb_connect_options.size is %u, expected %zu", given->size, sizeof *given);
	rb_connect_options o = given ? *given : (rb_connect_options){0};
	rb_watch_forks();
	rb_weights *w = calloc(1, sizeof *w);
	if (!w)
		return rb_say(RB_ERR_NO_MEMORY);
	w->pending.fd = -1;
	pthread_mutex_init(&w->mu, NULL);
	pthread_cond_init(&w->left, NULL);
	w->model = strdup(model);
	w->name = strdup(o.name ? o.name : "");
	w->texts = texts ? strdup(texts) : NULL;
	*until = rb_until(o.timeout ? o.timeout : RB_CALL_TIMEOUT, rb_now());
	int status = w->model && w->name && (w->texts || !texts) ? rb_socket_path(o.socket, w->socket, sizeof w->socket) :
								   rb_say(RB_ERR_NO_MEMORY);
	if (!status)
		status = first_attach(w, *until, o.wait);
	if (status)
		free_weights(w);
	*out = w;
	return status;
}

static int give_handle(rb_table *table, rb_weights *w, uint64_t *handle)
{
	if ((*handle = rb_table_put(table, w)))
		return RB_OK;
	free_weights(w);
	return rb_say(RB_ERR_NO_MEMORY);
}

static int close_weights(rb_table *table, uint64_t handle)
{
	rb_entry *e = rb_table_shut(table, handle);
	if (!e)
		return rb_say(RB_ERR_CLOSED);
	rb_weights *w = e->value;
	rb_table_remove(e);
	free_weights(w);
	return RB_OK;
}

static int tensor_of(rb_weights *w, uint32_t k, rb_tensor *t)
{
	if (k >= w->tensors)
		return rb_explain(RB_ERR_INVALID, "tensor %u of %u", k, w->tensors);
	*t = w->tensor[k];
	return RB_OK;
}

/* Body of a function of the header; result may use w, which it has locked. */
#define WITH(table, given, handle, result)                                                                              \
	do {                                                                                                            \
		if (!(given))                                                                                           \
			return rb_missing();                                                                            \
		rb_entry *e = rb_table_enter(table, handle);                                                            \
		if (!e)                                                                                                 \
			return rb_say(RB_ERR_CLOSED);                                                                   \
		rb_weights *w = e->value;                                                                               \
		int status;                                                                                             \
		if (w->parents) {                                                                                       \
			status = rb_fail(RB_ERR_FORKED, "these weights are the parent process's: a child opens its own"); \
		} else {                                                                                                \
			pthread_mutex_lock(&w->mu);                                                                     \
			status = (result);                                                                              \
			pthread_mutex_unlock(&w->mu);                                                                   \
		}                                                                                                       \
		rb_table_leave(e);                                                                                      \
		return status;                                                                                          \
	} while (0)

/* ---- the publisher ------------------------------------------------------------------- */

/* Publishes the version in force at the broker before, unless another publisher was there first. */
static void carry_over(rb_weights *w, rb_weights_link *from)
{
	uint64_t word = in_force(from);
	int b = free_buffer(w->live);
	w->version = (uint32_t)rb_max(w->version, atomic_load(&from->words->last));
	if (b < 0 || !version_of(word) || atomic_load(&w->live->words->last))
		return;
	memcpy(buffer_at(w, w->live, (uint32_t)b), buffer_at(w, from, buffer_of(word)), w->buffer_bytes);
	publish(w->live, (uint32_t)b, version_of(word));
}

static int check(rb_weights *w)
{
	int64_t now = rb_now();
	rb_weights_link *from = w->live;
	if (!gone(from))
		return RB_OK;
	if (now < w->next_try)
		return rb_say(w->why);
	w->next_try = now + RETRY_EVERY;
	int status = begin_attach(w, now + PUBLISHER_WAIT);
	if (!status)
		status = end_attach(w, now + PUBLISHER_WAIT);
	if (!status) {
		w->next_try = 0;
		carry_over(w, from);
		retire_links(w);
	}
	return w->why = status;
}

/* Without a broker the publisher goes on: workers may still read the old segment, and check carries the version over. */
static int check_or_go_on(rb_weights *w)
{
	int status = check(w);
	return status == RB_ERR_BUSY || status == RB_ERR_SIGNATURE_MISMATCH || status == RB_ERR_FORBIDDEN ? status : RB_OK;
}

static int begin(rb_weights *w, int64_t timeout, void **buffer)
{
	for (int64_t until = rb_until(timeout, rb_now());;) {
		int status = check_or_go_on(w), b = free_buffer(w->live);
		if (status)
			return status;
		if (b >= 0) {
			w->begun = (rb_weights_view){.link = w->live, .buffer = (uint32_t)b};
			*buffer = buffer_at(w, w->live, (uint32_t)b);
			return RB_OK;
		}
		if (rb_now() >= until)
			return rb_explain(RB_ERR_FULL, "workers read all %d buffers of the weights of \"%s\"", (int)RB_GO_WEIGHT_BUFFERS, w->model);
		pthread_mutex_unlock(&w->mu);
		pause_for(PAUSE);
		pthread_mutex_lock(&w->mu);
	}
}

/* Returns the reason if the last version was withdrawn, once. */
static int withdrawn(rb_weights *w)
{
	uint32_t version = last_refused(w->live), n = atomic_load(&w->live->words->reason_len);
	if (!version || version != w->version || version == w->reported)
		return RB_OK;
	w->reported = version;
	return rb_fail(RB_ERR_FAILED, "version %u of the weights of \"%s\" was withdrawn: %.*s", version, w->model,
		(int)rb_min(n, RB_GO_WEIGHT_REASON_BYTES), (char *)w->live->segment.at + RB_GO_WEIGHT_REASON);
}

static int commit(rb_weights *w, uint32_t *version)
{
	if (!w->begun.link)
		return rb_explain(RB_ERR_INVALID, "rb_publish_begin comes first");
	int status = withdrawn(w);
	if (!status)
		status = check_or_go_on(w);
	if (status)
		return status;
	if (w->begun.link != w->live) { /* the broker was restarted */
		int b = free_buffer(w->live);
		if (b < 0)
			return rb_explain(RB_ERR_FULL, "workers read all buffers of the weights of \"%s\"", w->model);
		memcpy(buffer_at(w, w->live, (uint32_t)b), buffer_at(w, w->begun.link, w->begun.buffer), w->buffer_bytes);
		w->begun.buffer = (uint32_t)b;
	}
	w->version = (uint32_t)rb_max(w->version, atomic_load(&w->live->words->last)) + 1;
	publish(w->live, w->begun.buffer, w->version);
	w->begun.link = NULL;
	*version = w->version;
	retire_links(w);
	return RB_OK;
}

int rb_publish_open(const char *model, const char *tensors, const rb_connect_options *options, rb_publisher *publisher)
{
	rb_weights *w;
	int64_t until;
	if (!model || !tensors || !publisher)
		return rb_missing();
	int status = open_weights(model, tensors, options, &w, &until);
	return status ? status : give_handle(&rb_publishers, w, publisher);
}

int rb_publish_tensor(rb_publisher p, uint32_t k, rb_tensor *t) { WITH(&rb_publishers, t, p, tensor_of(w, k, t)); }
int rb_publish_begin(rb_publisher p, int64_t timeout, void **buffer) { WITH(&rb_publishers, buffer, p, begin(w, timeout, buffer)); }
int rb_publish_commit(rb_publisher p, uint32_t *version) { WITH(&rb_publishers, version, p, commit(w, version)); }
int rb_publish_check(rb_publisher p) { WITH(&rb_publishers, true, p, check(w)); }
int rb_publish_close(rb_publisher p) { return close_weights(&rb_publishers, p); }

/* ---- the follower ---------------------------------------------------------------------- */

/* Attaches again if the broker went away. It does not wait for a broker, and hardly for its reply. */
static void follow_broker(rb_weights *w)
{
	int64_t now = rb_now();
	int status = RB_OK;
	if (now - w->looked < LOOK_EVERY)
		return;
	w->looked = now;
	if (w->pending.fd < 0) {
		if (!gone(w->live) || now < w->next_try)
			return;
		w->next_try = now + RETRY_EVERY;
		status = begin_attach(w, now + REPLY_WAIT);
	}
	rb_weights_link *before = w->live;
	struct pollfd p = {.fd = w->pending.fd, .events = POLLIN};
	if (!status && poll(&p, 1, REPLY_WAIT / MILLISECOND) > 0)
		status = end_attach(w, now + SECOND);
	else if (!status && now > w->pending.deadline)
		rb_attach_cancel(&w->pending);
	if (w->live != before && !w->before)
		w->before = before;
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
	uint64_t word = in_force(w->now.link);
	return w->loaded && (w->now.link == w->live || w->now.link == w->before) && version_of(word) == w->now.version &&
	       (w->now.link == w->live || !version_of(in_force(w->live)));
}

static int enter(rb_weights *w, uint32_t *version, const void **buffer, uint32_t *changed)
{
	follow_broker(w);
	while (w->running && !may_join(w))
		pthread_cond_wait(&w->left, &w->mu);
	if (!w->running) {
		rb_weights_view v = take(w);
		if (!v.version)
			return rb_fail(RB_ERR_FAILED, "no version of the weights of \"%s\" is in force", w->model);
		w->loaded = w->loaded && w->now.link == v.link && w->now.version == v.version;
		w->now = v;
	}
	w->running++;
	*version = w->now.version;
	*buffer = buffer_at(w, w->now.link, w->now.buffer);
	*changed = !w->loaded;
	return RB_OK;
}

static int loaded(rb_weights *w)
{
	if (!w->running)
		return rb_explain(RB_ERR_INVALID, "rb_follow_enter comes first");
	w->loaded = true;
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
		retire_links(w);
	}
	pthread_cond_broadcast(&w->left);
	return RB_OK;
}

static int refuse_now(rb_weights *w, const char *reason)
{
	rb_weights_view v = w->now;
	if (!w->running || w->loaded)
		return rb_explain(RB_ERR_INVALID, "only a version that is not loaded can be refused");
	refuse(v.link, v.version, reason);
	uint32_t other = version_of(in_force(v.link));
	leave(w);
	if (other && other != v.version)
		return RB_OK;
	return rb_fail(RB_ERR_FAILED, "version %u of the weights of \"%s\" cannot be loaded: %s", v.version, w->model, reason);
}

int rb_follow_open(const char *model, const rb_connect_options *options, rb_follower *follower)
{
	rb_weights *w;
	int64_t until;
	if (!model || !follower)
		return rb_missing();
	int status = open_weights(model, NULL, options, &w, &until);
	if (status)
		return status;
	while (!version_of(in_force(w->live))) {
		if (!options || !options->wait || rb_now() >= until) {
			free_weights(w);
			return rb_fail(RB_ERR_TIMEOUT, "no version of the weights of \"%s\" was published yet", model);
		}
		pause_for(MILLISECOND);
		follow_broker(w);
		w->before = NULL;
		retire_links(w);
	}
	return give_handle(&rb_followers, w, follower);
}

int rb_follow_tensor(rb_follower f, uint32_t k, rb_tensor *t) { WITH(&rb_followers, t, f, tensor_of(w, k, t)); }
int rb_follow_enter(rb_follower f, uint32_t *version, const void **buffer, uint32_t *changed)
{
	WITH(&rb_followers, version && buffer && changed, f, enter(w, version, buffer, changed));
}
int rb_follow_loaded(rb_follower f) { WITH(&rb_followers, true, f, loaded(w)); }
int rb_follow_refuse(rb_follower f, const char *reason) { WITH(&rb_followers, reason, f, refuse_now(w, reason)); }
int rb_follow_exit(rb_follower f) { WITH(&rb_followers, true, f, leave(w)); }
int rb_follow_close(rb_follower f) { return close_weights(&rb_followers, f); }
