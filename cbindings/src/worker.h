/* SPDX-License-Identifier: Apache-2.0 */
/* A worker: one attachment to a model, and the batches that it has taken. */
#ifndef RB_WORKER_H
#define RB_WORKER_H

#include "internal.h"

/* A request's answer; its rb_member has the rest. */
typedef struct rb_answer {
	uint32_t slot, gen, bell;
	uint8_t status;
	bool whole;   /* it failed with its batch: the broker runs it again or ends it */
	char *reason; /* of a failed request */
} rb_answer;

/* How far the growing output of a row is. */
typedef struct rb_progress {
	uint32_t steps, attempt, request;
} rb_progress;

typedef struct rb_work rb_work;
typedef struct rb_crew rb_crew; /* gather.c */

/* A batch: its public part and the library's. The arrays are allocated once, for the largest batch. */
typedef struct rb_taken {
	rb_batch shown;
	rb_work *worker;
	bool in_use;
	uint32_t version; /* of the weights that its answers name */
	uint32_t rounds;  /* rb_batch_set_rounds */
	uint64_t asked; /* outputs, then next states, of which the worker has asked for all rows */
	uint64_t *asked_of; /* the same, by row */
	int64_t mailed, started;
	rb_mail_request *mails; /* the mail's requests, copied: the broker may post over them */
	uint64_t *order;        /* scratch of sorting */
	rb_member *member;
	uint32_t *slot;
	rb_run *run;
	uint8_t *step;   /* of models with state: the step word of each row */
	uint32_t *half;  /* and the half that it reads: 2 * slot, or 1 more */
	uint64_t *start; /* scratch of packing: where each row begins, and the last one ends, in bytes */
	rb_answer *answer;           /* by request */
	uint32_t (*dims)[RB_DIMS];   /* sizes of the outputs, by row; only of models with variable outputs */
	rb_progress *progress;       /* by row; NULL if no output can grow */
	uint8_t *streamed;           /* by row; likewise */
} rb_taken;

struct rb_work {
	rb_session session;
	char model[RB_MAX_NAME_BYTES + 1];
	uint64_t handle;
	bool parents; /* attached before a fork, by the parent */
	bool pads;    /* asked for padding */
	bool direct;  /* it has mapped the tensors, and may write them past its batches */
	_Atomic bool busy; /* a thread is inside; a second one is refused */
	_Atomic uint32_t holds; /* maps, plus one until it is closed */
	rb_mail_words *mail;
	rb_producer done;
	uint64_t next; /* number of the mail to take next */
	uint32_t taken; /* batches not completed */
	int64_t looked; /* last check of the socket */
	rb_taken *batch[RB_GO_MAX_MAIL_DEPTH + 1];
	uint32_t batches;
	/* Spinning before parking: how long, since when, and whether it paid last time. */
	int64_t spin_for, waiting_since;
	bool spin_pays;
	int64_t spin_rest;
	/* Threads that gather: as many as the options say, 0: as the cores allow. */
	uint32_t gather_threads;
	bool alone; /* no crew can be made */
	rb_crew *crew;
};

/* worker.c: finds a worker and refuses a second thread. */
int rb_work_use(rb_worker id, rb_entry **entry, rb_work **w);
void rb_work_leave(rb_entry *e, rb_work *w);

/* Body of a function of the header; result may use w, the worker. */
#define WITH_WORKER(given, id, result)                \
	do {                                          \
		rb_entry *e;                          \
		rb_work *w;                           \
		if (!(given))                         \
			return rb_missing();          \
		int status = rb_work_use(id, &e, &w); \
		if (status)                           \
			return status;                \
		status = (result);                    \
		rb_work_leave(e, w);                  \
		return status;                        \
	} while (0)

/* taken.c */
rb_taken *rb_work_spare(rb_work *w);
/* Copies a mail, without requests that have ended meanwhile. */
int rb_taken_read(rb_taken *b, const uint8_t *mail);
/* Whether a client waits for one of its requests. */
bool rb_taken_wanted(const rb_taken *b);
void rb_taken_complete(rb_taken *b);
/* show.c: begins an attempt of the rows whose clients take parts. */
void rb_taken_begin(rb_taken *b);
/* Whether a row is smaller than it was shown; the text is in rb_error. */
bool rb_taken_took_back(const rb_taken *b, uint32_t row);
int rb_taken_show(rb_taken *b, uint32_t row, uint32_t steps);
void rb_taken_free(rb_taken *b);
void rb_taken_fail(rb_taken *b, uint32_t i, int status, const char *text);
/* whole: the broker may run its requests again. */
void rb_taken_fail_all(rb_taken *b, int status, const char *text, bool whole);

/* gather.c */
/* Rows by the numbers of their slots. */
typedef struct rb_rows {
	const uint8_t *plane;
	const uint32_t *slot;
	uint64_t count, size, stride;
	const uint64_t *start; /* where each row begins in the copy, and the last one ends; NULL: rows of size bytes */
} rb_rows;

/* Copies rows with the crew; false if they are too few for it. */
bool rb_crew_gather(rb_work *w, const rb_rows *r, uint8_t *to);
/* Begins to copy in the crew's threads. */
void rb_crew_prefetch(rb_work *w, const rb_rows *r, uint8_t *to);
/* Finishes the copies of the batch with these slots. */
void rb_crew_leave(rb_work *w, const uint32_t *slot);
void rb_crew_end(rb_work *w);

/* fork.c */
void rb_worker_in_child(void *worker);

#endif
