/* SPDX-License-Identifier: Apache-2.0 */
/* SYNC POINT "entry": a reader that sees the new tail sees the entry and the input
 * before it, also when the ring wraps. No entry is overwritten while it is read. */
#include "world.h"

#define ENTRIES 3
static rb_ring_words words;
static uint64_t entries[2], input[ENTRIES];

static void *client(void *unused)
{
	rb_producer p = {&words, (uint8_t *)entries, sizeof entries[0], 2, 0};
	for (uint64_t i = 0; i < ENTRIES; i++) {
		_Bool ring;
		uint64_t entry = i + 1;
		input[i] = 10 + i;
		if (!rb_push(&p, &entry, &ring))
			break; /* full */
	}
	return unused;
}

static void *broker(void *unused)
{
	consumer c = {&words, entries, 2, 0};
	for (int look = 0; look < 2; look++) {
		for (uint64_t n = pending(&c); n > 0; n--) {
			uint64_t entry = take(&c);
			assert(entry == c.head);
			assert(input[entry - 1] == 9 + entry);
		}
		give(&c);
	}
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
}
