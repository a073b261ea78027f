/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The quick path of a request, without ctypes: calls of a model, and request() with its
 * arrays, run and release. binding/ctypes_path.py has the same classes over ctypes, for
 * systems without a compiler; binding/paths.py chooses.
 *
 *   client.c    Client    base of Core: a connection, its waits and its tensors
 *   call.c      Caller    base of Model: model(x, …) without a Python function in between
 *               Stepper   base of Sequence: the same for step(x, …)
 *   many.c                requests in flight, and their futures
 *   request.c   Held      base of Request: one claimed request and the arrays over it
 *               Columns   the arrays of one side of it, by name
 *   batch.c               a worker's batches
 *   module.c    the module, and its setup by Python
 *
 * Two rules for everything here:
 *
 * - A Python signal handler runs only where PyErr_CheckSignals is called, so every
 *   claimed request is either owned by an object or given back.
 * - The interpreter's lock is released only around calls that may wait, once for each
 *   request: a thread that releases it may get it back milliseconds later.
 *
 * Built with the limited API (one build for every CPython from 3.9 on) and
 * without NumPy's headers. Of an ndarray it knows the fields that NumPy's C ABI
 * fixes, and tries them out before it is used (setup).
 */
#ifndef RINGBATCH_QUICK_H
#define RINGBATCH_QUICK_H

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x03090000
#include <Python.h>
#include <structmember.h>

#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "ringbatch_cuda.h"
#include "ringbatch_weights.h"

#define MOST_DIMS RB_MAX_VARIABLE_DIMS
#define MOST_RANK RB_MAX_RANK
#define MOST_TENSORS 64

/* ---- what Python gave (module.c) ------------------------------------------- */

/* The functions of the library that ctypes has loaded. */
#define FUNCTIONS(F)                                                                                                   \
	F(rb_connect) F(rb_close) F(rb_client_model) F(rb_claim) F(rb_sequence_request) F(rb_input) F(rb_set_priority) \
	F(rb_set_cost) F(rb_commit) F(rb_commit_all) F(rb_wait) F(rb_poll) F(rb_output) F(rb_output_row) F(rb_release) \
	F(rb_request_version) F(rb_commit_on_stream) F(rb_release_on_stream) F(rb_infer) F(rb_step) F(rb_collect)      \
	F(rb_sequence_undo) F(rb_reap) F(rb_worker_next) F(rb_batch_gather) F(rb_batch_scatter) F(rb_batch_complete)
#define DECLARE(name) extern __typeof__(name) *p_##name;
FUNCTIONS(DECLARE)

/* Of NumPy, and Python functions for the slower cases. */
extern PyObject *ndarray, *np_empty, *columns_class, *end_view, *nanoseconds, *err_released, *err_committed, *err_parents;
extern PyObject *name_done, *name_set_result; /* of a future's methods */
extern PyObject *keyword_numbers;             /* the keywords of a call, numbered: module.c */

extern unsigned int generation; /* +1 in a forked child */

/* ---- arrays ---------------------------------------------------------------- */

typedef struct {
	PyObject_HEAD
	char *data;
	int rank;
	Py_ssize_t *shape, *strides;
	PyObject *base, *dtype;
	int flags;
} Array;

#define CONTIGUOUS 1 /* NPY_ARRAY_C_CONTIGUOUS */
#define WRITEABLE 0x0400 /* NPY_ARRAY_WRITEABLE */

/* ---- a connection ---------------------------------------------------------- */

#define CACHED 256u

/* A tensor of the model: a row of it. */
typedef struct {
	PyObject *dtype, *one; /* one: the arguments of np.empty for one row */
	PyObject *texts;       /* of a tensor of text: makes its str of an array of rows; else NULL */
	Py_ssize_t item, bytes; /* of one number; of the largest row */
	Py_ssize_t shape[MOST_RANK];
	uint32_t rank, variable;
} Tensor;

typedef struct {
	PyObject_HEAD
	unsigned long long handle;
	/* plain: the inputs have fixed shapes, and sized: the outputs, too; in_c: all tensors are on the host, and whole requests
	 * are made here. Otherwise a stream orders commits and releases. */
	char closed, plain, sized, in_c;
	PyObject *names; /* side -> {name: k}, outputs counted on from the inputs */
	Tensor *tensor;  /* the inputs, then the outputs */
	uint32_t tensors, inputs;
	/* Unused arrays over single slots, for the next request in the slot. */
	unsigned int cached_attachment;
	struct {
		uint64_t key; /* slot * tensors + k */
		PyObject *view;
	} cache[CACHED];
} Client;

extern PyTypeObject *client_type, *stepper_type;
extern PyType_Spec client_spec, caller_spec, stepper_spec, held_spec, columns_spec;

/* Raises the status as an exception; NULL. */
PyObject *raise_status(Client *c, int status);
/* Raises the exception that the function returns; NULL. */
PyObject *raise_from(PyObject *function);
/* Frees an object, and its hold of its type. */
void free_object(void *object);
/* Drops the unused arrays. */
void forget_views(Client *c);
/* Commits; the status, -1 if an exception was raised. stream: the caller's, or NULL. */
int commit_all(Client *c, const uint64_t *requests, uint32_t count, int64_t timeout, uint32_t flags, PyObject *stream);
/* Gives the slots back; on the device after the work of the stream. */
void release_one(Client *c, uint64_t request, PyObject *stream);
/* After a step that ended with RB_OK: the status, or -1 if a handler raises, and the step is undone. */
int keep_step(Client *c, uint64_t sequence, uint64_t request, int status);

/* Python's timeout, None or seconds; -1 if an exception was raised. */
int timeout_ns(PyObject *timeout, int64_t *ns);
/* Attempts in slices of the time left (0: without end), between which Python handles signals and sweep makes room: the last
 * status, or -1 if an exception was raised. After the end there is one more attempt: the sweep may have made room. */
typedef int (*Attempt)(Client *c, void *what, int64_t left, int64_t slice);
int in_slices(Client *c, int64_t timeout, Attempt attempt, void *what);
/* Waits until the request has ended or the time is over; -1 if a handler raised. */
int wait_for(Client *c, uint64_t request, int64_t timeout);

/* ---- whole requests (call.c) ------------------------------------------------ */

/* What a caller gave, and the request that it became. */
typedef struct {
	PyObject *x[MOST_TENSORS]; /* the inputs, which the caller's arguments keep */
	PyObject *kept;            /* or this dict */
	const void *in[MOST_TENSORS];
	void *out[MOST_TENSORS];
	uint64_t bytes[MOST_TENSORS]; /* of the inputs, then of the outputs */
	uint32_t dims[MOST_DIMS], ndims, given;
	int64_t rows; /* -1: one item, whose outputs have no rows */
	int64_t timeout, left, priority, cost; /* priority and cost: -1 is the default */
	uint64_t sequence, request;
	uint32_t version;
	char with_version, under_way;
} Call;

/* Takes arrays by place, all as the library wants them; -1 if an exception was raised. */
int take_all(Client *c, PyObject *arrays, PyObject *priority, PyObject *cost, Call *q);
/* The most rows of a request; -1 if an exception was raised. */
int64_t most_rows(Client *c);
/* A number of Python below the limit, or None; false if it is another one. */
int take_number(PyObject *given, int64_t limit, int64_t *number);
/* An attempt to claim slots and to write the inputs: RB_OK, with the request. */
int fill(Client *c, void *call, int64_t left, int64_t slice);
/* The outputs and the version of an ended request, which is released. */
PyObject *collect(Client *c, Call *q);
PyObject *client_rows_of(Client *c, PyObject *inputs);
PyObject *client_infer(Client *c, PyObject *args);
PyObject *client_collect(Client *c, PyObject *args);

/* ---- many in flight (many.c) ------------------------------------------------ */

/* Lists a filled request in waiters and commits it. After an exception it is released. */
PyObject *list_and_commit(Client *c, uint64_t request, PyObject *waiters, PyObject *waiter, int64_t timeout, int hold);
PyObject *client_send(Client *c, PyObject *args);
PyObject *client_drain(Client *c, PyObject *args);

/* ---- a worker's batches (batch.c) ------------------------------------------- */

PyObject *next_batch(PyObject *module, PyObject *args);
PyObject *copy_inputs(PyObject *module, PyObject *args);
PyObject *write_outputs(PyObject *module, PyObject *args);
PyObject *complete_batch(PyObject *module, PyObject *at);

#endif
