/* The arithmetic of the decoder: each kernel, by each set of instructions that
 * this CPU has, against the formula in double. */
#include "dw_math.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "dw_test.h"

typedef struct {
    const char *name;
} instructions;

static const instructions sets[] = {{"baseline"}, {"avx2"}, {"avx512"}};

/* NULL where this CPU lacks them, and so nothing is to be tested. */
static const dw_math *math_of(const instructions *which)
{
    return dw_math_named(which->name);
}

static uint32_t state = 1;

static float number(void)
{
    state = state * 1664525u + 1013904223u;
    return (float)(int32_t)state / 2147483648.0f;
}

static float *numbers(size_t count)
{
    float *out = malloc(count * sizeof *out);
    CHECK(out);
    for (size_t i = 0; i < count; i++)
        out[i] = number();
    return out;
}

static void check_near(float value, double expected)
{
    CHECK(fabs((double)value - expected) <= 1e-5 * (1 + fabs(expected)));
}

TEST(the_best_kernels_are_those_with_the_longest_vectors)
{
    const dw_math *best = dw_math_best();
    for (size_t i = 0; i < sizeof sets / sizeof sets[0]; i++) {
        const dw_math *math = math_of(&sets[i]);
        CHECK(!math || math->lanes <= best->lanes);
    }
    CHECK(dw_math_named("baseline") != NULL);
    CHECK(dw_math_named("abacus") == NULL);
}

/* Rows and outputs that do not fill a tile or a panel. */
TEST_EACH(a_linear_layer_is_the_sum_of_products, instructions, which, sets)
{
    enum { OUTPUTS = 37, INPUTS = 19, MAX_ROWS = 17 };
    const dw_math *math = math_of(which);
    if (!math)
        return;
    float *weight = numbers(OUTPUTS * INPUTS), *x = numbers(MAX_ROWS * INPUTS);
    float *bias = numbers(OUTPUTS), *out = numbers(MAX_ROWS * OUTPUTS);
    size_t padded = (OUTPUTS + math->panel - 1) / math->panel * math->panel;
    float *packed = malloc(padded * INPUTS * sizeof *packed);
    CHECK(packed);
    math->linear_pack(weight, OUTPUTS, INPUTS, packed);
    for (size_t rows = 1; rows <= MAX_ROWS; rows++) {
        float *before = malloc(rows * OUTPUTS * sizeof *before);
        CHECK(before);
        memcpy(before, out, rows * OUTPUTS * sizeof *before);
        math->linear(x, rows, INPUTS, packed, OUTPUTS, bias, out, out);
        for (size_t i = 0; i < rows * OUTPUTS; i++) {
            size_t row = i / OUTPUTS, column = i % OUTPUTS;
            double sum = bias[column] + (double)before[i];
            for (size_t k = 0; k < INPUTS; k++)
                sum +=
                    (double)x[row * INPUTS + k] * weight[column * INPUTS + k];
            check_near(out[i], sum);
        }
        free(before);
    }
    free(weight), free(x), free(bias), free(out), free(packed);
}

TEST_EACH(a_row_has_the_same_bits_in_any_company, instructions, which, sets)
{
    enum { OUTPUTS = 40, INPUTS = 33, MAX_ROWS = 19 };
    const dw_math *math = math_of(which);
    if (!math)
        return;
    float *weight = numbers(OUTPUTS * INPUTS), *x = numbers(MAX_ROWS * INPUTS);
    size_t padded = (OUTPUTS + math->panel - 1) / math->panel * math->panel;
    float *packed = malloc(padded * INPUTS * sizeof *packed);
    CHECK(packed);
    math->linear_pack(weight, OUTPUTS, INPUTS, packed);
    float all[MAX_ROWS * OUTPUTS], some[MAX_ROWS * OUTPUTS];
    math->linear(x, MAX_ROWS, INPUTS, packed, OUTPUTS, NULL, NULL, all);
    for (size_t first = 0; first < MAX_ROWS; first++)
        for (size_t rows = 1; first + rows <= MAX_ROWS; rows++) {
            math->linear(x + first * INPUTS, rows, INPUTS, packed, OUTPUTS,
                         NULL, NULL, some);
            CHECK(!memcmp(some, all + first * OUTPUTS,
                          rows * OUTPUTS * sizeof *some));
        }
    free(weight), free(x), free(packed);
}

TEST_EACH(a_norm_divides_by_the_root_of_the_mean_square, instructions, which,
          sets)
{
    enum { ROWS = 3, HEADS = 2, SIZE = 21, STRIDE = 50 };
    const dw_math *math = math_of(which);
    if (!math)
        return;
    float *x = numbers(ROWS * STRIDE), *weight = numbers(SIZE);
    float *out = numbers(ROWS * STRIDE), *before = malloc(sizeof(float) * 150);
    CHECK(before);
    memcpy(before, out, ROWS * STRIDE * sizeof *out);
    math->rms_norm(x, STRIDE, ROWS, HEADS, SIZE, weight, 1e-3f, out, out);
    for (size_t i = 0; i < ROWS * STRIDE; i++) {
        size_t column = i % STRIDE, head = column / SIZE;
        if (head >= HEADS) {
            CHECK(out[i] == before[i]);
            continue;
        }
        const float *own = x + i / STRIDE * STRIDE + head * SIZE;
        double squares = 0;
        for (size_t j = 0; j < SIZE; j++)
            squares += (double)own[j] * own[j];
        double factor = 1 / sqrt(squares / SIZE + 1e-3);
        check_near(out[i], before[i] + x[i] * factor * weight[column % SIZE]);
    }
    free(x), free(weight), free(out), free(before);
}

TEST_EACH(a_gate_is_as_exact_at_its_ends_as_in_the_middle, instructions, which,
          sets)
{
    enum { SIZE = 201 };
    const dw_math *math = math_of(which);
    if (!math)
        return;
    float x[2 * SIZE], out[SIZE];
    for (int i = 0; i < SIZE; i++) {
        x[i] = (float)(i - 100) * (i % 2 ? 0.1f : 1.3f);
        x[SIZE + i] = number();
    }
    for (int is_silu = 0; is_silu < 2; is_silu++) {
        math->gate(x, 1, SIZE, is_silu, out);
        for (int i = 0; i < SIZE; i++) {
            double v = x[i];
            double gelu =
                0.5 * v * (1 + tanh(0.7978845608 * (v + 0.044715 * v * v * v)));
            double act = is_silu ? v / (1 + exp(-v)) : gelu;
            check_near(out[i], act * x[SIZE + i]);
        }
    }
    x[3] = NAN;
    math->gate(x, 1, SIZE, 1, out);
    CHECK(isnan(out[3]));
}

static void attend_in_double(const dw_attention *a, const float *query,
                             const int32_t *table, size_t stop, double *out)
{
    size_t dim = a->head_dim, start = 0;
    if (a->window && a->window < stop)
        start = stop - a->window;
    for (size_t head = 0; head < a->num_heads; head++) {
        size_t kv_head = head / (a->num_heads / a->num_kv_heads);
        double total = 0;
        for (size_t d = 0; d < dim; d++)
            out[head * dim + d] = 0;
        for (size_t token = start; token < stop; token++) {
            size_t slot = (size_t)table[token / a->block_size] * a->block_size +
                          token % a->block_size;
            size_t at = (slot * a->num_kv_heads + kv_head) * dim;
            double score = 0;
            for (size_t d = 0; d < dim; d++)
                score += (double)query[head * dim + d] * a->keys[at + d];
            score *= a->scale;
            if (a->softcap != 0)
                score = a->softcap * tanh(score / a->softcap);
            total += exp(score);
            for (size_t d = 0; d < dim; d++)
                out[head * dim + d] += exp(score) * a->values[at + d];
        }
        for (size_t d = 0; d < dim; d++)
            out[head * dim + d] /= total;
    }
}

TEST_EACH(attention_reads_the_blocks_that_a_row_has_and_no_others, instructions,
          which, sets)
{
    enum { ROWS = 4, HEADS = 6, KV_HEADS = 2, DIM = 32, SIZE = 4, BLOCKS = 40 };
    const dw_math *math = math_of(which);
    if (!math)
        return;
    const int32_t lengths[ROWS] = {1, 37, 0, 16};
    int32_t tables[ROWS * 10];
    float *keys = numbers(BLOCKS * SIZE * KV_HEADS * DIM);
    float *values = numbers(BLOCKS * SIZE * KV_HEADS * DIM);
    float *query = numbers(ROWS * HEADS * DIM), out[ROWS * HEADS * DIM];
    float *scratch = numbers(48 * HEADS);
    /* What no row has is NaN, which would be a NaN in any sum. */
    char is_used[BLOCKS * SIZE] = {0};
    for (int32_t i = 0; i < ROWS * 10; i++)
        tables[i] = i * 7 % BLOCKS;
    for (size_t row = 0; row < ROWS; row++)
        for (size_t token = 0; token < (size_t)lengths[row]; token++)
            is_used[(size_t)tables[row * 10 + token / SIZE] * SIZE +
                    token % SIZE] = 1;
    for (size_t i = 0; i < BLOCKS * SIZE * KV_HEADS * DIM; i++)
        if (!is_used[i / (KV_HEADS * DIM)])
            keys[i] = values[i] = NAN;
    for (int variant = 0; variant < 3; variant++) {
        dw_attention a = {keys, values, HEADS, KV_HEADS, DIM, SIZE, 0.3f, 0, 0};
        a.softcap = variant == 1 ? 2.0f : 0.0f;
        a.window = variant == 2 ? 5 : 0;
        math->attend(&a, query, HEADS * DIM, ROWS, tables, 10, lengths, scratch,
                     out);
        for (size_t row = 0; row < ROWS; row++) {
            double expected[HEADS * DIM] = {0};
            if (lengths[row])
                attend_in_double(&a, query + row * HEADS * DIM,
                                 tables + row * 10, (size_t)lengths[row],
                                 expected);
            for (size_t i = 0; i < HEADS * DIM; i++)
                check_near(out[row * HEADS * DIM + i], expected[i]);
        }
    }
    free(keys), free(values), free(query), free(scratch);
}

TEST_EACH(the_greatest_is_the_first_of_equals_and_none_where_one_is_no_number,
          instructions, which, sets)
{
    enum { SIZE = 35 };
    const dw_math *math = math_of(which);
    if (!math)
        return;
    float x[5][SIZE];
    for (size_t i = 0; i < SIZE; i++)
        x[0][i] = x[1][i] = x[2][i] = x[3][i] = x[4][i] = -5 - (float)i;
    x[0][34] = x[0][20] = -1; /* one in a vector, its equal behind the last */
    x[1][3] = NAN;
    x[2][34] = NAN;
    x[3][17] = INFINITY;
    for (size_t i = 0; i < SIZE; i++)
        x[4][i] = -INFINITY;
    int64_t out[5];
    math->argmax(x[0], 5, SIZE, out);
    CHECK_EQ(out[0], 20);
    for (int row = 1; row < 5; row++)
        CHECK_EQ(out[row], -1);
}

TEST_EACH(turned_heads_are_turned_by_the_angle_of_their_position, instructions,
          which, sets)
{
    enum { HEADS = 2, DIM = 10, ROTARY = 6, STRIDE = 25 };
    const dw_math *math = math_of(which);
    if (!math)
        return;
    const int64_t positions[2] = {2, 0};
    float cos_[3 * ROTARY], sin_[3 * ROTARY];
    for (size_t i = 0; i < 3 * ROTARY; i++) {
        double angle = (double)(i / ROTARY) * (1 + (double)(i % ROTARY % 3));
        cos_[i] = (float)cos(angle);
        sin_[i] = (float)sin(angle) * (i % ROTARY < 3 ? -1.0f : 1.0f);
    }
    float *x = numbers(2 * STRIDE), before[2 * STRIDE];
    memcpy(before, x, sizeof before);
    math->rotate(x, STRIDE, 2, HEADS, DIM, ROTARY, cos_, sin_, positions);
    for (size_t i = 0; i < 2 * STRIDE; i++) {
        size_t column = i % STRIDE, d = column % DIM;
        double expected = before[i];
        if (column < HEADS * DIM && d < ROTARY) {
            double angle =
                (double)positions[i / STRIDE] * (1 + (double)(d % 3));
            expected =
                d < 3 ? before[i] * cos(angle) - before[i + 3] * sin(angle)
                      : before[i] * cos(angle) + before[i - 3] * sin(angle);
        }
        check_near(x[i], expected);
    }
    free(x);
}
