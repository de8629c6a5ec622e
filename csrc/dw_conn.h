/* Inside the core: one connection and the watches on it. The rules are those
 * at the head of dw_watch.h; what is here has no poller and no table.
 *
 * THREADS: every function with the connection's lock held by the caller.
 */
#ifndef DW_CONN_H
#define DW_CONN_H

#include <stdlib.h>

#include "dw_base.h"
#include "dw_mailbox.h"
#include "dw_optin.h"
#include "dw_sock.h"

/* fired: mail.event.reason is set. Free (only the one inside a connection):
 * mail.event.watch is 0. */
typedef struct dw_watch {
    dw_mail mail;
    struct dw_watch *next;
    dw_mailbox *mailbox; /* NULL: deliver nowhere */
    dw_flag flag;
    dw_reason_mask mask;
} dw_watch;

/* Who spoke of a connection's end. */
enum dw_source { DW_SOURCE_KERNEL = 1, DW_SOURCE_OWNER = 2 };

typedef struct {
    dw_lock lock;        /* guards all but next_free */
    uint32_t generation; /* odd: attached. Moves at attach and detach */
    uint32_t next_free;  /* slot + 1; guarded by the watcher's table lock */
    int fd;
    dw_sock_kind kind;
    bool has_fd; /* the poller's, too: false once another socket has it */
    bool is_blind;
    uint8_t sources;     /* of enum dw_source, those that spoke */
    uint8_t reason;      /* of the first source; sticky, as is seen */
    dw_reason_mask seen; /* of all sources */
    uint64_t seen_ns;    /* when the first spoke */
    uint64_t last_ns;    /* when the last did */
    int64_t unread;      /* behind the FIN; -1 unknown */
    uint32_t num_armed;
    dw_watch_id last_watch;
    dw_optin *optin;       /* NULL until asked for; owned */
    dw_watch *watches;     /* the newest first */
    dw_watch inline_watch; /* one request at a time is the common case */
} dw_conn;

static_assert(sizeof(dw_conn) <= 200, "18,000 idle connections stay small");

/* What the connections of a watcher share. */
typedef struct {
    dw_flags *flags;
    dw_lock lock; /* guards the counts; after every other lock */
    uint64_t num_fired;
    uint64_t num_second_sources;
    uint64_t num_signals[DW_REASON_MAX + 1];
} dw_conn_shared;

/* A mailbox that the caller has to ring, once it holds no lock, is put on the
 * list *owed by all functions that take one. */

/* What dw_conn_arm and dw_conn_disarm do not do by themselves. */
int dw_conn_fire_seen(dw_conn *conn, dw_conn_shared *shared, dw_watch *watch,
                      dw_mailbox **owed);
int dw_conn_disarm_any(dw_conn *conn, dw_watch_id id);

/* These three are what each request costs: inline, an eighth less. */

/* A watch with an id, not armed yet; the caller fills in what it asks for.
 * RETURNS: NULL without memory. */
static inline dw_watch *dw_conn_new_watch(dw_conn *conn)
{
    dw_watch *watch = &conn->inline_watch;
    if (watch->mail.event.watch) {
        watch = malloc(sizeof(*watch));
        if (!watch)
            return NULL;
    }
    if (++conn->last_watch == 0)
        conn->last_watch = 1;
    watch->mail.event.watch = conn->last_watch;
    watch->mail.event.reason = DW_REASON_NONE;
    watch->mail.is_posted = false;
    return watch;
}

/* RETURNS: as dw_watcher_arm. */
static inline int dw_conn_arm(dw_conn *conn, dw_conn_shared *shared,
                              dw_watch *watch, dw_mailbox **owed)
{
    watch->next = conn->watches;
    conn->watches = watch;
    conn->num_armed++;
    DW_SYNC_POINT("watch:arm-stored");

    if (!(conn->seen & watch->mask))
        return 0;
    return dw_conn_fire_seen(conn, shared, watch, owed);
}

/* RETURNS, ERRORS: as dw_watcher_disarm. */
static inline int dw_conn_disarm(dw_conn *conn, dw_watch_id id)
{
    dw_watch *watch = conn->watches;
    /* The common case: the newest, in its place, has not fired. */
    if (watch != &conn->inline_watch || watch->mail.event.watch != id ||
        watch->mail.event.reason != DW_REASON_NONE)
        return dw_conn_disarm_any(conn, id);
    conn->watches = watch->next;
    conn->num_armed--;
    watch->mail.event.watch = 0;
    return 0;
}

/* A source says how the connection ended; fires what waits for that reason.
 * RETURNS: true if it was the first to speak. */
bool dw_conn_tell(dw_conn *conn, dw_conn_shared *shared, enum dw_reason reason,
                  enum dw_source source, uint64_t at_ns, dw_mailbox **owed);

/* Drops all watches, unfired and undelivered. */
void dw_conn_drop(dw_conn *conn);

/* Can unread bytes hide the peer's leaving now? */
bool dw_conn_is_blind(const dw_conn *conn);

void dw_conn_forget_mailbox(dw_conn *conn, const dw_mailbox *mailbox);

#endif
