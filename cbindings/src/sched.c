/* SPDX-License-Identifier: Apache-2.0 */
/* Scheduling: time slices, and when a spin stops paying. As shm/slice.go and shm/spin.go. */
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "shm.h"

#define SLOW_YIELD 100000 /* ns; a longer yield ran another thread */
#define SPIN_REST 20000000 /* ns; no spin for this long after a slow yield */

bool rb_yield(int64_t *now, int64_t *rest)
{
	int64_t before = *now;
	sched_yield();
	*now = rb_now();
	if (*now - before <= SLOW_YIELD)
		return true;
	*rest = *now + SPIN_REST;
	return false;
}

/* struct sched_attr of Linux, which libraries do not have. */
typedef struct {
	uint32_t size, policy;
	uint64_t flags;
	int32_t nice;
	uint32_t priority;
	uint64_t runtime, deadline, period;
} attributes;

#define RESET_ON_FORK 1
#define SLICE 100000 /* ns */

void rb_ask_short_slice(void)
{
	static _Thread_local bool asked;
	if (asked)
		return;
	asked = true;
	const char *wanted = getenv("RINGBATCH_SHORT_SLICE");
	attributes a = {.size = sizeof a};
	if ((wanted && !strcmp(wanted, "off")) || syscall(SYS_sched_getattr, 0, &a, sizeof a, 0) || a.policy != SCHED_OTHER ||
	    a.nice < 0) /* RESET_ON_FORK would take the priority from children */
		return;
	a.flags |= RESET_ON_FORK;
	a.runtime = SLICE;
	syscall(SYS_sched_setattr, 0, &a, 0); /* older kernels take no notice */
}
