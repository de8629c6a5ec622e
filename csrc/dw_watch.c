#include "dw_watch.h"

#include <stdlib.h>
#include <string.h>

#include "dw_clock.h"
#include "dw_watcher.h"

/* Closing detaches all connections, so that those who arm need not ask whether
 * the watcher is open. */
int dw_watcher_gone(dw_watcher *watcher)
{
    pthread_mutex_lock(&watcher->lock);
    int rc = watcher->is_closed ? DW_ECLOSED : DW_ESTALE;
    pthread_mutex_unlock(&watcher->lock);
    return rc;
}

void dw_watcher_lose_fd(dw_watcher *watcher, dw_conn *conn, dw_conn_id id,
                        uint64_t at_ns, dw_mailbox **owed)
{
    /* Most often the kernel has forgotten the fd by itself. */
    watcher->ops->remove(watcher->poller, conn->fd, id);
    conn->has_fd = false;
    conn->is_blind = false;
    dw_conn_tell(conn, &watcher->shared, DW_REASON_OWNER_CLOSED,
                 DW_SOURCE_KERNEL, at_ns, owed);
}

/* With the table lock held. */
static int reserve_fd(dw_watcher *watcher, int fd)
{
    size_t num_fds = watcher->num_fds ? watcher->num_fds : 64;
    while (num_fds <= (size_t)fd)
        num_fds *= 2;
    if (num_fds == watcher->num_fds)
        return DW_OK;
    uint32_t *slots = realloc(watcher->slot_of_fd, num_fds * sizeof(*slots));
    if (!slots)
        return DW_ENOMEM;
    memset(slots + watcher->num_fds, 0,
           (num_fds - watcher->num_fds) * sizeof(*slots));
    watcher->slot_of_fd = slots;
    watcher->num_fds = num_fds;
    return DW_OK;
}

/* Sees to it that nobody has the fd number. With the table lock held. */
static int evict(dw_watcher *watcher, int fd, const dw_sock_kind *kind,
                 dw_mailbox **owed)
{
    if (!watcher->slot_of_fd[fd])
        return DW_OK;
    int rc = DW_OK;
    uint32_t slot = watcher->slot_of_fd[fd] - 1;
    dw_conn *conn = &watcher->conns[slot];
    dw_lock_acquire(&conn->lock);
    if (conn->has_fd && conn->kind.cookie == kind->cookie)
        rc = DW_EEXIST;
    else if (conn->has_fd)
        dw_watcher_lose_fd(watcher, conn,
                           dw_watcher_conn_id(slot, conn->generation),
                           dw_clock_ns(), owed);
    dw_lock_release(&conn->lock);
    return rc;
}

/* With the table lock held. */
static int take_slot(dw_watcher *watcher, uint32_t *out)
{
    if (watcher->first_free) {
        *out = watcher->first_free - 1;
        watcher->first_free = watcher->conns[*out].next_free;
        return DW_OK;
    }
    if (watcher->num_used == DW_WATCHER_NUM_SLOTS)
        return DW_ENOSPC;
    *out = watcher->num_used++;
    return DW_OK;
}

/* With the table lock held. */
static void give_slot(dw_watcher *watcher, uint32_t slot)
{
    watcher->conns[slot].next_free = watcher->first_free;
    watcher->first_free = slot + 1;
}

/* With the table lock held. */
static int fill_slot(dw_watcher *watcher, uint32_t slot, int fd,
                     const dw_sock_kind *kind, dw_conn_id *out)
{
    dw_conn *conn = &watcher->conns[slot];
    /* The event may be there before add returns, and waits for this lock. */
    dw_lock_acquire(&conn->lock);
    dw_conn_id id = dw_watcher_conn_id(slot, conn->generation + 1);
    int rc = watcher->ops->add(watcher->poller, fd, id);
    if (!rc) {
        conn->generation++;
        conn->fd = fd;
        conn->kind = *kind;
        conn->has_fd = true;
        conn->is_blind = false;
        conn->sources = 0;
        conn->reason = DW_REASON_NONE;
        conn->seen = 0;
        conn->seen_ns = 0;
        conn->last_ns = 0;
        conn->unread = -1;
        conn->last_watch = 0;
        *out = id;
    }
    dw_lock_release(&conn->lock);
    return rc;
}

int dw_watcher_attach(dw_watcher *watcher, int fd, dw_conn_id *out)
{
    *out = 0;
    if (dw_fork_is_child(&watcher->guard))
        return DW_EFORKED;
    dw_sock_kind kind;
    int rc = dw_sock_identify(fd, &kind);
    if (rc)
        return rc;
    uint32_t slot;
    dw_mailbox *owed = NULL;
    pthread_mutex_lock(&watcher->lock);
    rc = watcher->is_closed ? DW_ECLOSED : reserve_fd(watcher, fd);
    if (rc)
        goto unlock;
    rc = evict(watcher, fd, &kind, &owed);
    if (rc)
        goto unlock;
    rc = take_slot(watcher, &slot);
    if (rc)
        goto unlock;
    rc = fill_slot(watcher, slot, fd, &kind, out);
    if (rc) {
        give_slot(watcher, slot);
        goto unlock;
    }
    watcher->slot_of_fd[fd] = slot + 1;
    watcher->num_connections++;

unlock:
    pthread_mutex_unlock(&watcher->lock);
    dw_mailbox_ring_all(owed);
    return rc;
}

int dw_watcher_detach(dw_watcher *watcher, dw_conn_id id)
{
    if (dw_fork_is_child(&watcher->guard))
        return DW_EFORKED;
    uint32_t slot = (uint32_t)id;
    int rc = DW_OK;
    DW_SYNC_POINT("watch:detach-begin");
    pthread_mutex_lock(&watcher->lock);
    dw_conn *conn = dw_watcher_lock_conn(watcher, id);
    if (!conn) {
        rc = watcher->is_closed ? DW_ECLOSED : DW_ESTALE;
        goto unlock;
    }
    dw_conn_drop(conn);
    dw_watcher_drop_optin(watcher, conn);
    conn->generation++;
    if (conn->has_fd)
        watcher->ops->remove(watcher->poller, conn->fd, id);
    if (watcher->slot_of_fd[conn->fd] == slot + 1)
        watcher->slot_of_fd[conn->fd] = 0;
    dw_lock_release(&conn->lock);
    give_slot(watcher, slot);
    watcher->num_connections--;

unlock:
    pthread_mutex_unlock(&watcher->lock);
    return rc;
}

int dw_watcher_arm(dw_watcher *watcher, dw_conn_id id, dw_flag flag,
                   dw_reason_mask mask, dw_mailbox *mailbox, uint64_t cookie,
                   dw_watch_id *out)
{
    *out = 0;
    if (dw_fork_is_child(&watcher->guard))
        return DW_EFORKED;
    dw_conn *conn = dw_watcher_lock_conn(watcher, id);
    if (!conn)
        return dw_watcher_gone(watcher);
    dw_mailbox *owed = NULL;
    dw_watch *watch;
    int rc = dw_mailbox_accept(mailbox, watcher);
    if (rc)
        goto unlock;
    rc = DW_ENOMEM;
    watch = dw_conn_new_watch(conn);
    if (!watch)
        goto unlock;
    watch->mail.event.conn = id;
    watch->mail.event.cookie = cookie;
    watch->mailbox = mailbox;
    watch->flag = flag;
    watch->mask = mask & DW_MASK_ANY;
    *out = watch->mail.event.watch;
    rc = dw_conn_arm(conn, &watcher->shared, watch, &owed);

unlock:
    dw_lock_release(&conn->lock);
    if (owed)
        dw_mailbox_ring_all(owed);
    return rc;
}

int dw_watcher_disarm(dw_watcher *watcher, dw_conn_id id, dw_watch_id watch)
{
    if (dw_fork_is_child(&watcher->guard))
        return DW_EFORKED;
    dw_conn *conn = dw_watcher_lock_conn(watcher, id);
    if (!conn)
        return dw_watcher_gone(watcher);
    int rc = dw_conn_disarm(conn, watch);
    dw_lock_release(&conn->lock);
    return rc;
}

int dw_watcher_lost(dw_watcher *watcher, dw_conn_id id, enum dw_reason reason)
{
    if (dw_fork_is_child(&watcher->guard))
        return DW_EFORKED;
    if (reason > DW_REASON_MAX || !(DW_MASK(reason) & DW_MASK_ANY))
        return DW_EINVAL;
    dw_conn *conn = dw_watcher_lock_conn(watcher, id);
    if (!conn)
        return dw_watcher_gone(watcher);
    dw_mailbox *owed = NULL;
    bool is_news = dw_conn_tell(conn, &watcher->shared, reason, DW_SOURCE_OWNER,
                                dw_clock_ns(), &owed);
    dw_lock_release(&conn->lock);
    dw_mailbox_ring_all(owed);
    return is_news;
}

int dw_watcher_info(dw_watcher *watcher, dw_conn_id id, dw_conn_info *out)
{
    *out = (dw_conn_info){.fd = -1, .unread = -1};
    if (dw_fork_is_child(&watcher->guard))
        return DW_EFORKED;
    dw_conn *conn = dw_watcher_lock_conn(watcher, id);
    if (!conn)
        return dw_watcher_gone(watcher);
    out->fd = conn->fd;
    out->seen = conn->seen;
    out->reason = conn->reason;
    out->unread = conn->unread;
    out->seen_ns = conn->seen_ns;
    out->is_blind = dw_conn_is_blind(conn);
    out->vanish_bound_ms = conn->optin ? conn->optin->bound_ms : 0;
    dw_lock_release(&conn->lock);
    return DW_OK;
}

int dw_watcher_reason(dw_watcher *watcher, dw_conn_id id)
{
    if (dw_fork_is_child(&watcher->guard))
        return DW_EFORKED;
    dw_conn *conn = dw_watcher_lock_conn(watcher, id);
    if (!conn)
        return dw_watcher_gone(watcher);
    int reason = conn->reason;
    dw_lock_release(&conn->lock);
    return reason;
}

int dw_watcher_adopt(dw_watcher *watcher, dw_mailbox *mailbox)
{
    int rc = DW_ECLOSED;
    pthread_mutex_lock(&watcher->lock);
    if (!watcher->is_closed) {
        mailbox->next = watcher->mailboxes;
        if (mailbox->next)
            mailbox->next->prev = mailbox;
        watcher->mailboxes = mailbox;
        watcher->num_refs++;
        rc = DW_OK;
    }
    pthread_mutex_unlock(&watcher->lock);
    return rc;
}

void dw_watcher_disown(dw_watcher *watcher, dw_mailbox *mailbox)
{
    pthread_mutex_lock(&watcher->lock);
    for (uint32_t slot = 0; slot < watcher->num_used; slot++) {
        dw_conn *conn = &watcher->conns[slot];
        dw_lock_acquire(&conn->lock);
        dw_conn_forget_mailbox(conn, mailbox);
        dw_lock_release(&conn->lock);
    }
    if (mailbox->prev)
        mailbox->prev->next = mailbox->next;
    else
        watcher->mailboxes = mailbox->next;
    if (mailbox->next)
        mailbox->next->prev = mailbox->prev;
    pthread_mutex_unlock(&watcher->lock);
}
