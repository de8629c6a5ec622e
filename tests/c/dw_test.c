#include "dw_test.h"

#include <dirent.h>
#include <errno.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "dw_clock.h"
#include "dw_gate.h"

#define MAX_TESTS     1000
#define TEST_LIMIT_S  60
#define WAIT_LIMIT_NS (10ULL * 1000 * 1000 * 1000)
#define PAUSE_NS      200000

typedef struct {
    const char *name;
    void (*run)(void);
    void (*run_each)(const void *param);
    const void *param;
} test_case;

static test_case tests[MAX_TESTS];
static size_t num_tests;

static void add(test_case added)
{
    if (num_tests == MAX_TESTS) {
        fprintf(stderr, "more than %d tests: raise MAX_TESTS\n", MAX_TESTS);
        exit(2);
    }
    tests[num_tests++] = added;
}

void dw_test_add(const char *name, void (*run)(void))
{
    add((test_case){.name = name, .run = run});
}

void dw_test_add_each(const char *name, void (*run)(const void *param),
                      const void *param)
{
    add((test_case){.name = name, .run_each = run, .param = param});
}

void dw_test_fail(const char *file, int line, const char *format, ...)
{
    fprintf(stderr, "%s:%d: ", file, line);
    va_list args;
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fputc('\n', stderr);
    /* Not exit: a leak report on top of a failure helps nobody. */
    _exit(1);
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

/* RETURNS: what became of a child, as one number; 0 is well. */
static int child_status(pid_t child)
{
    int status;
    while (waitpid(child, &status, 0) < 0) {
        if (errno != EINTR)
            return -errno;
    }
    return status;
}

void dw_test_in_child(const char *file, int line, void (*body)(void *arg),
                      void *arg)
{
    fflush(NULL);
    pid_t child = fork();
    if (child < 0)
        dw_test_fail(file, line, "fork: %s", strerror(errno));
    if (!child) {
        alarm(TEST_LIMIT_S);
        body(arg);
        /* Not exit: what the parent holds is no leak of the child's. */
        _exit(0);
    }
    int status = child_status(child);
    if (status)
        dw_test_fail(file, line, "the child ended with status 0x%x", status);
}

static void *do_nothing(void *arg)
{
    return arg;
}

static void run_in_this_process(const test_case *test)
{
    pthread_t thread;

    alarm(TEST_LIMIT_S);
    gate_install();
    /* With the first one, ThreadSanitizer starts a thread that stays. */
    CHECK(!pthread_create(&thread, NULL, do_nothing, NULL));
    pthread_join(thread, NULL);
    int num_fds = dw_test_count_fds();
    int num_threads = dw_test_count_threads();
    if (test->run)
        test->run();
    else
        test->run_each(test->param);
    CHECK_EQ(dw_test_count_fds(), num_fds);
    /* A joined thread may be listed for a moment longer. */
    WAIT_UNTIL(dw_test_count_threads() <= num_threads);
}

static bool run(const test_case *test, const char *name)
{
    fflush(NULL);
    pid_t child = fork();
    if (!child) {
        run_in_this_process(test);
        exit(0); /* with the leak check */
    }
    int status = child < 0 ? -errno : child_status(child);
    if (!status)
        return true;
    if (status > 0 && WIFSIGNALED(status))
        printf("FAILED %s (%s)\n", name, strsignal(WTERMSIG(status)));
    else
        printf("FAILED %s\n", name);
    return false;
}

int main(int argc, char **argv)
{
    int num_passed = 0, num_failed = 0;
    for (size_t i = 0; i < num_tests; i++) {
        char name[300];
        const test_case *test = &tests[i];
        if (test->param)
            snprintf(name, sizeof name, "%s[%s]", test->name,
                     *(const char *const *)test->param);
        else
            snprintf(name, sizeof name, "%s", test->name);
        if (argc > 1 && !strstr(name, argv[1]))
            continue;
        if (run(test, name))
            num_passed++;
        else
            num_failed++;
    }
    printf("%d passed, %d failed\n", num_passed, num_failed);
    /* None at all is a mistake in the filter or the build, not a success. */
    return num_failed || !num_passed;
}
