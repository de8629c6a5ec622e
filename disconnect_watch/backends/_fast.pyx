# cython: language_level=3, auto_pickle=False, autotestdict=False
# The short way through a check of a request against its model: whether all is as it is
# mostly. What is not is looked at again by Validator (backends/validate.py), which finds
# the words for what is wrong.
#
# Threads: any; nothing here changes.
from libc.stdint cimport int64_t

cdef enum:
    MAX_INPUTS = 63


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
