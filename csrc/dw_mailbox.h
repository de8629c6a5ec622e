/* Inside the core: how the watches of a connection use a mailbox. What the
 * callers of the core see of it is in dw_watch.h.
 *
 *     QUIET ── first mail ──► OWED ── poster writes the fd ──► RUNG
 *       ▲                                                        │
 *       └──────────────────── drain finds it empty ◄─────────────┘
 *
 * The fd is written after the connection's lock is given back, so that a woken
 * consumer does not run into it. In between the mailbox is OWED: exactly one
 * poster has it on its list and will write, others need not, drain does not
 * change that, and shut waits for it.
 *
 * Once it is shut a mailbox is in no watch, and none gets it any more: arm looks
 * under the connection's lock, which shut takes after it has said so.
 */
#ifndef DW_MAILBOX_H
#define DW_MAILBOX_H

#include <pthread.h>
#include <stdatomic.h>

#include "dw_thread.h"
#include "dw_watch.h"

/* A watch's place in a mailbox. The event is the watch's own until it is
 * posted; from then until it is taken or forgotten, the mailbox's lock guards
 * it. */
typedef struct dw_mail {
    struct dw_mail *next;
    struct dw_mail *prev;
    bool is_posted; /* guarded by the mailbox's lock */
    dw_event event;
} dw_mail;

enum dw_mailbox_state { DW_MAILBOX_QUIET, DW_MAILBOX_OWED, DW_MAILBOX_RUNG };

struct dw_mailbox {
    dw_watcher *watcher;
    const dw_fork_guard *guard; /* the watcher's */
    int fd;                     /* open until it is shut */
    atomic_bool is_shut;
    dw_mailbox *next_owed; /* of the poster that owes the write */

    dw_mailbox *next; /* of the watcher; guarded by its table lock */
    dw_mailbox *prev;

    pthread_mutex_t lock; /* guards all below, and writes to the fd */
    enum dw_mailbox_state state;
    bool is_ended; /* the watcher was closed */
    dw_mail *first;
    dw_mail *last;
};

/* Puts mail last, and the mailbox on the list *owed if the caller has to ring
 * it (dw_mailbox_ring_all, with no lock held). */
void dw_mailbox_post(dw_mailbox *mailbox, dw_mail *mail, dw_mailbox **owed);
void dw_mailbox_ring_all(dw_mailbox *owed);

/* Takes mail out again if it is still in; it is the caller's own after that. */
void dw_mailbox_forget(dw_mailbox *mailbox, dw_mail *mail);

/* Whether a watch of that watcher may deliver to mailbox, or to NULL: nowhere.
 * With the lock of the watch's connection held.
 * ERRORS: DW_EINVAL, it is another watcher's; DW_ECLOSED. */
static inline int dw_mailbox_accept(const dw_mailbox *mailbox,
                                    const dw_watcher *watcher)
{
    if (!mailbox)
        return DW_OK;
    if (mailbox->watcher != watcher)
        return DW_EINVAL;
    /* Relaxed: pairs with the exchange in dw_mailbox_shut, which the
     * connection's lock orders. */
    if (atomic_load_explicit(&mailbox->is_shut, memory_order_relaxed))
        return DW_ECLOSED;
    return DW_OK;
}

/* The watcher is closed: wakes the consumer, whose drain then says so. */
void dw_mailbox_end(dw_mailbox *mailbox);

/* The watcher's side of create, shut and close (dw_watch.c, dw_watcher.c): adopt
 * takes a reference to the watcher, disown sees that no watch names the mailbox
 * any more, release gives the reference back. ERRORS (adopt): DW_ECLOSED. */
int dw_watcher_adopt(dw_watcher *watcher, dw_mailbox *mailbox);
void dw_watcher_disown(dw_watcher *watcher, dw_mailbox *mailbox);
void dw_watcher_release(dw_watcher *watcher);
const dw_fork_guard *dw_watcher_guard(const dw_watcher *watcher);

#endif
