/* SPDX-License-Identifier: Apache-2.0 */
/* A worker's batches. A function takes its small inputs as copies and returns arrays: one call makes those, one writes these. */
#include "quick.h"

#define MOST_WRITTEN (INT64_C(1) << 20) /* larger answers are copied without the interpreter's lock */

/* A tensor of one shape on the host. */
typedef struct {
	unsigned int k;
	PyObject *name, *dtype, *shape;
	Py_ssize_t bytes; /* of a row */
} Plain;

static int plain(PyObject *tensors, Py_ssize_t i, Plain *t)
{
	return PyArg_ParseTuple(PyTuple_GetItem(tensors, i), "IOOO!n", &t->k, &t->name, &t->dtype, &PyTuple_Type, &t->shape, &t->bytes);
}

/* next_batch(worker, timeout_ns): (address, requests, rows, runs, pad_to, first slot), None
 * if none came; a number is the status of an error. */
PyObject *next_batch(PyObject *Py_UNUSED(module), PyObject *args)
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
	if (status)
		return PyLong_FromLong(status);
	return Py_BuildValue("KIIIII", (unsigned long long)(uintptr_t)b, b->requests, b->rows, b->runs, b->pad_to, b->slot[0]);
}

/* A read-only copy of all rows of an input, and of the padding. */
static PyObject *copy_input(const rb_batch *b, const Plain *t)
{
	PyObject *rows = Py_BuildValue("(I)", b->pad_to), *shape = rows ? PySequence_Concat(rows, t->shape) : NULL;
	PyObject *x = shape ? PyObject_CallFunction(np_empty, "NO", shape, t->dtype) : NULL;
	Py_XDECREF(rows);
	if (x && Py_TYPE(x) == (PyTypeObject *)ndarray &&
	    !p_rb_batch_gather(b, RB_INPUT, t->k, ((Array *)x)->data, b->pad_to * (uint64_t)t->bytes)) {
		((Array *)x)->flags &= ~WRITEABLE;
		return x;
	}
	Py_XDECREF(x);
	return NULL;
}

/* copy_inputs(batch, tensors, most_bytes): copies of the inputs that are not larger, by name. Python takes the others, and says
 * the error of one that failed. */
PyObject *copy_inputs(PyObject *Py_UNUSED(module), PyObject *args)
{
	unsigned long long at;
	PyObject *tensors, *all = NULL;
	Py_ssize_t most;
	Plain t;
	if (!PyArg_ParseTuple(args, "KO!n", &at, &PyTuple_Type, &tensors, &most) || !(all = PyDict_New()))
		return NULL;
	const rb_batch *b = (const rb_batch *)(uintptr_t)at;
	for (Py_ssize_t i = 0; all && i < PyTuple_Size(tensors); i++) {
		PyObject *x = plain(tensors, i, &t) && t.bytes * (Py_ssize_t)b->pad_to <= most ? copy_input(b, &t) : NULL;
		if (x ? PyDict_SetItem(all, t.name, x) : PyErr_Occurred() != NULL)
			Py_CLEAR(all);
		Py_XDECREF(x);
	}
	return all;
}

/* Whether it is an array of all rows of the output, perhaps with the padding. */
static int is_output(const rb_batch *b, const Plain *t, PyObject *y)
{
	const Array *a = (const Array *)y;
	Py_ssize_t rank = PyTuple_Size(t->shape);
	if (Py_TYPE(y) != (PyTypeObject *)ndarray || a->dtype != t->dtype || !(a->flags & CONTIGUOUS) || a->rank != 1 + rank ||
	    (a->shape[0] != (Py_ssize_t)b->rows && a->shape[0] != (Py_ssize_t)b->pad_to) || b->rows * t->bytes > MOST_WRITTEN)
		return 0;
	for (Py_ssize_t i = 0; i < rank; i++)
		if (a->shape[1 + i] != PyLong_AsSsize_t(PyTuple_GetItem(t->shape, i)))
			return 0;
	return 1;
}

/* write_outputs(batch, tensors, result): writes what a function returned, an array or a dict of them. False if it is something
 * else than arrays of the outputs' types and shapes: Python converts that, or says what is wrong. */
PyObject *write_outputs(PyObject *Py_UNUSED(module), PyObject *args)
{
	unsigned long long at;
	PyObject *tensors, *result, *y[MOST_TENSORS];
	Plain t[MOST_TENSORS];
	if (!PyArg_ParseTuple(args, "KO!O", &at, &PyTuple_Type, &tensors, &result))
		return NULL;
	rb_batch *b = (rb_batch *)(uintptr_t)at;
	Py_ssize_t count = PyTuple_Size(tensors), by_name = PyDict_CheckExact(result);
	int fits = count > 0 && count <= MOST_TENSORS && (by_name ? PyDict_Size(result) == count : count == 1);
	for (Py_ssize_t i = 0; fits && i < count; i++) {
		if (!plain(tensors, i, &t[i]))
			return NULL;
		y[i] = by_name ? PyDict_GetItemWithError(result, t[i].name) : result;
		fits = y[i] && is_output(b, &t[i], y[i]);
	}
	for (Py_ssize_t i = 0; fits && i < count; i++)
		fits = p_rb_batch_scatter(b, t[i].k, ((Array *)y[i])->data, b->rows * (uint64_t)t[i].bytes) == RB_OK;
	return PyErr_Occurred() ? NULL : PyBool_FromLong(fits);
}

PyObject *complete_batch(PyObject *Py_UNUSED(module), PyObject *at)
{
	rb_batch *batch = PyLong_AsVoidPtr(at);
	if (PyErr_Occurred())
		return NULL;
	return PyLong_FromLong(p_rb_batch_complete(batch));
}
