/* SPDX-License-Identifier: Apache-2.0 */
/* A connection: its waits and its tensors. */
#include "quick.h"

/* Blocking calls return at least this often, so that Python can handle signals. */
#define SLICE INT64_C(50000000)

PyTypeObject *client_type;

static PyObject *raise_error(PyObject *e)
{
	if (e)
		PyErr_SetObject((PyObject *)Py_TYPE(e), e);
	Py_XDECREF(e);
	return NULL;
}

PyObject *raise_status(Client *c, int status) { return raise_error(PyObject_CallMethod((PyObject *)c, "error", "i", status)); }

PyObject *raise_from(PyObject *function) { return raise_error(PyObject_CallObject(function, NULL)); }

void forget_views(Client *c)
{
	for (uint32_t i = 0; i < CACHED; i++)
		Py_CLEAR(c->cache[i].view);
}

static PyObject *client_close(Client *c, PyObject *Py_UNUSED(none))
{
	char before = c->closed;
	c->closed = 1;
	if (!before && c->handle) {
		Py_BEGIN_ALLOW_THREADS
		p_rb_close(c->handle);
		Py_END_ALLOW_THREADS
		forget_views(c);
	}
	Py_RETURN_NONE;
}

void free_object(void *object)
{
	PyTypeObject *type = Py_TYPE((PyObject *)object);
	((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
	Py_DECREF(type);
}

static void client_dealloc(Client *c)
{
	Py_XDECREF(client_close(c, NULL));
	forget_views(c);
	for (uint32_t k = 0; c->tensor && k < c->tensors; k++) {
		Py_XDECREF(c->tensor[k].one);
		Py_XDECREF(c->tensor[k].texts);
	}
	free(c->tensor);
	Py_XDECREF(c->names);
	free_object(c);
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
	rb_connect_options o = {.size = sizeof o, .window = window, .patience = timeout, .device = 1,
				.socket = socket == Py_None ? NULL : PyBytes_AsString(socket),
				.name = name == Py_None ? NULL : PyBytes_AsString(name)};
	if (PyErr_Occurred())
		return NULL;
	Py_BEGIN_ALLOW_THREADS
	status = p_rb_connect(model, &o, &handle);
	Py_END_ALLOW_THREADS
	if (!status)
		c->handle = handle;
	return PyLong_FromLong(status);
}

/* Fills in a tensor; -1 if an exception was raised. */
static int learn_tensor(Tensor *t, PyObject *given)
{
	PyObject *one, *shape, *texts;
	if (!PyArg_ParseTuple(given, "O!nIO", &PyTuple_Type, &one, &t->item, &t->variable, &texts) ||
	    !PyArg_ParseTuple(one, "O!O", &PyTuple_Type, &shape, &t->dtype))
		return -1;
	t->one = one;
	Py_INCREF(t->one);
	if (texts != Py_None)
		Py_INCREF(t->texts = texts);
	t->bytes = t->item;
	for (; t->rank < PyTuple_Size(shape) && t->rank < MOST_RANK; t->rank++) {
		t->shape[t->rank] = PyLong_AsSsize_t(PyTuple_GetItem(shape, t->rank));
		t->bytes *= t->shape[t->rank];
	}
	return PyErr_Occurred() ? -1 : 0;
}

/* learn(names, tensors, in_c): the model's tensors: ((shape, dtype), bytes of a number, variable dimensions, what
 * makes texts of rows or None) of each one. */
static PyObject *client_learn(Client *c, PyObject *args)
{
	PyObject *names, *tensors;
	int in_c;
	if (!PyArg_ParseTuple(args, "O!O!p", &PyTuple_Type, &names, &PyTuple_Type, &tensors, &in_c))
		return NULL;
	if (c->names || PyTuple_Size(names) != 2 || PyTuple_Size(tensors) > MOST_TENSORS)
		return PyErr_Format(PyExc_ValueError, "learn: once, and two sides");
	c->inputs = (uint32_t)PyDict_Size(PyTuple_GetItem(names, 0));
	if (!(c->tensor = calloc((size_t)PyTuple_Size(tensors), sizeof *c->tensor)))
		return PyErr_NoMemory();
	c->plain = c->sized = 1;
	for (; c->tensors < PyTuple_Size(tensors); c->tensors++) {
		Tensor *t = &c->tensor[c->tensors];
		if (learn_tensor(t, PyTuple_GetItem(tensors, c->tensors)))
			return NULL;
		c->plain &= !t->variable || c->tensors >= c->inputs;
		c->sized &= !t->variable && !(t->texts && c->tensors >= c->inputs); /* texts are made of outputs that have come */
	}
	Py_INCREF(c->names = names);
	c->in_c = (char)in_c;
	Py_RETURN_NONE;
}

/* The stream that orders the work on the device; -1 if an exception was raised. */
static int find_stream(Client *c, PyObject *given, void **stream)
{
	PyObject *at = PyObject_CallMethod((PyObject *)c, "stream", "O", given ? given : Py_None);
	*stream = at ? PyLong_AsVoidPtr(at) : NULL;
	Py_XDECREF(at);
	return PyErr_Occurred() ? -1 : 0;
}

int commit_all(Client *c, const uint64_t *requests, uint32_t count, int64_t timeout, uint32_t flags, PyObject *given)
{
	void *stream;
	int status;
	if (c->in_c)
		return p_rb_commit_all(c->handle, requests, count, timeout, flags);
	if (find_stream(c, given, &stream))
		return -1;
	Py_BEGIN_ALLOW_THREADS /* the driver may wait for room in the stream */
	status = p_rb_commit_on_stream(c->handle, requests, count, stream, timeout, flags);
	Py_END_ALLOW_THREADS
	return status;
}

/* commit_all(requests, timeout_ns, flags, stream=None) */
static PyObject *client_commit_all(Client *c, PyObject *args)
{
	PyObject *requests, *stream = NULL;
	long long timeout;
	unsigned int flags;
	if (!PyArg_ParseTuple(args, "O!LI|O", &PyList_Type, &requests, &timeout, &flags, &stream))
		return NULL;
	uint32_t count = (uint32_t)PyList_Size(requests);
	uint64_t *ids = malloc((count + 1) * sizeof *ids);
	if (!ids)
		return PyErr_NoMemory();
	for (uint32_t i = 0; i < count; i++)
		ids[i] = PyLong_AsUnsignedLongLong(PyList_GetItem(requests, i));
	int status = PyErr_Occurred() ? -1 : commit_all(c, ids, count, timeout, flags, stream);
	free(ids);
	if (status)
		return status < 0 ? NULL : raise_status(c, status);
	Py_RETURN_NONE;
}

void release_one(Client *c, uint64_t request, PyObject *given)
{
	PyObject *kind, *value, *trace;
	void *stream;
	if (c->in_c) {
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

/* release_one(request): gives its slots back. */
static PyObject *client_release(Client *c, PyObject *number)
{
	uint64_t request = PyLong_AsUnsignedLongLong(number);
	if (PyErr_Occurred())
		return NULL;
	release_one(c, request, NULL);
	Py_RETURN_NONE;
}

/* place(request, k, row): (address, bytes from row to row, shape) of the rows of the k-th tensor, or of one row if row is not
 * -1; None if the rows differ in size. */
static PyObject *client_place(Client *c, PyObject *args)
{
	unsigned long long request;
	unsigned int k;
	int row;
	rb_view v;
	if (!PyArg_ParseTuple(args, "KIi", &request, &k, &row))
		return NULL;
	int status = k < c->inputs ? p_rb_input(c->handle, request, k, &v)
		: row < 0 ? p_rb_output(c->handle, request, k - c->inputs, &v)
		: p_rb_output_row(c->handle, request, k - c->inputs, (uint32_t)row, &v);
	if (status == RB_ERR_SHAPE)
		Py_RETURN_NONE;
	if (status)
		return raise_status(c, status);
	PyObject *shape = PyTuple_New(v.rank);
	for (uint32_t i = 0; shape && i < v.rank; i++)
		PyTuple_SetItem(shape, i, PyLong_FromUnsignedLongLong(v.shape[i]));
	return shape ? Py_BuildValue("KKN", (unsigned long long)(uintptr_t)v.data, (unsigned long long)v.stride, shape) : NULL;
}

/* ---- waiting ---------------------------------------------------------------- */

static int64_t now_ns(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

int timeout_ns(PyObject *timeout, int64_t *ns)
{
	*ns = 0;
	if (timeout == Py_None)
		return 0;
	double exact = PyFloat_CheckExact(timeout) ? 1e9 * PyFloat_AsDouble(timeout) : 0;
	if (exact >= 1 && exact < 1e18) {
		*ns = (int64_t)exact;
		return 0;
	}
	PyObject *number = PyObject_CallFunctionObjArgs(nanoseconds, timeout, NULL); /* another type, or a rare value */
	if (number)
		*ns = PyLong_AsLongLong(number);
	Py_XDECREF(number);
	return PyErr_Occurred() ? -1 : 0;
}

int in_slices(Client *c, int64_t timeout, Attempt attempt, void *what)
{
	int64_t now = timeout ? now_ns() : 0, left = timeout;
	int64_t end = timeout > INT64_MAX - now ? INT64_MAX : now + timeout;
	for (int last = 0;; last = left == 1) {
		int status = attempt(c, what, left, left && left < SLICE ? left : SLICE);
		if (last || (status != RB_ERR_FULL && status != RB_ERR_TIMEOUT))
			return status;
		PyObject *swept = PyErr_CheckSignals() ? NULL : PyObject_CallMethod((PyObject *)c, "sweep", NULL);
		if (!swept)
			return -1;
		Py_DECREF(swept);
		if (timeout)
			left = (left = end - now_ns()) > 1 ? left : 1;
	}
}

static int call_python(Client *Py_UNUSED(c), void *function, int64_t Py_UNUSED(left), int64_t slice)
{
	PyObject *number = PyObject_CallFunction(function, "L", (long long)slice);
	long status = number ? PyLong_AsLong(number) : -1;
	Py_XDECREF(number);
	return (int)status;
}

/* in_slices(call, timeout_ns): call(ns) waits for at most so long, and returns a status. */
static PyObject *client_in_slices(Client *c, PyObject *args)
{
	PyObject *function;
	long long timeout;
	if (!PyArg_ParseTuple(args, "OL", &function, &timeout))
		return NULL;
	int status = in_slices(c, timeout, call_python, function);
	if (status)
		return status < 0 ? NULL : raise_status(c, status);
	Py_RETURN_NONE;
}

static int wait_once(Client *c, void *request, int64_t Py_UNUSED(left), int64_t slice)
{
	int status;
	Py_BEGIN_ALLOW_THREADS
	status = p_rb_wait(c->handle, *(const uint64_t *)request, slice);
	Py_END_ALLOW_THREADS
	return status;
}

int wait_for(Client *c, uint64_t request, int64_t timeout) { return in_slices(c, timeout, wait_once, &request); }

int keep_step(Client *c, uint64_t sequence, uint64_t request, int status)
{
	if (status || !sequence || !PyErr_CheckSignals())
		return status;
	p_rb_sequence_undo(c->handle, sequence, request);
	return -1;
}

static PyObject *client_most_rows(Client *c, PyObject *Py_UNUSED(none))
{
	int64_t most = most_rows(c);
	return most < 0 ? NULL : PyLong_FromLongLong(most);
}

static PyMethodDef client_methods[] = {
	{"dial", (PyCFunction)client_dial, METH_VARARGS, NULL},
	{"learn", (PyCFunction)client_learn, METH_VARARGS, NULL},
	{"rows_of", (PyCFunction)client_rows_of, METH_O, NULL},
	{"most_rows", (PyCFunction)client_most_rows, METH_NOARGS, NULL},
	{"infer", (PyCFunction)client_infer, METH_VARARGS, NULL},
	{"send", (PyCFunction)client_send, METH_VARARGS, NULL},
	{"in_slices", (PyCFunction)client_in_slices, METH_VARARGS, NULL},
	{"commit_all", (PyCFunction)client_commit_all, METH_VARARGS, NULL},
	{"collect", (PyCFunction)client_collect, METH_VARARGS, NULL},
	{"drain", (PyCFunction)client_drain, METH_VARARGS, NULL},
	{"release_one", (PyCFunction)client_release, METH_O, NULL},
	{"place", (PyCFunction)client_place, METH_VARARGS, NULL},
	{"close", (PyCFunction)client_close, METH_NOARGS, NULL},
	{0},
};
static PyMemberDef client_members[] = {
	{"handle", T_ULONGLONG, offsetof(Client, handle), READONLY, NULL},
	{"closed", T_BOOL, offsetof(Client, closed), READONLY, NULL},
	{"plain", T_BOOL, offsetof(Client, plain), READONLY, NULL},
	{"in_c", T_BOOL, offsetof(Client, in_c), READONLY, NULL},
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
