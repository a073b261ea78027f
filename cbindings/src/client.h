/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A client: its connection to one model, and one link for each attachment.
 *
 *   rb_conn    a client's state from rb_connect to rb_close
 *   rb_link    one attachment: one epoch of the broker, one window of slots
 *   rb_slot    a slot of the window as its client sees it
 */
#ifndef RB_CLIENT_H
#define RB_CLIENT_H

#include "internal.h"

/*
 *	free -- claim --> claimed -- commit --> committed -- word on the board --> ended
 *	 ^                   |                      |                               |
 *	 +---- release ------+-- release (cancel, abandoned until the word) -- release
 *
 * A slot that a stream releases is leaving until the stream has got there (stream.c).
 */
enum rb_slot_state { RB_SLOT_FREE, RB_SLOT_CLAIMED, RB_SLOT_COMMITTED, RB_SLOT_ENDED, RB_SLOT_ABANDONED, RB_SLOT_LEAVING };

typedef struct rb_conn rb_conn;
typedef struct rb_seq rb_seq;

typedef struct rb_slot {
	_Atomic uint32_t handle; /* +1 at every claim and release: a stale number no longer matches */
	uint8_t state, status;   /* the status once ended */
	int8_t level;
	uint16_t cost; /* of one row; 0: by its size */
	bool held;   /* a worker may still write; decided together with the status */
	bool cancel; /* the cancellation was sent */
	bool traced; /* the broker records its times */
	_Atomic bool pending; /* committed on a stream that has not got there: not sent to the broker yet */
	_Atomic bool broken;  /* never will be: the stream's context has failed */
	uint32_t rows;
	uint32_t dims[RB_DIMS];
	int64_t claim_took, claimed, committed, seen;
	_Atomic int64_t stream_looked; /* last check of its stream */
	int64_t ends; /* its deadline and END_GRACE; INT64_MAX without a deadline */
	/* Of a request whose client takes parts. A thread that waits in its place reads the first three, under mu. */
	bool parts;
	bool awaited;    /* the wait is over when a part is there */
	bool notified;   /* it was committed with RB_NOTIFY */
	bool begun;      /* the caller was given a part */
	uint64_t seen_shown; /* at the last look */
	uint32_t attempt, given; /* the attempt that the caller's steps are of, before the first an earlier request's; the steps */
	rb_seq *sequence; /* that keeps the slots; NULL: a plain request */
} rb_slot;

/*
 * The list of free slots is private: no other process claims from the window. refs
 * counts the claimed requests, the maps, and one for the client; at zero the segments
 * are unmapped. The struct stays until the client is closed, so that a stale number
 * finds it.
 */
typedef struct rb_link {
	struct rb_link *next; /* an older one */
	rb_conn *client;
	rb_session session;
	uint32_t first;  /* slot of the window */
	uint32_t window; /* slots */
	uint32_t number; /* of the client's attachments, counted from 1 */
	_Atomic int64_t refs;
	_Atomic uint32_t owners; /* of the struct: the client, and maps */
	_Atomic bool dead;      /* the broker went away, or the client was closed */
	bool parents;           /* attached before the fork: not mapped here */
	_Atomic int64_t woke;   /* last wake-up from the bell */
	_Atomic int64_t looked; /* last check of the socket */

	pthread_mutex_t mu; /* guards what follows */
	rb_producer commits;
	rb_record_words *record; /* NULL: the broker does not record times */
	rb_times *times;         /* two for each slot, by the generation's last bit */
	rb_slot *slots;
	uint32_t *gens;      /* generation of the last commit, by slot */
	uint64_t *free;      /* bitmap: 1 = free */
	uint32_t free_words; /* of each bitmap */
	uint32_t lowest;     /* no word of free below this one has a bit set */
	uint32_t nfree;
	uint32_t nkept;      /* by sequences */
	uint32_t *abandoned; /* slots released while a worker or the broker still has them */
	uint32_t nabandoned;
	struct rb_claimer *line; /* claims that wait, in order */

	/* stream.c */
	_Atomic bool streams_are_long[2]; /* the last stream was not worth waiting for: with one request, with several */

	/* waiting.c */
	bool leading;      /* a thread does */
	bool idle;         /* the leader polls descriptors: nothing is under way */
	bool spin_pays;    /* the last leader waited for less than SPIN; the leader's */
	int64_t spin_rest; /* no spin before this time; the leader's */
	struct rb_waiter *waiting; /* threads that do not lead */
	_Atomic uint64_t parked;   /* odd while the leader is parked; +1 at each change */
	uint64_t *watched; /* bitmap of slots whose end rings the notifier */
	uint32_t nwatched;
} rb_link;

struct rb_conn {
	char *model, *name;
	char socket[4096];
	uint32_t window_wanted; /* 0: the broker chooses */
	bool sized; /* no variable dimensions: whole requests in one call */
	bool on_device[2]; /* by side: a tensor is in device memory */
	bool device; /* the program can use tensors in device memory */
	uint32_t inputs, outputs, states;
	uint32_t input_dims; /* variable dimensions of the inputs */
	_Atomic uint32_t window, max_batch; /* of the latest attachment */

	rb_link *_Atomic live;     /* NULL while there is no broker */
	_Atomic int final;         /* set once: closed */
	_Atomic bool left;         /* links that the client has left may have watched requests */
	_Atomic uint32_t change;   /* +1 whenever live or final changes; a futex */
	rb_link *_Atomic links;    /* newest first */

	pthread_mutex_t mu; /* guards what follows */
	uint32_t attached;  /* attachments so far */
	rb_model info;      /* of the latest */
	rb_layout layout;   /* likewise; tensors only */
	bool attaching;     /* a thread is attaching, and uses pending */
	rb_attach pending;
	int64_t next_try, backoff;
	int64_t unbegun;    /* since when no try could send its request; 0 if the last one could */
	int why;            /* status of the last try to attach again; 0 while there is a link */
	char why_text[512];

	rb_seq *sequences;

	/* notify.c */
	_Atomic int notify_fd, poke_fd; /* -1: none */
	_Atomic bool reaping;
	pthread_t reaper;
	_Atomic bool closing;
};

/* conn.c */
/* The present link, held; NULL if there is none. */
rb_link *rb_conn_live(rb_conn *c, int64_t now);
/* The same, attaching again if need be, for at most until the deadline. */
int rb_conn_link(rb_conn *c, int64_t until, bool may_wait, rb_link **link, bool *interrupted);
/* A link for a claim, which follows the broker's request to attach again. */
int rb_conn_hold(rb_conn *c, int64_t until, bool may_wait, int64_t now, rb_link **link, bool *interrupted);
/* Attaches again at the broker's request, for at most `patience`, while the caller's link goes on. True if the client has
 * another link afterwards, or none. */
bool rb_conn_follow(rb_conn *c, rb_link *held, int64_t patience, bool *interrupted);
/* The broker went away: ends everything in flight. */
void rb_conn_lost(rb_conn *c, rb_link *l);
/* Makes l the present link, held by the client; false if there is no memory. The caller holds mu. */
bool rb_conn_use(rb_conn *c, rb_link *l);
int rb_conn_attach(rb_conn *c, int64_t deadline, rb_link **link, bool *interrupted);
void rb_conn_changed(rb_conn *c); /* live or final has changed */
void rb_conn_look_at_left(rb_conn *c); /* wakes the reaper for links that the client has left */

/* link.c; "mu": the caller holds mu */
rb_link *rb_link_new(rb_conn *c, rb_session *s, int *status); /* takes the session over */
void rb_link_free(rb_link *l);
bool rb_link_hold(rb_link *l); /* false: it is unmapped already */
void rb_link_drop(rb_link *l);
/* A map of the link's tensors; takes a ref over. */
int rb_link_map(rb_link *l, rb_map *out);
void rb_link_disown(rb_link *l);
void rb_link_fail(rb_link *l);
/* Checks the socket, unless a thread has done so within `every`. */
bool rb_link_lost(rb_link *l, int64_t now, int64_t every);
bool rb_link_push(rb_link *l, const rb_commit_entry *e, bool *ring); /* the caller holds mu */
bool rb_link_ended(rb_link *l, uint32_t at);
/* Checks now and then whether a request's stream has failed. */
void rb_link_check_stream(rb_link *l, uint32_t at, int64_t now);
/* A thread that waits; on its stack. */
typedef struct rb_waiter {
	struct rb_waiter *next;
	uint32_t at; /* the slot of its request; RB_WATCHES: all watched ones */
	bool reaper; /* it is the library's thread */
	bool listed;
	_Atomic uint32_t wake; /* a futex */
	int64_t start, until;
} rb_waiter;
#define RB_WATCHES UINT32_MAX
void rb_waiter_wake(rb_waiter **at);      /* mu: takes it off the list; it looks again */
void rb_link_wake_waiting(rb_link *l);    /* mu: all of them */
void rb_link_wake_idle(rb_link *l);       /* mu: an idle leader looks around */
void rb_link_stir(rb_link *l);            /* every thread that waits in the link looks again */
void rb_link_watch(rb_link *l, uint32_t at);   /* mu; before the commit */
void rb_link_unwatch(rb_link *l, uint32_t at); /* mu */
void rb_link_book_parts(rb_link *l, uint32_t at, uint32_t flags); /* mu; before the commit of a request with RB_PARTS */
void rb_link_await_parts(rb_link *l, uint32_t at, bool on); /* whether a wait for the request ends with a part */
static inline bool rb_link_recorded(const rb_link *l)
{
	return l->record && atomic_load_explicit(&l->record->recording, memory_order_relaxed);
}
static inline rb_times *rb_link_times(rb_link *l, uint32_t at) { return &l->times[2 * at + l->gens[at] % 2]; }
/* The broker ends a request at its deadline. If the broker stands still, the client ends it this much later. */
#define END_GRACE (2 * MILLISECOND)
static inline bool rb_link_expired(const rb_link *l, uint32_t at)
{
	return l->slots[at].ends != INT64_MAX && rb_now() >= l->slots[at].ends;
}
/* Whether an awaited part may be there. */
static inline bool rb_link_has_part(const rb_link *l, uint32_t at)
{
	const rb_slot *s = &l->slots[at];
	return s->awaited && atomic_load_explicit(&l->session.board.bells[l->first + at].shown, memory_order_acquire) != s->seen_shown;
}
/* Whether the request has ended, or has an awaited part; does not change the slot's state. */
static inline bool rb_link_over(const rb_link *l, uint32_t at)
{
	return rb_word_gen(rb_board_word(&l->session.board, l->first + at)) == l->gens[at] || l->dead || rb_link_expired(l, at) ||
		rb_link_has_part(l, at);
}

/*
 * A sequence. Its slots have a request at all times, claimed, committed or ended, which
 * the caller may have released. When a step has ended well, the halves change.
 */
struct rb_seq {
	rb_seq *next; /* of the same client */
	rb_conn *client;
	uint64_t id;
	rb_link *link; /* NULL: it has no slots, since its state was lost */
	uint32_t at, rows;
	_Atomic bool busy;   /* a thread is inside */
	const void *thread;  /* that began the latest request: other threads keep off until its release */
	uint8_t half;  /* the half that the next step reads */
	bool stepping; /* a step was committed, and its end was not looked at yet */
	bool told;     /* the caller knows that the step ended well */
	bool undone;   /* it asked for the state from before it */
	bool advanced; /* the last step changed halves, for which undo changes them back */
	bool lost;
	uint8_t row[]; /* RB_STEP_FRESH; RB_RESET: fresh after the step that is under way; RB_WAS_FRESH: before the last one */
};
enum { RB_RESET = 4, RB_NAMED = 8, RB_WAS_FRESH = 16 };

/* request.c */
typedef struct rb_req {
	rb_link *link;
	uint32_t at, handle;
} rb_req;

/* Finds a request by its number. */
int rb_req_find(rb_conn *c, uint64_t id, rb_req *r);
#define RB_HANDLE_BITS 32
#define RB_SLOT_BITS 20
#ifndef RB_LINK_MASK /* tests have fewer numbers */
#define RB_LINK_MASK ((1u << (64 - RB_HANDLE_BITS - RB_SLOT_BITS)) - 1)
#endif
uint64_t rb_req_id(const rb_req *r);
rb_request rb_req_shown(const rb_req *r);
int rb_req_claim(rb_conn *c, uint32_t rows, const uint32_t *dims, uint32_t ndims, int64_t timeout, rb_req *r);
/* Claims slots that a sequence will keep. from: the attachment that they must be of, or NULL. */
int rb_req_claim_kept(rb_conn *c, rb_link *from, uint32_t rows, int64_t timeout, rb_req *r);
/* Whether these are sizes of the inputs. */
int rb_link_check_dims(const rb_link *l, const uint32_t *dims, uint32_t ndims);
/* Makes a request of slots that the client has. */
void rb_req_begin(rb_link *l, uint32_t at, uint32_t rows, const uint32_t *dims, int64_t start, int64_t now, rb_req *r);
int rb_req_commit(rb_conn *c, const rb_req *r, uint32_t count, int64_t timeout, uint32_t flags);
/* Finds requests by their numbers and commits them with a function. */
typedef int (*rb_committer)(rb_conn *c, const rb_req *r, uint32_t count, uint32_t flags, const void *how);
int rb_reqs_commit(rb_conn *c, const uint64_t *requests, uint32_t count, uint32_t flags, rb_committer commit, const void *how);
/* The steps of a commit, for stream.c. First the check: */
int rb_req_check_commit(rb_conn *c, const rb_req *r, uint32_t flags);
/* Marks requests of one attachment as committed: all, or none if one is listed twice. The caller holds mu. */
bool rb_reqs_mark_committed(const rb_req *r, uint32_t count);
/* Makes a claimed request a committed one. The caller holds mu. */
void rb_link_book(rb_link *l, uint32_t at, int64_t now, uint32_t flags);
/* Sends it to the broker, with its cancellation if there is one; false if the ring is full. The caller holds mu. */
bool rb_link_send(rb_link *l, uint32_t at, int64_t now, int64_t timeout, bool *ring);
/* Rings the doorbell, and handles a dead or left link. After mu is unlocked. */
void rb_link_after_send(rb_conn *c, rb_link *l, bool ring, bool full, uint32_t flags);
/* Whether the slots of a request would be free if it were released now. */
bool rb_req_is_over(const rb_req *r);
/* Lists a released slot, which is free after its word has come, and cancels the request if asked. The caller holds mu. */
void rb_link_abandon(rb_link *l, uint32_t at, bool cancel, bool *ring);
int rb_req_wait(const rb_req *r, int64_t until);
int rb_req_poll(const rb_req *r);
int rb_req_release(const rb_req *r);

/*
 * Bodies of functions of the header. given: all needed pointers are there;
 * result may use c, the client, and r, the request.
 */
#define WITH_CLIENT(given, client, result)                             \
	do {                                                           \
		if (!(given))                                          \
			return rb_missing();                           \
		rb_entry *entry = rb_table_enter(&rb_clients, client); \
		if (!entry)                                            \
			return rb_say(RB_ERR_CLOSED);                  \
		rb_conn *c = entry->value;                             \
		int status = RB_OK;                                    \
		status = (result);                                     \
		rb_table_leave(entry);                                 \
		return status;                                         \
	} while (0)
#define WITH_REQUEST(given, client, request, result)                                                           \
	do {                                                                                                   \
		rb_req r;                                                                                      \
		WITH_CLIENT(given, client, (status = rb_req_find(c, request, &r)) ? status : (result));        \
	} while (0)

static inline rb_slot *rb_req_slot(const rb_req *r) { return &r->link->slots[r->at]; }
static inline uint8_t *rb_req_rows(const rb_req *r, const rb_tensor *t)
{
	return r->link->session.planes.at + t->offset + (r->link->first + r->at) * t->stride;
}
/* The sizes of one row's outputs as the worker reported them, cut to the slot's. */
void rb_req_row_dims(const rb_req *r, uint32_t row, uint32_t dims[RB_DIMS]);
/* Sizes of a request's inputs, rounded up to the model's buckets. */
void rb_link_padded(const rb_link *l, const rb_slot *s, uint32_t dims[RB_DIMS]);

static inline uint8_t *rb_link_step(const rb_link *l, uint32_t at)
{
	return l->session.planes.at + l->session.layout.steps_at + (uint64_t)(l->first + at) * RB_STEP_BYTES;
}

/* sequence.c */
/* Finds a sequence by its number, and keeps other threads out of it until rb_seq_leave. */
int rb_seq_enter(rb_conn *c, uint64_t id, rb_entry **entry);
void rb_seq_leave(rb_entry *entry);
/* The next step as a claimed request. */
int rb_seq_request(rb_conn *c, rb_seq *q, const uint32_t *dims, uint32_t ndims, int64_t timeout, rb_req *r);
/* Frees all sequences of a client that is closed. */
void rb_seqs_free(rb_conn *c);

/* line.c */
typedef struct rb_claimer {
	struct rb_claimer *next;
	uint32_t rows, at;
	bool kept;                 /* a sequence will keep the slots */
	bool stays;                /* they must be of this attachment */
	bool interrupted;          /* a signal's handler ran */
	int64_t now, start, until; /* start: since when it waits; 0: it does not */
	int64_t joined;
	int64_t short_since; /* free slots are there but too few, while it is first; 0: not yet */
	bool polls;          /* it looks again each millisecond */
	_Atomic uint32_t wake; /* a futex; odd: the slots from `at` are its own */
} rb_claimer;
void rb_link_wake_claims(rb_link *l); /* mu: all look again; link.c */
enum { RB_SERVED = 1, RB_LOOK = 2 };                /* added to wake */
void rb_claimer_wake(rb_claimer *w, uint32_t add);
/* Takes slots, or waits in line for them. RB_LOOK_AGAIN: the client has another link, or is to look for one. */
int rb_link_claim(rb_link *l, rb_claimer *w);
#define RB_LOOK_AGAIN (-2)
void rb_link_give_back(rb_link *l, uint32_t at, uint32_t rows);  /* mu */
void rb_link_serve(rb_link *l);    /* mu: takes slots for the claimers */

/* waiting.c */
int rb_link_await(rb_link *l, uint32_t at, int64_t until);
/* Wakes waiters and rings the notifier while this is the client's link: the reaper until then, a thread in rb_reap_wait until
 * a watched request has ended. Returns `until`, or earlier after a signal. */
int64_t rb_link_await_watched(rb_link *l, bool reaper, int64_t until);

/* How long a leader spins before it parks; as Go's shm.LeastSpin. */
#define SPIN (50 * MICROSECOND)

/* notify.c */
void rb_notifier_stop(rb_conn *c);

/* fork.c */
void rb_link_in_child(void *link);

#define BIT(map, i) ((map)[(i) / 64] >> ((i) % 64) & 1)
#define SET_BIT(map, i) ((map)[(i) / 64] |= UINT64_C(1) << ((i) % 64))
#define CLEAR_BIT(map, i) ((map)[(i) / 64] &= ~(UINT64_C(1) << ((i) % 64)))

#endif
