/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <linux/futex.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "shm.h"

/* Go's layout is the truth: what differs does not compile. */
#define SAME_SIZE(type, bytes) _Static_assert(sizeof(type) == bytes, "size of " #type);
#define SAME_PLACE(type, field, at) _Static_assert(offsetof(type, field) == at, "place of " #type "." #field);
RB_GO_STRUCTS(SAME_SIZE, SAME_PLACE)

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
	/* Store tail, then load armed_at; the consumer stores armed_at, then loads tail: one sees the other. An exchange is
	 * a full barrier. */
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
