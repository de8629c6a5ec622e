/* The arithmetic of a decoder on a CPU, in float32: what a step with few tokens
 * spends its time on, without the cost of one library call an operation.
 *
 * Every result is a function of its own row alone: sums run in one order,
 * whatever the number of rows, so a row has the same bits in any company. They
 * differ from one set of instructions to the other.
 *
 * THREADS: any; nothing is shared but what the caller shares. No memory is
 * taken. Rows are contiguous unless a stride, in floats, says otherwise.
 */
#ifndef DW_MATH_H
#define DW_MATH_H

#include <stddef.h>
#include <stdint.h>

/* What attend sees of a cache of keys and values in blocks. */
typedef struct {
    const float *keys;   /* [slots, num_kv_heads, head_dim] */
    const float *values; /* likewise */
    size_t num_heads;    /* a multiple of num_kv_heads */
    size_t num_kv_heads;
    size_t head_dim; /* a multiple of lanes */
    size_t block_size;
    float scale;
    float softcap; /* 0: none */
    size_t window; /* how many keys a token sees, itself included; 0: all */
} dw_attention;

/* The kernels for one set of instructions. */
typedef struct {
    const char *name; /* "avx512", "avx2" or "baseline" */
    size_t lanes;     /* floats in one vector: 16, 8 or 4 */
    size_t panel;     /* packed weights have so many outputs beside each other,
                         and are padded to a multiple of them */

    /* Pack a weight [outputs, inputs] for linear. */
    void (*linear_pack)(const float *weight, size_t outputs, size_t inputs,
                        float *packed);

    /* out[r] = x[r] @ weight.T + bias + residual[r]; bias [outputs] and
     * residual [rows, outputs] may be NULL, and residual may be out. */
    void (*linear)(const float *x, size_t rows, size_t inputs,
                   const float *packed, size_t outputs, const float *bias,
                   const float *residual, float *out);

    /* out[r, h] = x[r, h] / rms(x[r, h]) * weight for each of the heads that
     * lie at the begin of a row, size floats each, plus residual unless NULL;
     * all have the same stride. out may be x, or residual. */
    void (*rms_norm)(const float *x, size_t stride, size_t rows, size_t heads,
                     size_t size, const float *weight, float epsilon,
                     const float *residual, float *out);

    /* out[r] = act(x[r][:size]) * x[r][size:], with SiLU or the tanh form of
     * GELU. */
    void (*gate)(const float *x, size_t rows, size_t size, int is_silu,
                 float *out);

    /* Turn the first rotary_dim of each head [rows, heads, head_dim] in place;
     * cos and sin [positions, rotary_dim] as rotary.py has them. */
    void (*rotate)(float *heads, size_t stride, size_t rows, size_t num_heads,
                   size_t head_dim, size_t rotary_dim, const float *cos,
                   const float *sin, const int64_t *positions);

    /* Attend from one token a row to the first lengths[r] tokens of its
     * sequence, whose blocks are tables[r * table_stride ...]. A row of length
     * 0 gets zeros.
     *
     * query has query_stride floats a row; out is [rows, num_heads * head_dim].
     * scratch has num_heads times as many floats as the greatest length,
     * rounded up to lanes. */
    void (*attend)(const dw_attention *attention, const float *query,
                   size_t query_stride, size_t rows, const int32_t *tables,
                   size_t table_stride, const int32_t *lengths, float *scratch,
                   float *out);

    /* The index of the greatest of each row [rows, size], the first of
     * several; -1 where the greatest is not finite or a NaN is among them. */
    void (*argmax)(const float *x, size_t rows, size_t size, int64_t *out);
} dw_math;

/* The best kernels that this CPU can run. */
const dw_math *dw_math_best(void);

/* RETURNS: the kernels of that name, or NULL if there are none or the CPU
 * cannot run them. */
const dw_math *dw_math_named(const char *name);

/* to[slots[r]] = from[r], with stride floats from one row to the next of from
 * and size floats in each. */
void dw_math_scatter(const float *from, size_t stride, size_t rows, size_t size,
                     const int64_t *slots, float *to);

#endif
