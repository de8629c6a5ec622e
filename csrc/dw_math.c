#include "dw_math.h"

#include <math.h>
#include <string.h>

#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (ivec){__VA_ARGS__})
#endif

/* 4 lanes are what x86-64 and aarch64 have without being asked. */
#define LANES        4
#define TILE_ROWS    6
#define INSTRUCTIONS "baseline"
#define NAME(x)      x##_baseline
#include "dw_math_body.h"
#undef LANES
#undef TILE_ROWS
#undef INSTRUCTIONS
#undef NAME

#ifdef __x86_64__

#ifdef __clang__
#define BEGIN_TARGET(t)                                      \
    _Pragma("clang attribute push(__attribute__((target(" #t \
            "))), apply_to=function)")
#define END_TARGET _Pragma("clang attribute pop")
#else
#define PRAGMA(x) _Pragma(#x)
#define BEGIN_TARGET(t)      \
    PRAGMA(GCC push_options) \
    PRAGMA(GCC target(t))
#define END_TARGET PRAGMA(GCC pop_options)
#endif

BEGIN_TARGET("avx2,fma")
#define LANES        8
#define TILE_ROWS    6
#define INSTRUCTIONS "avx2"
#define NAME(x)      x##_avx2
#include "dw_math_body.h"
#undef LANES
#undef TILE_ROWS
#undef INSTRUCTIONS
#undef NAME
END_TARGET

BEGIN_TARGET("avx512f,avx512dq,avx512vl,avx512bw,avx2,fma")
#define LANES        16
#define TILE_ROWS    8
#define INSTRUCTIONS "avx512"
#define NAME(x)      x##_avx512
#include "dw_math_body.h"
#undef LANES
#undef TILE_ROWS
#undef INSTRUCTIONS
#undef NAME
END_TARGET

static int has_avx2(void)
{
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

static int has_avx512(void)
{
    return has_avx2() && __builtin_cpu_supports("avx512f") &&
           __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl");
}

#endif

const dw_math *dw_math_best(void)
{
#ifdef __x86_64__
    if (has_avx512())
        return &kernels_avx512;
    if (has_avx2())
        return &kernels_avx2;
#endif
    return &kernels_baseline;
}

const dw_math *dw_math_named(const char *name)
{
#ifdef __x86_64__
    if (!strcmp(name, kernels_avx512.name) && has_avx512())
        return &kernels_avx512;
    if (!strcmp(name, kernels_avx2.name) && has_avx2())
        return &kernels_avx2;
#endif
    return strcmp(name, kernels_baseline.name) ? NULL : &kernels_baseline;
}

void dw_math_scatter(const float *from, size_t stride, size_t rows, size_t size,
                     const int64_t *slots, float *to)
{
    for (size_t row = 0; row < rows; row++)
        memcpy(to + (size_t)slots[row] * size, from + row * stride,
               size * sizeof(float));
}
