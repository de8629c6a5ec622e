#include "dw_test.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "dw_gate.h"

#define MAX_TESTS    1000
#define TEST_LIMIT_S 180

/* In a forked child ThreadSanitizer has two threads. */
#ifdef __SANITIZE_THREAD__
#define NUM_THREADS_AT_REST 3
#else
#define NUM_THREADS_AT_REST 1
#endif

typedef struct {
    const char *name;
    void (*run)(void);
    void (*run_each)(const void *a, const void *b);
    const void *a;
    const void *b;
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

void dw_test_add_each(const char *name, void (*run)(const void *, const void *),
                      const void *a, const void *b)
{
    add((test_case){.name = name, .run_each = run, .a = a, .b = b});
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
        gate_install();
        body(arg);
        /* Not exit: what the parent holds is no leak of the child's. */
        _exit(0);
    }
    int status = child_status(child);
    if (status)
        dw_test_fail(file, line, "the child ended with status 0x%x", status);
}

static void *return_at_once(void *arg)
{
    return arg;
}

/* Starts one thread for nothing: with the first of a process ThreadSanitizer
 * starts one of its own, which would count as left behind. */
static void come_to_rest(void)
{
    pthread_t thread;
    CHECK_EQ(pthread_create(&thread, NULL, return_at_once, NULL), 0);
    CHECK_EQ(pthread_join(thread, NULL), 0);
    /* A joined thread may be listed for a moment longer. */
    WAIT_UNTIL(dw_test_count_threads() == NUM_THREADS_AT_REST);
}

static void run_in_this_process(const test_case *test)
{
    alarm(TEST_LIMIT_S);
    gate_install();
    come_to_rest();
    int num_fds = dw_test_count_fds();
    if (test->run)
        test->run();
    else
        test->run_each(test->a, test->b);
    CHECK_EQ(dw_test_count_fds(), num_fds);
    WAIT_UNTIL(dw_test_count_threads() == NUM_THREADS_AT_REST);
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

static const char *label(const void *param)
{
    return *(const char *const *)param;
}

static void write_name(const test_case *test, char *out, size_t size)
{
    if (test->b)
        snprintf(out, size, "%s[%s, %s]", test->name, label(test->a),
                 label(test->b));
    else if (test->a)
        snprintf(out, size, "%s[%s]", test->name, label(test->a));
    else
        snprintf(out, size, "%s", test->name);
}

int main(int argc, char **argv)
{
    int num_passed = 0, num_failed = 0;
    for (size_t i = 0; i < num_tests; i++) {
        char name[300];
        write_name(&tests[i], name, sizeof name);
        if (argc > 1 && !strstr(name, argv[1]))
            continue;
        if (run(&tests[i], name))
            num_passed++;
        else
            num_failed++;
    }
    printf("%d passed, %d failed\n", num_passed, num_failed);
    /* None at all is a mistake in the filter or the build, not a success. */
    return num_failed || !num_passed;
}
