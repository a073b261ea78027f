/* SPDX-License-Identifier: Apache-2.0 */
/* Generated from Go's package shm: go test ./shm -run CLibrary -update */
#ifndef RB_LAYOUT_GEN_H
#define RB_LAYOUT_GEN_H
#define RB_GO_LAYOUT_VERSION 0x1ull
#define RB_GO_MAGIC 0x48435442474e4952ull
#define RB_GO_KIND_PLANES 0x1ull
#define RB_GO_HELD_BIT 0x100ull
#define RB_GO_KIND_COMMIT 0x1ull
#define RB_GO_KIND_CANCEL 0x2ull
#define RB_GO_KIND_STREAM 0x3ull
#define RB_GO_REASON_BYTES 0x400ull
#define RB_GO_MAX_SLOTS 0x100000ull
#define RB_GO_MAX_BATCH_ROWS 0x4000ull
#define RB_GO_MAX_MAIL_DEPTH 0x100ull
#define RB_GO_PAGE 0x1000ull
#define RB_GO_CACHE_LINE 0x40ull
#define RB_GO_SEGMENT_HEADER 0x1000ull
#define RB_GO_DEVICE_GRAIN 0x200000ull
#define RB_GO_MAX_DEVICES 0x40ull
#define RB_GO_RING_WORDS 0x40ull
#define RB_GO_MAIL_WORDS 0xc0ull
#define RB_GO_RECORD_WORDS 0xc0ull
#define RB_GO_MAX_VARIABLE_DIMS 0x8ull
#define RB_GO_MAX_RANK 0x8ull
#define RB_GO_MAX_TENSORS 0x40ull
#define RB_GO_MAX_NAME_BYTES 0x80ull
#define RB_GO_MAX_DIM_NAME_BYTES 0x1full
#define RB_GO_KIND_WEIGHTS 0x5ull
#define RB_GO_WEIGHT_BUFFERS 0x4ull
#define RB_GO_WEIGHT_FOLLOWERS 0x100ull
#define RB_GO_MAX_WEIGHT_TENSORS 0x1000ull
#define RB_GO_MAX_WEIGHT_BYTES 0x10000000000ull
#define RB_GO_WEIGHT_WORDS 0x40ull
#define RB_GO_WEIGHT_FOLLOWER_WORDS 0x80ull
#define RB_GO_WEIGHT_REASON 0x4080ull
#define RB_GO_WEIGHT_REASON_BYTES 0x400ull
#define RB_GO_WEIGHT_DATA 0x5000ull
#define RB_GO_SEALS 0x7ull
#define RB_GO_CONTROL_VERSION 0x1ull
#define RB_GO_MAX_FRAME 0x100000ull

/* For each struct SIZE(type, bytes) and for each of its fields PLACE(type, field, offset). */
#define RB_GO_STRUCTS(SIZE, PLACE) \
	SIZE(rb_header, 64) PLACE(rb_header, magic, 0) PLACE(rb_header, version, 8) PLACE(rb_header, kind, 12) \
	PLACE(rb_header, size, 16) PLACE(rb_header, epoch, 24) PLACE(rb_header, geometry, 32) PLACE(rb_header, slots, 40) \
	PLACE(rb_header, max_batch, 44) \
	SIZE(rb_commit_entry, 64) PLACE(rb_commit_entry, kind, 0) PLACE(rb_commit_entry, level, 1) \
	PLACE(rb_commit_entry, cost, 2) PLACE(rb_commit_entry, rows, 4) PLACE(rb_commit_entry, slot, 8) \
	PLACE(rb_commit_entry, gen, 12) PLACE(rb_commit_entry, deadline, 16) PLACE(rb_commit_entry, committed, 24) \
	PLACE(rb_commit_entry, dims, 32) \
	SIZE(rb_mail, 64) PLACE(rb_mail, batch, 0) PLACE(rb_mail, dispatched, 8) PLACE(rb_mail, requests, 16) \
	PLACE(rb_mail, rows, 20) PLACE(rb_mail, pad_to, 24) PLACE(rb_mail, level, 28) PLACE(rb_mail, dims, 32) \
	SIZE(rb_mail_request, 64) PLACE(rb_mail_request, slot, 0) PLACE(rb_mail_request, gen, 4) PLACE(rb_mail_request, rows, 8) \
	PLACE(rb_mail_request, bell, 12) PLACE(rb_mail_request, deadline, 16) PLACE(rb_mail_request, committed, 24) \
	PLACE(rb_mail_request, dims, 32) \
	SIZE(rb_done_entry, 32) PLACE(rb_done_entry, batch, 0) PLACE(rb_done_entry, started, 8) \
	PLACE(rb_done_entry, finished, 16) PLACE(rb_done_entry, failed, 24) PLACE(rb_done_entry, whole, 28) \
	SIZE(rb_record, 64) PLACE(rb_record, dispatched, 0) PLACE(rb_record, started, 8) PLACE(rb_record, finished, 16) \
	PLACE(rb_record, reason_len, 24) PLACE(rb_record, version, 28) PLACE(rb_record, dims, 32) \
	SIZE(rb_ring_words, 128) PLACE(rb_ring_words, tail, 0) PLACE(rb_ring_words, head, 64) PLACE(rb_ring_words, armed_at, 72) \
	SIZE(rb_mail_words, 192) PLACE(rb_mail_words, tail, 0) PLACE(rb_mail_words, bell, 56) PLACE(rb_mail_words, taken, 64) \
	PLACE(rb_mail_words, parked, 72) PLACE(rb_mail_words, lanes, 76) PLACE(rb_mail_words, rounds, 80) \
	SIZE(rb_record_words, 64) PLACE(rb_record_words, recording, 0) \
	SIZE(rb_times, 64) PLACE(rb_times, gen, 0) PLACE(rb_times, asked, 8) PLACE(rb_times, claimed, 16) \
	PLACE(rb_times, woken, 24) \
	SIZE(rb_bell, 64) PLACE(rb_bell, count, 0) PLACE(rb_bell, streams, 4) PLACE(rb_bell, shown, 8) PLACE(rb_bell, plane, 16) \
	SIZE(rb_weight_words, 64) PLACE(rb_weight_words, current, 0) PLACE(rb_weight_words, good, 8) \
	PLACE(rb_weight_words, last, 16) PLACE(rb_weight_words, published, 24) PLACE(rb_weight_words, refused, 32) \
	PLACE(rb_weight_words, reasoned, 48) PLACE(rb_weight_words, reason_len, 52) \
	SIZE(rb_follower_words, 64) PLACE(rb_follower_words, in_use, 0) PLACE(rb_follower_words, loaded, 4)

#endif
