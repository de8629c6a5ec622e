/* The portable poller: poll() for POLLIN, then one byte of MSG_PEEK to tell
 * an end of stream from bytes.
 *
 *               bytes                          peek: 0
 *     LOOKING ─────────► BLIND       LOOKING ──────────► ENDED ──┐ recheck
 *        ▲   queue empty   │            any ── HUP, ERR ──► DONE ──┴─► DOUBTED
 *        └─────────────────┘
 *
 *     LOOKING  POLLIN is asked for
 *     BLIND    unread bytes: POLLIN would make poll() return at once for ever,
 *              so it is not asked for and the fd is peeked at by a timer
 *     ENDED    end of stream reported; only HUP and ERR can follow
 *     DOUBTED  what was reported last came of the owner's own shutdown, or of
 *              its error queue. poll() would go on about it, so the fd is taken
 *              out of the set, asked about by the timer, and reported again
 *     DONE     both directions are over; poll() would report it for ever, so
 *              the fd is taken out. Nothing more is reported of it
 *
 * What it cannot do: an end of stream behind unread bytes is seen once the
 * owner has read them, no sooner. A reset that comes between poll() and the
 * peek is taken from the owner by the peek, who then reads an end of stream in
 * its place. While poll() runs it holds every open file of the set, so an
 * owner that closes without remove sends its FIN only when poll() returns.
 *
 * That last point is why add and remove wait until the waiting thread is out
 * of poll(): after remove the owner's close() is really the last. It also
 * means that the array poll() works on never changes under it.
 */
#include "dw_poller.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "dw_clock.h"

#define LOOK_EVERY_MS 20
#define NS_PER_MS     UINT64_C(1000000)

enum fd_state { LOOKING, BLIND, ENDED, DOUBTED, DONE };

/* Beside polled[i], which has fd -1 in states DONE and DOUBTED. */
typedef struct {
    uint64_t key;
    int fd;
    enum fd_state state;
} entry;

struct dw_poller {
    pthread_mutex_t lock;  /* guards all below; order: after every other */
    pthread_cond_t is_out; /* is_polling or num_blocked has changed */
    bool is_polling;       /* a thread is in poll(); the arrays are its own */
    size_t num_blocked;    /* callers of add and remove that wait for it */

    struct pollfd *polled; /* [capacity]; the first is the wake pipe */
    entry *entries;        /* [capacity]; the first is not used */
    size_t num_entries;
    size_t capacity;

    size_t num_timed;       /* entries in BLIND or DOUBTED */
    uint64_t look_ns;       /* when they are looked at next */
    uint64_t tick_every_ns; /* 0: no ticks */
    uint64_t tick_ns;       /* the next */
    int wake_fds[2];        /* pipe: read end, write end */
};

static bool is_timed(enum fd_state state)
{
    return state == BLIND || state == DOUBTED;
}

static void set_state(dw_poller *poller, size_t i, enum fd_state state)
{
    entry *it = &poller->entries[i];
    if (is_timed(it->state))
        poller->num_timed--;
    if (is_timed(state))
        poller->num_timed++;
    it->state = state;
    poller->polled[i].fd = state == DONE || state == DOUBTED ? -1 : it->fd;
    poller->polled[i].events = state == LOOKING ? POLLIN : 0;
}

static int reserve(dw_poller *poller, size_t num_entries)
{
    if (num_entries <= poller->capacity)
        return DW_OK;
    size_t capacity = poller->capacity ? 2 * poller->capacity : 16;
    struct pollfd *polled = realloc(poller->polled, capacity * sizeof(*polled));
    if (!polled)
        return DW_ENOMEM;
    poller->polled = polled;
    entry *entries = realloc(poller->entries, capacity * sizeof(*entries));
    if (!entries)
        return DW_ENOMEM;
    poller->entries = entries;
    poller->capacity = capacity;
    return DW_OK;
}

static void poll_close(dw_poller *poller)
{
    close(poller->wake_fds[0]);
    close(poller->wake_fds[1]);
    /* The lock and the condition are left as they are: in a child of fork()
     * they can be held by a thread that does not exist there, and destroying
     * them would wait for it. They own nothing. */
    free(poller->entries);
    free(poller->polled);
    free(poller);
}

static int poll_open(dw_poller **out)
{
    *out = NULL;
    dw_poller *poller = calloc(1, sizeof(*poller));
    if (!poller)
        return DW_ENOMEM;
    int rc = reserve(poller, 1);
    if (rc)
        goto fail_free;
    if (pipe2(poller->wake_fds, O_CLOEXEC | O_NONBLOCK)) {
        rc = -errno;
        goto fail_free;
    }
    pthread_mutex_init(&poller->lock, NULL);
    pthread_cond_init(&poller->is_out, NULL);
    poller->polled[0] =
        (struct pollfd){.fd = poller->wake_fds[0], .events = POLLIN};
    poller->num_entries = 1;
    *out = poller;
    return DW_OK;

fail_free:
    free(poller->entries);
    free(poller->polled);
    free(poller);
    return rc;
}

static int poll_wake(dw_poller *poller)
{
    /* A full pipe is awake already. */
    if (write(poller->wake_fds[1], "", 1) < 0 && errno != EAGAIN)
        return -errno;
    return DW_OK;
}

/* Takes the lock at a moment when no thread is in poll(). */
static void lock_out_of_poll(dw_poller *poller)
{
    pthread_mutex_lock(&poller->lock);
    poller->num_blocked++;
    while (poller->is_polling) {
        poll_wake(poller);
        pthread_cond_wait(&poller->is_out, &poller->lock);
    }
    poller->num_blocked--;
    pthread_cond_broadcast(&poller->is_out);
}

/* RETURNS: the index of the entry, 0 if there is none. */
static size_t find(const dw_poller *poller, int fd, uint64_t key)
{
    for (size_t i = 1; i < poller->num_entries; i++) {
        if (poller->entries[i].fd == fd && poller->entries[i].key == key)
            return i;
    }
    return 0;
}

static int poll_add(dw_poller *poller, int fd, uint64_t key)
{
    struct stat stat;
    if (fstat(fd, &stat))
        return -errno;
    /* recv() can peek into nothing else; the write end of a pipe is never
     * readable, and reports an error by itself. */
    if (!S_ISSOCK(stat.st_mode) && !S_ISFIFO(stat.st_mode))
        return DW_ENOTSOCK;
    int rc;
    size_t i;
    lock_out_of_poll(poller);
    for (i = 1; i < poller->num_entries; i++) {
        if (poller->entries[i].fd == fd) {
            rc = DW_EEXIST;
            goto unlock;
        }
    }
    rc = reserve(poller, poller->num_entries + 1);
    if (rc)
        goto unlock;
    poller->num_entries++;
    poller->entries[i] = (entry){.key = key, .fd = fd};
    set_state(poller, i, LOOKING);

unlock:
    pthread_mutex_unlock(&poller->lock);
    return rc;
}

static int poll_remove(dw_poller *poller, int fd, uint64_t key)
{
    lock_out_of_poll(poller);
    size_t i = find(poller, fd, key);
    if (i) {
        size_t last = --poller->num_entries;
        set_state(poller, i, DONE);
        poller->entries[i] = poller->entries[last];
        poller->polled[i] = poller->polled[last];
    }
    pthread_mutex_unlock(&poller->lock);
    return i ? DW_OK : -ENOENT;
}

static void poll_recheck(dw_poller *poller, int fd, uint64_t key)
{
    pthread_mutex_lock(&poller->lock);
    size_t i = find(poller, fd, key);
    if (i &&
        (poller->entries[i].state == ENDED || poller->entries[i].state == DONE))
        set_state(poller, i, DOUBTED);
    pthread_mutex_unlock(&poller->lock);
}

static int poll_set_tick(dw_poller *poller, uint32_t every_ms)
{
    lock_out_of_poll(poller);
    poller->tick_every_ns = every_ms * NS_PER_MS;
    poller->tick_ns = dw_clock_ns() + poller->tick_every_ns;
    pthread_mutex_unlock(&poller->lock);
    return DW_OK;
}

/* One peek. RETURNS: true if there is something to report, in *bits. */
static bool look(dw_poller *poller, size_t i, uint32_t *bits)
{
    enum fd_state before = poller->entries[i].state;
    char byte;
    ssize_t size =
        recv(poller->entries[i].fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    if (size > 0) {
        set_state(poller, i, BLIND);
        *bits = DW_POLL_BLIND;
        return before != BLIND;
    }
    if (size == 0) {
        set_state(poller, i, ENDED);
        *bits = DW_POLL_EOF;
        return true;
    }
    if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) {
        set_state(poller, i, LOOKING);
        *bits = 0;
        return before == BLIND;
    }
    set_state(poller, i, DONE);
    *bits = errno == EBADF ? DW_POLL_HUP : DW_POLL_ERR;
    return true;
}

/* What poll() said of one fd. RETURNS: as look. */
static bool translate(dw_poller *poller, size_t i, short revents,
                      uint32_t *bits)
{
    if (revents & (POLLERR | POLLHUP | POLLNVAL)) {
        /* Not looked at closer: the error stays with the owner. */
        *bits = revents & POLLERR ? DW_POLL_ERR : DW_POLL_HUP;
        if (revents & POLLHUP)
            *bits |= DW_POLL_HUP | DW_POLL_EOF;
        set_state(poller, i, DONE);
        return true;
    }
    return revents & POLLIN && look(poller, i, bits);
}

/* The timer's look. RETURNS: as look. */
static bool look_again(dw_poller *poller, size_t i, uint32_t *bits)
{
    if (poller->entries[i].state == BLIND)
        return look(poller, i, bits);
    /* poll() first: with an error there is, the peek would take it. */
    struct pollfd one = {.fd = poller->entries[i].fd, .events = POLLIN};
    poll(&one, 1, 0);
    if (one.revents)
        return translate(poller, i, one.revents, bits);
    set_state(poller, i, LOOKING);
    return false;
}

/* RETURNS: 1 if it was due, and is the first of the events. */
static int collect_tick(dw_poller *poller, dw_poll_event *events)
{
    uint64_t now = poller->tick_every_ns ? dw_clock_ns() : 0;
    if (!poller->tick_every_ns || now < poller->tick_ns)
        return 0;
    poller->tick_ns = now + poller->tick_every_ns;
    events[0] = (dw_poll_event){.key = DW_POLL_TICK};
    return 1;
}

static int collect(dw_poller *poller, dw_poll_event *events, int max_events)
{
    uint64_t now = poller->num_timed ? dw_clock_ns() : 0;
    bool is_time = poller->num_timed && now >= poller->look_ns;
    int num_events = collect_tick(poller, events);
    for (size_t i = 1; i < poller->num_entries; i++) {
        /* What does not fit is still there at the next call. */
        if (num_events == max_events)
            return num_events;
        uint32_t bits;
        bool is_news = false;
        if (poller->polled[i].revents)
            is_news = translate(poller, i, poller->polled[i].revents, &bits);
        else if (is_time && is_timed(poller->entries[i].state))
            is_news = look_again(poller, i, &bits);
        poller->polled[i].revents = 0;
        if (is_news) {
            events[num_events].key = poller->entries[i].key;
            events[num_events].bits = bits;
            num_events++;
        }
    }
    if (is_time)
        poller->look_ns = now + LOOK_EVERY_MS * NS_PER_MS;
    return num_events;
}

/* Milliseconds from now to then, rounded up; 0 if it is over. */
static int ms_until(uint64_t then_ns, uint64_t now_ns)
{
    if (then_ns <= now_ns)
        return 0;
    return (int)((then_ns - now_ns + NS_PER_MS - 1) / NS_PER_MS);
}

/* Until end_ns (UINT64_MAX: no end) or a timer, whichever comes first. */
static int next_timeout(const dw_poller *poller, uint64_t end_ns)
{
    uint64_t then = end_ns;
    if (poller->num_timed && poller->look_ns < then)
        then = poller->look_ns;
    if (poller->tick_every_ns && poller->tick_ns < then)
        then = poller->tick_ns;
    return then == UINT64_MAX ? -1 : ms_until(then, dw_clock_ns());
}

static int poll_wait(dw_poller *poller, dw_poll_event *events, int max_events,
                     int timeout_ms)
{
    uint64_t end_ns = UINT64_MAX;
    if (timeout_ms >= 0)
        end_ns = dw_clock_ns() + (uint64_t)timeout_ms * NS_PER_MS;
    bool is_woken = false;
    int num_events = 0;
    pthread_mutex_lock(&poller->lock);
    do {
        while (poller->num_blocked)
            pthread_cond_wait(&poller->is_out, &poller->lock);
        int wait_ms = next_timeout(poller, end_ns);
        poller->is_polling = true;
        pthread_mutex_unlock(&poller->lock);
        int rc = poll(poller->polled, poller->num_entries, wait_ms);
        if (rc < 0)
            rc = -errno;
        pthread_mutex_lock(&poller->lock);
        poller->is_polling = false;
        pthread_cond_broadcast(&poller->is_out);

        if (rc == DW_EINTR)
            break;
        if (rc < 0) {
            num_events = rc;
            break;
        }
        if (poller->polled[0].revents) {
            char bytes[64];
            while (read(poller->wake_fds[0], bytes, sizeof(bytes)) > 0)
                is_woken = true;
        }
        num_events = collect(poller, events, max_events);
    } while (!num_events && !is_woken && dw_clock_ns() < end_ns);
    pthread_mutex_unlock(&poller->lock);
    return num_events;
}

static int poll_fd(const dw_poller *poller)
{
    (void)poller;
    return DW_ENOTSUP;
}

const dw_poller_ops dw_poller_poll = {
    .name = "poll",
    .open = poll_open,
    .close = poll_close,
    .add = poll_add,
    .remove = poll_remove,
    .recheck = poll_recheck,
    .set_tick = poll_set_tick,
    .wait = poll_wait,
    .wake = poll_wake,
    .fd = poll_fd,
    .is_blinded_by_unread = true,
};
