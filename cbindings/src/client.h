/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A client: its connection to one model, and one link for each attachment.
 *
 *   rb_conn    what a handle stands for; lives from rb_connect to rb_close
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
 * One that a stream is to release is leaving until the stream has got there (stream.c).
 */
enum rb_slot_state { RB_SLOT_FREE, RB_SLOT_CLAIMED, RB_SLOT_COMMITTED, RB_SLOT_ENDED, RB_SLOT_ABANDONED, RB_SLOT_LEAVING };

typedef struct rb_slot {
	_Atomic uint32_t handle; /* +1 at every claim and release: a stale number no longer matches */
	_Atomic uint32_t wake;   /* a follower sleeps here, see waiting.c */
	uint8_t state, status;   /* the status once ended */
	int8_t level;
	bool held;   /* a worker may still write; decided together with the status */
	bool cancel; /* the broker was told to cancel it */
	bool notify; /* its end is to be told through the notifier */
	bool traced; /* the broker records, and wants to know its times */
	_Atomic bool pending; /* committed on a stream that has not got there: the broker does not know of it */
	_Atomic bool broken;  /* and never will, since the stream's context has failed */
	uint32_t rows;
	uint32_t dims[RB_DIMS];
	int64_t claim_took, claimed, committed, seen;
	_Atomic int64_t stream_looked; /* at the state of its stream */
	int64_t ends; /* not later than then: its deadline and END_GRACE; INT64_MAX if it has none */
} rb_slot;

typedef struct rb_conn rb_conn;

/*
 * The window's free slots are kept here, privately: no other process claims
 * from it. refs counts the claimed requests, the maps, and one for the client;
 * the segments are unmapped when it falls to zero. The struct itself stays
 * until the client is closed, so that a stale number finds it.
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
	bool parents;           /* of before the fork: not mapped here */
	_Atomic int64_t woke;   /* when somebody last woke from the bell */
	_Atomic int64_t looked; /* when somebody last looked at the socket */

	pthread_mutex_t mu; /* guards what follows */
	rb_producer commits;
	rb_record_words *record; /* NULL: the broker does not ask for times */
	rb_times *times;         /* two for each slot, by the generation's last bit */
	rb_slot *slots;
	uint32_t *gens;      /* generation of the last commit, by slot */
	uint64_t *free;      /* bitmap: 1 = free */
	uint32_t free_words; /* of each bitmap */
	uint32_t lowest;     /* no word of free below this one has a bit set */
	uint32_t nfree;
	uint32_t *abandoned; /* released while a worker or the broker still has them */
	uint32_t nabandoned;
	_Atomic uint32_t room; /* who waits in claim sleeps here */
	uint32_t claimers;     /* how many do */

	/* stream.c */
	_Atomic bool streams_are_long[2]; /* the last one took longer than it pays to wait for: with one request, with several */

	/* waiting.c */
	bool leading;
	bool spin_pays;    /* the last leader waited for a moment only; the leader's */
	int64_t spin_rest; /* no spin before this time; the leader's */
	uint64_t *follow; /* bitmap of slots with a follower */
	uint32_t followers;
	_Atomic uint64_t parked; /* odd while the leader is parked; +1 at each change */

	/* notify.c */
	uint64_t *watched; /* bitmap of slots */
	uint32_t nwatched;
	uint32_t reapers_waiting; /* for the lead, on turn: the reaper, and threads in rb_reap_wait */
	bool reaper_idle;         /* it polls its descriptors, nothing is under way */
	_Atomic uint32_t turn;
} rb_link;

struct rb_conn {
	char *model, *name;
	char socket[4096];
	uint32_t window_wanted; /* 0: the broker chooses */
	bool sized; /* no variable dimensions: whole requests in one call */
	bool on_device[2]; /* by side: some tensor lies in device memory */
	bool device; /* the program can use tensors in device memory */
	uint32_t inputs, outputs;
	_Atomic uint32_t window, max_batch; /* of the latest attachment */

	rb_link *_Atomic live;     /* NULL while there is no broker */
	_Atomic int final;         /* set once: closed */
	_Atomic bool left;         /* a link that is no longer live may have requests that are watched */
	_Atomic uint32_t change;   /* +1 whenever live or final changes; a futex */
	_Atomic uint32_t own_from; /* attachments with lower numbers are the parent's */
	rb_link *_Atomic links;    /* newest first */

	pthread_mutex_t mu; /* guards what follows */
	uint32_t attached;  /* how many attachments there ever were */
	rb_model info;      /* of the latest */
	rb_layout layout;   /* likewise; tensors only */
	bool attaching;     /* a thread is at it; pending is its own */
	rb_attach pending;
	int64_t next_try, delay;
	/* since when no try has got so far as to ask: this process stood still, or the broker's queue is full; 0: the last one has */
	int64_t unbegun;
	int why;            /* it could not attach again; 0 while there is a link */
	char why_text[512];

	/* notify.c */
	_Atomic int notify_fd, poke_fd; /* -1: none */
	_Atomic bool reaping;
	pthread_t reaper;
	_Atomic bool closing;
};

/* wake.c; where it says mu, the caller holds that */
void rb_link_wake_ended(rb_link *l);     /* pokes followers, and rings the notifier, for requests that have ended */
void rb_link_wake_followers(rb_link *l); /* all of them: the link is dead */
void rb_link_kick(rb_link *l);           /* makes a parked leader look around */
void rb_link_resign(rb_link *l);
void rb_link_promote(rb_link *l);                /* mu: has some follower try for the lead, if there is no leader */
void rb_link_pass_turn(rb_link *l);              /* mu: has all look who wait for the lead in notify.c */
void rb_link_unfollow(rb_link *l, uint32_t at);  /* mu */
bool rb_link_any_over(const rb_link *l);         /* mu: a watched request has ended */
void rb_link_tell_notifier(rb_link *l);          /* mu: rings if one has */
void rb_link_wake_reaper(rb_link *l);            /* mu: there is something to wait for */
void rb_link_watch(rb_link *l, uint32_t at);     /* mu; the caller commits it now */
void rb_link_unwatch(rb_link *l, uint32_t at);   /* mu */

/* conn.c */
#define RB_FIRST_RETRY (5 * MILLISECOND) /* of attaching; doubles each time */
#define RB_LAST_RETRY (500 * MILLISECOND)
/* The present link, held; NULL if there is none. */
rb_link *rb_conn_live(rb_conn *c, int64_t now);
/* The same, attaching again if need be, until the deadline at most. */
int rb_conn_link(rb_conn *c, int64_t until, bool may_wait, rb_link **link, bool *interrupted);
/* Attaches again as the broker has said, while the link that the caller holds
 * goes on. Takes at most so long; true if the client has another link then, or none. */
bool rb_conn_follow(rb_conn *c, rb_link *held, int64_t patience, bool *interrupted);
/* A broker that went away: ends everything in flight. */
void rb_conn_lost(rb_conn *c, rb_link *l);
/* Another link, held by the client, instead of the present one, for rb_connect; false: no memory. The caller holds mu. */
bool rb_conn_use(rb_conn *c, rb_link *l);
int rb_conn_attach(rb_conn *c, int64_t deadline, rb_link **link, bool *interrupted);
void rb_conn_changed(rb_conn *c); /* live or final has */
void rb_conn_look_at_left(rb_conn *c); /* has the reaper look at links that the client has left */

/* link.c */
rb_link *rb_link_new(rb_conn *c, rb_session *s, int *status); /* takes the session over */
void rb_link_free(rb_link *l);
bool rb_link_hold(rb_link *l); /* false: it is gone already */
void rb_link_drop(rb_link *l);
/* A map of the link's tensors; takes a ref over. */
int rb_link_map(rb_link *l, rb_map *out);
void rb_link_disown(rb_link *l);
void rb_link_fail(rb_link *l);
/* Looks at the socket, if nobody has for a while. */
bool rb_link_lost(rb_link *l, int64_t now, int64_t every);
bool rb_link_take(rb_link *l, uint32_t rows, uint32_t *at);          /* the caller holds mu */
void rb_link_give_back(rb_link *l, uint32_t at, uint32_t rows);      /* likewise */
bool rb_link_push(rb_link *l, const rb_commit_entry *e, bool *ring); /* likewise */
bool rb_link_ended(rb_link *l, uint32_t at);
/* Looks now and then whether the stream that a request was committed on has failed. */
void rb_link_check_stream(rb_link *l, uint32_t at, int64_t now);
static inline bool rb_link_recorded(const rb_link *l)
{
	return l->record && atomic_load_explicit(&l->record->recording, memory_order_relaxed);
}
static inline rb_times *rb_link_times(rb_link *l, uint32_t at) { return &l->times[2 * at + l->gens[at] % 2]; }
/* A request whose deadline has passed ends so much later at the latest, also if
 * the broker, which ends it at the same moment and knows why, stands still. */
#define END_GRACE (2 * MILLISECOND)
static inline bool rb_link_expired(const rb_link *l, uint32_t at)
{
	return l->slots[at].ends != INT64_MAX && rb_now() >= l->slots[at].ends;
}
/* Nobody will answer the request any more; leaves the slot's books alone. */
static inline bool rb_link_over(const rb_link *l, uint32_t at)
{
	return rb_word_gen(rb_board_word(&l->session.board, l->first + at)) == l->gens[at] || l->dead || rb_link_expired(l, at);
}

/* request.c */
typedef struct rb_req {
	rb_link *link;
	uint32_t at, handle;
} rb_req;

/* Finds a request by its number, or says why it is none. */
int rb_req_find(rb_conn *c, uint64_t id, rb_req *r);
uint64_t rb_req_id(const rb_req *r);
int rb_req_claim(rb_conn *c, uint32_t rows, const uint32_t *dims, uint32_t ndims, int64_t timeout, rb_req *r);
int rb_req_commit(rb_conn *c, const rb_req *r, uint32_t count, int64_t timeout, uint32_t flags);
/* Finds requests by their numbers, and commits all of them in some way. */
typedef int (*rb_committer)(rb_conn *c, const rb_req *r, uint32_t count, uint32_t flags, const void *how);
int rb_reqs_commit(rb_conn *c, const uint64_t *requests, uint32_t count, uint32_t flags, rb_committer commit, const void *how);
/* The steps of it, for stream.c. What can be wrong with a request that is to be committed: */
int rb_req_check_commit(rb_conn *c, const rb_req *r, uint32_t flags);
/* Marks requests of one attachment as committed: all, or none if one is listed twice. The caller holds mu. */
bool rb_reqs_mark_committed(const rb_req *r, uint32_t count);
/* A claimed request is a committed one in this client's books; the caller holds mu. */
void rb_link_book(rb_link *l, uint32_t at, int64_t now, uint32_t flags);
/* Tells the broker of it, also of its cancellation; false: the ring is full. The caller holds mu. */
bool rb_link_tell(rb_link *l, uint32_t at, int64_t now, int64_t timeout, bool *ring);
/* What follows when mu was given back. */
void rb_link_told(rb_conn *c, rb_link *l, bool ring, bool full, uint32_t flags);
/* Whether the slots of a request would be free if it were released now. */
bool rb_req_is_over(const rb_req *r);
/* The slots of a released request are free when its word has come; cancels it, if asked. The caller holds mu. */
void rb_link_abandon(rb_link *l, uint32_t at, bool cancel, bool *ring);
int rb_req_wait(const rb_req *r, int64_t until);
int rb_req_poll(const rb_req *r);
int rb_req_release(const rb_req *r);

/*
 * Bodies of functions of the header. given: all pointers that they need are there;
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
/* Sizes of a request's inputs, rounded up to the model's buckets. */
void rb_link_padded(const rb_link *l, const rb_slot *s, uint32_t dims[RB_DIMS]);

/* waiting.c */
int rb_link_await(rb_link *l, uint32_t at, int64_t until);

/* How long a leader spins before it parks: as Go's shm.LeastSpin. */
#define SPIN (50 * MICROSECOND)

/* notify.c */
void rb_notifier_stop(rb_conn *c);

/* fork.c */
void rb_link_in_child(void *link);

#define BIT(map, i) ((map)[(i) / 64] >> ((i) % 64) & 1)
#define SET_BIT(map, i) ((map)[(i) / 64] |= UINT64_C(1) << ((i) % 64))
#define CLEAR_BIT(map, i) ((map)[(i) / 64] &= ~(UINT64_C(1) << ((i) % 64)))

#endif
