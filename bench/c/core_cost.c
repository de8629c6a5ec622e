/* What the core's calls cost with no Python above them, beside the bare system
 * calls they stand for; and the memory of one connection.
 *
 *     core_cost ROUNDS CALLS CONNECTIONS
 *
 * Prints a line "name value" for each measurement of each round, in turn, so
 * that a change of the machine's speed meets all of them: nanoseconds of this
 * thread's CPU time a call. Then, once, "bytes_per_connection value": how much
 * the process's resident memory grew for that many attached sockets, divided by
 * their number. What the kernel keeps for them is not in it.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "dw_flags.h"
#include "dw_watch.h"

/* Read by strace only: between two of these lies what is being counted. */
#define MARK_BEGIN "/bench-begin"
#define MARK_END   "/bench-end"

static dw_flags *flags;
static dw_watcher *watcher;
static dw_conn_id conn;
static dw_flag flag;
static int sockets[2];
static int epoll_fd;

static void check(int rc, const char *tried)
{
    if (rc < 0) {
        fprintf(stderr, "core_cost: %s: %s\n", tried, dw_strerror(rc));
        exit(1);
    }
}

static double cpu_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (double)now.tv_sec * 1e9 + (double)now.tv_nsec;
}

static void arm_disarm(void)
{
    dw_watch_id watch;
    check(dw_watcher_arm(watcher, conn, flag, DW_MASK_ANY, NULL, 0, &watch),
          "arm");
    check(dw_watcher_disarm(watcher, conn, watch), "disarm");
}

static void alloc_release(void)
{
    dw_flag one;
    check(dw_flag_alloc(flags, &one), "alloc");
    dw_flag_release(flags, one);
}

static void attach_detach(void)
{
    dw_conn_id other;
    check(dw_watcher_attach(watcher, sockets[1], &other), "attach");
    check(dw_watcher_detach(watcher, other), "detach");
}

static void add_del(void)
{
    struct epoll_event event = {.events = EPOLLRDHUP | EPOLLET};
    if (epoll_ctl(epoll_fd, EPOLL_CTL_ADD, sockets[1], &event) ||
        epoll_ctl(epoll_fd, EPOLL_CTL_DEL, sockets[1], NULL))
        exit(1);
}

static void measure(const char *name, void (*call)(void), long num_calls)
{
    double start = cpu_ns();
    for (long i = 0; i < num_calls; i++)
        call();
    printf("%s %.3f\n", name, (cpu_ns() - start) / (double)num_calls);
}

/* This process's own resident memory; -1 where /proc does not tell. */
static long anonymous_kib(void)
{
    char line[256];
    long kib = -1;
    FILE *file = fopen("/proc/self/status", "r");
    if (!file)
        return -1;
    while (kib < 0 && fgets(line, sizeof(line), file)) {
        if (!strncmp(line, "RssAnon:", 8))
            kib = atol(line + 8);
    }
    fclose(file);
    return kib;
}

static void measure_memory(int num_connections)
{
    int *fds = malloc((size_t)num_connections * sizeof(*fds));
    if (!fds)
        exit(1);
    for (int i = 0; i < num_connections; i += 2) {
        if (socketpair(AF_UNIX, SOCK_STREAM, 0, fds + i)) {
            perror("core_cost: socketpair");
            exit(1);
        }
    }
    long before_kib = anonymous_kib();
    for (int i = 0; i < num_connections; i++) {
        dw_conn_id one;
        check(dw_watcher_attach(watcher, fds[i], &one), "attach");
    }
    double grown = (double)(anonymous_kib() - before_kib) * 1024;
    printf("bytes_per_connection %.1f\n", grown / num_connections);
    free(fds);
}

int main(int argc, char **argv)
{
    if (argc != 4) {
        fprintf(stderr, "usage: core_cost ROUNDS CALLS CONNECTIONS\n");
        return 2;
    }
    int num_rounds = atoi(argv[1]);
    long num_calls = atol(argv[2]);
    int num_connections = atoi(argv[3]) & ~1;

    check(dw_flags_create(&flags), "create the flag table");
    check(dw_watcher_create(flags, NULL, DW_DRIVER_THREAD, &watcher),
          "create a watcher");
    check(dw_flag_alloc(flags, &flag), "alloc");
    epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    if (epoll_fd < 0 || socketpair(AF_UNIX, SOCK_STREAM, 0, sockets)) {
        perror("core_cost");
        return 1;
    }
    check(dw_watcher_attach(watcher, sockets[0], &conn), "attach");

    for (int round = 0; round < num_rounds; round++) {
        measure("arm_disarm", arm_disarm, num_calls);
        measure("alloc_release", alloc_release, num_calls);
        measure("attach_detach", attach_detach, num_calls / 20 + 1);
        measure("add_del", add_del, num_calls / 20 + 1);
    }
    fflush(stdout);
    (void)!access(MARK_BEGIN, F_OK);
    for (long i = 0; i < num_calls; i++)
        arm_disarm();
    (void)!access(MARK_END, F_OK);
    if (num_connections)
        measure_memory(num_connections);

    dw_watcher_free(watcher);
    dw_flags_free(flags);
    return 0;
}
