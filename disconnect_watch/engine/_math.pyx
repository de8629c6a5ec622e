# cython: language_level=3, auto_pickle=False, autotestdict=False
# The arithmetic of csrc/dw_math.h for tensors, which come as addresses: whoever has a tensor asks
# it once, and no call of ours makes one. Shapes are the caller's affair, see native.py.
cimport cython
from libc.stdint cimport int32_t, int64_t, uintptr_t


cdef extern from "dw_math.h" nogil:
    ctypedef struct dw_attention:
        const float *keys
        const float *values
        size_t num_heads
        size_t num_kv_heads
        size_t head_dim
        size_t block_size
        float scale
        float softcap
        size_t window
    ctypedef struct dw_math:
        const char *name
        size_t lanes
        size_t panel
        void (*linear_pack)(
            const float *weight, size_t outputs, size_t inputs, float *packed
        ) noexcept nogil
        void (*linear)(
            const float *x, size_t rows, size_t inputs, const float *packed, size_t outputs,
            const float *bias, const float *residual, float *out
        ) noexcept nogil
        void (*rms_norm)(
            const float *x, size_t stride, size_t rows, size_t heads, size_t size,
            const float *weight, float epsilon, const float *residual, float *out
        ) noexcept nogil
        void (*gate)(
            const float *x, size_t rows, size_t size, int is_silu, float *out
        ) noexcept nogil
        void (*rotate)(
            float *heads, size_t stride, size_t rows, size_t num_heads, size_t head_dim,
            size_t rotary_dim, const float *cos, const float *sin, const int64_t *positions
        ) noexcept nogil
        void (*attend)(
            const dw_attention *attention, const float *query, size_t query_stride, size_t rows,
            const int32_t *tables, size_t table_stride, const int32_t *lengths, float *scratch,
            float *out
        ) noexcept nogil
        void (*argmax)(const float *x, size_t rows, size_t size, int64_t *out) noexcept nogil
    const dw_math *dw_math_best() noexcept
    void dw_math_scatter(
        const float *source, size_t stride, size_t rows, size_t size, const int64_t *slots,
        float *to
    ) noexcept


cdef const dw_math *math = dw_math_best()

INSTRUCTIONS = math.name.decode()
LANES = math.lanes


def linear_size(size_t outputs, size_t inputs):
    return (outputs + math.panel - 1) // math.panel * math.panel * inputs


def linear_pack(uintptr_t weight, size_t outputs, size_t inputs, uintptr_t packed):
    with nogil:
        math.linear_pack(<const float *>weight, outputs, inputs, <float *>packed)


def linear(
    uintptr_t x, size_t rows, size_t inputs, uintptr_t packed, size_t outputs,
    uintptr_t bias, uintptr_t residual, uintptr_t out
):
    with nogil:
        math.linear(
            <const float *>x, rows, inputs, <const float *>packed, outputs,
            <const float *>bias, <const float *>residual, <float *>out
        )


def rms_norm(
    uintptr_t x, size_t stride, size_t rows, size_t heads, size_t size, uintptr_t weight,
    float epsilon, uintptr_t residual, uintptr_t out
):
    with nogil:
        math.rms_norm(
            <const float *>x, stride, rows, heads, size, <const float *>weight, epsilon,
            <const float *>residual, <float *>out
        )


def gate(uintptr_t x, size_t rows, size_t size, bint is_silu, uintptr_t out):
    with nogil:
        math.gate(<const float *>x, rows, size, is_silu, <float *>out)


def rotate(
    uintptr_t heads, size_t stride, size_t rows, size_t num_heads, size_t head_dim,
    size_t rotary_dim, uintptr_t cos, uintptr_t sin, uintptr_t positions
):
    with nogil:
        math.rotate(
            <float *>heads, stride, rows, num_heads, head_dim, rotary_dim,
            <const float *>cos, <const float *>sin, <const int64_t *>positions
        )


def scatter(
    uintptr_t source, size_t stride, size_t rows, size_t size, uintptr_t slots, uintptr_t to
):
    with nogil:
        dw_math_scatter(
            <const float *>source, stride, rows, size, <const int64_t *>slots, <float *>to
        )


def argmax(uintptr_t x, size_t rows, size_t size, uintptr_t out):
    with nogil:
        math.argmax(<const float *>x, rows, size, <int64_t *>out)


@cython.final
cdef class Attention:
    cdef dw_attention _attention

    def __cinit__(
        self, *, uintptr_t keys, uintptr_t values, size_t num_heads, size_t num_kv_heads,
        size_t head_dim, size_t block_size, float scale, float softcap, size_t window
    ):
        self._attention = dw_attention(
            <const float *>keys, <const float *>values, num_heads, num_kv_heads, head_dim,
            block_size, scale, softcap, window
        )

    def attend(
        self, uintptr_t query, size_t query_stride, size_t rows, uintptr_t tables,
        size_t table_stride, uintptr_t lengths, uintptr_t scratch, uintptr_t out
    ):
        with nogil:
            math.attend(
                &self._attention, <const float *>query, query_stride, rows,
                <const int32_t *>tables, table_stride, <const int32_t *>lengths,
                <float *>scratch, <float *>out
            )
