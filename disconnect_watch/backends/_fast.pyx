# cython: language_level=3, auto_pickle=False, autotestdict=False
# The fields of what goes into a model and comes out of it, and the short way through a check
# of a request against its model.
#
# Field* are the bases of the classes in backends/infer.py, which documents them: several are
# made for each request, and a dataclass takes five times as long.
#
# PlainCheck sees whether all is as it is mostly. What is not is looked at again by Validator
# (backends/validate.py), which finds the words for what is wrong.
#
# Threads: any.
from libc.stdint cimport int64_t

from disconnect_watch import token as tokens

cdef type CancelToken = tokens.CancelToken

cdef enum:
    MAX_INPUTS = 63


cdef class TensorFields:
    cdef public object name
    cdef public object datatype
    cdef public object shape
    cdef public object data
    cdef public object parameters
    cdef public bint is_classified

    def __init__(self, name, datatype, shape, data, parameters=None, is_classified=False):
        self.name = name
        self.datatype = datatype
        self.shape = shape
        self.data = data
        self.parameters = {} if parameters is None else parameters
        self.is_classified = is_classified

    def __eq__(self, other):
        return type(self) is type(other) and fields_of(self) == fields_of(other)

    __hash__ = None

    def __reduce__(self):
        return type(self), tuple(fields_of(self).values())

    def __repr__(self):
        return shown(self)


cdef class RequestFields:
    cdef public object id
    cdef public object inputs
    cdef public object requested_outputs
    cdef public object num_classes
    cdef public object headers
    cdef public object parameters
    cdef public object sequence_id
    cdef public bint sequence_start
    cdef public bint sequence_end
    cdef public object priority
    cdef public object timeout_us
    cdef public object cancel
    cdef public object phase

    def __init__(
        self,
        id="",
        inputs=None,
        requested_outputs=None,
        num_classes=None,
        headers=(),
        parameters=None,
        sequence_id=0,
        sequence_start=False,
        sequence_end=False,
        priority=0,
        timeout_us=0,
        cancel=None,
        phase=None,
    ):
        self.id = id
        self.inputs = [] if inputs is None else inputs
        self.requested_outputs = [] if requested_outputs is None else requested_outputs
        self.num_classes = {} if num_classes is None else num_classes
        self.headers = headers
        self.parameters = {} if parameters is None else parameters
        self.sequence_id = sequence_id
        self.sequence_start = sequence_start
        self.sequence_end = sequence_end
        self.priority = priority
        self.timeout_us = timeout_us
        self.cancel = CancelToken() if cancel is None else cancel
        self.phase = phase

    __hash__ = None

    def __reduce__(self):
        return type(self), tuple(fields_of(self).values())

    def __repr__(self):
        return shown(self)


cdef class ResponseFields:
    cdef public object model_name
    cdef public object model_version
    cdef public object id
    cdef public object parameters
    cdef public object outputs
    cdef public object error
    cdef public bint is_final

    def __init__(
        self,
        model_name,
        model_version,
        id="",
        parameters=None,
        outputs=None,
        error=None,
        is_final=True,
    ):
        self.model_name = model_name
        self.model_version = model_version
        self.id = id
        self.parameters = {} if parameters is None else parameters
        self.outputs = [] if outputs is None else outputs
        self.error = error
        self.is_final = is_final

    __hash__ = None

    def __reduce__(self):
        return type(self), tuple(fields_of(self).values())

    def __repr__(self):
        return shown(self)


cdef dict fields_of(of):
    # In their order above, which is that of the arguments.
    cdef type kind = type(of)
    while kind.__module__ != __name__:
        kind = kind.__base__
    return {
        name: getattr(of, name) for name in vars(kind) if not name.startswith("_")
    }


cdef str shown(of):
    fields = ", ".join(f"{name}={value!r}" for name, value in fields_of(of).items())
    return f"{type(of).__name__}({fields})"


cdef class _Input:
    cdef str datatype
    cdef tuple dims
    cdef int64_t size_bytes
    cdef int index


cdef class PlainCheck:
    # Requests that have each input once, of a datatype of fixed size.
    cdef dict _inputs
    cdef frozenset _outputs
    cdef int64_t _max_batch_size

    def __cinit__(self, inputs, outputs, int64_t max_batch_size):
        cdef _Input one
        self._inputs = {}
        self._outputs = frozenset(outputs)
        self._max_batch_size = max_batch_size
        for index, (name, datatype, dims, size_bytes) in enumerate(inputs):
            one = _Input.__new__(_Input)
            one.datatype, one.dims, one.size_bytes, one.index = datatype, dims, size_bytes, index
            self._inputs[name] = one

    def batch_size(self, request):
        """That of a request that fits, 1 without batches; 0 where it must be looked at closer."""
        cdef list given = request.inputs
        cdef Py_ssize_t num = len(given)
        if num != len(self._inputs) or num > MAX_INPUTS:
            return 0
        cdef int64_t batch_size = 1
        cdef int64_t seen = 0
        cdef int64_t bit, num_bytes
        cdef tuple shape
        cdef _Input one
        cdef bint is_first = True
        for tensor in given:
            one = self._inputs.get(tensor.name)
            if one is None or not one.size_bytes:
                return 0
            bit = <int64_t>1 << one.index
            if seen & bit:
                return 0
            seen |= bit
            if <str>tensor.datatype != one.datatype:
                return 0
            shape = tensor.shape
            num_bytes = self._num_bytes(shape, one)
            if num_bytes < 0 or num_bytes != len(tensor.data):
                return 0
            if self._max_batch_size:
                if is_first:
                    batch_size = shape[0]
                    is_first = False
                elif <int64_t>shape[0] != batch_size:
                    return 0
        if batch_size < 1 or self._max_batch_size and batch_size > self._max_batch_size:
            return 0
        for name in request.requested_outputs:
            if name not in self._outputs:
                return 0
        return batch_size

    cdef int64_t _num_bytes(self, tuple shape, _Input one) except -2:
        # Of a tensor of that shape; -1 where the shape is not the input's.
        cdef Py_ssize_t skipped = 1 if self._max_batch_size else 0
        cdef Py_ssize_t num_dims = len(shape)
        cdef int64_t num_bytes = one.size_bytes
        cdef int64_t dim, wanted
        cdef Py_ssize_t at
        if num_dims != len(one.dims) + skipped:
            return -1
        for at in range(num_dims):
            dim = shape[at]
            if at >= skipped:
                wanted = one.dims[at - skipped]
                if wanted != -1 and wanted != dim:
                    return -1
            if dim < 0 or dim and num_bytes > (<int64_t>1 << 62) // dim:
                return -1
            num_bytes *= dim
        return num_bytes
