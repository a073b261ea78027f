/* SPDX-License-Identifier: Apache-2.0 */
/* Live weights: a publisher (publisher.c) or a follower (follower.c), and one link for each attachment (weights.c). */
#ifndef RB_WEIGHTS_H
#define RB_WEIGHTS_H

#include "internal.h"

/* One attachment. A link that is no longer needed has private zeros in place of the segment, until the handle is closed. */
typedef struct rb_weights_link {
	struct rb_weights_link *next; /* an older one */
	rb_segment segment;
	rb_device device; /* with the buffers, if the tensors are there; else its base is 0 */
	_Atomic int socket; /* -1: closed */
	pid_t owner;
	bool retired;
	rb_weight_words *words;
	rb_follower_words *followers;
	uint32_t follower; /* its own words, of a follower */
} rb_weights_link;

/* A version in its buffer. */
typedef struct rb_weights_view {
	rb_weights_link *link; /* NULL: none */
	uint32_t version, buffer;
} rb_weights_view;

typedef struct rb_weights {
	char *model, *name, *texts; /* texts: of a publisher's tensors; NULL: a follower */
	char socket[4096];
	rb_tensor *tensor;
	uint32_t tensors;
	uint64_t buffer_bytes, geometry;
	bool device;  /* the caller can use device memory */
	bool waits;   /* a follower: the broker answers it when there is a publisher */
	bool parents; /* opened before a fork, by the parent */

	pthread_mutex_t mu; /* guards the rest */
	rb_weights_link *links, *live; /* links: newest first */
	rb_attach pending;
	int64_t looked, next_try, backoff;
	int why; /* of the last try to attach again */
	char why_text[256];

	/* A publisher's. */
	rb_weights_view begun;
	uint32_t version, earlier; /* the last version, and the last withdrawal of the publisher before */

	/* A follower's. */
	rb_weights_link *before; /* the link before live, while live has no version */
	rb_weights_view now;     /* in use, or loaded last */
	bool loaded;             /* the caller has loaded now */
	rb_weights_view kept;    /* what it has loaded last */
	uint32_t running;        /* threads between enter and exit */
	pthread_cond_t left;     /* running or loaded has changed */
} rb_weights;

static inline uint32_t rb_version_of(uint64_t word) { return (uint32_t)(word >> 8); }
static inline uint32_t rb_buffer_of(uint64_t word) { return (word & 0xff) % RB_GO_WEIGHT_BUFFERS; }

/* A buffer; a device pointer if the tensors are in device memory. */
static inline uint8_t *rb_weights_buffer(const rb_weights *w, const rb_weights_link *l, uint32_t buffer)
{
	uint8_t *first = l->device.base ? (uint8_t *)(uintptr_t)l->device.base : l->segment.at + RB_GO_WEIGHT_DATA;
	return first + buffer * w->buffer_bytes;
}

/* Whether a version, current or good, was not refused. */
static inline bool rb_weights_stand(const rb_weights_link *l, uint64_t word)
{
	return rb_version_of(word) > atomic_load(&l->words->refused[rb_buffer_of(word)]);
}

/* The word that followers use: current, or good if current was refused; 0 if both were. */
static inline uint64_t rb_weights_in_force(const rb_weights_link *l)
{
	uint64_t word = atomic_load(&l->words->current);
	if (rb_weights_stand(l, word))
		return word;
	word = atomic_load(&l->words->good);
	return rb_weights_stand(l, word) ? word : 0;
}

/* Why the version that was refused last was. */
static inline const char *rb_weights_reason(const rb_weights_link *l, int *length)
{
	*length = (int)rb_min(atomic_load(&l->words->reason_len), RB_GO_WEIGHT_REASON_BYTES);
	return (const char *)l->segment.at + RB_GO_WEIGHT_REASON;
}

/* Attaches again: sends the request. A publisher may offer device memory, else memory is -1. */
int rb_weights_begin(rb_weights *w, int64_t deadline, int memory, const char *gpu);
/* Waits for the reply; the new link is live. A publisher allocates device memory if there is none. */
int rb_weights_end(rb_weights *w, int64_t deadline);
bool rb_weights_gone(const rb_weights_link *l);
/* Gives back the memory of links that are not needed. */
void rb_weights_retire(rb_weights *w);

/* Handles. texts: of a publisher's tensors; NULL: a follower. */
static inline int64_t rb_weights_until(const rb_connect_options *o)
{
	return rb_until(o->patience ? o->patience : RB_CALL_TIMEOUT, rb_now());
}
int rb_weights_open(const char *model, const char *texts, const rb_connect_options *o, rb_weights **out, int64_t until);
int rb_weights_handle(rb_table *table, rb_weights *w, uint64_t *handle);
int rb_weights_close(rb_table *table, uint64_t handle);
void rb_weights_free(rb_weights *w);
int rb_weights_tensor(const rb_weights *w, uint32_t k, rb_tensor *t);
int rb_weights_device(const rb_weights *w, rb_device *d);

/* Body of a function of the header; result may use w, which it has locked. */
#define RB_WITH_WEIGHTS(table, given, handle, result)                                                                   \
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

#endif
