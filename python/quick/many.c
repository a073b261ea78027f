/* SPDX-License-Identifier: Apache-2.0 */
/* Many requests in flight, for submit and asyncio: sending them, and resolving the futures of ended requests. */
#include "quick.h"

enum { PLAIN, WITH_VERSION, LEAVE }; /* how a future gets its answer; completions.py has the same */

PyObject *list_and_commit(Client *c, uint64_t request, PyObject *waiters, PyObject *waiter, int64_t timeout, int hold)
{
	PyObject *id = PyLong_FromUnsignedLongLong(request);
	if (id && !PyDict_SetItem(waiters, id, waiter)) {
		int status = hold ? RB_OK : commit_all(c, &request, 1, timeout, RB_NOTIFY, NULL);
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

/* send(arrays, waiters, future, loop, how, timeout_ns, priority, cost, hold, sequence): sets waiters[request] =
 * (future, loop, rows, how), then sends the request; with hold it is not committed yet. The request's number; 0 if there is no
 * room yet. */
PyObject *client_send(Client *c, PyObject *args)
{
	PyObject *arrays, *waiters, *future, *loop, *priority, *cost, *id = NULL;
	int how, hold;
	long long timeout;
	Call q = {.priority = -1, .cost = -1};
	if (!PyArg_ParseTuple(args, "O!O!OOiLOOpK", &PyTuple_Type, &arrays, &PyDict_Type, &waiters, &future, &loop, &how, &timeout, &priority,
			      &cost, &hold, &q.sequence))
		return NULL;
	if (take_all(c, arrays, priority, cost, &q))
		return NULL;
	int status = fill(c, &q, 0, 0);
	if (status == RB_ERR_FULL || status == RB_ERR_TIMEOUT)
		return PyLong_FromLong(0);
	if (status)
		return raise_status(c, status);
	PyObject *waiter = Py_BuildValue("OOLi", future, loop, (long long)q.rows, how);
	if (waiter)
		id = list_and_commit(c, q.request, waiters, waiter, timeout, hold);
	else
		p_rb_release(c->handle, q.request);
	Py_XDECREF(waiter);
	return id;
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

/* Resolves the future of an ended request: here if it is of this loop, otherwise by deliver(request, waiter, loop, error). */
static PyObject *deliver(Client *c, PyObject *id, PyObject *waiter, PyObject *loop, PyObject *others)
{
	PyObject *future, *its_loop, *kind, *error = NULL, *trace;
	int how;
	long long rows;
	if (!PyArg_ParseTuple(waiter, "OOLi", &future, &its_loop, &rows, &how))
		return NULL;
	if (c->in_c && its_loop == loop && how != LEAVE) {
		Call q = {.request = PyLong_AsUnsignedLongLong(id), .rows = rows};
		PyObject *y = collect(c, &q);
		if (y && how == WITH_VERSION)
			y = Py_BuildValue("NI", y, q.version);
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
