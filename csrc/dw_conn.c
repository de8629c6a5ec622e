#include "dw_conn.h"

#include <stdlib.h>

static void fire(dw_conn *conn, dw_conn_shared *shared, dw_watch *watch,
                 enum dw_reason reason, uint64_t at_ns, dw_mailbox **owed)
{
    conn->num_armed--;
    watch->mail.event.reason = reason;
    watch->mail.event.at_ns = at_ns;
    /* A flag that was released or cancelled before stays as it is; the watch
     * has fired all the same. */
    if (watch->flag.generation)
        dw_flag_cancel(shared->flags, watch->flag, reason, at_ns);
    if (watch->mailbox)
        dw_mailbox_post(watch->mailbox, &watch->mail, owed);
    dw_lock_acquire(&shared->lock);
    shared->num_fired++;
    dw_lock_release(&shared->lock);
}

/* Which of the reasons seen, of which the mask holds one, a watch armed now
 * fires with. */
static enum dw_reason seen_before(const dw_conn *conn, dw_reason_mask mask)
{
    dw_reason_mask seen = conn->seen & mask;
    if (seen & DW_MASK(conn->reason))
        return conn->reason;
    unsigned reason = DW_REASON_NONE;
    while (seen >> reason > 1)
        reason++;
    return reason;
}

int dw_conn_fire_seen(dw_conn *conn, dw_conn_shared *shared, dw_watch *watch,
                      dw_mailbox **owed)
{
    enum dw_reason reason = seen_before(conn, watch->mask);
    fire(conn, shared, watch, reason,
         reason == conn->reason ? conn->seen_ns : conn->last_ns, owed);
    return 1;
}

/* The link, not the watch, so that it can be cut. */
static dw_watch **find(dw_conn *conn, dw_watch_id id)
{
    dw_watch **link = &conn->watches;
    while (*link && (*link)->mail.event.watch != id)
        link = &(*link)->next;
    return link;
}

/* RETURNS: 1 if it had fired. */
static int cut(dw_conn *conn, dw_watch **link)
{
    dw_watch *watch = *link;
    int has_fired = watch->mail.event.reason != DW_REASON_NONE;
    *link = watch->next;
    if (!has_fired)
        conn->num_armed--;
    else if (watch->mailbox)
        dw_mailbox_forget(watch->mailbox, &watch->mail);
    if (watch == &conn->inline_watch)
        watch->mail.event.watch = 0;
    else
        free(watch);
    return has_fired;
}

int dw_conn_disarm_any(dw_conn *conn, dw_watch_id id)
{
    dw_watch **link = find(conn, id);
    return *link ? cut(conn, link) : DW_ESTALE;
}

bool dw_conn_tell(dw_conn *conn, dw_conn_shared *shared, enum dw_reason reason,
                  enum dw_source source, uint64_t at_ns, dw_mailbox **owed)
{
    bool is_first = conn->reason == DW_REASON_NONE;
    bool is_second = !is_first && !(conn->sources & source);
    if (is_first) {
        conn->reason = (uint8_t)reason;
        conn->seen_ns = at_ns;
    }
    conn->sources |= (uint8_t)source;
    conn->seen |= DW_MASK(reason);
    conn->last_ns = at_ns;
    dw_lock_acquire(&shared->lock);
    shared->num_signals[reason] += is_first;
    shared->num_second_sources += is_second;
    dw_lock_release(&shared->lock);

    for (dw_watch *watch = conn->watches; watch; watch = watch->next) {
        if (!watch->mail.event.reason && watch->mask & DW_MASK(reason))
            fire(conn, shared, watch, reason, at_ns, owed);
    }
    return is_first;
}

void dw_conn_drop(dw_conn *conn)
{
    while (conn->watches)
        cut(conn, &conn->watches);
}

bool dw_conn_is_blind(const dw_conn *conn)
{
    if (conn->is_blind)
        return true;
    return conn->kind.is_tcp && conn->has_fd && !conn->seen &&
           dw_sock_is_window_closed(conn->fd) &&
           dw_sock_is_same(conn->fd, &conn->kind);
}

void dw_conn_forget_mailbox(dw_conn *conn, const dw_mailbox *mailbox)
{
    for (dw_watch *watch = conn->watches; watch; watch = watch->next) {
        if (watch->mailbox != mailbox)
            continue;
        dw_mailbox_forget(watch->mailbox, &watch->mail);
        watch->mailbox = NULL;
    }
}
