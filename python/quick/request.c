/* SPDX-License-Identifier: Apache-2.0 */
/* A request that is claimed, and the arrays over it. */
#include "quick.h"

typedef struct {
	PyObject_HEAD
	Client *core;
	uint64_t id, sequence;
	unsigned int slot, rows, attachment, generation;
	char single, released, committed, ok;
	PyObject **view; /* arrays by tensor; NULL until the first one is made */
} Held;

/* Ends the arrays from..to. An array without other references is kept for the next request in this slot; the others lose
 * their memory. */
static int end_views(Held *r, uint32_t from, uint32_t to, PyObject *error)
{
	int failed = 0;
	Client *c = r->core;
	for (uint32_t k = from; r->view && k < to; k++) {
		PyObject *v = r->view[k];
		if (!v)
			continue;
		r->view[k] = NULL;
		int fixed = r->single && !c->tensor[k].variable && !c->tensor[k].texts;
		if (Py_REFCNT(v) == 1 && fixed && !c->closed && r->attachment == c->cached_attachment) {
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

/* Whether the request may be used. Without a successful __init__ it has no core and no slot. */
static PyObject *check(Held *r)
{
	if (r->core && r->generation != generation)
		return raise_from(err_parents);
	if (!r->core || r->released)
		return raise_from(err_released);
	return Py_None;
}

typedef struct {
	const uint32_t *dims;
	uint32_t ndims, rows;
	uint64_t sequence;
	rb_request taken;
} Claim;

static int claim_once(Client *c, void *claim, int64_t Py_UNUSED(left), int64_t slice)
{
	Claim *q = claim;
	int status;
	Py_BEGIN_ALLOW_THREADS
	status = q->sequence ? p_rb_sequence_request(c->handle, q->sequence, q->dims, q->ndims, slice, &q->taken)
			     : p_rb_claim(c->handle, q->rows, q->dims, q->ndims, slice, &q->taken);
	Py_END_ALLOW_THREADS
	return status;
}

/* Held(core, rows=1, dims=(), timeout_ns=0, single=True, sequence=0): waits for room in the window, or for the step before. */
static int held_init(Held *r, PyObject *args, PyObject *named)
{
	Client *c;
	PyObject *dims = NULL;
	long long rows = 1, timeout = 0;
	unsigned long long sequence = 0;
	int single = 1, status;
	uint32_t sizes[MOST_DIMS];
	Py_ssize_t ndims;
	if ((named && PyDict_Size(named)) || !PyArg_ParseTuple(args, "O!|LOLpK", client_type, &c, &rows, &dims, &timeout, &single, &sequence))
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
	Claim q = {sizes, (uint32_t)ndims, (uint32_t)rows, sequence, {0}};
	status = sequence ? RB_ERR_FULL : p_rb_claim(c->handle, q.rows, sizes, q.ndims, RB_AT_ONCE, &q.taken);
	if (status == RB_ERR_FULL)
		status = in_slices(c, timeout, claim_once, &q);
	if (status) {
		if (status > 0)
			raise_status(c, status);
		return -1;
	}
	r->id = q.taken.id;
	r->slot = q.taken.slot;
	r->attachment = q.taken.attachment;
	r->rows = (unsigned int)rows;
	r->single = (char)single;
	r->sequence = sequence;
	r->released = 0;
	Py_INCREF(c);
	r->core = c;
	return 0;
}

static int let_go(Held *r)
{
	r->released = 1;
	return r->core->names ? end_views(r, 0, r->core->tensors, err_released) : 0;
}

static PyObject *give_back(Held *r, PyObject *stream)
{
	if (r->core && !r->released) {
		int failed = let_go(r); /* before the slot is given back */
		release_one(r->core, r->id, stream);
		if (failed)
			return NULL;
	}
	Py_RETURN_NONE;
}

/* release(stream=None) */
static PyObject *held_release(Held *r, PyObject *args, PyObject *named)
{
	static char *names[] = {"stream", NULL};
	PyObject *stream = NULL;
	if ((named || PyTuple_Size(args)) && !PyArg_ParseTupleAndKeywords(args, named, "|O:release", names, &stream))
		return NULL;
	return give_back(r, stream);
}

static PyObject *held_exit(Held *r, PyObject *Py_UNUSED(args)) { return give_back(r, NULL); }

/* detach_into(waiters, waiter, timeout_ns): ends the arrays, and does with the request what submit_into does. */
static PyObject *held_detach_into(Held *r, PyObject *args)
{
	PyObject *waiters, *waiter;
	long long timeout;
	if (!PyArg_ParseTuple(args, "O!OL", &PyDict_Type, &waiters, &waiter, &timeout) || !check(r))
		return NULL;
	if (let_go(r)) {
		release_one(r->core, r->id, NULL);
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
	PyObject *kind, *value, *trace;
	PyErr_Fetch(&kind, &value, &trace);
	Py_XDECREF(give_back(r, NULL));
	PyErr_Restore(kind, value, trace);
	free(r->view);
	Py_XDECREF(r->core);
	free_object(r);
}

/* Its inputs belong to the worker now. */
static int end_inputs(Held *r)
{
	r->committed = 1;
	return end_views(r, 0, r->core->inputs, err_committed);
}

/* commit_in(timeout_ns, flags, stream=None) */
static PyObject *held_commit(Held *r, PyObject *args)
{
	long long timeout;
	unsigned int flags;
	PyObject *stream = NULL;
	if (!PyArg_ParseTuple(args, "LI|O", &timeout, &flags, &stream) || !check(r))
		return NULL;
	int status = commit_all(r->core, &r->id, 1, timeout, flags, stream);
	if (status)
		return status < 0 ? NULL : raise_status(r->core, status);
	if (end_inputs(r))
		return NULL;
	Py_RETURN_NONE;
}

/* choose(priority, cost): None, or numbers in their range. */
static PyObject *held_choose(Held *r, PyObject *args)
{
	int64_t priority = -1, cost = -1;
	PyObject *level, *each;
	if (!PyArg_ParseTuple(args, "OO", &level, &each) || !check(r))
		return NULL;
	if (!take_number(level, INT64_C(1) << 32, &priority) || !take_number(each, 1 << 16, &cost))
		return PyErr_Format(PyExc_TypeError, "numbers only");
	int status = priority < 0 ? RB_OK : p_rb_set_priority(r->core->handle, r->id, (uint32_t)priority);
	if (!status && cost >= 0)
		status = p_rb_set_cost(r->core->handle, r->id, (uint32_t)cost);
	if (status)
		return raise_status(r->core, status);
	Py_RETURN_NONE;
}

/* was_committed(): by Model.commit, together with other requests. */
static PyObject *held_was_committed(Held *r, PyObject *Py_UNUSED(none))
{
	if (!check(r) || end_inputs(r))
		return NULL;
	Py_RETURN_NONE;
}

/* wait_in(timeout_ns) */
static PyObject *held_wait(Held *r, PyObject *number)
{
	long long timeout = PyLong_AsLongLong(number);
	if (PyErr_Occurred() || !check(r))
		return NULL;
	int status = keep_step(r->core, r->sequence, r->id, wait_for(r->core, r->id, timeout));
	if (status)
		return status < 0 ? NULL : raise_status(r->core, status);
	r->ok = 1;
	Py_RETURN_NONE;
}

/* run(timeout=None, *, priority=None, cost=None, stream=None): commits and waits. */
static PyObject *held_run(Held *r, PyObject *args, PyObject *named)
{
	static char *names[] = {"timeout", "priority", "cost", "stream", NULL};
	PyObject *timeout = Py_None, *priority = Py_None, *cost = Py_None, *stream = NULL;
	if ((named || PyTuple_Size(args)) &&
	    !PyArg_ParseTupleAndKeywords(args, named, "|O$OOO:run", names, &timeout, &priority, &cost, &stream))
		return NULL;
	if (!check(r))
		return NULL;
	int64_t within;
	if (r->committed)
		return raise_status(r->core, p_rb_commit(r->core->handle, r->id, 0, 0));
	if (priority != Py_None || cost != Py_None) {
		PyObject *set = PyObject_CallMethod((PyObject *)r, "_choose", "OO", priority, cost);
		if (!set)
			return NULL;
		Py_DECREF(set);
	}
	if (timeout_ns(timeout, &within))
		return NULL;
	int status = commit_all(r->core, &r->id, 1, within, 0, stream);
	if (status)
		return status < 0 ? NULL : raise_status(r->core, status);
	if (end_inputs(r))
		return NULL;
	status = keep_step(r->core, r->sequence, r->id, wait_for(r->core, r->id, 0));
	if (status)
		return status < 0 ? NULL : raise_status(r->core, status);
	r->ok = 1;
	return held_enter(r, NULL);
}

/* ---- its arrays ------------------------------------------------------------ */

/* The arrays of one side, by name. It refers to its request, and the request does not refer to it: without a cycle both are
 * freed at once. */
typedef struct {
	PyObject_HEAD
	Held *request;
	int side;
} Columns;

static PyObject *columns_of(Held *r, void *side)
{
	if (!r->core)
		return raise_from(err_released);
	Columns *c = (Columns *)PyType_GenericAlloc((PyTypeObject *)columns_class, 0);
	if (!c)
		return NULL;
	Py_INCREF(c->request = r);
	c->side = side != NULL;
	return (PyObject *)c;
}

static void columns_dealloc(Columns *c)
{
	Py_XDECREF(c->request);
	free_object(c);
}

static PyObject *names_of(Columns *c) { return c->request ? PyTuple_GetItem(c->request->core->names, c->side) : raise_from(err_released); }

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
	PyObject *names = names_of(columns);
	if (!names)
		return NULL;
	Held *r = columns->request;
	Client *c = r->core;
	PyObject *number = PyDict_GetItemWithError(names, name);
	if (!number)
		return PyErr_Occurred() ? NULL : PyObject_CallMethod((PyObject *)r, "_no_tensor", "iO", columns->side, name);
	uint32_t k = (uint32_t)PyLong_AsUnsignedLong(number);
	if (!may_hand_out(r, k))
		return NULL;
	if (!r->view && !(r->view = calloc(c->tensors, sizeof *r->view)))
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
			if (r->released || r->view[k]) { /* a signal's handler has done it */
				Py_DECREF(v);
				return raise_from(err_released);
			}
			r->view[k] = v;
		}
	}
	Py_INCREF(r->view[k]);
	return r->view[k];
}

static int columns_set(Columns *c, PyObject *name, PyObject *value)
{
	PyObject *names = names_of(c), *number = names && value ? PyDict_GetItemWithError(names, name) : NULL;
	if (!names || PyErr_Occurred())
		return -1;
	uint32_t k = number ? (uint32_t)PyLong_AsUnsignedLong(number) : 0;
	if (number && c->side == 0 && c->request->core->tensor[k].texts) {
		PyObject *set = may_hand_out(c->request, k) ? PyObject_CallMethod((PyObject *)c->request, "_set_text", "IO", k, value) : NULL;
		Py_XDECREF(set);
		return set ? 0 : -1;
	}
	PyErr_Format(PyExc_TypeError, "the arrays are where they are: write into them, [%R][...] = value", name);
	return -1;
}

static Py_ssize_t columns_length(Columns *c)
{
	PyObject *names = names_of(c);
	return names ? PyDict_Size(names) : -1;
}

static PyObject *columns_iter(Columns *c)
{
	PyObject *names = names_of(c);
	return names ? PyObject_GetIter(names) : NULL;
}

static PyType_Slot columns_slots[] = {
	{Py_tp_doc, "The arrays of one side of a request, by name; made when asked for."},
	{Py_tp_dealloc, columns_dealloc},
	{Py_mp_subscript, columns_get},
	{Py_mp_ass_subscript, columns_set},
	{Py_mp_length, columns_length},
	{Py_tp_iter, columns_iter},
	{0},
};
PyType_Spec columns_spec = {"ringbatch._quick.Columns", sizeof(Columns), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, columns_slots};

static PyMethodDef held_methods[] = {
	{"run", (PyCFunction)(void (*)(void))held_run, METH_VARARGS | METH_KEYWORDS, "Commits and waits."},
	{"release", (PyCFunction)(void (*)(void))held_release, METH_VARARGS | METH_KEYWORDS,
	 "Gives the slots back; the views of this request are over."},
	{"commit_in", (PyCFunction)held_commit, METH_VARARGS, NULL},
	{"choose", (PyCFunction)held_choose, METH_VARARGS, NULL},
	{"was_committed", (PyCFunction)held_was_committed, METH_NOARGS, NULL},
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
	{"outputs", (getter)columns_of, NULL,
	 "Where to read, by name, once the request has ended; a list of arrays where rows differ in size.", (void *)1},
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
PyType_Spec held_spec = {"ringbatch._quick.Held", sizeof(Held), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, held_slots};
