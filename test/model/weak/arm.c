/* SPDX-License-Identifier: Apache-2.0 */
/* A client that pushes and a broker that goes to sleep: one sees the other. */
#include "world.h"

static rb_ring_words words;
static uint64_t entries[2];
static _Bool rings, sleeps;

static void *client(void *unused)
{
	rb_producer p = {&words, (uint8_t *)entries, sizeof entries[0], 2, 0};
	uint64_t entry = 1;
	rb_push(&p, &entry, &rings);
	return unused;
}

static void *broker(void *unused)
{
	consumer c = {&words, entries, 2, 0};
	sleeps = arm(&c);
	return unused;
}

int main(void)
{
	pthread_t a, b;
	words.armed_at = ~0ULL;
	pthread_create(&a, NULL, client, NULL);
	pthread_create(&b, NULL, broker, NULL);
	pthread_join(a, NULL);
	pthread_join(b, NULL);
	assert(!sleeps || rings);
}
