/* What must hold, in tests and in the fuzzer: a failed check ends the process. */
#ifndef DW_CHECK_H
#define DW_CHECK_H

#include <stdbool.h>
#include <stdint.h>

#define CHECK(condition)                                        \
    do {                                                        \
        if (!(condition))                                       \
            dw_test_fail(__FILE__, __LINE__, "%s", #condition); \
    } while (0)

/* Of integers; shows both. */
#define CHECK_EQ(got, want)                                                   \
    do {                                                                      \
        intmax_t got_ = (intmax_t)(got), want_ = (intmax_t)(want);            \
        if (got_ != want_)                                                    \
            dw_test_fail(__FILE__, __LINE__, "%s is %jd, not %s (%jd)", #got, \
                         got_, #want, want_);                                 \
    } while (0)

#define CHECK_STR(got, want)                                                   \
    do {                                                                       \
        const char *got_ = (got), *want_ = (want);                             \
        if (!dw_test_same(got_, want_))                                        \
            dw_test_fail(__FILE__, __LINE__, "%s is \"%s\", not \"%s\"", #got, \
                         got_, want_);                                         \
    } while (0)

/* Evaluates the predicate until it holds; fails after 40 s. Not a sleep for
 * luck: it goes on as soon as it may. */
#define WAIT_UNTIL(predicate)                                         \
    do {                                                              \
        uint64_t deadline_ = dw_test_deadline_ns();                   \
        while (!(predicate))                                          \
            dw_test_pause(deadline_, __FILE__, __LINE__, #predicate); \
    } while (0)

/* Ends the test's process, from whichever thread. */
__attribute__((noreturn, format(printf, 3, 4))) void
dw_test_fail(const char *file, int line, const char *format, ...);

/* Ends the test's process, which then has passed, and says why it did no more. */
__attribute__((noreturn)) void dw_test_skip(const char *why);

bool dw_test_same(const char *a, const char *b);
uint64_t dw_test_deadline_ns(void);
void dw_test_pause(uint64_t deadline_ns, const char *file, int line,
                   const char *predicate);

/* Open fds, and threads, of this process. */
int dw_test_count_fds(void);
int dw_test_count_threads(void);

#endif
