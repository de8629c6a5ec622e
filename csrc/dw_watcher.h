/* Inside the core: what a watcher is made of. dw_watcher.c has its life and
 * its driver, dw_watch.c its table of connections, dw_watch_optin.c what these
 * can opt in to.
 *
 * The table is mapped whole and sparse, like that of the flags: a slot's
 * address never changes, so a connection is found without a lock, and a page
 * costs memory from its first use on. Only the connection's own lock is needed
 * to see, by the generation, whether it is still the one that was meant.
 */
#ifndef DW_WATCHER_H
#define DW_WATCHER_H

#include <pthread.h>

#include "dw_conn.h"
#include "dw_poller.h"
#include "dw_thread.h"
#include "dw_watch.h"

#define DW_WATCHER_NUM_SLOTS   (1U << 20)
#define DW_WATCHER_TABLE_BYTES (DW_WATCHER_NUM_SLOTS * sizeof(dw_conn))

struct dw_watcher {
    /* Set by create, constant from then on. */
    const dw_poller_ops *ops;
    enum dw_driver driver;
    dw_conn *conns; /* [DW_WATCHER_NUM_SLOTS] */
    pthread_t thread;
    dw_fork_guard guard;

    dw_conn_shared shared;

    dw_lock driver_lock; /* guards these three; no other lock inside */
    bool is_stopping;
    uint64_t num_wakeups;
    uint64_t num_stale_events;

    /* The table lock: guards all below and dw_conn.next_free. The thread
     * reads poller without it, which is set before it starts and NULL after
     * it has ended. */
    pthread_mutex_t lock;
    pthread_cond_t is_out; /* num_polling became 0 */
    dw_poller *poller;
    bool is_closed;
    unsigned num_polling; /* callers in dw_watcher_poll */
    unsigned num_refs;    /* the creator's, and one a mailbox */
    dw_mailbox *mailboxes;
    uint64_t num_connections;
    uint64_t num_vanish;  /* of them, those with a bound on silence */
    uint32_t tick_ms;     /* how often these are looked at; 0 never */
    uint32_t num_used;    /* slots used ever: all later ones are zero */
    uint32_t first_free;  /* slot + 1; 0 none */
    uint32_t *slot_of_fd; /* [num_fds]; slot + 1; 0 not attached */
    size_t num_fds;
};

static inline dw_conn_id dw_watcher_conn_id(uint32_t slot, uint32_t generation)
{
    return (uint64_t)generation << 32 | slot;
}

/* RETURNS: the connection, its lock held; NULL if it is not attached now. */
static inline dw_conn *dw_watcher_lock_conn(dw_watcher *watcher, dw_conn_id id)
{
    uint32_t slot = (uint32_t)id;
    uint32_t generation = (uint32_t)(id >> 32);
    if (slot >= DW_WATCHER_NUM_SLOTS || !(generation & 1))
        return NULL;
    dw_conn *conn = &watcher->conns[slot];
    dw_lock_acquire(&conn->lock);
    if (conn->generation != generation) {
        dw_lock_release(&conn->lock);
        return NULL;
    }
    return conn;
}

/* The fd names another socket than was attached, or none: its owner closed it
 * and has not told us yet. With the connection's lock held. */
void dw_watcher_lose_fd(dw_watcher *watcher, dw_conn *conn, dw_conn_id id,
                        uint64_t at_ns, dw_mailbox **owed);

/* Why dw_watcher_lock_conn gave NULL: DW_ECLOSED or DW_ESTALE. Not with the
 * table lock held. */
int dw_watcher_gone(dw_watcher *watcher);

/* One look at every armed connection with a bound on its peer's silence. */
void dw_watcher_tick(dw_watcher *watcher, uint64_t at_ns);

/* Ends all opt-ins of a connection and puts its socket's options back. With the
 * table lock and the connection's lock held. */
void dw_watcher_drop_optin(dw_watcher *watcher, dw_conn *conn);

#endif
