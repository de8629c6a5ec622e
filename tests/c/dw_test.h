/* A test program in one header and one file: TEST registers, main runs.
 *
 * Every test runs in a process of its own, so that a crash, a hang (180 s) or a
 * stray thread fails that test alone. After it the process must have as many
 * open fds and threads as before it.
 *
 *     ./test_watch            runs all
 *     ./test_watch fin        runs those with "fin" in their name
 */
#ifndef DW_TEST_H
#define DW_TEST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "dw_check.h"

/* TEST(a_sentence) { ... CHECK(...); } */
#define TEST(name)                                                 \
    static void name(void);                                        \
    __attribute__((constructor)) static void name##_register(void) \
    {                                                              \
        dw_test_add(#name, name);                                  \
    }                                                              \
    static void name(void)

/* TEST_EACH(a_sentence, type, param, array) { ... param->... }: one test for
 * each element; the element's first member is its label, a const char *. */
#define TEST_EACH(name, type, param, array)                             \
    static void name(const type *param);                                \
    static void name##_any(const void *param, const void *unused)       \
    {                                                                   \
        (void)unused;                                                   \
        name(param);                                                    \
    }                                                                   \
    __attribute__((constructor)) static void name##_register(void)      \
    {                                                                   \
        for (size_t i = 0; i < sizeof(array) / sizeof((array)[0]); i++) \
            dw_test_add_each(#name, name##_any, &(array)[i], NULL);     \
    }                                                                   \
    static void name(const type *param)

/* The same for each pair of two arrays' elements. */
#define TEST_CROSS(name, type_a, a, array_a, type_b, b, array_b)            \
    static void name(const type_a *a, const type_b *b);                     \
    static void name##_any(const void *a, const void *b)                    \
    {                                                                       \
        name(a, b);                                                         \
    }                                                                       \
    __attribute__((constructor)) static void name##_register(void)          \
    {                                                                       \
        for (size_t i = 0; i < sizeof(array_a) / sizeof((array_a)[0]); i++) \
            for (size_t j = 0; j < sizeof(array_b) / sizeof((array_b)[0]);  \
                 j++)                                                       \
                dw_test_add_each(#name, name##_any, &(array_a)[i],          \
                                 &(array_b)[j]);                            \
    }                                                                       \
    static void name(const type_a *a, const type_b *b)

void dw_test_add(const char *name, void (*run)(void));
void dw_test_add_each(const char *name, void (*run)(const void *, const void *),
                      const void *a, const void *b);

/* Runs body(arg) in a child of fork() and checks that it came to its end with
 * every CHECK holding. */
#define CHECK_IN_CHILD(body, arg) \
    dw_test_in_child(__FILE__, __LINE__, (body), (arg))
void dw_test_in_child(const char *file, int line, void (*body)(void *arg),
                      void *arg);

#endif
