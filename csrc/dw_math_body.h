/* The kernels of dw_math.h for one instruction set; dw_math.c includes this
 * once for each, with
 *
 *   LANES      floats in a vector
 *   TILE_ROWS  rows that dw_linear computes at once: twice as many sums, two
 *              vectors and a splat have to fit into the registers
 *   NAME(x)    x with a suffix of its own
 *
 * Vectors are those of gcc and clang, which know the instructions. No include
 * guard: it is meant to be read several times.
 */
#define PANEL  (2 * LANES)
#define INLINE static inline __attribute__((always_inline))

typedef float NAME(vec) __attribute__((vector_size(4 * LANES)));
typedef int32_t NAME(ivec) __attribute__((vector_size(4 * LANES)));
/* The same wherever it lies in memory. */
typedef NAME(vec) NAME(uvec) __attribute__((aligned(4), may_alias));
#define vec  NAME(vec)
#define ivec NAME(ivec)

INLINE vec NAME(load)(const float *from)
{
    return *(const NAME(uvec) *)from;
}

INLINE void NAME(store)(float *to, vec value)
{
    *(NAME(uvec) *)to = value;
}

INLINE vec NAME(splat)(float value)
{
    return value - (vec){0};
}

/* Lane by lane: what value is where mask is -1, what other is where it is 0. */
INLINE vec NAME(choose)(ivec mask, vec value, vec other)
{
    return (vec)((mask & (ivec)value) | (~mask & (ivec)other));
}

INLINE float NAME(sum)(vec value)
{
    float total = 0;
    for (size_t lane = 0; lane < LANES; lane++)
        total += value[lane];
    return total;
}

/* e^x to 2 units in the last place: 2^n times a polynomial on ln(2)/2 around 0.
 * Ends at 2^-126 and 2^127; a NaN stays one.
 * Source of the coefficients: Cephes, expf. */
INLINE vec NAME(exp)(vec x)
{
    const vec low = NAME(splat)(-87.3f), high = NAME(splat)(88.0f);
    /* Adding it pushes the fraction out: what is left is the integer. */
    const float shift = 12582912.0f;
    x = NAME(choose)(x < low, low, x);
    x = NAME(choose)(x > high, high, x);
    vec shifted = x * 1.44269504f + shift;
    ivec exponent = ((ivec)shifted - 0x4b400000 + 127) << 23;
    vec n = shifted - shift;
    vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vec poly = NAME(splat)(1.9875691500e-4f);
    poly = poly * r + 1.3981999507e-3f;
    poly = poly * r + 8.3334519073e-3f;
    poly = poly * r + 4.1665795894e-2f;
    poly = poly * r + 1.6666665459e-1f;
    poly = poly * r + 5.0000001201e-1f;
    return (poly * r * r + r + 1.0f) * (vec)exponent;
}

INLINE vec NAME(tanh)(vec x)
{
    return 1.0f - 2.0f / (NAME(exp)(2.0f * x) + 1.0f);
}

/* TILE_ROWS rows at most against one panel; num_rows is a constant wherever
 * this is inlined, so that the sums stay in registers. */
INLINE void NAME(linear_tile)(size_t num_rows, const float *x, size_t inputs,
                              const float *panel, float (*sums)[PANEL])
{
    vec low[TILE_ROWS], high[TILE_ROWS];
#pragma GCC unroll 16
    for (size_t row = 0; row < num_rows; row++)
        low[row] = high[row] = NAME(splat)(0);
    for (size_t k = 0; k < inputs; k++, panel += PANEL) {
        vec left = NAME(load)(panel), right = NAME(load)(panel + LANES);
#pragma GCC unroll 16
        for (size_t row = 0; row < num_rows; row++) {
            vec factor = NAME(splat)(x[row * inputs + k]);
            low[row] += factor * left;
            high[row] += factor * right;
        }
    }
#pragma GCC unroll 16
    for (size_t row = 0; row < num_rows; row++) {
        NAME(store)(sums[row], low[row]);
        NAME(store)(sums[row] + LANES, high[row]);
    }
}

static void NAME(linear_pack)(const float *weight, size_t outputs,
                              size_t inputs, float *packed)
{
    for (size_t first = 0; first < outputs; first += PANEL)
        for (size_t k = 0; k < inputs; k++)
            for (size_t column = first; column < first + PANEL; column++)
                *packed++ =
                    column < outputs ? weight[column * inputs + k] : 0.0f;
}

static void NAME(linear)(const float *x, size_t rows, size_t inputs,
                         const float *packed, size_t outputs, const float *bias,
                         const float *residual, float *out)
{
    for (size_t first = 0; first < outputs; first += PANEL) {
        size_t width = outputs - first < PANEL ? outputs - first : PANEL;
        for (size_t row = 0; row < rows; row += TILE_ROWS) {
            float sums[TILE_ROWS][PANEL];
            size_t num_rows = rows - row < TILE_ROWS ? rows - row : TILE_ROWS;
            const float *tile = x + row * inputs;
            /* TILE_ROWS is 8 at most. */
            switch (num_rows) {
            case TILE_ROWS:
                NAME(linear_tile)(TILE_ROWS, tile, inputs, packed, sums);
                break;
#define CASE(n)                                           \
    case n:                                               \
        NAME(linear_tile)(n, tile, inputs, packed, sums); \
        break;
#if TILE_ROWS > 6
                CASE(7)
                CASE(6)
#endif
                CASE(5)
                CASE(4)
                CASE(3)
                CASE(2)
            default:
                NAME(linear_tile)(1, tile, inputs, packed, sums);
#undef CASE
            }
            for (size_t r = 0; r < num_rows; r++) {
                size_t at = (row + r) * outputs + first;
                for (size_t column = 0; column < width; column++) {
                    float value = sums[r][column];
                    if (bias)
                        value += bias[first + column];
                    if (residual)
                        value += residual[at + column];
                    out[at + column] = value;
                }
            }
        }
        packed += PANEL * inputs;
    }
}

static void NAME(rms_norm)(const float *x, size_t stride, size_t rows,
                           size_t heads, size_t size, const float *weight,
                           float epsilon, const float *residual, float *out)
{
    size_t whole = size - size % LANES;
    for (size_t i = 0; i < rows * heads; i++) {
        size_t at = i / heads * stride + i % heads * size;
        const float *own = x + at;
        vec squares = NAME(splat)(0);
        for (size_t j = 0; j < whole; j += LANES) {
            vec part = NAME(load)(own + j);
            squares += part * part;
        }
        float total = NAME(sum)(squares);
        for (size_t j = whole; j < size; j++)
            total += own[j] * own[j];
        float factor = 1.0f / sqrtf(total / (float)size + epsilon);
        for (size_t j = 0; j < size; j++) {
            float value = own[j] * factor * weight[j];
            out[at + j] = residual ? residual[at + j] + value : value;
        }
    }
}

INLINE vec NAME(activate)(vec x, int is_silu)
{
    if (is_silu)
        return x / (1.0f + NAME(exp)(-x));
    vec inner = 0.7978845608f * (x + 0.044715f * x * x * x);
    return 0.5f * x * (1.0f + NAME(tanh)(inner));
}

static void NAME(gate)(const float *x, size_t rows, size_t size, int is_silu,
                       float *out)
{
    for (size_t row = 0; row < rows; row++, x += 2 * size, out += size) {
        size_t i = 0;
        for (; i + LANES <= size; i += LANES)
            NAME(store)(out + i, NAME(activate)(NAME(load)(x + i), is_silu) *
                                     NAME(load)(x + size + i));
        if (i < size) {
            float rest[LANES] = {0};
            memcpy(rest, x + i, (size - i) * sizeof(float));
            vec value = NAME(activate)(NAME(load)(rest), is_silu);
            for (size_t lane = 0; i < size; i++, lane++)
                out[i] = value[lane] * x[size + i];
        }
    }
}

static void NAME(rotate)(float *heads, size_t stride, size_t rows,
                         size_t num_heads, size_t head_dim, size_t rotary_dim,
                         const float *cos, const float *sin,
                         const int64_t *positions)
{
    size_t half = rotary_dim / 2;
    for (size_t row = 0; row < rows; row++, heads += stride) {
        const float *c = cos + (size_t)positions[row] * rotary_dim;
        const float *s = sin + (size_t)positions[row] * rotary_dim;
        for (size_t head = 0; head < num_heads; head++) {
            float *restrict left = heads + head * head_dim;
            float *restrict right = left + half;
            for (size_t i = 0; i < half; i++) {
                float x = left[i], y = right[i];
                left[i] = x * c[i] + y * s[i];
                right[i] = y * c[half + i] + x * s[half + i];
            }
        }
    }
}

/* The sums of LANES vectors, each in the lane of its index. At each level two
 * vectors, which hold some partial sums of some keys each, become one that
 * holds half as many of twice the keys. */
INLINE vec NAME(sums_of)(vec *v)
{
#if LANES == 16
    for (size_t i = 0; i < 8; i++) {
        vec a = v[2 * i], b = v[2 * i + 1];
        v[i] = SHUFFLE(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22,
                       23) +
               SHUFFLE(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28,
                       29, 30, 31);
    }
    for (size_t i = 0; i < 4; i++) {
        vec a = v[2 * i], b = v[2 * i + 1];
        v[i] = SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25,
                       26, 27) +
               SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29,
                       30, 31);
    }
    for (size_t i = 0; i < 2; i++) {
        vec a = v[2 * i], b = v[2 * i + 1];
        v[i] = SHUFFLE(a, b, 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25,
                       28, 29) +
               SHUFFLE(a, b, 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27,
                       30, 31);
    }
    return SHUFFLE(v[0], v[1], 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24,
                   26, 28, 30) +
           SHUFFLE(v[0], v[1], 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25,
                   27, 29, 31);
#elif LANES == 8
    for (size_t i = 0; i < 4; i++) {
        vec a = v[2 * i], b = v[2 * i + 1];
        v[i] = SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11) +
               SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
    }
    for (size_t i = 0; i < 2; i++) {
        vec a = v[2 * i], b = v[2 * i + 1];
        v[i] = SHUFFLE(a, b, 0, 1, 4, 5, 8, 9, 12, 13) +
               SHUFFLE(a, b, 2, 3, 6, 7, 10, 11, 14, 15);
    }
    return SHUFFLE(v[0], v[1], 0, 2, 4, 6, 8, 10, 12, 14) +
           SHUFFLE(v[0], v[1], 1, 3, 5, 7, 9, 11, 13, 15);
#else
    for (size_t i = 0; i < 2; i++) {
        vec a = v[2 * i], b = v[2 * i + 1];
        v[i] = SHUFFLE(a, b, 0, 1, 4, 5) + SHUFFLE(a, b, 2, 3, 6, 7);
    }
    return SHUFFLE(v[0], v[1], 0, 2, 4, 6) + SHUFFLE(v[0], v[1], 1, 3, 5, 7);
#endif
}

/* The scores of one head's query against LANES keys, in the keys' order. */
INLINE vec NAME(scores)(const dw_attention *a, const float *query,
                        const float *const *keys)
{
    vec sums[LANES];
#pragma GCC unroll 16
    for (size_t key = 0; key < LANES; key++) {
        sums[key] = NAME(load)(query) * NAME(load)(keys[key]);
        for (size_t d = LANES; d < a->head_dim; d += LANES)
            sums[key] += NAME(load)(query + d) * NAME(load)(keys[key] + d);
    }
    vec scores = NAME(sums_of)(sums) * a->scale;
    if (a->softcap != 0.0f)
        scores = NAME(tanh)(scores / a->softcap) * a->softcap;
    return scores;
}

/* From scores to weights that sum up to one, in place; what is behind count in
 * the last vector gets the weight 0. */
INLINE void NAME(softmax)(float *scores, size_t count)
{
    float highest = scores[0];
    for (size_t i = 1; i < count; i++)
        highest = scores[i] > highest ? scores[i] : highest;
    vec total = NAME(splat)(0);
    for (size_t i = 0; i < count; i += LANES) {
        vec weights = NAME(exp)(NAME(load)(scores + i) - highest);
        for (size_t lane = count - i; lane < LANES; lane++)
            weights[lane] = 0;
        total += weights;
        NAME(store)(scores + i, weights);
    }
    vec factor = NAME(splat)(1.0f / NAME(sum)(total));
    for (size_t i = 0; i < count; i += LANES)
        NAME(store)(scores + i, NAME(load)(scores + i) * factor);
}

/* Where the keys or the values of up to LANES tokens lie; behind the last of
 * them it stands in for the missing ones, whose weight will be 0. */
INLINE size_t NAME(find)(const dw_attention *a, const float *memory,
                         const int32_t *table, size_t first, size_t stop,
                         const float **found)
{
    size_t row_size = a->num_kv_heads * a->head_dim;
    size_t count = stop - first < LANES ? stop - first : LANES;
    size_t index = first / a->block_size, offset = first % a->block_size;
    for (size_t lane = 0; lane < count; lane++) {
        size_t slot = (size_t)table[index] * a->block_size + offset;
        found[lane] = memory + slot * row_size;
        if (++offset == a->block_size) {
            offset = 0;
            index++;
        }
    }
    for (size_t lane = count; lane < LANES; lane++)
        found[lane] = found[count - 1];
    return count;
}

/* Have the next tokens on their way while these are computed: they lie in
 * another block, where no prefetcher of the CPU would look. */
INLINE void NAME(fetch)(const dw_attention *a, const float *memory,
                        const int32_t *table, size_t first, size_t stop)
{
    const float *rows[LANES];
    if (first >= stop)
        return;
    size_t count = NAME(find)(a, memory, table, first, stop, rows);
    for (size_t lane = 0; lane < count; lane++)
        for (size_t i = 0; i < a->num_kv_heads * a->head_dim; i += 16)
            __builtin_prefetch(rows[lane] + i);
}

/* Add up weighted values of up to LANES tokens, for the heads that share them.
 */
INLINE void NAME(weigh)(size_t dim, size_t group, const float *weights,
                        size_t padded, const float *const *values, size_t count,
                        size_t offset, float *out)
{
    for (size_t head = 0; head < group; head++, weights += padded)
        for (size_t d = 0; d < dim; d += LANES, out += LANES) {
            vec sum = NAME(load)(out);
            for (size_t i = 0; i < count; i++)
                sum += weights[i] * NAME(load)(values[i] + offset + d);
            NAME(store)(out, sum);
        }
}

/* One row. Tokens outside, heads inside: so memory is read once, in order. */
INLINE void NAME(attend_row)(const dw_attention *a, const float *query,
                             const int32_t *table, size_t start, size_t stop,
                             float *scratch, float *out)
{
    size_t dim = a->head_dim, group = a->num_heads / a->num_kv_heads;
    size_t padded = (stop - start + LANES - 1) / LANES * LANES;
    const float *rows[LANES];
    for (size_t i = start; i < stop; i += LANES) {
        NAME(fetch)(a, a->keys, table, i + LANES, stop);
        NAME(find)(a, a->keys, table, i, stop, rows);
        for (size_t head = 0; head < a->num_heads; head++) {
            const float *keys[LANES];
            for (size_t lane = 0; lane < LANES; lane++)
                keys[lane] = rows[lane] + head / group * dim;
            NAME(store)(scratch + head * padded + i - start,
                        NAME(scores)(a, query + head * dim, keys));
        }
    }
    NAME(fetch)(a, a->values, table, start, stop);
    for (size_t head = 0; head < a->num_heads; head++)
        NAME(softmax)(scratch + head * padded, stop - start);
    for (size_t i = start; i < stop; i += LANES) {
        NAME(fetch)(a, a->values, table, i + LANES, stop);
        size_t count = NAME(find)(a, a->values, table, i, stop, rows);
        for (size_t head = 0; head < a->num_kv_heads; head++)
            NAME(weigh)(dim, group, scratch + head * group * padded + i - start,
                        padded, rows, count, head * dim,
                        out + head * group * dim);
    }
}

static void NAME(attend)(const dw_attention *a, const float *query,
                         size_t query_stride, size_t rows,
                         const int32_t *tables, size_t table_stride,
                         const int32_t *lengths, float *scratch, float *out)
{
    size_t row_size = a->num_heads * a->head_dim;
    for (size_t row = 0; row < rows; row++, out += row_size) {
        size_t stop = (size_t)lengths[row];
        size_t start = a->window && a->window < stop ? stop - a->window : 0;
        memset(out, 0, row_size * sizeof(float));
        if (stop > 0)
            NAME(attend_row)(a, query + row * query_stride,
                             tables + row * table_stride, start, stop, scratch,
                             out);
    }
}

static void NAME(argmax)(const float *x, size_t rows, size_t size, int64_t *out)
{
    size_t whole = size - size % LANES;
    for (size_t row = 0; row < rows; row++, x += size) {
        /* A NaN is greater than nothing, so it is looked for by itself. */
        vec highest = NAME(splat)(-INFINITY);
        ivec is_nan = {0};
        for (size_t i = 0; i < whole; i += LANES) {
            vec part = NAME(load)(x + i);
            is_nan |= part != part;
            highest = NAME(choose)(part > highest, part, highest);
        }
        float best = -INFINITY;
        int has_nan = 0;
        for (size_t lane = 0; lane < LANES; lane++) {
            has_nan |= is_nan[lane] != 0;
            best = highest[lane] > best ? highest[lane] : best;
        }
        for (size_t i = whole; i < size; i++) {
            has_nan |= isnan(x[i]) != 0;
            best = x[i] > best ? x[i] : best;
        }
        size_t index = 0;
        if (!has_nan && isfinite(best))
            while (x[index] != best)
                index++;
        out[row] = has_nan || !isfinite(best) ? -1 : (int64_t)index;
    }
}

static const dw_math NAME(kernels) = {
    .name = INSTRUCTIONS,
    .lanes = LANES,
    .panel = PANEL,
    .linear_pack = NAME(linear_pack),
    .linear = NAME(linear),
    .rms_norm = NAME(rms_norm),
    .gate = NAME(gate),
    .rotate = NAME(rotate),
    .attend = NAME(attend),
    .argmax = NAME(argmax),
};

#undef vec
#undef ivec
#undef PANEL
#undef INLINE
