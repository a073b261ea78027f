/* SPDX-License-Identifier: Apache-2.0 */
/* Many requests in flight, for submit and asyncio: sending them, and resolving the futures of ended requests. */
#include "quick.h"

PyObject *list_and_commit(Client *c, uint64_t request, PyObject *waiters, PyObject *waiter, int64_t timeout, int hold)
{
	PyObject *id = PyLong_FromUnsignedLongLong(request);
	if (id && !PyDict_SetItem(waiters, id, waiter)) {
		int status = hold ? RB_OK : commit_one(c, request, timeout, RB_NOTIFY, NULL);
		if (!status)
			return id;
		if (status > 0)
			raise_status(c, status);
		PyObject *kind, *value, *trace;
		PyErr_Fetch(&kind, &value, &trace);
		PyDict_DelItem(waiters, id);
		PyErr_Restore(kind, value, trace);
	}
	Py_XDECREF(id);
	release_one(c, request, NULL);
	return NULL;
}

static PyObject *send_rows(Client *c, uint32_t rows, const void *const *in, PyObject *waiters, PyObject *waiter, int64_t timeout,
	int hold)
{
	rb_inference i = {.client = c->handle, .inputs = in, .rows = rows, .flags = RB_HOLD};
	int status;
	Py_BEGIN_ALLOW_THREADS
	status = p_rb_submit_prepared(&i);
	Py_END_ALLOW_THREADS
	if (status == RB_ERR_FULL || status == RB_ERR_TIMEOUT)
		return PyLong_FromLong(0);
	if (status)
		return raise_status(c, status);
	return list_and_commit(c, i.request, waiters, waiter, timeout, hold);
}

/* submit_into(waiters, waiter, arrays, rows, timeout_ns, hold): sets waiters[request] = waiter, then sends the request; with
 * hold it is not committed yet. The request's number; 0 if there is no room yet. */
PyObject *client_submit_into(Client *c, PyObject *args)
{
	PyObject *waiters, *waiter, *arrays;
	unsigned int rows;
	long long timeout;
	int hold;
	const void *in[MOST_TENSORS];
	if (!PyArg_ParseTuple(args, "O!OO!ILp", &PyDict_Type, &waiters, &waiter, &PyTuple_Type, &arrays, &rows, &timeout, &hold))
		return NULL;
	Py_ssize_t count = PyTuple_Size(arrays);
	for (Py_ssize_t i = 0; i < count; i++) {
		Array *a = (Array *)PyTuple_GetItem(arrays, i);
		if (count > MOST_TENSORS || Py_TYPE((PyObject *)a) != (PyTypeObject *)ndarray || !(a->flags & CONTIGUOUS))
			return PyErr_Format(PyExc_TypeError, "contiguous arrays only");
		in[i] = a->data;
	}
	return send_rows(c, rows, in, waiters, waiter, timeout, hold);
}

/* hold_one(x, waiters, waiter): submit_into with hold for one item; None if x is not for the quick path. */
PyObject *client_hold_one(Client *c, PyObject *args)
{
	PyObject *x, *waiters, *waiter;
	if (!PyArg_ParseTuple(args, "OO!O", &x, &PyDict_Type, &waiters, &waiter))
		return NULL;
	if (!c->single || !fits(c, 0, x))
		Py_RETURN_NONE;
	const void *in[1] = {((Array *)x)->data};
	return send_rows(c, 1, in, waiters, waiter, 0, 1);
}

/* commit_held(requests, waiters, timeout_ns): commits the requests that are still in waiters; the others were canceled. */
PyObject *client_commit_held(Client *c, PyObject *args)
{
	PyObject *requests, *waiters;
	long long timeout;
	if (!PyArg_ParseTuple(args, "O!O!L", &PyList_Type, &requests, &PyDict_Type, &waiters, &timeout))
		return NULL;
	for (Py_ssize_t i = 0; i < PyList_Size(requests);) {
		uint64_t ids[64];
		uint32_t count = 0;
		for (; i < PyList_Size(requests) && count < 64; i++) {
			PyObject *id = PyList_GetItem(requests, i);
			int listed = PyDict_Contains(waiters, id);
			if (listed > 0)
				ids[count++] = PyLong_AsUnsignedLongLong(id);
			if (PyErr_Occurred())
				return NULL;
		}
		int status = count ? p_rb_commit_all(c->handle, ids, count, timeout, RB_NOTIFY) : RB_OK;
		if (status)
			return raise_status(c, status);
	}
	Py_RETURN_NONE;
}

/* Appends the numbers of the requests that have ended: 1; 0 once the client is closed, -1 if an exception was raised. */
static int reap_into(Client *c, PyObject *ended)
{
	uint64_t ids[64];
	uint32_t count;
	do {
		int status = p_rb_reap(c->handle, ids, 64, &count);
		if (status == RB_ERR_CLOSED)
			return 0;
		if (status) {
			raise_status(c, status);
			return -1;
		}
		for (uint32_t i = 0; i < count; i++) {
			PyObject *id = PyLong_FromUnsignedLongLong(ids[i]);
			int failed = !id || PyList_Append(ended, id);
			Py_XDECREF(id);
			if (failed)
				return -1;
		}
	} while (count == 64);
	return 1;
}

/* collect_one(request): the output of an ended request, which is released. */
PyObject *client_collect_one(Client *c, PyObject *number)
{
	uint64_t request = PyLong_AsUnsignedLongLong(number);
	if (PyErr_Occurred())
		return NULL;
	void *out[1];
	PyObject *y = new_output(c, 0, out);
	if (!y)
		return NULL;
	int status = p_rb_collect_prepared(&(rb_inference){.client = c->handle, .outputs = out, .request = request});
	if (!status)
		return y;
	Py_DECREF(y);
	return raise_status(c, status);
}

/* Resolves a future of the running loop, unless it was canceled. */
static PyObject *resolve(PyObject *future, PyObject *result)
{
	PyObject *done = PyObject_CallMethodObjArgs(future, name_done, NULL);
	if (done == Py_False) {
		Py_DECREF(done);
		done = PyObject_CallMethodObjArgs(future, name_set_result, result, NULL);
	}
	return done;
}

/* Resolves the future of an ended request: here if hold_one has sent it from this loop, otherwise by deliver(request, waiter,
 * loop, error). */
static PyObject *deliver(Client *c, PyObject *id, PyObject *waiter, PyObject *loop, PyObject *others)
{
	PyObject *future, *its_loop, *read, *kind, *error = NULL, *trace;
	if (!PyArg_ParseTuple(waiter, "OOO", &future, &its_loop, &read))
		return NULL;
	if (its_loop == loop && read == Py_None) {
		PyObject *y = client_collect_one(c, id);
		if (y) {
			PyObject *done = resolve(future, y);
			Py_DECREF(y);
			return done;
		}
		if (!PyErr_ExceptionMatches(PyExc_Exception))
			return NULL;
		PyErr_Fetch(&kind, &error, &trace);
		PyErr_NormalizeException(&kind, &error, &trace);
		Py_XDECREF(kind);
		Py_XDECREF(trace);
	}
	PyObject *done = PyObject_CallFunctionObjArgs(others, id, waiter, loop, error ? error : Py_None, NULL);
	Py_XDECREF(error);
	return done;
}

/* drain(ended, waiters, loop, deliver): resolves the futures of ended requests, or calls deliver. After an exception the rest
 * is still in ended and in waiters. */
PyObject *client_drain(Client *c, PyObject *args)
{
	PyObject *ended, *waiters, *loop, *others;
	if (!PyArg_ParseTuple(args, "O!O!OO", &PyList_Type, &ended, &PyDict_Type, &waiters, &loop, &others))
		return NULL;
	int open = reap_into(c, ended);
	if (open < 0)
		return NULL;
	for (Py_ssize_t last; open && (last = PyList_Size(ended) - 1) >= 0;) {
		PyObject *id = PyList_GetItem(ended, last), *done = Py_None;
		PyObject *waiter = PyDict_GetItemWithError(waiters, id);
		Py_INCREF(id);
		if (waiter) {
			Py_INCREF(waiter);
			done = deliver(c, id, waiter, loop, others);
			Py_DECREF(waiter);
			Py_XDECREF(done);
			if (done && PyDict_DelItem(waiters, id)) /* a handler that ran meanwhile took it off */
				PyErr_Clear();
		}
		Py_DECREF(id);
		if (!done || PyErr_Occurred() || PyList_SetSlice(ended, last, last + 1, NULL))
			return NULL;
	}
	Py_RETURN_NONE;
}
