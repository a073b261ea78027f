/* SPDX-License-Identifier: Apache-2.0 */
#include <unistd.h>

#include "internal.h"

rb_table rb_clients, rb_workers, rb_maps, rb_sequences, rb_publishers, rb_followers;

#define FIRST_CHUNK 8u

static rb_entry *entry_at(rb_table *t, uint32_t index)
{
	uint32_t size = FIRST_CHUNK;
	for (int k = 0; k < 24; k++, size *= 2) {
		if (index < size) {
			rb_entry *chunk = t->chunk[k];
			return chunk ? &chunk[index] : NULL;
		}
		index -= size;
	}
	return NULL;
}

uint64_t rb_table_put(rb_table *t, void *value)
{
	uint32_t index = 0, size = FIRST_CHUNK;
	for (int k = 0; k < 24; k++, size *= 2) {
		rb_entry *chunk = t->chunk[k];
		if (!chunk) {
			rb_entry *fresh = calloc(size, sizeof *fresh);
			if (!fresh)
				return 0;
			if (!atomic_compare_exchange_strong(&t->chunk[k], &chunk, fresh))
				free(fresh); /* another thread was quicker */
			else
				chunk = fresh;
		}
		for (uint32_t i = 0; i < size; i++, index++) {
			void *free_one = NULL;
			if (atomic_compare_exchange_strong(&chunk[i].value, &free_one, value)) {
				uint32_t gen = chunk[i].gen + 1; /* odd: open; even: shut, or never used */
				chunk[i].gen = gen;
				return (uint64_t)gen << 32 | index;
			}
		}
	}
	return 0;
}

static bool open_gen(uint64_t id) { return id >> 32 & 1; }

rb_entry *rb_table_enter(rb_table *t, uint64_t id)
{
	rb_entry *e = entry_at(t, (uint32_t)id);
	if (!e || !open_gen(id))
		return NULL;
	atomic_fetch_add(&e->users, 1);
	if (atomic_load(&e->gen) == (uint32_t)(id >> 32))
		return e;
	rb_table_leave(e);
	return NULL;
}

rb_entry *rb_table_shut(rb_table *t, uint64_t id)
{
	rb_entry *e = entry_at(t, (uint32_t)id);
	uint32_t gen = (uint32_t)(id >> 32);
	return e && open_gen(id) && atomic_compare_exchange_strong(&e->gen, &gen, gen + 1) ? e : NULL;
}

void rb_table_remove(rb_entry *e)
{
	while (atomic_load(&e->users))
		usleep(50);
	e->value = NULL;
}

void rb_table_in_child(rb_table *t, void (*f)(void *))
{
	uint32_t size = FIRST_CHUNK;
	for (int k = 0; k < 24 && t->chunk[k]; k++, size *= 2)
		for (uint32_t i = 0; i < size; i++) {
			rb_entry *e = &t->chunk[k][i];
			e->users = 0; /* of a free entry, too: a stale handle counts its caller for a moment */
			if (e->value)
				f(e->value);
		}
}

/* ---- maps ------------------------------------------------------------------ */

typedef struct {
	void *owner;
	void (*release)(void *), (*in_child)(void *);
	rb_device device;
} map;

int rb_map_new(rb_map *out, const rb_session *s, uint32_t attachment, void *owner, void (*release)(void *), void (*in_child)(void *))
{
	map *m = malloc(sizeof *m);
	uint64_t id = 0;
	if (m) {
		*m = (map){owner, release, in_child, s->device};
		id = rb_table_put(&rb_maps, m);
	}
	if (!id) {
		free(m);
		release(owner);
		return rb_say(RB_ERR_NO_MEMORY);
	}
	*out = (rb_map){.id = id, .base = s->planes.at, .bytes = s->planes.bytes, .attachment = attachment};
	return RB_OK;
}

void rb_map_in_child(void *of_parent)
{
	map *m = of_parent;
	m->device = (rb_device){.ordinal = -1};
	m->in_child(m->owner);
}

static int no_map(void) { return rb_fail(RB_ERR_RELEASED, "no such mapping, or it was released"); }

int rb_map_device(uint64_t id, rb_device *device)
{
	if (!device)
		return rb_missing();
	rb_entry *e = rb_table_enter(&rb_maps, id);
	if (!e)
		return no_map();
	int status = rb_give_device(device, &((map *)e->value)->device);
	rb_table_leave(e);
	return status;
}

int rb_map_release(uint64_t id)
{
	rb_entry *e = rb_table_shut(&rb_maps, id);
	if (!e)
		return no_map();
	map *m = e->value;
	rb_table_remove(e);
	m->release(m->owner);
	free(m);
	return RB_OK;
}
