/* SPDX-License-Identifier: Apache-2.0 */
#ifndef RB_REPLY_H
#define RB_REPLY_H

#include "internal.h"

/* A broker's reply. Texts and readers point into its frame. */
typedef struct rb_reply {
	uint64_t code, version, epoch;
	const char *message, *stats, *model;
	uint32_t message_bytes, stats_bytes, model_bytes;
	bool attached;
	rb_reader inputs, outputs, state, policy; /* at the values; at is NULL if they are missing or nil */
	rb_reader notes, planes, weights;
	bool more, times, hands_on, isolates, needs;
	uint64_t needed, needed_on; /* device memory, and the number of its GPU */
	const char *gpu;
	uint32_t gpu_bytes;
	uint64_t device_size, clock, slots, max_batch, geometry, planes_size, board_size, session_size, first_slot, window,
		first_gen, depth, max_rows;
} rb_reply;

/* Decodes a reply. Returns the broker's status if it refused. */
int rb_read_reply(const rb_frame *f, rb_reply *p);
/* RB_ERR_PROTOCOL, naming the wrong part of the reply. */
int rb_malformed(const char *what);

#endif
