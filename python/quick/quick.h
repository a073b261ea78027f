/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The quick path of a request, without ctypes: model(x), and request() with its
 * arrays, run and release. binding/ctypes_path.py is the same over ctypes, for where there
 * is no compiler; both have the same classes, and binding/paths.py chooses.
 *
 *   client.c    Client    base of Core: a connection, and whole requests in one call
 *               Caller    base of Model: model(x) without a function of Python in between
 *   many.c                requests in flight, and their futures
 *   request.c   Held      base of Request: one claimed request and the arrays over it
 *               Columns   the arrays of one side of it, by name
 *   module.c    the module, what it is given by Python, and a worker's batches
 *
 * Two rules for everything here:
 *
 * - A signal's handler of Python runs only where PyErr_CheckSignals is called,
 *   so whatever is claimed is either owned by an object or given back.
 * - The interpreter's lock is released only around what may wait, once for each
 *   request: a thread that lets go of it may get it back milliseconds later.
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

#include <string.h>
#include <time.h>

#include "ringbatch.h"

/* Blocking calls return at least this often, so that Python can handle signals. */
#define SLICE INT64_C(50000000)
#define MOST_DIMS RB_MAX_VARIABLE_DIMS
#define MOST_RANK RB_MAX_RANK
#define MOST_TENSORS 64

/* ---- what Python gave (module.c) ------------------------------------------- */

/* The one that ctypes has loaded: its functions, by name. */
#define FUNCTIONS(F)                                                                                                       \
	F(rb_error) F(rb_connect) F(rb_close) F(rb_claim) F(rb_claim_prepared) F(rb_commit) F(rb_commit_all) F(rb_wait) \
	F(rb_poll) F(rb_release) F(rb_commit_on_stream) F(rb_release_on_stream) F(rb_infer) F(rb_collect) F(rb_submit) F(rb_reap) F(rb_worker_next) F(rb_batch_complete)
#define DECLARE(name) extern __typeof__(name) *p_##name;
FUNCTIONS(DECLARE)

/* Of NumPy, and the functions of Python that are needed where it is not quick any more. */
extern PyObject *ndarray, *np_empty, *columns_class, *end_view, *nanoseconds, *err_released, *err_committed, *err_parents;
extern PyObject *name_done, *name_set_result; /* of a future's methods */

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
	PyObject_HEAD
	unsigned long long handle;
	/* plain: every input has a fixed shape; single: model(x) has a quick path;
	 * on_device: some tensor is, and a stream orders commits and releases */
	char closed, plain, single, on_device;
	/* model(x) for one item of a model with one input and one output of fixed
	 * shapes; x_dtype is NULL for other models. */
	PyObject *x_dtype, *y_arguments; /* of np.empty */
	int x_rank;
	Py_ssize_t x_shape[MOST_RANK];
	/* Arrays over single slots that nobody holds any more: for the next request there. */
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
extern PyType_Spec client_spec, caller_spec, held_spec, columns_spec;

/* Raises what the status says; NULL. */
PyObject *raise_status(Client *c, int status);
/* Raises the exception that the function makes; NULL. */
PyObject *raise_from(PyObject *function);
/* Drops the arrays that were kept for the next request. */
void forget_views(Client *c);
/* Commits; the status, -1 if an exception was raised. stream: which one the caller named, or NULL. */
int commit_one(Client *c, uint64_t request, int64_t timeout, uint32_t flags, PyObject *stream);
/* Gives the slots back; on the device once what was queued there has been done. */
void release_one(Client *c, uint64_t request, PyObject *stream);
/* Gives back slots that nothing in this process can use any more, as there is no room; -1 if an exception was raised. */
int sweep(Client *c);
/* Waits until the request has ended, or the time is over, or a handler raised: -1. */
int wait_for(Client *c, uint64_t request, int64_t timeout);
/* Whether x is what model(x) has a quick path for. */
int fits(const Client *c, PyObject *x);
/* An array for its output. */
PyObject *new_output(const Client *c);

/* ---- many in flight (many.c) ------------------------------------------------ */

/* Lists a request that is claimed and filled, and commits it. It is either in
 * waiters afterwards or released. */
PyObject *list_and_commit(Client *c, uint64_t request, PyObject *waiters, PyObject *waiter, int64_t timeout, int hold);
PyObject *client_submit_into(Client *c, PyObject *args);
PyObject *client_hold_one(Client *c, PyObject *args);
PyObject *client_commit_held(Client *c, PyObject *args);
PyObject *client_collect_one(Client *c, PyObject *number);
PyObject *client_drain(Client *c, PyObject *args);

#endif
