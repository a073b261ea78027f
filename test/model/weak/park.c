/* SPDX-License-Identifier: Apache-2.0 */
/* SYNC POINT "mail": a worker that takes a mail sees all of it. A worker that parks
 * while mail is posted is woken, or does not sleep. The worker's lines are has_mail,
 * park and try_next of cbindings/src/worker.c. */
#include "world.h"

static rb_mail_words mail;
static uint64_t letter; /* the mail itself */
static _Bool wakes, sleeps;

static _Bool has_mail(void)
{
#ifdef RELAXED_MAIL
	return atomic_load_explicit(&mail.tail, memory_order_relaxed) != 0;
#else
	return atomic_load(&mail.tail) != 0;
#endif
}

static void *broker(void *unused)
{
	letter = 7;
	wakes = post(&mail, 0);
	return unused;
}

static void *worker(void *unused)
{
	uint32_t seen = atomic_load(&mail.bell);
#ifdef PARK_RELEASE
	atomic_store_explicit(&mail.parked, 1, memory_order_release);
	if (atomic_load_explicit(&mail.tail, memory_order_acquire) == 0)
		sleeps = atomic_load_explicit(&mail.bell, memory_order_relaxed) == seen;
#else
	atomic_exchange(&mail.parked, 1);
	if (!has_mail())
		sleeps = atomic_load(&mail.bell) == seen;
#endif
	if (has_mail())
		assert(letter == 7);
	return unused;
}

int main(void)
{
	pthread_t a, b;
	pthread_create(&a, NULL, broker, NULL);
	pthread_create(&b, NULL, worker, NULL);
	pthread_join(a, NULL);
	pthread_join(b, NULL);
	assert(!sleeps || wakes);
}
