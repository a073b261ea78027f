/* SPDX-License-Identifier: Apache-2.0 */
/* A connection, and the call of a model. */
#include "quick.h"

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
	for (uint32_t k = 0; c->quick && k < c->inputs; k++)
		Py_XDECREF(c->quick[k].dtype);
	free(c->quick);
	Py_XDECREF(c->empty);
	Py_XDECREF(c->names);
	Py_XDECREF(c->fixed);
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

/* Fills in the inputs that the quick path takes; -1 if an exception was raised. */
static int learn_inputs(Client *c, PyObject *inputs)
{
	c->quick = calloc(c->inputs, sizeof *c->quick);
	if (!c->quick) {
		PyErr_NoMemory();
		return -1;
	}
	for (uint32_t k = 0; k < c->inputs; k++) {
		PyObject *dtype, *shape;
		Input *x = &c->quick[k];
		if (!PyArg_ParseTuple(PyTuple_GetItem(inputs, k), "OO!", &dtype, &PyTuple_Type, &shape))
			return -1;
		Py_INCREF(x->dtype = dtype);
		for (; x->rank < PyTuple_Size(shape) && x->rank < MOST_RANK; x->rank++)
			x->shape[x->rank] = PyLong_AsSsize_t(PyTuple_GetItem(shape, x->rank));
	}
	return PyErr_Occurred() ? -1 : 0;
}

/* learn(names, fixed, plain, inputs, outputs, on_device): the model's tensors. inputs has (dtype, shape) of each one, outputs
 * (shape, dtype); both are empty if the model has no quick path. */
static PyObject *client_learn(Client *c, PyObject *args)
{
	PyObject *names, *fixed, *inputs, *outputs;
	int plain, on_device;
	if (!PyArg_ParseTuple(args, "O!O!pO!O!p", &PyTuple_Type, &names, &PyTuple_Type, &fixed, &plain, &PyTuple_Type, &inputs,
			      &PyTuple_Type, &outputs, &on_device))
		return NULL;
	if (c->names || PyTuple_Size(names) != 2 || PyTuple_Size(fixed) > MOST_TENSORS)
		return PyErr_Format(PyExc_ValueError, "learn: once, and two sides");
	c->plain = (char)plain;
	c->tensors = (uint32_t)PyTuple_Size(fixed);
	c->inputs = (uint32_t)PyDict_Size(PyTuple_GetItem(names, 0));
	Py_INCREF(c->names = names);
	Py_INCREF(c->fixed = fixed);
	c->on_device = (char)on_device;
	if (PyTuple_Size(outputs)) {
		Py_INCREF(c->empty = outputs);
		c->single = c->inputs == 1 && PyTuple_Size(outputs) == 1;
		for (Py_ssize_t k = 0; k < PyTuple_Size(outputs); k++)
			c->scalar |= PyTuple_Size(PyTuple_GetItem(PyTuple_GetItem(outputs, k), 0)) == 0;
		if (learn_inputs(c, inputs))
			return NULL;
	}
	Py_RETURN_NONE;
}

int fits(const Client *c, uint32_t k, PyObject *x)
{
	const Array *a = (const Array *)x;
	const Input *want = &c->quick[k];
	return Py_TYPE(x) == (PyTypeObject *)ndarray && a->dtype == want->dtype && a->rank == want->rank && a->flags & CONTIGUOUS &&
	       !memcmp(a->shape, want->shape, (size_t)a->rank * sizeof *a->shape);
}

PyObject *new_output(const Client *c, Py_ssize_t k, void **data)
{
	PyObject *y = PyObject_Call(np_empty, PyTuple_GetItem(c->empty, k), NULL);
	if (y && Py_TYPE(y) != (PyTypeObject *)ndarray) {
		Py_DECREF(y);
		return PyErr_Format(PyExc_TypeError, "numpy.empty gave no ndarray");
	}
	if (y)
		*data = ((Array *)y)->data;
	return y;
}

/* An array, or a dict of several by name. */
static PyObject *new_outputs(const Client *c, void **data)
{
	PyObject *name, *number, *all = PyTuple_Size(c->empty) == 1 ? new_output(c, 0, data) : PyDict_New();
	if (!all || PyTuple_Size(c->empty) == 1)
		return all;
	Py_ssize_t at = 0;
	for (Py_ssize_t k = 0; PyDict_Next(PyTuple_GetItem(c->names, 1), &at, &name, &number); k++) {
		PyObject *y = new_output(c, k, &data[k]);
		int failed = !y || PyDict_SetItem(all, name, y);
		Py_XDECREF(y);
		if (failed) {
			Py_DECREF(all);
			return NULL;
		}
	}
	return all;
}

/* The stream that orders the work on the device; -1 if an exception was raised. */
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

int64_t now_ns(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

int64_t ends_at(int64_t timeout)
{
	int64_t now = timeout ? now_ns() : 0;
	return !timeout || timeout > INT64_MAX - now ? INT64_MAX : now + timeout;
}

int64_t slice_until(int64_t end)
{
	int64_t left = end == INT64_MAX ? SLICE : end - now_ns();
	return left < 0 ? 0 : left < SLICE ? left : SLICE;
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

int wait_for(Client *c, uint64_t request, int64_t timeout)
{
	int64_t end = ends_at(timeout);
	for (;;) {
		int64_t slice = slice_until(end);
		int status;
		Py_BEGIN_ALLOW_THREADS
		status = p_rb_wait(c->handle, request, slice);
		Py_END_ALLOW_THREADS
		if (status != RB_ERR_TIMEOUT || !slice)
			return status;
		if (PyErr_CheckSignals())
			return -1;
	}
}

int keep_step(Client *c, uint64_t sequence, uint64_t request, int status)
{
	if (status || !sequence || !PyErr_CheckSignals())
		return status;
	p_rb_sequence_undo(c->handle, sequence, request);
	return -1;
}

/* Sends one item, as a step of the sequence if it is not 0, and waits for its outputs: the status, -1 if an exception was
 * raised. */
static int infer(Client *c, uint64_t sequence, const void *const *in, void *const *out, int64_t timeout)
{
	int64_t end = ends_at(timeout), slice = timeout && timeout < SLICE ? timeout : SLICE, left = timeout;
	rb_inference i = {.client = c->handle, .inputs = in, .outputs = out, .rows = 1};
	int status;
	for (int last = 0;; last = timeout && left == 1) {
		i.timeout = left;
		i.slice = slice;
		Py_BEGIN_ALLOW_THREADS
		status = sequence ? p_rb_step_prepared(&i, sequence) : p_rb_infer_prepared(&i);
		Py_END_ALLOW_THREADS
		if (last || (status != RB_ERR_FULL && (status != RB_ERR_TIMEOUT || i.request)))
			break;
		if (PyErr_CheckSignals() || sweep(c)) /* no slot yet, or not attached yet */
			return -1;
		if (timeout) { /* after its end one more try: the sweep may have made room */
			left = end - now_ns();
			left = left > 1 ? left : 1;
			slice = left < SLICE ? left : SLICE;
		}
	}
	if (status != RB_ERR_TIMEOUT || !i.request)
		return keep_step(c, sequence, i.request, status);
	status = PyErr_CheckSignals() ? -1 : wait_for(c, i.request, 0);
	if (status < 0)
		p_rb_release(c->handle, i.request);
	return status < 0 ? status : keep_step(c, sequence, i.request, p_rb_collect_prepared(&i));
}

static PyMethodDef client_methods[] = {
	{"dial", (PyCFunction)client_dial, METH_VARARGS, NULL},
	{"learn", (PyCFunction)client_learn, METH_VARARGS, NULL},
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

/* ---- model(x, …) ------------------------------------------------------------ */

typedef struct {
	PyObject_HEAD
	PyObject *core;
	unsigned long long sequence; /* of a Stepper; 0 once it is closed */
	unsigned int rows;
	char busy; /* a coroutine waits for a step; of a model: a call has to warn first */
} Caller;

/* Finds the inputs by place and by name, and the timeout. False if the call is not for the quick path: it takes one item
 * of contiguous arrays with the model's types and shapes, and no keyword but the inputs and timeout. */
static int take_arguments(const Client *c, PyObject *args, PyObject *named, const void **in, PyObject **timeout)
{
	Py_ssize_t count = PyTuple_Size(args), at = 0;
	uint32_t given = 0;
	PyObject *key, *x;
	if (!c->quick || count > c->inputs || (c->scalar && (named || !c->single)))
		return 0;
	memset(in, 0, c->inputs * sizeof *in);
	for (; given < count; given++) {
		x = PyTuple_GetItem(args, given);
		if (!fits(c, given, x))
			return 0;
		in[given] = ((Array *)x)->data;
	}
	while (named && PyDict_Next(named, &at, &key, &x)) {
		if (key == name_timeout || PyUnicode_Compare(key, name_timeout) == 0) {
			*timeout = x;
			continue;
		}
		PyObject *number = PyDict_GetItemWithError(PyTuple_GetItem(c->names, 0), key);
		uint32_t k = number ? (uint32_t)PyLong_AsUnsignedLong(number) : 0;
		if (!number || in[k] || !fits(c, k, x))
			return 0;
		in[k] = ((Array *)x)->data;
		given++;
	}
	return given == c->inputs;
}

static PyObject *call_quick(Client *c, uint64_t sequence, const void *const *in, PyObject *timeout)
{
	void *out[MOST_TENSORS];
	int64_t ns;
	PyObject *y = timeout_ns(timeout, &ns) ? NULL : new_outputs(c, out);
	if (!y)
		return NULL;
	int status = infer(c, sequence, in, out, ns);
	if (!status)
		return y;
	Py_DECREF(y);
	return status < 0 ? NULL : raise_status(c, status);
}

static PyObject *call_slowly(Caller *m, PyObject *args, PyObject *named)
{
	PyObject *general = PyErr_Occurred() ? NULL : PyObject_GetAttrString((PyObject *)m, "_call");
	PyObject *y = general ? PyObject_Call(general, args, named) : NULL;
	Py_XDECREF(general);
	return y;
}

static PyObject *caller_call(Caller *m, PyObject *args, PyObject *named)
{
	const void *in[MOST_TENSORS];
	PyObject *timeout = Py_None;
	if (named && PyDict_Size(named) == 0)
		named = NULL;
	if (m->core && !m->busy && take_arguments((Client *)m->core, args, named, in, &timeout))
		return call_quick((Client *)m->core, 0, in, timeout);
	return call_slowly(m, args, named);
}

/* step(x, …) */
static PyObject *stepper_step(Caller *m, PyObject *args, PyObject *named)
{
	const void *in[MOST_TENSORS];
	PyObject *timeout = Py_None;
	if (named && PyDict_Size(named) == 0)
		named = NULL;
	if (!m->core || !m->sequence || m->busy || m->rows != 1 || !take_arguments((Client *)m->core, args, named, in, &timeout))
		return call_slowly(m, args, named);
	return call_quick((Client *)m->core, m->sequence, in, timeout);
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
	if (!m->core)
		return PyErr_Format(PyExc_AttributeError, "_core");
	Py_INCREF(m->core);
	return m->core;
}

static void caller_dealloc(Caller *m)
{
	Py_XDECREF(m->core);
	free_object(m);
}

static PyGetSetDef caller_fields[] = {{"_core", (getter)caller_get_core, (setter)caller_set_core, NULL, NULL}, {0}};
static PyMemberDef caller_members[] = {{"_unwarned", T_BOOL, offsetof(Caller, busy), 0, NULL}, {0}};
static PyType_Slot caller_slots[] = {
	{Py_tp_doc, "A model that is called."},
	{Py_tp_members, caller_members},
	{Py_tp_dealloc, caller_dealloc},
	{Py_tp_call, caller_call},
	{Py_tp_getset, caller_fields},
	{0},
};
PyType_Spec caller_spec = {"ringbatch._quick.Caller", sizeof(Caller), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, caller_slots};

static PyMethodDef stepper_methods[] = {
	{"step", (PyCFunction)(void (*)(void))stepper_step, METH_VARARGS | METH_KEYWORDS, "Runs one step."},
	{0},
};
static PyMemberDef stepper_members[] = {
	{"_id", T_ULONGLONG, offsetof(Caller, sequence), 0, NULL},
	{"_rows", T_UINT, offsetof(Caller, rows), 0, NULL},
	{"_busy", T_BOOL, offsetof(Caller, busy), 0, NULL},
	{0},
};
static PyType_Slot stepper_slots[] = {
	{Py_tp_doc, "A sequence that is stepped."},
	{Py_tp_dealloc, caller_dealloc},
	{Py_tp_methods, stepper_methods},
	{Py_tp_members, stepper_members},
	{Py_tp_getset, caller_fields},
	{0},
};
PyType_Spec stepper_spec = {"ringbatch._quick.Stepper", sizeof(Caller), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, stepper_slots};
