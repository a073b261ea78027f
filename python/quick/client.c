/* SPDX-License-Identifier: Apache-2.0 */
/* A connection, and model(x). */
#include "quick.h"

PyTypeObject *client_type;

PyObject *raise_status(Client *c, int status)
{
	PyObject *e = PyObject_CallMethod((PyObject *)c, "error", "i", status);
	if (e) {
		PyErr_SetObject((PyObject *)Py_TYPE(e), e);
		Py_DECREF(e);
	}
	return NULL;
}

PyObject *raise_from(PyObject *function)
{
	PyObject *e = PyObject_CallObject(function, NULL);
	if (e) {
		PyErr_SetObject((PyObject *)Py_TYPE(e), e);
		Py_DECREF(e);
	}
	return NULL;
}

void forget_views(Client *c)
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
	rb_connect_options o = {.size = sizeof o, .window = window, .timeout = timeout, .device = 1,
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

/* learn(names, fixed, plain, x_dtype, x_shape, y_arguments, on_device): what the
 * quick path has to know of the model; x_dtype is None where model(x) has none. */
static PyObject *client_learn(Client *c, PyObject *args)
{
	PyObject *names, *fixed, *dtype, *shape, *arguments;
	int plain, on_device;
	if (!PyArg_ParseTuple(args, "O!O!pOO!O!p", &PyTuple_Type, &names, &PyTuple_Type, &fixed, &plain, &dtype, &PyTuple_Type, &shape, &PyTuple_Type, &arguments, &on_device))
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
	c->on_device = (char)on_device;
	if (dtype != Py_None) {
		Py_INCREF(c->x_dtype = dtype);
		Py_INCREF(c->y_arguments = arguments);
		c->single = 1;
	}
	if (PyErr_Occurred())
		return NULL;
	Py_RETURN_NONE;
}

int fits(const Client *c, PyObject *x)
{
	const Array *a = (const Array *)x;
	return c->single && Py_TYPE(x) == (PyTypeObject *)ndarray && a->dtype == c->x_dtype && a->rank == c->x_rank && a->flags & CONTIGUOUS &&
	       !memcmp(a->shape, c->x_shape, (size_t)a->rank * sizeof *a->shape);
}

PyObject *new_output(const Client *c)
{
	PyObject *y = PyObject_Call(np_empty, c->y_arguments, NULL);
	if (y && Py_TYPE(y) != (PyTypeObject *)ndarray) {
		Py_DECREF(y);
		PyErr_SetString(PyExc_TypeError, "numpy.empty gave no ndarray");
		return NULL;
	}
	return y;
}

/* The stream that orders what was queued on the device; -1 if an exception was raised. */
static int find_stream(Client *c, PyObject *given, void **stream)
{
	PyObject *at = PyObject_CallMethod((PyObject *)c, "stream", "O", given ? given : Py_None);
	*stream = at ? PyLong_AsVoidPtr(at) : NULL;
	Py_XDECREF(at);
	return PyErr_Occurred() ? -1 : 0;
}

int commit_one(Client *c, uint64_t request, int64_t timeout, uint32_t flags, PyObject *given)
{
	void *stream;
	int status;
	if (!c->on_device)
		return p_rb_commit(c->handle, request, timeout, flags);
	if (find_stream(c, given, &stream))
		return -1;
	Py_BEGIN_ALLOW_THREADS /* the driver may wait for room in the stream */
	status = p_rb_commit_on_stream(c->handle, &request, 1, stream, timeout, flags);
	Py_END_ALLOW_THREADS
	return status;
}

void release_one(Client *c, uint64_t request, PyObject *given)
{
	PyObject *kind, *value, *trace;
	void *stream;
	if (!c->on_device) {
		p_rb_release(c->handle, request);
		return;
	}
	PyErr_Fetch(&kind, &value, &trace);
	if (find_stream(c, given, &stream)) { /* closed, or at the interpreter's end */
		PyErr_Clear();
		p_rb_release(c->handle, request);
	} else {
		Py_BEGIN_ALLOW_THREADS
		p_rb_release_on_stream(c->handle, request, stream);
		Py_END_ALLOW_THREADS
	}
	PyErr_Restore(kind, value, trace);
}

int sweep(Client *c)
{
	PyObject *done = PyObject_CallMethod((PyObject *)c, "sweep", NULL);
	Py_XDECREF(done);
	return done ? 0 : -1;
}

int wait_for(Client *c, uint64_t request, int64_t timeout)
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
	} while ((status == RB_ERR_FULL || (status == RB_ERR_TIMEOUT && !request)) && !PyErr_CheckSignals() && !sweep(c));
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

static PyMethodDef client_methods[] = {
	{"dial", (PyCFunction)client_dial, METH_VARARGS, NULL},
	{"learn", (PyCFunction)client_learn, METH_VARARGS, NULL},
	{"one", (PyCFunction)one, METH_O, NULL},
	{"submit_into", (PyCFunction)client_submit_into, METH_VARARGS, NULL},
	{"hold_one", (PyCFunction)client_hold_one, METH_VARARGS, NULL},
	{"commit_held", (PyCFunction)client_commit_held, METH_VARARGS, NULL},
	{"drain", (PyCFunction)client_drain, METH_VARARGS, NULL},
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
PyType_Spec client_spec = {"ringbatch._quick.Client", sizeof(Client), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, client_slots};

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
PyType_Spec caller_spec = {"ringbatch._quick.Caller", sizeof(Caller), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, caller_slots};
