# cython: language_level=3, auto_pickle=False, autotestdict=False
# The short way through an infer request whose tensors are numbers in JSON: from the
# document to the tensors, and from tensors to the document.
#
# Whatever is unusual, and all that is wrong, goes the long way from its beginning
# (parse.py, elements.py, render.py), which knows the words for it: both functions
# return None then and have changed nothing.
#
# Threads: any.
cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AsString, PyBytes_FromStringAndSize
from cpython.float cimport PyFloat_AsDouble, PyFloat_CheckExact, PyFloat_FromDouble
from cpython.list cimport PyList_CheckExact
from cpython.long cimport PyLong_AsLongLongAndOverflow, PyLong_CheckExact
from cpython.unicode cimport PyUnicode_CheckExact
from libc.math cimport isfinite
from libc.stdint cimport int32_t, int64_t
from libc.string cimport memcpy

import sys

from disconnect_watch.backends import infer

# As a C variable it is found without a look into the module.
cdef type InferTensor = infer.InferTensor
# The wire's order; elsewhere all go the long way.
cdef bint IS_LITTLE_ENDIAN = sys.byteorder == "little"

cdef enum Kind:
    FP32 = 1
    FP64 = 2
    INT32 = 3
    INT64 = 4

# The largest integer that a double has exactly: what is beyond is rounded elsewhere.
cdef int64_t MAX_EXACT = <int64_t>1 << 53
# Elements; more are not what this is for.
cdef int64_t MAX_ELEMENTS = 1 << 20


cdef Kind kind_of(str datatype) except? <Kind>0:
    if not IS_LITTLE_ENDIAN:
        return <Kind>0
    if datatype == "FP32":
        return FP32
    if datatype == "INT32":
        return INT32
    if datatype == "INT64":
        return INT64
    if datatype == "FP64":
        return FP64
    return <Kind>0


def plain_inputs(document):
    """The inputs of a request that says nothing but them and its id, if all are plain."""
    if type(document) is not dict:
        return None
    cdef dict members = document
    cdef object inputs = members.get("inputs")
    if not PyList_CheckExact(inputs):
        return None
    if len(members) != 1 and (len(members) != 2 or "id" not in members):
        return None
    cdef list tensors = []
    for entry in <list>inputs:
        tensor = plain_tensor(entry)
        if tensor is None:
            return None
        tensors.append(tensor)
    return tensors


cdef object plain_tensor(entry):
    if type(entry) is not dict or len(<dict>entry) != 4:
        return None
    cdef dict members = entry
    cdef object name = members.get("name")
    cdef object datatype = members.get("datatype")
    cdef object dims = members.get("shape")
    cdef object data = members.get("data")
    if not (
        PyUnicode_CheckExact(name)
        and PyUnicode_CheckExact(datatype)
        and PyList_CheckExact(dims)
        and PyList_CheckExact(data)
    ):
        return None
    cdef Kind kind = kind_of(datatype)
    if not kind:
        return None
    cdef int64_t num_elements = 1
    cdef int64_t dim
    cdef int overflow = 0
    for one in <list>dims:
        if not PyLong_CheckExact(one):
            return None
        dim = PyLong_AsLongLongAndOverflow(one, &overflow)
        if overflow or dim < 1 or num_elements > MAX_ELEMENTS // dim:
            return None
        num_elements *= dim
    if len(<list>data) != num_elements:
        return None
    laid_out = lay_out(kind, data, num_elements)
    if laid_out is None:
        return None
    return InferTensor(name, datatype, tuple(<list>dims), laid_out, {})


@cython.boundscheck(False)
cdef bytes lay_out(Kind kind, list data, int64_t num_elements):
    cdef int size = 4 if kind == FP32 or kind == INT32 else 8
    cdef bytes laid_out = PyBytes_FromStringAndSize(NULL, num_elements * size)
    cdef char *place = PyBytes_AsString(laid_out)
    cdef object element
    cdef double number
    cdef int64_t integer
    cdef int overflow = 0
    cdef int64_t at
    for at in range(num_elements):
        element = data[at]
        if kind == FP32 or kind == FP64:
            if PyFloat_CheckExact(element):
                number = PyFloat_AsDouble(element)
            elif PyLong_CheckExact(element):
                integer = PyLong_AsLongLongAndOverflow(element, &overflow)
                if overflow or integer > MAX_EXACT or integer < -MAX_EXACT:
                    return None
                number = <double>integer
            else:
                return None
            if kind == FP32:
                (<float *>place)[at] = <float>number
            else:
                (<double *>place)[at] = number
            continue
        if not PyLong_CheckExact(element):
            return None
        integer = PyLong_AsLongLongAndOverflow(element, &overflow)
        if overflow:
            return None
        if kind == INT32:
            (<int32_t *>place)[at] = <int32_t>integer
        else:
            (<int64_t *>place)[at] = integer
    return laid_out


def plain_document(response):
    """What an answer's JSON says, if all its outputs are finite numbers; else None."""
    cdef dict document = {}
    if response.parameters:
        return None
    name = response.id
    if name:
        document["id"] = name
    document["model_name"] = response.model_name
    document["model_version"] = response.model_version
    cdef list outputs = []
    for tensor in <list>response.outputs:
        elements = plain_elements(tensor)
        if elements is None:
            return None
        outputs.append(
            {
                "name": tensor.name,
                "datatype": tensor.datatype,
                "shape": tensor.shape,
                "data": elements,
            }
        )
    document["outputs"] = outputs
    return document


cdef list plain_elements(tensor):
    cdef Kind kind = kind_of(tensor.datatype)
    if not kind or tensor.is_classified:
        return None
    cdef int64_t num_elements = 1
    for dim in <tuple>tensor.shape:
        num_elements *= <int64_t>dim
    if num_elements < 0 or num_elements > MAX_ELEMENTS:
        return None
    cdef int size = 4 if kind == FP32 or kind == INT32 else 8
    cdef Py_buffer view
    PyObject_GetBuffer(tensor.data, &view, PyBUF_SIMPLE)
    try:
        if view.len != num_elements * size:
            return None
        return elements_of(kind, <const char *>view.buf, num_elements)
    finally:
        PyBuffer_Release(&view)


cdef list elements_of(Kind kind, const char *data, int64_t num_elements):
    # Copied one by one: they may lie anywhere.
    cdef list elements = []
    cdef double wide
    cdef float narrow
    cdef int32_t small
    cdef int64_t at, large
    for at in range(num_elements):
        if kind == INT32:
            memcpy(&small, data + 4 * at, 4)
            elements.append(small)
            continue
        if kind == INT64:
            memcpy(&large, data + 8 * at, 8)
            elements.append(large)
            continue
        if kind == FP32:
            memcpy(&narrow, data + 4 * at, 4)
            wide = narrow
        else:
            memcpy(&wide, data + 8 * at, 8)
        if not isfinite(wide):
            return None
        elements.append(PyFloat_FromDouble(wide))
    return elements
