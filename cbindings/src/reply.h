/* SPDX-License-Identifier: Apache-2.0 */
#ifndef RB_REPLY_H
#define RB_REPLY_H

#include "internal.h"

/* What a broker replies. Texts and readers point into the frame that it was read from. */
typedef struct rb_reply {
	uint64_t code, version, epoch;
	const char *message, *stats, *model;
	uint32_t message_bytes, stats_bytes, model_bytes;
	bool attached;
	rb_reader inputs, outputs, policy; /* at the values; at is NULL if they are missing */
	rb_reader notes, planes;
	bool more, times, hands_on, needs;
	uint64_t needed, needed_on; /* device memory, and the number of its GPU */
	const char *gpu;
	uint32_t gpu_bytes;
	uint64_t device_size, clock, slots, max_batch, geometry, planes_size, board_size, session_size, first_slot, window,
		first_gen, depth, max_rows;
} rb_reply;

/* Reads it from a frame. What the broker refuses with is the status. */
int rb_read_reply(const rb_frame *f, rb_reply *p);
/* RB_ERR_PROTOCOL, with what of the reply is wrong. */
int rb_malformed(const char *what);

#endif
