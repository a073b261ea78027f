/* SPDX-License-Identifier: Apache-2.0 */
/* The module: its setup by Python. */
#include "quick.h"

#include <dlfcn.h>

#define DEFINE(name) __typeof__(name) *p_##name;
FUNCTIONS(DEFINE)

PyObject *ndarray, *np_empty, *columns_class, *end_view, *nanoseconds, *err_released, *err_committed, *err_parents;
PyObject *name_done, *name_set_result, *keyword_numbers;
unsigned int generation;

/* Whether an ndarray has the fields of Array; tried with a probe of shape (2, 3). */
static int knows_arrays(PyObject *probe, PyObject *dtype, unsigned long long address, Py_ssize_t item)
{
	Array *a = (Array *)probe;
	return Py_TYPE(probe) == (PyTypeObject *)ndarray && (unsigned long long)(uintptr_t)a->data == address && a->rank == 2 &&
	       a->shape[0] == 2 && a->shape[1] == 3 && a->strides[0] == 3 * item && a->strides[1] == item && a->base == NULL &&
	       a->dtype == dtype && a->flags & CONTIGUOUS && a->flags & WRITEABLE;
}

/* ---- the module ------------------------------------------------------------ */

static PyObject *forked(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
	generation++;
	Py_RETURN_NONE;
}

/* setup(probe, dtype, address, item, ndarray, empty, columns, end_view, nanoseconds, released, committed, parents):
 * whether this build understands ndarrays. */
static PyObject *setup(PyObject *Py_UNUSED(module), PyObject *args)
{
	PyObject *probe, *dtype, *given[8], **kept[] = {&ndarray, &np_empty, &columns_class, &end_view, &nanoseconds, &err_released,
		&err_committed, &err_parents};
	unsigned long long address;
	Py_ssize_t item;
	if (!PyArg_ParseTuple(args, "OOKnOOOOOOOO", &probe, &dtype, &address, &item, &given[0], &given[1], &given[2], &given[3],
			      &given[4], &given[5], &given[6], &given[7]))
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
	if (!library)
		return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_OSError, "%s", dlerror());
#define FIND(name) p_##name = (__typeof__(name) *)dlsym(library, #name);
	FUNCTIONS(FIND)
	Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
	{"setup", setup, METH_VARARGS, NULL},
	{"load", load, METH_O, NULL},
	{"forked", forked, METH_NOARGS, NULL},
	{"next_batch", next_batch, METH_VARARGS, NULL},
	{"copy_inputs", copy_inputs, METH_VARARGS, NULL},
	{"write_outputs", write_outputs, METH_VARARGS, NULL},
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
	name_done = PyUnicode_InternFromString("done");
	name_set_result = PyUnicode_InternFromString("set_result");
	keyword_numbers = Py_BuildValue("{sisisisisi}", "timeout", 0, "priority", 1, "cost", 2, "split", 3, "version", 4);
	client_type = name_done && name_set_result && keyword_numbers ? add_type(module, "Client", &client_spec) : NULL;
	stepper_type = client_type ? add_type(module, "Stepper", &stepper_spec) : NULL;
	if (stepper_type && add_type(module, "Caller", &caller_spec) && add_type(module, "Held", &held_spec) &&
	    add_type(module, "Columns", &columns_spec))
		return module;
	Py_DECREF(module);
	return NULL;
}
