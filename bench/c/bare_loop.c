/* The least that could notice a leaving client: an epoll set with the same
 * interest as the watcher's, a thread of its own, and a look at the clock when
 * it wakes. The watcher is measured against it, trial by trial. Beside it, a
 * way to hold the GIL for an exact time: called through ctypes.PyDLL, which
 * does not release it.
 *
 * THREADS: one caller; one connection is watched at a time.
 */
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

typedef struct {
    int epoll_fd;
    int stop_fd;
    pthread_t thread;
    atomic_uint_fast64_t woken_ns; /* of the last event; 0 none yet */
} bare_loop;

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000U + (uint64_t)now.tv_nsec;
}

static void *run(void *arg)
{
    bare_loop *loop = arg;
    struct epoll_event events[64];

    for (;;) {
        int n = epoll_wait(loop->epoll_fd, events, 64, -1);
        uint64_t at_ns = now_ns();
        for (int i = 0; i < n; i++) {
            if (events[i].data.fd == loop->stop_fd)
                return NULL;
            /* Release: pairs with the acquire in bare_loop_take. */
            atomic_store_explicit(&loop->woken_ns, at_ns, memory_order_release);
        }
        if (n < 0 && errno != EINTR)
            return NULL;
    }
}

int bare_loop_add(bare_loop *loop, int fd);
int bare_loop_remove(bare_loop *loop, int fd);
uint64_t bare_loop_take(bare_loop *loop);
bare_loop *bare_loop_start(void);
void bare_loop_stop(bare_loop *loop);
uint64_t hold(uint64_t duration_ns);

int bare_loop_add(bare_loop *loop, int fd)
{
    struct epoll_event event = {.events = EPOLLRDHUP | EPOLLET, .data.fd = fd};
    return epoll_ctl(loop->epoll_fd, EPOLL_CTL_ADD, fd, &event) ? -errno : 0;
}

int bare_loop_remove(bare_loop *loop, int fd)
{
    return epoll_ctl(loop->epoll_fd, EPOLL_CTL_DEL, fd, NULL) ? -errno : 0;
}

/* RETURNS: when the last event woke the thread, once; 0 when there was none. */
uint64_t bare_loop_take(bare_loop *loop)
{
    /* Acquire: pairs with the release in run. */
    return atomic_exchange_explicit(&loop->woken_ns, 0, memory_order_acquire);
}

bare_loop *bare_loop_start(void)
{
    sigset_t all, before;
    int rc;
    bare_loop *loop = calloc(1, sizeof(*loop));
    if (!loop)
        return NULL;
    loop->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    if (loop->epoll_fd < 0)
        goto fail_free;
    loop->stop_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (loop->stop_fd < 0)
        goto fail_epoll;
    struct epoll_event event = {.events = EPOLLIN, .data.fd = loop->stop_fd};
    if (epoll_ctl(loop->epoll_fd, EPOLL_CTL_ADD, loop->stop_fd, &event))
        goto fail_stop;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    rc = pthread_create(&loop->thread, NULL, run, loop);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (rc)
        goto fail_stop;
    return loop;

fail_stop:
    close(loop->stop_fd);
fail_epoll:
    close(loop->epoll_fd);
fail_free:
    free(loop);
    return NULL;
}

void bare_loop_stop(bare_loop *loop)
{
    uint64_t one = 1;
    ssize_t written = write(loop->stop_fd, &one, sizeof(one));
    (void)written; /* an eventfd at zero always takes a one */
    pthread_join(loop->thread, NULL);
    close(loop->stop_fd);
    close(loop->epoll_fd);
    free(loop);
}

/* Spins, so that the thread neither sleeps nor gives anything up.
 * RETURNS: the time at which it ended. */
uint64_t hold(uint64_t duration_ns)
{
    uint64_t end_ns = now_ns() + duration_ns;
    uint64_t at_ns;
    do {
        at_ns = now_ns();
    } while (at_ns < end_ns);
    return at_ns;
}
