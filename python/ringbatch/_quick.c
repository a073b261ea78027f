/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The quick path of a request, without ctypes: model(x), and request() with its
 * arrays, run and release. _plain.py is the same over ctypes, for where there
 * is no compiler; both have the same classes, and _way.py chooses.
 *
 *   Client   base of Core: a connection, and whole requests in one call
 *   Caller   base of Model: model(x) without a function of Python in between
 *   Held     base of Request: one claimed request and the arrays over it
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
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x03090000
#include <Python.h>
#include <structmember.h>

#include <dlfcn.h>
#include <string.h>
#include <time.h>

#include "ringbatch.h"

/* Blocking calls return at least this often, so that Python can handle signals. */
#define SLICE INT64_C(50000000)
#define MOST_DIMS RB_MAX_VARIABLE_DIMS
#define MOST_RANK RB_MAX_RANK
#define MOST_TENSORS 64

/* ---- the library ----------------------------------------------------------- */

/* The one that ctypes has loaded: its functions, by name. */
#define FUNCTIONS(F)                                                                                                       \
	F(rb_error) F(rb_connect) F(rb_close) F(rb_claim) F(rb_claim_prepared) F(rb_commit) F(rb_wait) \
	F(rb_poll) F(rb_release) F(rb_infer) F(rb_collect) F(rb_submit) F(rb_reap) F(rb_worker_next) F(rb_batch_complete)
#define DECLARE(name) static __typeof__(name) *p_##name;
FUNCTIONS(DECLARE)

/* What setup was given: of NumPy, and the functions of Python that are needed
 * where it is not quick any more. */
static PyObject *ndarray, *np_empty, *columns_class, *end_view, *nanoseconds, *err_released, *err_committed, *err_parents;

static unsigned int generation; /* +1 in a forked child */

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

/* Whether the fields are where we think they are: those of a probe of shape (2, 3). */
static int knows_arrays(PyObject *probe, PyObject *dtype, unsigned long long address, Py_ssize_t item)
{
	Array *a = (Array *)probe;
	return Py_TYPE(probe) == (PyTypeObject *)ndarray && (unsigned long long)(uintptr_t)a->data == address && a->rank == 2 && a->shape[0] == 2 && a->shape[1] == 3 &&
	       a->strides[0] == 3 * item && a->strides[1] == item && a->base == NULL && a->dtype == dtype && a->flags & CONTIGUOUS;
}

/* ---- a connection ---------------------------------------------------------- */

#define CACHED 64u

typedef struct {
	PyObject_HEAD
	unsigned long long handle;
	char closed, plain, single; /* plain: every input has a fixed shape; single: model(x) has a quick path */
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

static PyObject *raise_status(Client *c, int status)
{
	PyObject *e = PyObject_CallMethod((PyObject *)c, "error", "i", status);
	if (e) {
		PyErr_SetObject((PyObject *)Py_TYPE(e), e);
		Py_DECREF(e);
	}
	return NULL;
}

static PyObject *raise_from(PyObject *function)
{
	PyObject *e = PyObject_CallObject(function, NULL);
	if (e) {
		PyErr_SetObject((PyObject *)Py_TYPE(e), e);
		Py_DECREF(e);
	}
	return NULL;
}

static void forget_views(Client *c)
{
	for (uint32_t i = 0; i < CACHED; i++)
		Py_CLEAR(c->cache[i].view);
}

static void close_handle(Client *c)
{
	if (c->closed || !c->handle)
		return;
	c->closed = 1;
	Py_BEGIN_ALLOW_THREADS
	p_rb_close(c->handle);
	Py_END_ALLOW_THREADS
	forget_views(c);
}

static PyObject *client_close(Client *c, PyObject *Py_UNUSED(none))
{
	close_handle(c);
	c->closed = 1;
	Py_RETURN_NONE;
}

static void client_dealloc(Client *c)
{
	PyTypeObject *type = Py_TYPE(c);
	close_handle(c);
	forget_views(c);
	Py_XDECREF(c->x_dtype);
	Py_XDECREF(c->y_arguments);
	Py_XDECREF(c->names);
	Py_XDECREF(c->fixed);
	((freefunc)PyType_GetSlot(type, Py_tp_free))(c);
	Py_DECREF(type);
}

/* dial(model, socket, name, window, timeout_ns): the status. */
static PyObject *client_dial(Client *c, PyObject *args)
{
	const char *model;
	PyObject *socket, *name;
	unsigned int window;
	long long timeout;
	int status;
	rb_client handle = 0;
	if (!PyArg_ParseTuple(args, "yOOIL", &model, &socket, &name, &window, &timeout))
		return NULL;
	rb_connect_options o = {.size = sizeof o, .window = window, .timeout = timeout,
				.socket = socket == Py_None ? NULL : PyBytes_AsString(socket), .name = name == Py_None ? NULL : PyBytes_AsString(name)};
	if (PyErr_Occurred())
		return NULL;
	Py_BEGIN_ALLOW_THREADS
	status = p_rb_connect(model, &o, &handle);
	Py_END_ALLOW_THREADS
	if (!status)
		c->handle = handle;
	return PyLong_FromLong(status);
}

/* learn(names, fixed, plain, x_dtype, x_shape, y_arguments): what the quick path
 * has to know of the model; x_dtype is None where model(x) has no quick path. */
static PyObject *client_learn(Client *c, PyObject *args)
{
	PyObject *names, *fixed, *dtype, *shape, *arguments;
	int plain;
	if (!PyArg_ParseTuple(args, "O!O!pOO!O!", &PyTuple_Type, &names, &PyTuple_Type, &fixed, &plain, &dtype, &PyTuple_Type, &shape, &PyTuple_Type, &arguments))
		return NULL;
	if (c->names || PyTuple_Size(names) != 2 || PyTuple_Size(shape) > MOST_RANK) {
		PyErr_SetString(PyExc_ValueError, "learn: once, and two sides");
		return NULL;
	}
	for (Py_ssize_t i = 0; i < PyTuple_Size(shape); i++)
		c->x_shape[c->x_rank++] = PyLong_AsSsize_t(PyTuple_GetItem(shape, i));
	c->plain = (char)plain;
	c->tensors = (uint32_t)PyTuple_Size(fixed);
	c->inputs = (uint32_t)PyDict_Size(PyTuple_GetItem(names, 0));
	Py_INCREF(c->names = names);
	Py_INCREF(c->fixed = fixed);
	if (dtype != Py_None) {
		Py_INCREF(c->x_dtype = dtype);
		Py_INCREF(c->y_arguments = arguments);
		c->single = 1;
	}
	if (PyErr_Occurred())
		return NULL;
	Py_RETURN_NONE;
}

static int fits(const Client *c, PyObject *x)
{
	const Array *a = (const Array *)x;
	return c->single && Py_TYPE(x) == (PyTypeObject *)ndarray && a->dtype == c->x_dtype && a->rank == c->x_rank && a->flags & CONTIGUOUS &&
	       !memcmp(a->shape, c->x_shape, (size_t)a->rank * sizeof *a->shape);
}

static PyObject *new_output(const Client *c)
{
	PyObject *y = PyObject_Call(np_empty, c->y_arguments, NULL);
	if (y && Py_TYPE(y) != (PyTypeObject *)ndarray) {
		Py_DECREF(y);
		PyErr_SetString(PyExc_TypeError, "numpy.empty gave no ndarray");
		return NULL;
	}
	return y;
}

/* Waits until the request has ended, or the time is over, or a handler raised: -1. */
static int wait_for(Client *c, uint64_t request, int64_t timeout)
{
	struct timespec t;
	int64_t end = 0, slice = SLICE;
	int status;
	if (timeout) {
		clock_gettime(CLOCK_MONOTONIC, &t);
		int64_t now = t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
		end = timeout > INT64_MAX - now ? INT64_MAX : now + timeout;
	}
	for (;;) {
		if (timeout) {
			clock_gettime(CLOCK_MONOTONIC, &t);
			int64_t left = end - (t.tv_sec * INT64_C(1000000000) + t.tv_nsec);
			slice = left < 0 ? 0 : left < SLICE ? left : SLICE;
		}
		Py_BEGIN_ALLOW_THREADS
		status = p_rb_wait(c->handle, request, slice);
		Py_END_ALLOW_THREADS
		if (status != RB_ERR_TIMEOUT || !slice)
			return status;
		if (PyErr_CheckSignals())
			return -1;
	}
}

/* Lists a request that is claimed and filled, and commits it. It is either in
 * waiters afterwards or released. */
static PyObject *list_and_commit(Client *c, uint64_t request, PyObject *waiters, PyObject *waiter, int64_t timeout, int hold)
{
	PyObject *id = PyLong_FromUnsignedLongLong(request);
	if (id && !PyDict_SetItem(waiters, id, waiter)) {
		int status = hold ? RB_OK : p_rb_commit(c->handle, request, timeout, RB_NOTIFY);
		if (!status)
			return id;
		raise_status(c, status);
		PyObject *kind, *value, *trace;
		PyErr_Fetch(&kind, &value, &trace);
		PyDict_DelItem(waiters, id);
		PyErr_Restore(kind, value, trace);
	}
	Py_XDECREF(id);
	p_rb_release(c->handle, request);
	return NULL;
}

/* model(x): the output, None if x is not just what the quick path takes. */
static PyObject *one(Client *c, PyObject *x)
{
	if (!fits(c, x))
		Py_RETURN_NONE;
	PyObject *y = new_output(c);
	if (!y)
		return NULL;
	const void *in[1] = {((Array *)x)->data};
	void *out[1] = {((Array *)y)->data};
	uint64_t request;
	int status;
	do { /* no slot yet, or not attached yet */
		Py_BEGIN_ALLOW_THREADS
		status = p_rb_infer(c->handle, 1, in, out, 0, SLICE, &request);
		Py_END_ALLOW_THREADS
	} while ((status == RB_ERR_FULL || (status == RB_ERR_TIMEOUT && !request)) && !PyErr_CheckSignals());
	if (status == RB_ERR_TIMEOUT && request && !PyErr_CheckSignals()) {
		status = wait_for(c, request, 0);
		if (status >= 0) {
			status = p_rb_collect(c->handle, request, out);
			request = 0;
		}
	}
	if (!status)
		return y;
	Py_DECREF(y);
	if (!PyErr_Occurred())
		return raise_status(c, status);
	if (request)
		p_rb_release(c->handle, request);
	return NULL;
}

/* submit_into(waiters, waiter, arrays, rows, timeout_ns, hold): sends and lists
 * waiters[request] = waiter, before anybody can tell that it has ended; with hold
 * it is not committed yet. The request's number; 0 if there is no room yet. */
static PyObject *client_submit_into(Client *c, PyObject *args)
{
	PyObject *waiters, *waiter, *arrays;
	unsigned int rows;
	long long timeout;
	int hold, status;
	const void *in[MOST_TENSORS];
	uint64_t request = 0;
	if (!PyArg_ParseTuple(args, "O!OO!ILp", &PyDict_Type, &waiters, &waiter, &PyTuple_Type, &arrays, &rows, &timeout, &hold))
		return NULL;
	Py_ssize_t count = PyTuple_Size(arrays);
	for (Py_ssize_t i = 0; i < count; i++) {
		Array *a = (Array *)PyTuple_GetItem(arrays, i);
		if (count > MOST_TENSORS || Py_TYPE((PyObject *)a) != (PyTypeObject *)ndarray || !(a->flags & CONTIGUOUS)) {
			PyErr_SetString(PyExc_TypeError, "contiguous arrays only");
			return NULL;
		}
		in[i] = a->data;
	}
	Py_BEGIN_ALLOW_THREADS
	status = p_rb_submit(c->handle, rows, in, 0, RB_HOLD, &request);
	Py_END_ALLOW_THREADS
	if (status == RB_ERR_FULL || status == RB_ERR_TIMEOUT)
		return PyLong_FromLong(0);
	if (status)
		return raise_status(c, status);
	return list_and_commit(c, request, waiters, waiter, timeout, hold);
}

/* reap_into(ended): appends the numbers of the requests that have ended; False once the client is closed. */
static PyObject *client_reap_into(Client *c, PyObject *ended)
{
	uint64_t ids[64];
	uint32_t count;
	do {
		int status = p_rb_reap(c->handle, ids, 64, &count);
		if (status == RB_ERR_CLOSED)
			Py_RETURN_FALSE;
		if (status)
			return raise_status(c, status);
		for (uint32_t i = 0; i < count; i++) {
			PyObject *id = PyLong_FromUnsignedLongLong(ids[i]);
			if (!id || PyList_Append(ended, id))
				return NULL;
			Py_DECREF(id);
		}
	} while (count == 64);
	Py_RETURN_TRUE;
}

/* collect_one(request): the output of one that has ended; it is released. */
static PyObject *client_collect_one(Client *c, PyObject *number)
{
	uint64_t request = PyLong_AsUnsignedLongLong(number);
	if (PyErr_Occurred())
		return NULL;
	PyObject *y = new_output(c);
	if (!y)
		return NULL;
	void *out[1] = {((Array *)y)->data};
	int status = p_rb_collect(c->handle, request, out);
	if (!status)
		return y;
	Py_DECREF(y);
	return raise_status(c, status);
}

static PyMethodDef client_methods[] = {
	{"dial", (PyCFunction)client_dial, METH_VARARGS, NULL},
	{"learn", (PyCFunction)client_learn, METH_VARARGS, NULL},
	{"one", (PyCFunction)one, METH_O, NULL},
	{"submit_into", (PyCFunction)client_submit_into, METH_VARARGS, NULL},
	{"reap_into", (PyCFunction)client_reap_into, METH_O, NULL},
	{"collect_one", (PyCFunction)client_collect_one, METH_O, NULL},
	{"close", (PyCFunction)client_close, METH_NOARGS, NULL},
	{0},
};
static PyMemberDef client_members[] = {
	{"handle", T_ULONGLONG, offsetof(Client, handle), READONLY, NULL},
	{"closed", T_BOOL, offsetof(Client, closed), READONLY, NULL},
	{"plain", T_BOOL, offsetof(Client, plain), READONLY, NULL},
	{"single", T_BOOL, offsetof(Client, single), READONLY, NULL},
	{0},
};
static PyType_Slot client_slots[] = {
	{Py_tp_doc, "A connection."},
	{Py_tp_dealloc, client_dealloc},
	{Py_tp_methods, client_methods},
	{Py_tp_members, client_members},
	{0},
};
static PyType_Spec client_spec = {"ringbatch._quick.Client", sizeof(Client), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, client_slots};
static PyTypeObject *client_type;

/* ---- model(x) -------------------------------------------------------------- */

typedef struct {
	PyObject_HEAD
	PyObject *core;
} Caller;

static PyObject *caller_call(Caller *m, PyObject *args, PyObject *named)
{
	if (PyTuple_Size(args) == 1 && (!named || PyDict_Size(named) == 0) && m->core) {
		PyObject *y = one((Client *)m->core, PyTuple_GetItem(args, 0));
		if (y != Py_None)
			return y;
		Py_DECREF(y);
	}
	PyObject *general = PyObject_GetAttrString((PyObject *)m, "_call");
	PyObject *y = general ? PyObject_Call(general, args, named) : NULL;
	Py_XDECREF(general);
	return y;
}

static int caller_set_core(Caller *m, PyObject *core, void *Py_UNUSED(closure))
{
	if (!core || !PyObject_TypeCheck(core, client_type) || m->core) {
		PyErr_SetString(PyExc_TypeError, "a model has one connection");
		return -1;
	}
	Py_INCREF(m->core = core);
	return 0;
}

static PyObject *caller_get_core(Caller *m, void *Py_UNUSED(closure))
{
	if (!m->core) {
		PyErr_SetString(PyExc_AttributeError, "_core");
		return NULL;
	}
	Py_INCREF(m->core);
	return m->core;
}

static void caller_dealloc(Caller *m)
{
	PyTypeObject *type = Py_TYPE(m);
	Py_XDECREF(m->core);
	((freefunc)PyType_GetSlot(type, Py_tp_free))(m);
	Py_DECREF(type);
}

static PyGetSetDef caller_fields[] = {{"_core", (getter)caller_get_core, (setter)caller_set_core, NULL, NULL}, {0}};
static PyType_Slot caller_slots[] = {
	{Py_tp_doc, "A model that is called."},
	{Py_tp_dealloc, caller_dealloc},
	{Py_tp_call, caller_call},
	{Py_tp_getset, caller_fields},
	{0},
};
static PyType_Spec caller_spec = {"ringbatch._quick.Caller", sizeof(Caller), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, caller_slots};

/* ---- a request ------------------------------------------------------------- */

typedef struct {
	PyObject_HEAD
	Client *core;
	unsigned long long id;
	unsigned int slot, rows, attachment, generation;
	char single, released, committed, ok;
	PyObject **view; /* by tensor: what was handed out; NULL until the first one is */
} Held;

/* Ends the arrays from..to. One that nobody else holds stays as it is, for the
 * next request in this slot; the others lose their memory. */
static int end_views(Held *r, uint32_t from, uint32_t to, PyObject *error)
{
	int failed = 0;
	Client *c = r->core;
	for (uint32_t k = from; r->view && k < to; k++) {
		PyObject *v = r->view[k];
		if (!v)
			continue;
		r->view[k] = NULL;
		if (Py_REFCNT(v) == 1 && r->single && PyTuple_GetItem(c->fixed, k) == Py_True && !c->closed && r->attachment == c->cached_attachment) {
			uint64_t key = (uint64_t)r->slot * c->tensors + k;
			PyObject *before = c->cache[key % CACHED].view;
			c->cache[key % CACHED].key = key;
			c->cache[key % CACHED].view = v;
			Py_XDECREF(before);
			continue;
		}
		PyObject *done = PyObject_CallFunctionObjArgs(end_view, v, error, NULL);
		failed |= !done;
		Py_XDECREF(done);
		Py_DECREF(v);
	}
	return failed ? -1 : 0;
}

static PyObject *check(Held *r)
{
	if (r->generation != generation)
		return raise_from(err_parents);
	if (r->released)
		return raise_from(err_released);
	return Py_None;
}

/* Held(core, rows=1, dims=(), timeout_ns=0, single=True): waits for room in the window. */
static int held_init(Held *r, PyObject *args, PyObject *named)
{
	Client *c;
	PyObject *dims = NULL;
	long long rows = 1, timeout = 0;
	int single = 1, status;
	uint32_t sizes[MOST_DIMS];
	Py_ssize_t ndims;
	if ((named && PyDict_Size(named)) || !PyArg_ParseTuple(args, "O!|LOLp", client_type, &c, &rows, &dims, &timeout, &single))
		return -1;
	if (r->core) {
		PyErr_SetString(PyExc_TypeError, "a request is made once");
		return -1;
	}
	ndims = dims ? PyTuple_Size(dims) : 0;
	if (ndims < 0 || ndims > MOST_DIMS || rows < 0 || rows > UINT32_MAX) {
		if (!PyErr_Occurred())
			raise_status(c, RB_ERR_ROWS);
		return -1;
	}
	for (Py_ssize_t i = 0; i < ndims; i++) {
		unsigned long long size = PyLong_AsUnsignedLongLong(PyTuple_GetItem(dims, i));
		if (PyErr_Occurred())
			return -1;
		sizes[i] = size > UINT32_MAX ? UINT32_MAX : (uint32_t)size;
	}
	r->generation = generation;
	r->released = 1;
	rb_inference now = {.client = c->handle, .rows = (uint32_t)rows, .flags = RB_AT_ONCE};
	status = ndims ? RB_ERR_FULL : p_rb_claim_prepared(&now);
	if (!status) {
		r->id = now.request;
		r->slot = now.slot;
		r->attachment = now.attachment;
	} else {
		rb_request taken;
		struct timespec t;
		clock_gettime(CLOCK_MONOTONIC, &t);
		int64_t start = t.tv_sec * INT64_C(1000000000) + t.tv_nsec, left = timeout ? timeout : INT64_MAX;
		for (;;) {
			int64_t slice = left < SLICE ? left : SLICE;
			Py_BEGIN_ALLOW_THREADS
			status = p_rb_claim(c->handle, (uint32_t)rows, sizes, (uint32_t)ndims, slice, &taken);
			Py_END_ALLOW_THREADS
			if (status != RB_ERR_FULL && status != RB_ERR_TIMEOUT)
				break;
			clock_gettime(CLOCK_MONOTONIC, &t);
			left = timeout ? timeout - (t.tv_sec * INT64_C(1000000000) + t.tv_nsec - start) : INT64_MAX;
			if (left <= 0)
				break;
			if (PyErr_CheckSignals())
				return -1;
		}
		if (status) {
			raise_status(c, status);
			return -1;
		}
		r->id = taken.id;
		r->slot = taken.slot;
		r->attachment = taken.attachment;
	}
	r->rows = (unsigned int)rows;
	r->single = (char)single;
	r->released = 0;
	Py_INCREF(c);
	r->core = c;
	return 0;
}

static int let_go(Held *r)
{
	r->released = 1;
	return r->core && r->core->names ? end_views(r, 0, r->core->tensors, err_released) : 0;
}

static PyObject *held_release(Held *r, PyObject *Py_UNUSED(none))
{
	if (!r->released) {
		int failed = let_go(r); /* before the slot is somebody else's */
		p_rb_release(r->core->handle, r->id);
		if (failed)
			return NULL;
	}
	Py_RETURN_NONE;
}

static PyObject *held_exit(Held *r, PyObject *Py_UNUSED(args)) { return held_release(r, NULL); }

/* detach_into(waiters, waiter, timeout_ns): ends the arrays, and does with the request what submit_into does. */
static PyObject *held_detach_into(Held *r, PyObject *args)
{
	PyObject *waiters, *waiter;
	long long timeout;
	if (!PyArg_ParseTuple(args, "O!OL", &PyDict_Type, &waiters, &waiter, &timeout) || !check(r))
		return NULL;
	if (let_go(r)) {
		p_rb_release(r->core->handle, r->id);
		return NULL;
	}
	return list_and_commit(r->core, r->id, waiters, waiter, timeout, 0);
}

static PyObject *held_enter(Held *r, PyObject *Py_UNUSED(none))
{
	Py_INCREF(r);
	return (PyObject *)r;
}

static void held_dealloc(Held *r)
{
	PyTypeObject *type = Py_TYPE(r);
	PyObject *kind, *value, *trace;
	PyErr_Fetch(&kind, &value, &trace);
	Py_XDECREF(held_release(r, NULL));
	PyErr_Restore(kind, value, trace);
	PyMem_Free(r->view);
	Py_XDECREF(r->core);
	((freefunc)PyType_GetSlot(type, Py_tp_free))(r);
	Py_DECREF(type);
}

/* Its inputs belong to the worker now. */
static int end_inputs(Held *r)
{
	r->committed = 1;
	return end_views(r, 0, r->core->inputs, err_committed);
}

/* commit_in(timeout_ns, flags) */
static PyObject *held_commit(Held *r, PyObject *args)
{
	long long timeout;
	unsigned int flags;
	if (!PyArg_ParseTuple(args, "LI", &timeout, &flags) || !check(r))
		return NULL;
	int status = p_rb_commit(r->core->handle, r->id, timeout, flags);
	if (status)
		return raise_status(r->core, status);
	if (end_inputs(r))
		return NULL;
	Py_RETURN_NONE;
}

/* wait_in(timeout_ns) */
static PyObject *held_wait(Held *r, PyObject *number)
{
	long long timeout = PyLong_AsLongLong(number);
	if (PyErr_Occurred() || !check(r))
		return NULL;
	int status = wait_for(r->core, r->id, timeout);
	if (status)
		return status < 0 ? NULL : raise_status(r->core, status);
	r->ok = 1;
	Py_RETURN_NONE;
}

/* run(timeout=None, *, priority=None): commits and waits. */
static PyObject *held_run(Held *r, PyObject *args, PyObject *named)
{
	static char *names[] = {"timeout", "priority", NULL};
	PyObject *timeout = Py_None, *priority = Py_None;
	if ((named || PyTuple_Size(args)) && !PyArg_ParseTupleAndKeywords(args, named, "|O$O:run", names, &timeout, &priority))
		return NULL;
	if (!check(r))
		return NULL;
	int64_t within = 0;
	if (r->committed)
		return raise_status(r->core, p_rb_commit(r->core->handle, r->id, 0, 0)); /* it says so */
	if (priority != Py_None) {
		PyObject *set = PyObject_CallMethod((PyObject *)r, "_set_priority", "O", priority);
		if (!set)
			return NULL;
		Py_DECREF(set);
	}
	if (timeout != Py_None) {
		PyObject *ns = PyObject_CallFunctionObjArgs(nanoseconds, timeout, NULL);
		if (!ns)
			return NULL;
		within = PyLong_AsLongLong(ns);
		Py_DECREF(ns);
		if (PyErr_Occurred())
			return NULL;
	}
	int status = p_rb_commit(r->core->handle, r->id, within, 0);
	if (status)
		return raise_status(r->core, status);
	if (end_inputs(r))
		return NULL;
	status = wait_for(r->core, r->id, 0);
	if (status)
		return status < 0 ? NULL : raise_status(r->core, status);
	r->ok = 1;
	return held_enter(r, NULL);
}

/* ---- its arrays ------------------------------------------------------------ */

/* The arrays of one side, by name. It refers to its request but is not referred
 * to by it: what is forgotten goes at once. */
typedef struct {
	PyObject_HEAD
	Held *request;
	int side;
} Columns;

static PyObject *columns_of(Held *r, void *side)
{
	Columns *c = (Columns *)PyType_GenericAlloc((PyTypeObject *)columns_class, 0);
	if (!c)
		return NULL;
	Py_INCREF(c->request = r);
	c->side = side != NULL;
	return (PyObject *)c;
}

static void columns_dealloc(Columns *c)
{
	PyTypeObject *type = Py_TYPE(c);
	Py_XDECREF(c->request);
	((freefunc)PyType_GetSlot(type, Py_tp_free))(c);
	Py_DECREF(type);
}

static PyObject *names_of(Columns *c) { return PyTuple_GetItem(c->request->core->names, c->side); }

/* Whether an array may be handed out now. */
static int may_hand_out(Held *r, uint32_t k)
{
	if (!check(r))
		return 0;
	if (k < r->core->inputs) {
		if (r->committed)
			raise_from(err_committed);
		return !r->committed;
	}
	if (!r->ok) {
		int status = p_rb_poll(r->core->handle, r->id);
		if (status)
			raise_status(r->core, status);
		r->ok = !status;
	}
	return r->ok;
}

static PyObject *columns_get(Columns *columns, PyObject *name)
{
	Held *r = columns->request;
	Client *c = r->core;
	PyObject *number = PyDict_GetItemWithError(names_of(columns), name);
	if (!number)
		return PyErr_Occurred() ? NULL : PyObject_CallMethod((PyObject *)r, "_no_tensor", "iO", columns->side, name);
	uint32_t k = (uint32_t)PyLong_AsUnsignedLong(number);
	if (!may_hand_out(r, k))
		return NULL;
	if (!r->view && !(r->view = PyMem_Calloc(c->tensors, sizeof *r->view)))
		return PyErr_NoMemory();
	if (!r->view[k]) {
		if (r->attachment != c->cached_attachment) {
			forget_views(c);
			c->cached_attachment = r->attachment;
		}
		uint64_t key = (uint64_t)r->slot * c->tensors + k;
		if (r->single && c->cache[key % CACHED].view && c->cache[key % CACHED].key == key) {
			r->view[k] = c->cache[key % CACHED].view;
			c->cache[key % CACHED].view = NULL;
		} else {
			PyObject *v = PyObject_CallMethod((PyObject *)r, "_fresh", "I", k);
			if (!v)
				return NULL;
			if (r->released || r->view[k]) { /* a handler of the user's was quicker */
				Py_DECREF(v);
				return raise_from(err_released);
			}
			r->view[k] = v;
		}
	}
	Py_INCREF(r->view[k]);
	return r->view[k];
}

static int columns_set(Columns *c, PyObject *name, PyObject *Py_UNUSED(value))
{
	(void)c;
	PyErr_Format(PyExc_TypeError, "the arrays are where they are: write into them, [%R][...] = value", name);
	return -1;
}

static Py_ssize_t columns_length(Columns *c) { return PyDict_Size(names_of(c)); }
static PyObject *columns_iter(Columns *c) { return PyObject_GetIter(names_of(c)); }

static PyType_Slot columns_slots[] = {
	{Py_tp_doc, "The arrays of one side of a request, by name; made when asked for."},
	{Py_tp_dealloc, columns_dealloc},
	{Py_mp_subscript, columns_get},
	{Py_mp_ass_subscript, columns_set},
	{Py_mp_length, columns_length},
	{Py_tp_iter, columns_iter},
	{0},
};
static PyType_Spec columns_spec = {"ringbatch._quick.Columns", sizeof(Columns), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, columns_slots};

static PyMethodDef held_methods[] = {
	{"run", (PyCFunction)(void (*)(void))held_run, METH_VARARGS | METH_KEYWORDS, "Commits and waits."},
	{"release", (PyCFunction)held_release, METH_NOARGS, "Gives the slots back; the views of this request are over."},
	{"commit_in", (PyCFunction)held_commit, METH_VARARGS, NULL},
	{"wait_in", (PyCFunction)held_wait, METH_O, NULL},
	{"detach_into", (PyCFunction)held_detach_into, METH_VARARGS, NULL},
	{"__enter__", (PyCFunction)held_enter, METH_NOARGS, NULL},
	{"__exit__", (PyCFunction)held_exit, METH_VARARGS, NULL},
	{0},
};
static PyMemberDef held_members[] = {
	{"_core", T_OBJECT_EX, offsetof(Held, core), READONLY, NULL},
	{"_id", T_ULONGLONG, offsetof(Held, id), READONLY, NULL},
	{"_slot", T_UINT, offsetof(Held, slot), READONLY, NULL},
	{"_attachment", T_UINT, offsetof(Held, attachment), READONLY, NULL},
	{"_single", T_BOOL, offsetof(Held, single), READONLY, NULL},
	{"_released", T_BOOL, offsetof(Held, released), READONLY, NULL},
	{"rows", T_UINT, offsetof(Held, rows), READONLY, "The rows of this request."},
	{0},
};
static PyGetSetDef held_fields[] = {
	{"inputs", (getter)columns_of, NULL, "Where to write, by name; until the request is committed.", NULL},
	{"outputs", (getter)columns_of, NULL, "Where to read, by name, once the request has ended; a list of arrays where rows differ in size.", (void *)1},
	{0},
};
static PyType_Slot held_slots[] = {
	{Py_tp_doc, "A claimed request."},
	{Py_tp_init, held_init},
	{Py_tp_dealloc, held_dealloc},
	{Py_tp_methods, held_methods},
	{Py_tp_members, held_members},
	{Py_tp_getset, held_fields},
	{0},
};
static PyType_Spec held_spec = {"ringbatch._quick.Held", sizeof(Held), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, held_slots};

/* ---- a worker's batches ---------------------------------------------------- */

/* next_batch(worker, timeout_ns): (address, requests, rows, runs, pad_to), None if
 * none came; a number is the status of an error. */
static PyObject *next_batch(PyObject *Py_UNUSED(module), PyObject *args)
{
	unsigned long long worker;
	long long timeout;
	rb_batch *b = NULL;
	if (!PyArg_ParseTuple(args, "KL", &worker, &timeout))
		return NULL;
	int status = p_rb_worker_next(worker, 0, &b); /* there may be one already */
	if (status == RB_ERR_TIMEOUT && timeout) {
		Py_BEGIN_ALLOW_THREADS
		status = p_rb_worker_next(worker, timeout, &b);
		Py_END_ALLOW_THREADS
	}
	if (status == RB_ERR_TIMEOUT)
		Py_RETURN_NONE;
	return status ? PyLong_FromLong(status) : Py_BuildValue("KIIII", (unsigned long long)(uintptr_t)b, b->requests, b->rows, b->runs, b->pad_to);
}

static PyObject *complete_batch(PyObject *Py_UNUSED(module), PyObject *at)
{
	rb_batch *batch = PyLong_AsVoidPtr(at);
	if (PyErr_Occurred())
		return NULL;
	return PyLong_FromLong(p_rb_batch_complete(batch));
}

/* ---- the module ------------------------------------------------------------ */

static PyObject *forked(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
	generation++;
	Py_RETURN_NONE;
}

/* setup(probe, dtype, address, item, ndarray, empty, columns, end_view, nanoseconds, released, committed, parents):
 * whether arrays are what we think they are. */
static PyObject *setup(PyObject *Py_UNUSED(module), PyObject *args)
{
	PyObject *probe, *dtype, *given[8], **kept[] = {&ndarray, &np_empty, &columns_class, &end_view, &nanoseconds, &err_released, &err_committed, &err_parents};
	unsigned long long address;
	Py_ssize_t item;
	if (!PyArg_ParseTuple(args, "OOKnOOOOOOOO", &probe, &dtype, &address, &item, &given[0], &given[1], &given[2], &given[3], &given[4], &given[5], &given[6], &given[7]))
		return NULL;
	for (int i = 0; i < 8; i++) {
		Py_INCREF(given[i]);
		Py_XDECREF(*kept[i]);
		*kept[i] = given[i];
	}
	return PyBool_FromLong(knows_arrays(probe, dtype, address, item));
}

/* load(path): the library that ctypes has loaded from there. */
static PyObject *load(PyObject *Py_UNUSED(module), PyObject *path)
{
	const char *name = PyBytes_AsString(path);
	void *library = name ? dlopen(name, RTLD_NOW) : NULL;
	if (!library) {
		if (!PyErr_Occurred())
			PyErr_SetString(PyExc_OSError, dlerror());
		return NULL;
	}
#define FIND(name) p_##name = (__typeof__(name) *)dlsym(library, #name);
	FUNCTIONS(FIND)
	Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
	{"setup", setup, METH_VARARGS, NULL},
	{"load", load, METH_O, NULL},
	{"forked", forked, METH_NOARGS, NULL},
	{"next_batch", next_batch, METH_VARARGS, NULL},
	{"complete_batch", complete_batch, METH_O, NULL},
	{0},
};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "_quick", .m_size = -1, .m_methods = functions};

static PyTypeObject *add_type(PyObject *module, const char *name, PyType_Spec *spec)
{
	PyObject *type = PyType_FromSpec(spec);
	if (!type)
		return NULL;
	Py_INCREF(type); /* one for us */
	if (PyModule_AddObject(module, name, type))
		return NULL;
	return (PyTypeObject *)type;
}

PyMODINIT_FUNC PyInit__quick(void)
{
	PyObject *module = PyModule_Create(&definition);
	if (!module)
		return NULL;
	client_type = add_type(module, "Client", &client_spec);
	if (client_type && add_type(module, "Caller", &caller_spec) && add_type(module, "Held", &held_spec) && add_type(module, "Columns", &columns_spec))
		return module;
	Py_DECREF(module);
	return NULL;
}
