/* The poller for Linux: a private epoll set, EPOLLRDHUP and EPOLLET.
 *
 * EPOLLIN is not asked for. So bytes cause no wake-up, and unread bytes hide
 * nothing: the FIN's arrival is a state change of the socket, whatever lies
 * before it in the queue. EPOLLERR and EPOLLHUP are always reported.
 *
 * Edge-triggered, because an end of stream that is tolerated (a half-close)
 * would otherwise make every wait return at once. A reset after it is a new
 * edge, and so is the FIN that comes after the owner's own SHUT_RD.
 *
 * The key of the kernel's set is (open file, fd number). It forgets a socket
 * at the last close of its open file, so a dup or a forked child keeps the
 * registration, which can then be neither removed nor told from a new one by
 * its fd number: hence a 64-bit key with a generation, checked by the caller.
 */
#include "dw_poller.h"

#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <unistd.h>

#define MAX_BATCH 64

/* No caller's key: its low half would be a slot. */
#define WAKE_KEY UINT64_MAX

struct dw_poller {
    int epoll_fd;
    int wake_fd;
    int tick_fd; /* -1: nobody asked for ticks yet */
};

static int set_add(int epoll_fd, int fd, uint32_t events, uint64_t key)
{
    struct epoll_event event = {.events = events, .data.u64 = key};
    return epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &event) ? -errno : DW_OK;
}

/* Does this kernel report an end of stream behind an unread byte, and only
 * that? Headers know EPOLLRDHUP even where the kernel (or what stands in for
 * one) ignores it.
 */
static int probe(int epoll_fd)
{
    int pair[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair))
        return -errno;
    struct epoll_event event;
    int rc = DW_ENOTSUP;
    if (set_add(epoll_fd, pair[0], EPOLLRDHUP | EPOLLET, 0))
        goto close_pair;
    if (write(pair[1], "x", 1) != 1 || epoll_wait(epoll_fd, &event, 1, 0) != 0)
        goto close_pair;
    if (shutdown(pair[1], SHUT_WR) || epoll_wait(epoll_fd, &event, 1, 0) != 1)
        goto close_pair;
    if (event.events & EPOLLRDHUP)
        rc = DW_OK;

close_pair:
    close(pair[0]);
    close(pair[1]);
    return rc;
}

static int epoll_open(dw_poller **out)
{
    *out = NULL;
    int rc;
    dw_poller *poller = malloc(sizeof(*poller));
    if (!poller)
        return DW_ENOMEM;
    poller->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    if (poller->epoll_fd < 0) {
        rc = -errno;
        goto fail_free;
    }
    rc = probe(poller->epoll_fd);
    if (rc)
        goto fail_close_epoll;
    poller->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (poller->wake_fd < 0) {
        rc = -errno;
        goto fail_close_epoll;
    }
    rc = set_add(poller->epoll_fd, poller->wake_fd, EPOLLIN, WAKE_KEY);
    if (rc)
        goto fail_close_wake;
    poller->tick_fd = -1;
    *out = poller;
    return DW_OK;

fail_close_wake:
    close(poller->wake_fd);
fail_close_epoll:
    close(poller->epoll_fd);
fail_free:
    free(poller);
    return rc;
}

static void epoll_close(dw_poller *poller)
{
    if (poller->tick_fd >= 0)
        close(poller->tick_fd);
    close(poller->wake_fd);
    close(poller->epoll_fd);
    free(poller);
}

static int epoll_add(dw_poller *poller, int fd, uint64_t key)
{
    int rc = set_add(poller->epoll_fd, fd, EPOLLRDHUP | EPOLLET, key);
    /* EPERM: a file that has nothing to wait for. */
    return rc == -EPERM ? DW_ENOTSOCK : rc;
}

static int epoll_remove(dw_poller *poller, int fd, uint64_t key)
{
    (void)key;
    if (epoll_ctl(poller->epoll_fd, EPOLL_CTL_DEL, fd, NULL))
        return -errno;
    return DW_OK;
}

static void epoll_recheck(dw_poller *poller, int fd, uint64_t key)
{
    /* The next FIN is a new edge by itself. */
    (void)poller;
    (void)fd;
    (void)key;
}

static int open_tick(dw_poller *poller)
{
    int fd = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
    if (fd < 0)
        return -errno;
    /* Before the set has it: whoever waits reads it at the first tick. */
    poller->tick_fd = fd;
    int rc = set_add(poller->epoll_fd, fd, EPOLLIN, DW_POLL_TICK);
    if (rc) {
        poller->tick_fd = -1;
        close(fd);
    }
    return rc;
}

static int epoll_set_tick(dw_poller *poller, uint32_t every_ms)
{
    if (poller->tick_fd < 0) {
        int rc = every_ms ? open_tick(poller) : DW_OK;
        if (rc || !every_ms)
            return rc;
    }
    struct timespec every = {.tv_sec = every_ms / 1000,
                             .tv_nsec = every_ms % 1000 * 1000000L};
    struct itimerspec when = {.it_interval = every, .it_value = every};
    return timerfd_settime(poller->tick_fd, 0, &when, NULL) ? -errno : DW_OK;
}

/* RETURNS: whether it was the poller's own fd, with nothing to report. */
static bool absorb(dw_poller *poller, uint64_t key)
{
    eventfd_t count;
    if (key == WAKE_KEY) {
        eventfd_read(poller->wake_fd, &count);
        return true;
    }
    if (key == DW_POLL_TICK) {
        /* EAGAIN: set anew since it was due. */
        return read(poller->tick_fd, &count, sizeof(count)) < 0;
    }
    return false;
}

static uint32_t translate(uint32_t events)
{
    uint32_t bits = 0;
    if (events & EPOLLRDHUP)
        bits |= DW_POLL_EOF;
    if (events & EPOLLHUP)
        bits |= DW_POLL_HUP;
    if (events & EPOLLERR)
        bits |= DW_POLL_ERR;
    return bits;
}

static int epoll_wait_events(dw_poller *poller, dw_poll_event *events,
                             int max_events, int timeout_ms)
{
    struct epoll_event batch[MAX_BATCH];
    int max_batch = max_events < MAX_BATCH ? max_events : MAX_BATCH;
    int num_batch = epoll_wait(poller->epoll_fd, batch, max_batch, timeout_ms);
    if (num_batch < 0)
        return errno == EINTR ? 0 : -errno;
    int num_events = 0;
    for (int i = 0; i < num_batch; i++) {
        uint64_t key = batch[i].data.u64;
        if (absorb(poller, key))
            continue;
        events[num_events].key = key;
        events[num_events].bits =
            key == DW_POLL_TICK ? 0 : translate(batch[i].events);
        num_events++;
    }
    return num_events;
}

static int epoll_wake(dw_poller *poller)
{
    return eventfd_write(poller->wake_fd, 1) ? -errno : DW_OK;
}

static int epoll_fd(const dw_poller *poller)
{
    return poller->epoll_fd;
}

const dw_poller_ops dw_poller_epoll = {
    .name = "epoll",
    .open = epoll_open,
    .close = epoll_close,
    .add = epoll_add,
    .remove = epoll_remove,
    .recheck = epoll_recheck,
    .set_tick = epoll_set_tick,
    .wait = epoll_wait_events,
    .wake = epoll_wake,
    .fd = epoll_fd,
    .is_blinded_by_unread = false,
};
