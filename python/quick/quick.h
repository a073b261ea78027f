/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The quick path of a request, without ctypes: calls of a model, and request() with its
 * arrays, run and release. binding/ctypes_path.py has the same classes over ctypes, for
 * systems without a compiler; binding/paths.py chooses.
 *
 *   client.c    Client    base of Core: a connection, and whole requests in one call
 *               Caller    base of Model: model(x, …) without a Python function in between
 *               Stepper   base of Sequence: the same for step(x, …)
 *   many.c                requests in flight, and their futures
 *   request.c   Held      base of Request: one claimed request and the arrays over it
 *               Columns   the arrays of one side of it, by name
 *   module.c    the module, its setup by Python, and a worker's batches
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

/* Blocking calls return at least this often, so that Python can handle signals. */
#define SLICE INT64_C(50000000)
#define MOST_DIMS RB_MAX_VARIABLE_DIMS
#define MOST_RANK RB_MAX_RANK
#define MOST_TENSORS 64

/* ---- what Python gave (module.c) ------------------------------------------- */

/* The functions of the library that ctypes has loaded. */
#define FUNCTIONS(F)                                                                                                    \
	F(rb_error) F(rb_connect) F(rb_close) F(rb_claim) F(rb_claim_prepared) F(rb_commit) F(rb_commit_all) F(rb_wait) \
	F(rb_poll) F(rb_release) F(rb_commit_on_stream) F(rb_release_on_stream) F(rb_infer_prepared) \
	F(rb_collect_prepared) F(rb_submit_prepared) F(rb_reap) F(rb_step_prepared) F(rb_sequence_request) F(rb_sequence_undo) \
	F(rb_worker_next) F(rb_batch_complete)
#define DECLARE(name) extern __typeof__(name) *p_##name;
FUNCTIONS(DECLARE)

/* Of NumPy, and Python functions for the slower cases. */
extern PyObject *ndarray, *np_empty, *columns_class, *end_view, *nanoseconds, *err_released, *err_committed, *err_parents;
extern PyObject *name_done, *name_set_result, *name_timeout; /* of a future's methods, and of a keyword */

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

/* ---- a connection ---------------------------------------------------------- */

#define CACHED 256u

typedef struct {
	PyObject *dtype;
	int rank;
	Py_ssize_t shape[MOST_RANK];
} Input;

typedef struct {
	PyObject_HEAD
	unsigned long long handle;
	/* plain: every input has a fixed shape; single: one input and one output with a quick path;
	 * scalar: an output has no dimensions; on_device: a stream orders commits and releases */
	char closed, plain, single, scalar, on_device;
	/* Calls with one item of a model with fixed shapes on the host; NULL for other models. */
	Input *quick;    /* by input */
	PyObject *empty; /* by output: arguments of np.empty */
	/* Unused arrays over single slots, for the next request in the slot. */
	PyObject *names;   /* side -> {name: k}, outputs counted on from the inputs */
	PyObject *fixed;   /* k -> whether the tensor has a fixed shape */
	uint32_t tensors, inputs;
	unsigned int cached_attachment;
	struct {
		uint64_t key; /* slot * tensors + k */
		PyObject *view;
	} cache[CACHED];
} Client;

extern PyTypeObject *client_type;
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
int commit_one(Client *c, uint64_t request, int64_t timeout, uint32_t flags, PyObject *stream);
/* Gives the slots back; on the device after the work of the stream. */
void release_one(Client *c, uint64_t request, PyObject *stream);
/* Gives back slots that this process cannot use any more; -1 if an exception was raised. */
int sweep(Client *c);
/* After a step that ended with RB_OK: the status, or -1 if a handler raises, and the step is undone. */
int keep_step(Client *c, uint64_t sequence, uint64_t request, int status);
/* Waits until the request has ended or the time is over; -1 if a handler raised. */
int wait_for(Client *c, uint64_t request, int64_t timeout);
/* Whether x is one item of the k-th input. */
int fits(const Client *c, uint32_t k, PyObject *x);
/* An array for the k-th output, and its memory. */
PyObject *new_output(const Client *c, Py_ssize_t k, void **data);

int64_t now_ns(void);
/* When a timeout ends; 0 has no end: INT64_MAX. */
int64_t ends_at(int64_t timeout);
/* The time until then, at most SLICE; 0 if it has come. */
int64_t slice_until(int64_t end);
/* Python's timeout, None or seconds; -1 if an exception was raised. */
int timeout_ns(PyObject *timeout, int64_t *ns);

/* ---- many in flight (many.c) ------------------------------------------------ */

/* Lists a filled request in waiters and commits it. After an exception it is released. */
PyObject *list_and_commit(Client *c, uint64_t request, PyObject *waiters, PyObject *waiter, int64_t timeout, int hold);
PyObject *client_submit_into(Client *c, PyObject *args);
PyObject *client_hold_one(Client *c, PyObject *args);
PyObject *client_commit_held(Client *c, PyObject *args);
PyObject *client_collect_one(Client *c, PyObject *number);
PyObject *client_drain(Client *c, PyObject *args);

#endif
