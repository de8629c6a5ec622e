#include <stdlib.h>

#include "dw_clock.h"
#include "dw_watcher.h"

/* The connection with its lock held and a place for its opt-ins, or NULL and in
 * *rc why not; DW_OK if there is nothing to do. */
static dw_conn *lock_for_optin(dw_watcher *watcher, dw_conn_id id,
                               bool is_tcp_only, int *rc)
{
    dw_conn *conn = dw_watcher_lock_conn(watcher, id);
    if (!conn) {
        *rc = DW_ESTALE;
        return NULL;
    }
    *rc = DW_OK;
    if (is_tcp_only && !conn->kind.is_tcp)
        goto fail_unlock;
    *rc = DW_EBADF;
    if (!conn->has_fd || !dw_sock_is_same(conn->fd, &conn->kind))
        goto fail_unlock;
    *rc = DW_ENOMEM;
    if (!conn->optin)
        conn->optin = calloc(1, sizeof(*conn->optin));
    if (!conn->optin)
        goto fail_unlock;
    *rc = DW_OK;
    return conn;

fail_unlock:
    dw_lock_release(&conn->lock);
    return NULL;
}

/* Ticks as often as the connection wants that wants it most often, and not at
 * all once none does. With the table lock held. */
static int set_tick(dw_watcher *watcher, uint32_t wanted_ms)
{
    uint32_t tick_ms = watcher->tick_ms;
    if (!watcher->num_vanish)
        tick_ms = 0;
    else if (wanted_ms && (!tick_ms || wanted_ms < tick_ms))
        tick_ms = wanted_ms;
    if (tick_ms == watcher->tick_ms)
        return DW_OK;
    int rc = watcher->ops->set_tick(watcher->poller, tick_ms);
    if (!rc)
        watcher->tick_ms = tick_ms;
    return rc;
}

/* With the table lock and the connection's held. */
static int set_vanish(dw_watcher *watcher, dw_conn *conn, uint32_t after_ms)
{
    dw_optin *optin = conn->optin;
    watcher->num_vanish -= optin->vanish_ms != 0;
    int rc = dw_optin_set_vanish(optin, conn->fd, after_ms);
    watcher->num_vanish += optin->vanish_ms != 0;
    int tick_rc = set_tick(
        watcher, optin->vanish_ms ? dw_optin_tick_ms(optin->vanish_ms) : 0);
    if (tick_rc && optin->vanish_ms) {
        watcher->num_vanish--;
        dw_optin_set_vanish(optin, conn->fd, 0);
    }
    return rc ? rc : tick_rc;
}

int dw_watcher_set_vanish(dw_watcher *watcher, dw_conn_id id, uint32_t after_ms)
{
    if (dw_fork_is_child(&watcher->guard))
        return DW_EFORKED;
    if (after_ms && !dw_optin_is_bound(after_ms))
        return DW_EINVAL;
    int rc;
    pthread_mutex_lock(&watcher->lock);
    dw_conn *conn = lock_for_optin(watcher, id, true, &rc);
    if (conn) {
        rc = set_vanish(watcher, conn, after_ms);
        dw_lock_release(&conn->lock);
    }
    pthread_mutex_unlock(&watcher->lock);
    return rc == DW_ESTALE ? dw_watcher_gone(watcher) : rc;
}

int dw_watcher_vanish_bound(dw_watcher *watcher, dw_conn_id id)
{
    if (dw_fork_is_child(&watcher->guard))
        return DW_EFORKED;
    dw_conn *conn = dw_watcher_lock_conn(watcher, id);
    if (!conn)
        return dw_watcher_gone(watcher);
    int bound_ms = conn->optin ? (int)conn->optin->bound_ms : 0;
    dw_lock_release(&conn->lock);
    return bound_ms;
}

int dw_watcher_set_probing(dw_watcher *watcher, dw_conn_id id, bool is_on)
{
    if (dw_fork_is_child(&watcher->guard))
        return DW_EFORKED;
    int rc;
    dw_mailbox *owed = NULL;
    dw_conn *conn = lock_for_optin(watcher, id, false, &rc);
    if (!conn)
        return rc == DW_ESTALE ? dw_watcher_gone(watcher) : rc;
    if (conn->kind.is_tcp)
        rc = dw_optin_set_probing(conn->optin, conn->fd, is_on);
    else
        conn->optin->is_probing = is_on;
    if (is_on && !conn->kind.is_tcp && dw_sock_is_hung_up(conn->fd))
        dw_conn_tell(conn, &watcher->shared, DW_REASON_RESET, DW_SOURCE_KERNEL,
                     dw_clock_ns(), &owed);
    dw_lock_release(&conn->lock);
    dw_mailbox_ring_all(owed);
    return rc;
}

int dw_watcher_unblind(dw_watcher *watcher, dw_conn_id id, int num_bytes)
{
    if (dw_fork_is_child(&watcher->guard))
        return DW_EFORKED;
    if (num_bytes < 1)
        return DW_EINVAL;
    int rc;
    dw_conn *conn = lock_for_optin(watcher, id, true, &rc);
    if (!conn)
        return rc == DW_ESTALE ? dw_watcher_gone(watcher) : rc;
    rc = dw_optin_unblind(conn->optin, conn->fd, num_bytes);
    dw_lock_release(&conn->lock);
    return rc;
}

int dw_watcher_reblind(dw_watcher *watcher, dw_conn_id id)
{
    if (dw_fork_is_child(&watcher->guard))
        return DW_EFORKED;
    int rc;
    dw_conn *conn = lock_for_optin(watcher, id, true, &rc);
    if (!conn)
        return rc == DW_ESTALE ? dw_watcher_gone(watcher) : rc;
    dw_optin_reblind(conn->optin, conn->fd);
    dw_lock_release(&conn->lock);
    return rc;
}

/* With the connection's lock held. */
static bool is_looked_at(const dw_conn *conn)
{
    return conn->generation & 1 && conn->num_armed && conn->optin &&
           conn->optin->vanish_ms && conn->has_fd &&
           !(conn->seen & DW_MASK_GONE);
}

static void look(dw_watcher *watcher, dw_conn *conn, dw_conn_id id,
                 uint64_t at_ns, dw_mailbox **owed)
{
    dw_sock_silence silence;
    int rc = dw_sock_silence_of(conn->fd, &silence);
    if (!rc && !dw_optin_has_vanished(conn->optin, &silence, at_ns))
        return;
    if (!dw_sock_is_same(conn->fd, &conn->kind))
        dw_watcher_lose_fd(watcher, conn, id, at_ns, owed);
    else if (!rc)
        dw_conn_tell(conn, &watcher->shared, DW_REASON_TIMED_OUT,
                     DW_SOURCE_KERNEL, at_ns, owed);
}

void dw_watcher_tick(dw_watcher *watcher, uint64_t at_ns)
{
    pthread_mutex_lock(&watcher->lock);
    uint32_t num_used = watcher->num_used;
    pthread_mutex_unlock(&watcher->lock);
    for (uint32_t slot = 0; slot < num_used; slot++) {
        dw_conn *conn = &watcher->conns[slot];
        dw_mailbox *owed = NULL;
        dw_lock_acquire(&conn->lock);
        if (is_looked_at(conn))
            look(watcher, conn, dw_watcher_conn_id(slot, conn->generation),
                 at_ns, &owed);
        dw_lock_release(&conn->lock);
        dw_mailbox_ring_all(owed);
    }
}

void dw_watcher_drop_optin(dw_watcher *watcher, dw_conn *conn)
{
    dw_optin *optin = conn->optin;
    if (!optin)
        return;
    conn->optin = NULL;
    if (conn->has_fd && dw_sock_is_same(conn->fd, &conn->kind))
        dw_optin_restore(optin, conn->fd);
    if (optin->vanish_ms) {
        watcher->num_vanish--;
        set_tick(watcher, 0);
    }
    free(optin);
}
