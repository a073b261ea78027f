/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <linux/futex.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "shm.h"

/* Go's layout is the truth: what differs does not compile. */
#define SAME_SIZE(type, go) _Static_assert(sizeof(type) == RB_GO_SIZE_##go, "size of " #type)
#define SAME_PLACE(type, field, go) _Static_assert(offsetof(type, field) == RB_GO_AT_##go, "place of " #type "." #field)
SAME_SIZE(rb_header, HEADER);
SAME_PLACE(rb_header, version, HEADER_VERSION);
SAME_PLACE(rb_header, kind, HEADER_KIND);
SAME_PLACE(rb_header, size, HEADER_SIZE);
SAME_PLACE(rb_header, epoch, HEADER_EPOCH);
SAME_PLACE(rb_header, geometry, HEADER_GEOMETRY);
SAME_PLACE(rb_header, slots, HEADER_SLOTS);
SAME_PLACE(rb_header, max_batch, HEADER_MAX_BATCH);
SAME_SIZE(rb_commit_entry, COMMIT);
SAME_PLACE(rb_commit_entry, level, COMMIT_LEVEL);
SAME_PLACE(rb_commit_entry, rows, COMMIT_ROWS);
SAME_PLACE(rb_commit_entry, slot, COMMIT_SLOT);
SAME_PLACE(rb_commit_entry, gen, COMMIT_GEN);
SAME_PLACE(rb_commit_entry, deadline, COMMIT_DEADLINE);
SAME_PLACE(rb_commit_entry, committed, COMMIT_COMMITTED);
SAME_PLACE(rb_commit_entry, dims, COMMIT_DIMS);
SAME_SIZE(rb_mail, MAIL);
SAME_PLACE(rb_mail, dispatched, MAIL_DISPATCHED);
SAME_PLACE(rb_mail, requests, MAIL_REQUESTS);
SAME_PLACE(rb_mail, rows, MAIL_ROWS);
SAME_PLACE(rb_mail, pad_to, MAIL_PAD_TO);
SAME_PLACE(rb_mail, dims, MAIL_DIMS);
SAME_SIZE(rb_mail_request, MAIL_REQUEST);
SAME_PLACE(rb_mail_request, slot, MAIL_REQUEST_SLOT);
SAME_PLACE(rb_mail_request, gen, MAIL_REQUEST_GEN);
SAME_PLACE(rb_mail_request, rows, MAIL_REQUEST_ROWS);
SAME_PLACE(rb_mail_request, bell, MAIL_REQUEST_BELL);
SAME_PLACE(rb_mail_request, deadline, MAIL_REQUEST_DEADLINE);
SAME_PLACE(rb_mail_request, committed, MAIL_REQUEST_COMMITTED);
SAME_PLACE(rb_mail_request, dims, MAIL_REQUEST_DIMS);
SAME_SIZE(rb_done_entry, DONE);
SAME_PLACE(rb_done_entry, started, DONE_STARTED);
SAME_PLACE(rb_done_entry, finished, DONE_FINISHED);
SAME_PLACE(rb_done_entry, failed, DONE_FAILED);
SAME_SIZE(rb_record, RECORD);
SAME_PLACE(rb_record, started, RECORD_STARTED);
SAME_PLACE(rb_record, finished, RECORD_FINISHED);
SAME_PLACE(rb_record, reason_len, RECORD_REASON_LEN);
SAME_PLACE(rb_record, dims, RECORD_DIMS);
SAME_SIZE(rb_ring_words, RING_WORDS);
SAME_PLACE(rb_ring_words, head, RING_WORDS_HEAD);
SAME_PLACE(rb_ring_words, armed_at, RING_WORDS_ARMED_AT);
SAME_SIZE(rb_mail_words, MAIL_WORDS);
SAME_PLACE(rb_mail_words, bell, MAIL_WORDS_BELL);
SAME_PLACE(rb_mail_words, taken, MAIL_WORDS_TAKEN);
SAME_PLACE(rb_mail_words, parked, MAIL_WORDS_PARKED);
SAME_SIZE(rb_record_words, RECORD_WORDS);
SAME_PLACE(rb_record_words, recording, RECORD_WORDS_RECORDING);
SAME_SIZE(rb_times, TIMES);
SAME_PLACE(rb_times, asked, TIMES_ASKED);
SAME_PLACE(rb_times, claimed, TIMES_CLAIMED);
SAME_PLACE(rb_times, woken, TIMES_WOKEN);
SAME_SIZE(rb_bell, BELL);

bool rb_board_end(rb_board *b, uint32_t slot, uint32_t gen, uint8_t status)
{
	_Atomic uint64_t *word = &b->words[slot];
	uint64_t old = atomic_load(word);
	while ((int32_t)(gen - rb_word_gen(old)) > 0)
		if (atomic_compare_exchange_weak(word, &old, rb_word(gen, status)))
			return true;
	return false;
}

void rb_board_ring(rb_board *b, uint32_t slot)
{
	atomic_fetch_add(&b->bells[slot].count, 1);
	/* Always: a client's board is read-only to it, so it cannot say whether it is parked. All: a broken or malicious
	 * peer that waits there, too, cannot swallow the wake-up. */
	rb_futex_wake(&b->bells[slot].count, INT32_MAX, false);
}

bool rb_push(rb_producer *p, const void *entry, bool *ring)
{
	if (p->tail - atomic_load(&p->words->head) >= p->capacity)
		return false;
	memcpy(p->entries + (p->tail & (p->capacity - 1)) * p->entry_bytes, entry, p->entry_bytes);
	/* Store tail, then load armed_at; the consumer stores armed_at, then loads
	 * tail: one of us sees the other. An exchange is a full barrier. */
	atomic_exchange(&p->words->tail, p->tail + 1);
	*ring = atomic_load(&p->words->armed_at) == p->tail++;
	return true;
}

int rb_futex_wait(_Atomic uint32_t *word, uint32_t seen, int64_t ns, bool private)
{
	struct timespec t = {ns / 1000000000, ns % 1000000000};
	if (ns <= 0)
		return ETIMEDOUT;
	return syscall(SYS_futex, word, FUTEX_WAIT | (private ? FUTEX_PRIVATE_FLAG : 0), seen, &t, NULL, 0) < 0 ? errno : 0;
}

void rb_futex_wake(_Atomic uint32_t *word, int n, bool private)
{
	syscall(SYS_futex, word, FUTEX_WAKE | (private ? FUTEX_PRIVATE_FLAG : 0), n, NULL, NULL, 0);
}

void rb_eventfd_ring(int fd)
{
	uint64_t one = 1;
	/* Not write(): a thread that is canceled must not end in here. */
	while (syscall(SYS_write, fd, &one, sizeof one) < 0 && errno == EINTR)
		;
}

int64_t rb_now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000000LL + t.tv_nsec;
}
