/* SPDX-License-Identifier: Apache-2.0 */
/* Live weights: a publisher or a follower, and one link for each attachment. */
#ifndef RB_WEIGHTS_H
#define RB_WEIGHTS_H

#include "internal.h"

/* One attachment. A link that is no longer needed has private zeros in place of the segment, until the handle is closed. */
typedef struct rb_weights_link {
	struct rb_weights_link *next; /* an older one */
	rb_segment segment;
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
	bool parents; /* opened before a fork, by the parent */

	pthread_mutex_t mu; /* guards the rest */
	rb_weights_link *links, *live; /* links: newest first */
	rb_attach pending;
	int64_t looked, next_try;
	int why; /* status of the publisher's last try to attach again */

	/* A publisher's. */
	rb_weights_view begun;
	uint32_t version, reported; /* the last version, and the last withdrawal that rb_publish_commit has returned */

	/* A follower's. */
	rb_weights_link *before; /* the link before live, while live has no version */
	rb_weights_view now;     /* in use, or loaded last */
	bool loaded;             /* the caller has loaded now */
	uint32_t running;        /* threads between enter and exit */
	pthread_cond_t left;     /* running or loaded has changed */
} rb_weights;

#endif
