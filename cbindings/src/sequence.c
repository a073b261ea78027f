/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Sequences. Each state tensor has two halves in a slot: a step reads one and writes
 * the other. Broker and worker read the steps, and know no sequence. The client writes the half to read into
 * the step words before each commit, and changes halves after a step that ended well:
 *
 *	request -- commit: step words --> under way -- RB_OK, which the caller saw --> change halves
 *	   ^                                  |                                            |
 *	   +---------- any other end ---------+--------------------------------------------+
 *
 * The sequence stays with its attachment, even if the client is asked to attach again.
 */
#include <string.h>

#include "client.h"

#define LOOK_EVERY (5 * MILLISECOND)

static _Thread_local char this_thread; /* its address */

static rb_slot *slot_of(const rb_seq *q) { return &q->link->slots[q->at]; }

/* One half of a row of the k-th state. */
static uint8_t *half_of(const rb_link *l, uint32_t at, uint32_t k, uint8_t half)
{
	const rb_tensor *t = &rb_tensors_of(&l->session.layout, RB_STATE)[k];
	return rb_base_of(&l->session, t) + t->offset + (2 * (uint64_t)(l->first + at) + half) * t->row_bytes;
}

/* Whether the caller still has the request of the latest step. */
static bool is_begun(const rb_seq *q) { return q->link && slot_of(q)->handle % 2; }

/* Keeps other threads out, also between the calls for one request. */
static int enter(rb_seq *q, bool to_close)
{
	if (!atomic_exchange(&q->busy, true)) {
		if (!is_begun(q) || q->thread == &this_thread || (to_close && slot_of(q)->state != RB_SLOT_COMMITTED))
			return RB_OK;
		q->busy = false;
	}
	return rb_fail(RB_ERR_NOT_DONE, "this sequence is busy in another thread: one thread at a time uses it");
}

static bool all_fresh(const rb_seq *q)
{
	uint32_t i = 0;
	while (i < q->rows && q->row[i] & RB_STEP_FRESH)
		i++;
	return i == q->rows;
}

/* ---- steps ---------------------------------------------------------------------- */

static bool is_gone(rb_link *l)
{
	if (!rb_link_lost(l, rb_now(), LOOK_EVERY))
		return false;
	rb_conn_lost(l->client, l);
	return true;
}

/* Whether the broker or a worker may still have the slots of the last step. */
static bool is_held(const rb_seq *q)
{
	uint64_t w = rb_board_word(&q->link->session.board, q->link->first + q->at);
	return (rb_word_gen(w) != q->link->gens[q->at] || rb_word_held(w)) && !is_gone(q->link);
}

/* Waits for the end of the last step, and changes halves if it ended well. */
static int settle(rb_seq *q, int64_t until)
{
	if (!q->link || !q->stepping)
		return RB_OK;
	if (!rb_link_ended(q->link, q->at) && !is_gone(q->link)) {
		int status = rb_link_await(q->link, q->at, until);
		if (status)
			return status;
	}
	rb_link_ended(q->link, q->at);
	for (int64_t nap = 20 * MICROSECOND; is_held(q); nap = rb_min(2 * nap, MILLISECOND)) {
		if (rb_now() >= until)
			return rb_explain(RB_ERR_TIMEOUT, "a worker still has the step before");
		rb_sleep(nap);
	}
	q->advanced = q->told && !q->undone;
	q->half ^= q->advanced;
	for (uint32_t i = 0; i < q->rows; i++) {
		uint8_t was = q->row[i] & RB_STEP_FRESH, now = q->row[i] & RB_RESET ? RB_STEP_FRESH : q->advanced ? 0 : was;
		q->row[i] = now | (was ? RB_WAS_FRESH : 0);
	}
	q->stepping = false;
	return RB_OK;
}

/* ---- slots ---------------------------------------------------------------------- */

static void adopt(rb_seq *q, const rb_req *r)
{
	q->link = r->link;
	q->at = r->at;
	pthread_mutex_lock(&q->link->mu);
	slot_of(q)->sequence = q;
	q->link->nkept += q->rows;
	rb_link_wake_claims(q->link); /* some may have no room now */
	pthread_mutex_unlock(&q->link->mu);
}

static void give_slots_back(rb_seq *q)
{
	if (!q->link || q->link->parents)
		return;
	pthread_mutex_lock(&q->link->mu);
	slot_of(q)->sequence = NULL;
	q->link->nkept -= q->rows;
	pthread_mutex_unlock(&q->link->mu);
	rb_req r = {q->link, q->at, slot_of(q)->handle | 1};
	atomic_store(&slot_of(q)->handle, r.handle); /* also if the caller has released the step */
	rb_req_release(&r);
	q->link = NULL;
	q->stepping = q->advanced = false;
}

/* Sees to it that the sequence has slots. Slots of a broker that is gone are given up, with their state. */
static int claim_slots(rb_conn *c, rb_seq *q, int64_t timeout)
{
	rb_req r;
	if (q->link && is_gone(q->link)) {
		give_slots_back(q);
		q->lost = !all_fresh(q);
	}
	if (q->lost)
		return rb_say(c->final ? c->final : RB_ERR_STATE_LOST);
	int status = q->link ? RB_OK : rb_req_claim_kept(c, NULL, q->rows, timeout, &r);
	if (!q->link && !status)
		adopt(q, &r);
	return status;
}

/* Sees to it that the last step is over, and the sequence has slots. */
static int ready(rb_conn *c, rb_seq *q, int64_t timeout)
{
	if (is_begun(q) && slot_of(q)->state == RB_SLOT_COMMITTED)
		return rb_fail(RB_ERR_NOT_DONE, "a step of this sequence is under way: wait for its end, or release it");
	int status = settle(q, rb_until(timeout, rb_now()));
	return status ? status : claim_slots(c, q, timeout);
}

int rb_seq_request(rb_conn *c, rb_seq *q, const uint32_t *dims, uint32_t ndims, int64_t timeout, rb_req *r)
{
	int64_t start = rb_now();
	int status = ready(c, q, timeout);
	if (!status)
		status = rb_link_check_dims(q->link, dims, ndims);
	if (status)
		return status;
	pthread_mutex_lock(&q->link->mu);
	rb_link_unwatch(q->link, q->at);
	pthread_mutex_unlock(&q->link->mu);
	q->thread = &this_thread;
	q->advanced = false;
	rb_req_begin(q->link, q->at, q->rows, dims, start, rb_now(), r);
	return RB_OK;
}

int rb_seq_enter(rb_conn *c, uint64_t id, rb_entry **entry)
{
	rb_entry *e = rb_table_enter(&rb_sequences, id);
	rb_seq *q = e ? e->value : NULL;
	int status;
	if (!q || q->client != c)
		status = rb_fail(RB_ERR_RELEASED, "no such sequence, or it was closed");
	else if (q->link && q->link->parents)
		status = rb_fail(RB_ERR_FORKED, "this sequence is the parent process's: a forked child opens its own");
	else
		status = enter(q, false);
	if (status && e)
		rb_table_leave(e);
	*entry = e;
	return status;
}

void rb_seq_leave(rb_entry *e)
{
	((rb_seq *)e->value)->busy = false;
	rb_table_leave(e);
}

/* ---- open, reset, state, close ---------------------------------------------------- */

/* from: as in rb_req_claim_kept. */
static int open_sequence(rb_conn *c, rb_link *from, uint32_t rows, int64_t timeout, rb_seq **made)
{
	rb_req r;
	if (!c->states)
		return rb_explain(RB_ERR_INVALID, "%s has no state: claim requests instead", c->model);
	int status = rb_req_claim_kept(c, from, rows, timeout, &r);
	if (status)
		return status;
	rb_seq *q = *made = calloc(1, sizeof *q + rows);
	if (!q || !(q->id = rb_table_put(&rb_sequences, q))) {
		free(q);
		rb_req_release(&r);
		return rb_say(RB_ERR_NO_MEMORY);
	}
	q->client = c;
	q->rows = rows;
	memset(q->row, RB_STEP_FRESH, rows);
	adopt(q, &r);
	pthread_mutex_lock(&c->mu);
	q->next = c->sequences;
	c->sequences = q;
	pthread_mutex_unlock(&c->mu);
	return rb_req_release(&r); /* the slots stay */
}

static int begin_step(rb_conn *c, rb_seq *q, const uint32_t *dims, uint32_t ndims, int64_t timeout, rb_request *request)
{
	rb_req r;
	int status = rb_seq_request(c, q, dims, ndims, timeout, &r);
	if (!status)
		*request = rb_req_shown(&r);
	return status;
}

/* Whether no row has begun, or all were reset. */
static bool is_zero(const rb_seq *q)
{
	bool advances = q->stepping && q->told && !q->undone;
	return all_fresh(q) && !advances;
}

static int reset(rb_seq *q, const uint32_t *rows, uint32_t count)
{
	int status = RB_OK;
	for (uint32_t i = 0; i < count && !status; i++) {
		if (rows[i] >= q->rows)
			status = rb_explain(RB_ERR_ROWS, "row %u of a sequence of %u", rows[i], q->rows);
		else if (q->row[rows[i]] & RB_NAMED)
			status = rb_explain(RB_ERR_ROWS, "row %u is given twice: give each row's number once; a mask is not taken", rows[i]);
		else
			q->row[rows[i]] |= RB_NAMED;
	}
	for (uint32_t i = 0; i < q->rows; i++)
		q->row[i] &= (uint8_t)~RB_NAMED;
	if (status)
		return status;
	if (count && (q->lost || (q->link && is_gone(q->link) && !is_zero(q))))
		return rb_say(RB_ERR_STATE_LOST);
	q->lost = false;
	uint8_t how = q->stepping ? RB_RESET : RB_STEP_FRESH;
	for (uint32_t i = 0; i < (count ? count : q->rows); i++)
		q->row[count ? rows[i] : i] |= how;
	return RB_OK;
}

static int no_device(const rb_seq *q)
{
	return rb_explain(RB_ERR_INVALID, "%s has state in device memory, which this client does not have", q->client->model);
}

/* Zeroes the present state of fresh rows. They stay fresh if the caller asks which they are. */
static int refresh(rb_seq *q, uint8_t *fresh)
{
	const rb_session *s = &q->link->session;
	for (uint32_t i = 0; i < q->rows; i++) {
		for (uint32_t k = 0; k < s->layout.states; k++) {
			const rb_tensor *t = &rb_tensors_of(&s->layout, RB_STATE)[k];
			if (t->on_device && !s->device.base)
				return no_device(q);
			if (!(q->row[i] & RB_STEP_FRESH))
				continue;
			uint8_t *at = half_of(q->link, q->at + i, k, q->half);
			int status = t->on_device ? rb_device_clear(&s->device, (uint64_t)(uintptr_t)at, t->row_bytes) : RB_OK;
			if (status)
				return status;
			if (!t->on_device)
				memset(at, 0, t->row_bytes);
		}
		if (fresh)
			fresh[i] = q->row[i] & RB_STEP_FRESH ? 1 : 0;
		else
			q->row[i] &= RB_WAS_FRESH;
	}
	return RB_OK;
}

static int state(rb_conn *c, rb_seq *q, uint32_t k, rb_view *v, uint8_t *fresh)
{
	const rb_tensor *t;
	uint32_t dims_at;
	if (settle(q, 0))
		return rb_say(RB_ERR_NOT_DONE);
	int status = claim_slots(c, q, RB_CALL_TIMEOUT);
	if (!status)
		status = rb_pick(&q->link->session.layout, RB_STATE, k, &t, &dims_at);
	if (status)
		return status;
	const rb_session *s = &q->link->session;
	if ((status = refresh(q, fresh)))
		return status;
	rb_fill_view(v, t, NULL, rb_base_of(s, t), q->link->first + q->at, q->rows);
	v->data = half_of(q->link, q->at, k, q->half);
	v->bytes -= q->half * t->row_bytes;
	return RB_OK;
}

static int copy_states(const rb_seq *from, const rb_seq *to)
{
	const rb_session *s = &from->link->session;
	int status = RB_OK;
	for (uint32_t n = 0; n < from->rows * s->layout.states && !status; n++) {
		uint32_t i = n / s->layout.states, k = n % s->layout.states;
		const rb_tensor *t = &rb_tensors_of(&s->layout, RB_STATE)[k];
		uint8_t *into = half_of(to->link, to->at + i, k, to->half), *old = half_of(from->link, from->at + i, k, from->half);
		if (from->row[i] & RB_STEP_FRESH)
			continue;
		if (!t->on_device)
			memcpy(into, old, t->row_bytes);
		else
			status = s->device.base ? rb_device_copy(&s->device, into, old, t->row_bytes) : no_device(from);
	}
	return status;
}

static int close_sequence(rb_conn *c, uint64_t id)
{
	rb_entry *e = rb_table_enter(&rb_sequences, id);
	rb_seq *q = e ? e->value : NULL, **at = &c->sequences;
	int status = q && q->client == c ? RB_OK : rb_fail(RB_ERR_RELEASED, "no such sequence, or it was closed");
	if (!status && !(q->link && q->link->parents))
		status = enter(q, true);
	if (!status)
		rb_table_shut(&rb_sequences, id);
	if (e)
		rb_table_leave(e);
	if (status)
		return status;
	rb_table_remove(e);
	give_slots_back(q);
	pthread_mutex_lock(&c->mu);
	while (*at != q)
		at = &(*at)->next;
	*at = q->next;
	pthread_mutex_unlock(&c->mu);
	free(q);
	return RB_OK;
}

static int copy_sequence(rb_conn *c, rb_seq *q, int64_t timeout, uint64_t *copy)
{
	rb_seq *made;
	int status = ready(c, q, timeout);
	if (!status)
		status = open_sequence(c, q->link, q->rows, timeout, &made);
	if (status)
		return status;
	memcpy(made->row, q->row, q->rows);
	if ((status = copy_states(q, made)))
		close_sequence(c, made->id);
	else
		*copy = made->id;
	return status;
}

/* request: 0, or the number that the last step's must have. */
static int undo(rb_seq *q, uint64_t request)
{
	uint32_t last = q->link ? (slot_of(q)->handle - 1) | 1 : 0;
	if (!q->link || (request && request != rb_req_id(&(rb_req){q->link, q->at, last})))
		return RB_OK;
	q->undone = true;
	if (q->stepping || !q->advanced)
		return RB_OK;
	q->advanced = false; /* back to the other half, which no step has written since */
	q->half ^= 1;
	for (uint32_t i = 0; i < q->rows; i++)
		q->row[i] = q->row[i] & (RB_STEP_FRESH | RB_WAS_FRESH) ? RB_STEP_FRESH : 0;
	return RB_OK;
}

void rb_seqs_free(rb_conn *c)
{
	while (c->sequences) {
		rb_seq *q = c->sequences;
		c->sequences = q->next;
		rb_table_remove(rb_table_shut(&rb_sequences, q->id));
		free(q);
	}
}

/* ---- the functions of the header ------------------------------------------------- */

/* As WITH_REQUEST; result may use q, the sequence. */
#define WITH_SEQUENCE(given, client, sequence, result)                                            \
	do {                                                                                      \
		rb_entry *its;                                                                    \
		rb_seq *q;                                                                        \
		WITH_CLIENT(given, client, (status = rb_seq_enter(c, sequence, &its)) ? status :  \
			(q = its->value, status = (result), rb_seq_leave(its), status));        \
	} while (0)

int rb_sequence_open(rb_client client, uint32_t rows, int64_t timeout, uint64_t *sequence)
{
	rb_seq *q;
	WITH_CLIENT(sequence, client, (status = open_sequence(c, NULL, rows, timeout, &q)) ? status : (*sequence = q->id, RB_OK));
}

int rb_sequence_copy(rb_client client, uint64_t sequence, int64_t timeout, uint64_t *copy)
{
	WITH_SEQUENCE(copy, client, sequence, copy_sequence(c, q, timeout, copy));
}

int rb_sequence_undo(rb_client client, uint64_t sequence, uint64_t request) { WITH_SEQUENCE(true, client, sequence, undo(q, request)); }

int rb_sequence_request(rb_client client, uint64_t sequence, const uint32_t *dims, uint32_t ndims, int64_t timeout, rb_request *request)
{
	WITH_SEQUENCE(request && (dims || !ndims), client, sequence, begin_step(c, q, dims, ndims, timeout, request));
}

int rb_sequence_reset(rb_client client, uint64_t sequence, const uint32_t *rows, uint32_t count)
{
	WITH_SEQUENCE(rows || !count, client, sequence, reset(q, rows, count));
}

int rb_sequence_state(rb_client client, uint64_t sequence, uint32_t k, rb_view *v, uint8_t *fresh)
{
	WITH_SEQUENCE(v, client, sequence, state(c, q, k, v, fresh));
}

int rb_sequence_close(rb_client client, uint64_t sequence) { WITH_CLIENT(true, client, close_sequence(c, sequence)); }
