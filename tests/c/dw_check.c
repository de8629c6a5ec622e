#include "dw_check.h"

#include <dirent.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "dw_clock.h"

#define WAIT_LIMIT_NS (40ULL * 1000 * 1000 * 1000)
#define PAUSE_NS      200000

void dw_test_fail(const char *file, int line, const char *format, ...)
{
    fprintf(stderr, "%s:%d: ", file, line);
    va_list args;
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fputc('\n', stderr);
#ifdef DW_FUZZING
    abort(); /* what a fuzzer takes for a finding */
#else
    /* Not exit: a leak report on top of a failure helps nobody. */
    _exit(1);
#endif
}

void dw_test_skip(const char *why)
{
    fprintf(stderr, "skipped: %s\n", why);
    _exit(0);
}

bool dw_test_same(const char *a, const char *b)
{
    return !strcmp(a, b);
}

uint64_t dw_test_deadline_ns(void)
{
    return dw_clock_ns() + WAIT_LIMIT_NS;
}

void dw_test_pause(uint64_t deadline_ns, const char *file, int line,
                   const char *predicate)
{
    if (dw_clock_ns() > deadline_ns)
        dw_test_fail(file, line, "never came true: %s", predicate);
    nanosleep(&(struct timespec){.tv_nsec = PAUSE_NS}, NULL);
}

static int count_entries(const char *path)
{
    DIR *dir = opendir(path);
    if (!dir)
        dw_test_fail(__FILE__, __LINE__, "cannot list %s", path);
    int count = 0;
    while (readdir(dir))
        count++;
    closedir(dir);
    return count - 2; /* . and .. */
}

int dw_test_count_fds(void)
{
    return count_entries("/proc/self/fd") - 1; /* the listing's own */
}

int dw_test_count_threads(void)
{
    return count_entries("/proc/self/task");
}
