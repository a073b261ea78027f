/* SPDX-License-Identifier: Apache-2.0 */
/* A whole request in one call: model(x, …), step(x, …), and the halves of submit. */
#include "quick.h"

PyTypeObject *stepper_type;

typedef struct {
	PyObject_HEAD
	PyObject *core;
	unsigned long long sequence, sent; /* of a Stepper: its number, 0 once it is closed; the last step's, 0 if it was not sent */
	unsigned int rows;
	char busy; /* a coroutine waits for a step; of a model: a call has to warn first */
} Caller;

/* ---- arguments --------------------------------------------------------------- */

/* The rows of an array of this tensor; -1: one item; 0: another array. */
static int64_t rows_of(const Tensor *t, PyObject *x)
{
	const Array *a = (const Array *)x;
	if (Py_TYPE(x) != (PyTypeObject *)ndarray || a->dtype != t->dtype || !(a->flags & CONTIGUOUS))
		return 0;
	uint32_t more = (uint32_t)a->rank - t->rank;
	if (more > 1 || (more && a->shape[0] > UINT32_MAX))
		return 0;
	for (uint32_t i = 0; i < t->rank; i++)
		if (t->variable >> i & 1 ? a->shape[more + i] > t->shape[i] : a->shape[more + i] != t->shape[i])
			return 0;
	return more ? a->shape[0] : -1;
}

static int take_input(const Client *c, Call *q, uint32_t k, PyObject *x)
{
	int64_t rows = k < c->inputs && !q->x[k] ? rows_of(&c->tensor[k], x) : 0;
	if (!rows || (q->given++ && rows != q->rows))
		return 0;
	q->rows = rows;
	q->x[k] = x;
	q->in[k] = ((Array *)x)->data;
	return 1;
}

int take_number(PyObject *given, int64_t limit, int64_t *number)
{
	int overflow = 0;
	if (given == Py_None)
		return 1;
	*number = PyLong_CheckExact(given) ? PyLong_AsLongLongAndOverflow(given, &overflow) : -1;
	return !overflow && *number >= 0 && *number < limit;
}

static int take_keyword(Call *q, long keyword, PyObject *x, int *split)
{
	switch (keyword) {
	case 0:
		return timeout_ns(x, &q->timeout) ? -1 : 1;
	case 1:
		return take_number(x, INT64_C(1) << 32, &q->priority);
	case 2:
		return take_number(x, 1 << 16, &q->cost);
	case 3:
		*split = x == Py_True;
		return PyBool_Check(x) && !q->sequence;
	default:
		q->with_version = x == Py_True;
		return PyBool_Check(x);
	}
}

int64_t most_rows(Client *c)
{
	rb_model m;
	int status = p_rb_client_model(c->handle, &m);
	if (status) {
		raise_status(c, status);
		return -1;
	}
	return m.window < m.max_batch_size ? m.window : m.max_batch_size;
}

/* Takes inputs by place and by name, or as one dict: 1, or 0 if they are not arrays of the model's types and shapes, contiguous
 * and of equal rows; -1 if an exception was raised. keywords: whether named has the keywords of a call, too. */
static int take(Client *c, PyObject *args, PyObject *named, int keywords, Call *q)
{
	Py_ssize_t count = PyTuple_Size(args), at = 0;
	PyObject *key, *x, *number, *by_name = NULL;
	int split = keywords, took = 1;
	if (!c->in_c || count > c->inputs)
		return 0;
	memset(q->x, 0, c->inputs * sizeof *q->x);
	q->given = 0;
	if (keywords && count == 1 && PyDict_CheckExact(x = PyTuple_GetItem(args, 0))) {
		if (!(by_name = q->kept = PyDict_Copy(x))) /* other threads may change the caller's */
			return -1;
	} else
		for (uint32_t k = 0; k < count; k++)
			if (!take_input(c, q, k, PyTuple_GetItem(args, k)))
				return 0;
	while (took > 0 && named && PyDict_Next(named, &at, &key, &x)) {
		number = keywords ? PyDict_GetItemWithError(keyword_numbers, key) : NULL;
		if (number)
			took = take_keyword(q, PyLong_AsLong(number), x, &split);
		else
			took = !by_name && (number = PyDict_GetItemWithError(PyTuple_GetItem(c->names, 0), key)) &&
			       take_input(c, q, (uint32_t)PyLong_AsUnsignedLong(number), x);
	}
	for (at = 0; took > 0 && by_name && PyDict_Next(by_name, &at, &key, &x);)
		took = (number = PyDict_GetItemWithError(PyTuple_GetItem(c->names, 0), key)) &&
		       take_input(c, q, (uint32_t)PyLong_AsUnsignedLong(number), x);
	if (took <= 0 || q->given != c->inputs || PyErr_Occurred())
		return PyErr_Occurred() ? -1 : 0;
	if (split && q->rows > 1 && !q->sequence) {
		int64_t most = most_rows(c);
		if (q->rows > most)
			return most < 0 ? -1 : 0;
	}
	return 1;
}

int take_all(Client *c, PyObject *arrays, PyObject *priority, PyObject *cost, Call *q)
{
	int took = take(c, arrays, NULL, 0, q);
	if (took > 0 && take_number(priority, INT64_C(1) << 32, &q->priority) && take_number(cost, 1 << 16, &q->cost))
		return 0;
	if (took >= 0)
		PyErr_SetString(PyExc_TypeError, "arrays of the model's types and shapes, and numbers in their range");
	return -1;
}

/* ---- the call ------------------------------------------------------------------ */

static uint32_t count_rows(const Call *q) { return q->rows < 0 ? 1 : (uint32_t)q->rows; }

static PyObject *empty(const Tensor *t, const uint64_t *shape, uint32_t rank)
{
	PyObject *dims = PyTuple_New(rank), *y;
	for (uint32_t i = 0; dims && i < rank; i++)
		PyTuple_SetItem(dims, i, PyLong_FromUnsignedLongLong(shape[i]));
	y = dims ? PyObject_CallFunctionObjArgs(np_empty, dims, t->dtype, NULL) : NULL;
	Py_XDECREF(dims);
	return y;
}

/* One answer, or a dict of several by name: make(k) gives the k-th output. */
static PyObject *gather(Client *c, Call *q, PyObject *(*make)(Client *c, Call *q, uint32_t k))
{
	PyObject *name, *number, *all;
	Py_ssize_t at = 0;
	if (c->tensors - c->inputs == 1)
		return make(c, q, 0);
	all = PyDict_New();
	for (uint32_t k = 0; all && PyDict_Next(PyTuple_GetItem(c->names, 1), &at, &name, &number); k++) {
		PyObject *y = make(c, q, k);
		if (!y || PyDict_SetItem(all, name, y))
			Py_CLEAR(all);
		Py_XDECREF(y);
	}
	return all;
}

static PyObject *new_output(Client *c, Call *q, uint32_t k)
{
	const Tensor *t = &c->tensor[c->inputs + k];
	uint64_t shape[1 + MOST_RANK] = {count_rows(q)};
	for (uint32_t i = 0; i < t->rank; i++)
		shape[1 + i] = (uint64_t)t->shape[i];
	PyObject *y = q->rows < 0 ? PyObject_Call(np_empty, t->one, NULL) : empty(t, shape, 1 + t->rank);
	if (y && Py_TYPE(y) != (PyTypeObject *)ndarray) {
		Py_DECREF(y);
		return PyErr_Format(PyExc_TypeError, "numpy.empty gave no ndarray");
	}
	if (y) {
		q->out[k] = ((Array *)y)->data;
		q->bytes[c->inputs + k] = count_rows(q) * (uint64_t)t->bytes;
	}
	return y;
}

/* An attempt at the whole request: RB_OK also once it is under way. */
static int infer_once(Client *c, void *call, int64_t left, int64_t slice)
{
	Call *q = call;
	const uint64_t *in = q->bytes, *out = q->bytes + c->inputs;
	int status;
	Py_BEGIN_ALLOW_THREADS
	status = q->sequence ? p_rb_step(c->handle, q->sequence, q->in, in, q->out, out, left, slice, &q->request)
			     : p_rb_infer(c->handle, count_rows(q), q->in, in, q->out, out, left, slice, &q->request);
	Py_END_ALLOW_THREADS
	q->under_way = status == RB_ERR_TIMEOUT && q->request;
	return q->under_way ? RB_OK : status;
}

/* Of a model with fixed shapes, and with no choice but a timeout: the library does everything. */
static PyObject *infer_whole(Client *c, Call *q)
{
	PyObject *y = gather(c, q, new_output);
	if (!y)
		return NULL;
	for (uint32_t k = 0; k < c->inputs; k++)
		q->bytes[k] = count_rows(q) * (uint64_t)c->tensor[k].bytes;
	int status = in_slices(c, q->timeout, infer_once, q);
	if (q->under_way) {
		status = PyErr_CheckSignals() ? -1 : wait_for(c, q->request, 0);
		if (status < 0)
			p_rb_release(c->handle, q->request);
		else
			status = p_rb_collect(c->handle, q->request, q->out, q->bytes + c->inputs);
	}
	status = keep_step(c, q->sequence, q->request, status);
	if (!status)
		return y;
	Py_DECREF(y);
	return status < 0 ? NULL : raise_status(c, status);
}

/* Copies an array into a larger one. */
static void copy_into(char *to, const uint64_t *room, const char *from, const Py_ssize_t *shape, uint32_t rank, size_t item)
{
	size_t to_step = item, step = item;
	for (uint32_t i = 1; i < rank; i++) {
		to_step *= room[i];
		step *= (size_t)shape[i];
	}
	if (!rank || to_step == step)
		memcpy(to, from, rank ? (size_t)shape[0] * step : item);
	else
		for (Py_ssize_t i = 0; i < shape[0]; i++)
			copy_into(to + (size_t)i * to_step, room + 1, from + (size_t)i * step, shape + 1, rank - 1, item);
}

static void write_input(const Tensor *t, const rb_view *v, const Array *a, int64_t rows)
{
	const Py_ssize_t *shape = a->shape + (rows < 0 ? 0 : 1);
	size_t step = (size_t)t->item;
	for (uint32_t i = 0; i < t->rank; i++)
		step *= (size_t)shape[i];
	for (uint64_t row = 0; row < v->shape[0]; row++)
		copy_into((char *)v->data + row * v->stride, v->shape + 1, a->data + row * step, shape, t->rank, (size_t)t->item);
}

int fill(Client *c, void *call, int64_t left, int64_t slice)
{
	Call *q = call;
	q->left = left;
	rb_request r;
	rb_view v;
	int status;
	q->ndims = 0;
	for (uint32_t k = 0; k < c->inputs; k++)
		for (uint32_t i = 0; c->tensor[k].variable && i < c->tensor[k].rank; i++)
			if (c->tensor[k].variable >> i & 1)
				q->dims[q->ndims++] = (uint32_t)((Array *)q->x[k])->shape[i + (q->rows < 0 ? 0 : 1)];
	Py_BEGIN_ALLOW_THREADS
	status = q->sequence ? p_rb_sequence_request(c->handle, q->sequence, q->dims, q->ndims, slice, &r)
			     : p_rb_claim(c->handle, count_rows(q), q->dims, q->ndims, slice, &r);
	if (!status) {
		for (uint32_t k = 0; k < c->inputs && !status; k++)
			if (!(status = p_rb_input(c->handle, r.id, k, &v)))
				write_input(&c->tensor[k], &v, (Array *)q->x[k], q->rows);
		if (!status && q->priority >= 0)
			status = p_rb_set_priority(c->handle, r.id, (uint32_t)q->priority);
		if (!status && q->cost >= 0)
			status = p_rb_set_cost(c->handle, r.id, (uint32_t)q->cost);
		if (status)
			p_rb_release(c->handle, r.id);
		q->request = r.id;
	}
	Py_END_ALLOW_THREADS
	return status;
}

/* A copy of some rows, or of the first one as an item. */
static PyObject *copy_rows(const Tensor *t, const rb_view *v, int item)
{
	PyObject *y = empty(t, v->shape + item, v->rank - (uint32_t)item);
	size_t step = (size_t)t->item;
	for (uint32_t i = 1; i < v->rank; i++)
		step *= v->shape[i];
	for (uint64_t row = 0; y && row < v->shape[0]; row++)
		memcpy(((Array *)y)->data + row * step, (char *)v->data + row * v->stride, step);
	if (!y || !t->texts)
		return y;
	PyObject *made = PyObject_CallFunctionObjArgs(t->texts, y, NULL);
	Py_DECREF(y);
	return made;
}

/* A copy of the k-th output; a list of rows if they differ in size. */
static PyObject *read_output(Client *c, Call *q, uint32_t k)
{
	const Tensor *t = &c->tensor[c->inputs + k];
	rb_view v;
	int status = p_rb_output(c->handle, q->request, k, &v);
	if (status != RB_ERR_SHAPE)
		return status ? raise_status(c, status) : copy_rows(t, &v, q->rows < 0);
	PyObject *all = PyList_New(0);
	for (uint32_t row = 0; all && row < count_rows(q); row++) {
		status = p_rb_output_row(c->handle, q->request, k, row, &v);
		PyObject *y = status ? raise_status(c, status) : copy_rows(t, &v, 1);
		if (!y || PyList_Append(all, y))
			Py_CLEAR(all);
		Py_XDECREF(y);
	}
	return all;
}

PyObject *collect(Client *c, Call *q)
{
	int status = p_rb_request_version(c->handle, q->request, &q->version);
	PyObject *y = status ? raise_status(c, status) : gather(c, q, read_output);
	p_rb_release(c->handle, q->request);
	return y;
}

/* In parts: claim, write, choose, commit, wait, read, release. */
static PyObject *infer_parts(Client *c, Call *q)
{
	PyObject *y = NULL;
	int status = in_slices(c, q->timeout, fill, q);
	if (status)
		return status < 0 ? NULL : raise_status(c, status);
	status = p_rb_commit(c->handle, q->request, q->left, 0);
	if (!status)
		status = wait_for(c, q->request, 0);
	if (!status)
		y = collect(c, q);
	else {
		if (status > 0)
			raise_status(c, status);
		release_one(c, q->request, NULL);
	}
	if (y && (status || !PyErr_CheckSignals()))
		return q->with_version ? Py_BuildValue("NI", y, q->version) : y;
	Py_XDECREF(y);
	if (!status && q->sequence)
		p_rb_sequence_undo(c->handle, q->sequence, q->request);
	return NULL;
}

/* Most of a Call is an array for each tensor: those stay as they are. */
static void begin(Call *q, uint64_t sequence)
{
	q->timeout = 0;
	q->priority = q->cost = -1;
	q->sequence = sequence;
	q->request = 0;
	q->kept = NULL;
	q->with_version = q->under_way = 0;
}

static PyObject *run(Client *c, Caller *m, Call *q)
{
	int whole = c->sized && q->priority < 0 && q->cost < 0 && !q->with_version;
	PyObject *y = whole ? infer_whole(c, q) : infer_parts(c, q);
	if (q->sequence)
		m->sent = q->request;
	return y;
}

/* rows_of(inputs): the rows of arrays that infer and send take, -1: one item; 0 if something is to be converted. */
PyObject *client_rows_of(Client *c, PyObject *inputs)
{
	Call q;
	int took = PyTuple_Check(inputs) ? take(c, inputs, NULL, 0, &q) : 0;
	return took < 0 ? NULL : PyLong_FromLongLong(took ? q.rows : 0);
}

/* infer(arrays, timeout_ns, priority, cost, with_version, step): priority, cost: None, or numbers in their range. step: the
 * Stepper whose next step it is, or None. */
PyObject *client_infer(Client *c, PyObject *args)
{
	PyObject *arrays, *priority, *cost, *step;
	long long timeout;
	int with_version;
	Call q;
	if (!PyArg_ParseTuple(args, "O!LOOpO", &PyTuple_Type, &arrays, &timeout, &priority, &cost, &with_version, &step))
		return NULL;
	Caller *m = PyObject_TypeCheck(step, stepper_type) ? (Caller *)step : NULL;
	begin(&q, m ? m->sequence : 0);
	q.timeout = timeout;
	q.with_version = (char)with_version;
	return take_all(c, arrays, priority, cost, &q) ? NULL : run(c, m, &q);
}

/* collect(request, rows): (answer, version) of an ended request, which is released. rows: -1 for one item. */
PyObject *client_collect(Client *c, PyObject *args)
{
	unsigned long long request;
	long long rows;
	Call q;
	if (!PyArg_ParseTuple(args, "KL", &request, &rows))
		return NULL;
	q.request = request;
	q.rows = rows;
	PyObject *y = collect(c, &q);
	return y ? Py_BuildValue("NI", y, q.version) : NULL;
}

/* ---- model(x, …), step(x, …) ------------------------------------------------------ */

/* Runs a call whose arguments are as the library wants them; others go to _call. */
static PyObject *call(Caller *m, int is_step, PyObject *args, PyObject *named)
{
	Client *c = (Client *)m->core;
	Call q;
	int took = 0;
	if (named && PyDict_Size(named) == 0)
		named = NULL;
	begin(&q, m->sequence);
	if (c && !m->busy && (m->sequence || !is_step))
		took = take(c, args, named, 1, &q);
	if (took > 0 && is_step && count_rows(&q) != m->rows)
		took = 0;
	PyObject *y = took > 0 ? run(c, m, &q) : NULL;
	Py_XDECREF(q.kept);
	if (took)
		return y;
	PyObject *general = PyObject_GetAttrString((PyObject *)m, "_call");
	y = general ? PyObject_Call(general, args, named) : NULL;
	Py_XDECREF(general);
	return y;
}

static PyObject *caller_call(Caller *m, PyObject *args, PyObject *named) { return call(m, 0, args, named); }
static PyObject *stepper_step(Caller *m, PyObject *args, PyObject *named) { return call(m, 1, args, named); }

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
	{"_sent", T_ULONGLONG, offsetof(Caller, sent), 0, NULL},
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
