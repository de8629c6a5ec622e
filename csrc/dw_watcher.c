#include "dw_watcher.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "dw_clock.h"

#define MAX_EVENTS 64

/* The poller said more than the socket's state bears out. */
static bool is_doubted(uint32_t bits, enum dw_reason reason)
{
    if (bits & DW_POLL_ERR)
        return reason == DW_REASON_NONE || reason == DW_REASON_FIN;
    return bits & DW_POLL_EOF && reason == DW_REASON_NONE;
}

/* Over AF_UNIX: HUP is both directions, so the peer has not only half-closed.
 * Over TCP it can be of the owner's own shutdown. */
static bool is_probed_without_bytes(const dw_conn *conn)
{
    return !conn->kind.is_tcp && conn->optin && conn->optin->is_probing;
}

/* The poller's event, believed or not. With the connection's lock held.
 *
 * What decides whether the flags are set is asked first, all else after it: a
 * system call of a thread that has just woken takes two microseconds. That the
 * fd number may be another socket's by now can wait too, since then the owner
 * closed ours, and it is lost whatever was read.
 */
static void look(dw_watcher *watcher, dw_conn *conn, const dw_poll_event *event,
                 uint64_t at_ns, dw_mailbox **owed)
{
    enum dw_reason reason =
        dw_sock_classify(conn->fd, &conn->kind, event->bits);
    if (reason != DW_REASON_NONE)
        dw_conn_tell(conn, &watcher->shared, reason, DW_SOURCE_KERNEL, at_ns,
                     owed);
    if (reason == DW_REASON_FIN && event->bits & DW_POLL_HUP &&
        is_probed_without_bytes(conn))
        dw_conn_tell(conn, &watcher->shared, DW_REASON_RESET, DW_SOURCE_KERNEL,
                     at_ns, owed);
    if (!dw_sock_is_same(conn->fd, &conn->kind)) {
        dw_watcher_lose_fd(watcher, conn, event->key, at_ns, owed);
        return;
    }
    conn->is_blind = (event->bits & DW_POLL_BLIND) != 0;
    if (is_doubted(event->bits, reason))
        watcher->ops->recheck(watcher->poller, conn->fd, event->key);
    if (reason == DW_REASON_FIN && conn->unread < 0)
        conn->unread = dw_sock_unread(conn->fd);
}

static void handle(dw_watcher *watcher, const dw_poll_event *event,
                   uint64_t at_ns)
{
    dw_mailbox *owed = NULL;
    bool is_stale = true;
    DW_SYNC_POINT("watch:event-before-lock");
    dw_conn *conn = dw_watcher_lock_conn(watcher, event->key);
    if (conn) {
        is_stale = !conn->has_fd;
        if (!is_stale) {
            DW_SYNC_POINT("watch:event-locked");
            look(watcher, conn, event, at_ns, &owed);
            DW_SYNC_POINT("watch:event-fired");
        }
        dw_lock_release(&conn->lock);
    }
    dw_mailbox_ring_all(owed);
    if (is_stale) {
        dw_lock_acquire(&watcher->driver_lock);
        watcher->num_stale_events++;
        dw_lock_release(&watcher->driver_lock);
    }
}

/* One wait and what it brought. RETURNS: the number of events, or an error;
 * *is_stopping as it was after the wait. */
static int drive(dw_watcher *watcher, dw_poller *poller, int timeout_ms,
                 bool *is_stopping)
{
    dw_poll_event events[MAX_EVENTS];
    int num_events = watcher->ops->wait(poller, events, MAX_EVENTS, timeout_ms);
    uint64_t at_ns = dw_clock_ns();

    dw_lock_acquire(&watcher->driver_lock);
    watcher->num_wakeups++;
    *is_stopping = watcher->is_stopping;
    dw_lock_release(&watcher->driver_lock);
    for (int i = 0; i < num_events; i++) {
        if (events[i].key == DW_POLL_TICK)
            dw_watcher_tick(watcher, at_ns);
        else
            handle(watcher, &events[i], at_ns);
    }
    return num_events;
}

static void *run(void *arg)
{
    dw_watcher *watcher = arg;
    bool is_stopping = false;
    dw_thread_prefer_short_turns();
    /* The wait fails only if somebody closed our fds; attach then says so. */
    while (!is_stopping) {
        if (drive(watcher, watcher->poller, -1, &is_stopping) < 0)
            break;
    }
    return NULL;
}

static int open_poller(const char *name, enum dw_driver driver,
                       const dw_poller_ops **ops, dw_poller **out)
{
    static const dw_poller_ops *const all[] = {
#ifdef __linux__
        &dw_poller_epoll,
#endif
        &dw_poller_poll,
    };
    int rc = DW_EINVAL;
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
        if (name && strcmp(name, all[i]->name) != 0)
            continue;
        rc = all[i]->open(out);
        if (rc == DW_ENOTSUP)
            continue;
        if (!rc && driver == DW_DRIVER_LOOP && all[i]->fd(*out) < 0) {
            all[i]->close(*out);
            rc = DW_ENOTSUP;
            continue;
        }
        *ops = all[i];
        return rc;
    }
    return rc;
}

int dw_watcher_create(dw_flags *flags, const char *poller,
                      enum dw_driver driver, dw_watcher **out)
{
    *out = NULL;
    int rc;
    dw_watcher *watcher = calloc(1, sizeof(*watcher));
    if (!watcher)
        return DW_ENOMEM;
    watcher->shared.flags = flags;
    watcher->driver = driver;
    watcher->num_refs = 1;
    watcher->conns = mmap(NULL, DW_WATCHER_TABLE_BYTES, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (watcher->conns == MAP_FAILED) {
        rc = -errno;
        goto fail_free;
    }
    rc = open_poller(poller, driver, &watcher->ops, &watcher->poller);
    if (rc)
        goto fail_unmap;
    pthread_mutex_init(&watcher->lock, NULL);
    pthread_cond_init(&watcher->is_out, NULL);
    rc = dw_fork_register(&watcher->guard);
    if (rc)
        goto fail_close_poller;
    if (driver == DW_DRIVER_THREAD) {
        rc = dw_thread_start(&watcher->thread, run, watcher);
        if (rc)
            goto fail_unregister;
    }
    *out = watcher;
    return DW_OK;

fail_unregister:
    dw_fork_unregister(&watcher->guard);
fail_close_poller:
    watcher->ops->close(watcher->poller);
fail_unmap:
    munmap(watcher->conns, DW_WATCHER_TABLE_BYTES);
fail_free:
    free(watcher);
    return rc;
}

static void close_poller(dw_watcher *watcher)
{
    if (watcher->poller)
        watcher->ops->close(watcher->poller);
    watcher->poller = NULL;
}

void dw_watcher_close(dw_watcher *watcher)
{
    if (dw_fork_is_child(&watcher->guard)) {
        /* No lock: the threads that may hold them are not here. */
        close_poller(watcher);
        return;
    }
    pthread_mutex_lock(&watcher->lock);
    if (watcher->is_closed) {
        pthread_mutex_unlock(&watcher->lock);
        return;
    }
    watcher->is_closed = true;
    pthread_mutex_unlock(&watcher->lock);

    dw_lock_acquire(&watcher->driver_lock);
    watcher->is_stopping = true;
    dw_lock_release(&watcher->driver_lock);
    watcher->ops->wake(watcher->poller);
    if (watcher->driver == DW_DRIVER_THREAD)
        pthread_join(watcher->thread, NULL);

    pthread_mutex_lock(&watcher->lock);
    while (watcher->num_polling)
        pthread_cond_wait(&watcher->is_out, &watcher->lock);
    for (uint32_t slot = 0; slot < watcher->num_used; slot++) {
        dw_conn *conn = &watcher->conns[slot];
        dw_lock_acquire(&conn->lock);
        if (conn->generation & 1) {
            dw_conn_drop(conn);
            dw_watcher_drop_optin(watcher, conn);
            conn->generation++;
        }
        dw_lock_release(&conn->lock);
    }
    watcher->num_connections = 0;
    for (dw_mailbox *it = watcher->mailboxes; it; it = it->next)
        dw_mailbox_end(it);
    close_poller(watcher);
    pthread_mutex_unlock(&watcher->lock);
}

void dw_watcher_release(dw_watcher *watcher)
{
    bool is_child = dw_fork_is_child(&watcher->guard);
    if (!is_child)
        pthread_mutex_lock(&watcher->lock);
    bool is_last = --watcher->num_refs == 0;
    if (!is_child)
        pthread_mutex_unlock(&watcher->lock);
    if (!is_last)
        return;
    dw_fork_unregister(&watcher->guard);
    if (!is_child) {
        pthread_cond_destroy(&watcher->is_out);
        pthread_mutex_destroy(&watcher->lock);
    }
    /* Left in a forked child alone, where the options are the parent's. */
    for (uint32_t slot = 0; slot < watcher->num_used; slot++)
        free(watcher->conns[slot].optin);
    munmap(watcher->conns, DW_WATCHER_TABLE_BYTES);
    free(watcher->slot_of_fd);
    free(watcher);
}

void dw_watcher_free(dw_watcher *watcher)
{
    if (!watcher)
        return;
    dw_watcher_close(watcher);
    dw_watcher_release(watcher);
}

int dw_watcher_fd(dw_watcher *watcher)
{
    if (dw_fork_is_child(&watcher->guard))
        return DW_EFORKED;
    if (watcher->driver != DW_DRIVER_LOOP)
        return DW_ENOTSUP;
    pthread_mutex_lock(&watcher->lock);
    int rc =
        watcher->is_closed ? DW_ECLOSED : watcher->ops->fd(watcher->poller);
    pthread_mutex_unlock(&watcher->lock);
    return rc;
}

int dw_watcher_poll(dw_watcher *watcher, int timeout_ms)
{
    if (dw_fork_is_child(&watcher->guard))
        return DW_EFORKED;
    if (watcher->driver != DW_DRIVER_LOOP)
        return DW_ENOTSUP;
    pthread_mutex_lock(&watcher->lock);
    if (watcher->is_closed) {
        pthread_mutex_unlock(&watcher->lock);
        return DW_ECLOSED;
    }
    watcher->num_polling++;
    pthread_mutex_unlock(&watcher->lock);

    bool is_stopping;
    int rc = drive(watcher, watcher->poller, timeout_ms, &is_stopping);

    pthread_mutex_lock(&watcher->lock);
    if (--watcher->num_polling == 0)
        pthread_cond_broadcast(&watcher->is_out);
    else if (is_stopping)
        watcher->ops->wake(watcher->poller); /* one wake, one of them */
    pthread_mutex_unlock(&watcher->lock);
    return is_stopping ? DW_ECLOSED : rc;
}

int dw_watcher_read_stats(dw_watcher *watcher, dw_watcher_stats *out)
{
    *out = (dw_watcher_stats){
        .poller = watcher->ops->name,
        .driver = watcher->driver,
    };
    if (dw_fork_is_child(&watcher->guard))
        return DW_EFORKED;
    pthread_mutex_lock(&watcher->lock);
    out->num_connections = watcher->num_connections;
    uint32_t num_used = watcher->num_used;
    pthread_mutex_unlock(&watcher->lock);

    /* Counted here rather than kept, so that arm and disarm touch nothing
     * that connections share. */
    for (uint32_t slot = 0; slot < num_used; slot++) {
        dw_conn *conn = &watcher->conns[slot];
        dw_lock_acquire(&conn->lock);
        if (conn->generation & 1) {
            out->num_armed += conn->num_armed;
            out->num_blind +=
                conn->num_armed ? dw_conn_is_blind(conn) : conn->is_blind;
        }
        dw_lock_release(&conn->lock);
    }
    dw_lock_acquire(&watcher->driver_lock);
    out->num_wakeups = watcher->num_wakeups;
    out->num_stale_events = watcher->num_stale_events;
    dw_lock_release(&watcher->driver_lock);
    dw_lock_acquire(&watcher->shared.lock);
    out->num_fired = watcher->shared.num_fired;
    out->num_second_sources = watcher->shared.num_second_sources;
    memcpy(out->num_signals, watcher->shared.num_signals,
           sizeof(out->num_signals));
    dw_lock_release(&watcher->shared.lock);
    return DW_OK;
}

const dw_fork_guard *dw_watcher_guard(const dw_watcher *watcher)
{
    return &watcher->guard;
}
