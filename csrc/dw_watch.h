/* Connections and the watches on them: who asked to be told, and who was.
 *
 * A connection is one attached socket, or the write end of a pipe, for as long
 * as it is open; the fd is borrowed. A watch is one request's interest in it:
 *
 *              arm                    event, lost()
 *     (none) ───────► ARMED ────────────────────────► FIRED
 *                       │                               │
 *                       └──────────► (none) ◄───────────┘
 *                           disarm: 0            disarm: 1
 *
 * Rules of this file:
 *  1. What the kernel said of a connection is sticky. An event fires the
 *     watches armed then whose mask holds its reason; a watch armed later
 *     looks at the same bits and fires inside arm. Both happen under the
 *     connection's lock, so no order of arm and event loses one.
 *  2. An event carries slot and generation, never the fd. A mismatch is a
 *     stale event: counted and dropped.
 *  3. Firing = set the flag, then put the watch on its mailbox's list. Watches
 *     are list nodes themselves, so a mailbox cannot overflow.
 *  4. disarm says definitively whether the watch fired, and takes it off its
 *     mailbox: after disarm no event of it is ever delivered.
 *  5. detach returns only when no other thread is inside the connection. After
 *     it the owner may close the fd.
 *  6. The first source of a connection's end decides the reason that each watch
 *     fired with; later ones add their bit and are counted.
 *
 * Lock order: watcher's table lock, connection lock, mailbox lock. No call out
 * of this core with any of them held. arm and disarm make no system call.
 *
 * THREADS: any thread, on any handle, until somebody frees it.
 * Never: consumes a byte or an error of the socket, or sets one of its options,
 * but by the opt-ins at the end, which put back what they found.
 *
 * Ids, masks and events are in disconnect_watch.h, which native users share.
 */
#ifndef DW_WATCH_H
#define DW_WATCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "dw_flags.h"

/* Who waits in the poller: a native thread of the watcher's, or the caller
 * through dw_watcher_fd and dw_watcher_poll. */
enum dw_driver { DW_DRIVER_THREAD, DW_DRIVER_LOOP };

/* What is known of a connection. */
typedef struct {
    int fd;
    uint32_t seen;    /* dw_reason_mask of all sources so far */
    uint32_t reason;  /* of the first source; 0 still there */
    int64_t unread;   /* bytes unread behind the FIN when it came; -1 unknown */
    uint64_t seen_ns; /* when the first source spoke */
    bool is_blind;    /* a leave may be hidden behind unread bytes, now */
    uint32_t
        vanish_bound_ms; /* worst case, see set_vanish; 0: not looked for */
} dw_conn_info;

typedef struct {
    const char *poller;
    enum dw_driver driver;
    uint64_t num_connections; /* attached now */
    uint64_t num_armed;       /* watches armed and not fired, now */
    uint64_t num_blind;       /* connections blind now */
    uint64_t num_fired;       /* since creation, as all below */
    uint64_t num_stale_events;
    uint64_t num_second_sources; /* the same end told again by another source */
    uint64_t num_wakeups;        /* returns from the poller's wait */
    uint64_t num_signals[DW_REASON_MAX + 1]; /* first sources, by reason */
} dw_watcher_stats;

/* poller: "epoll", "poll", or NULL for the best the running kernel has.
 * OWNERSHIP: borrows flags until dw_watcher_free.
 * ERRORS: DW_EINVAL unknown name; DW_ENOTSUP the kernel or the driver cannot
 * (the poll poller has no fd to hand to a loop). */
int dw_watcher_create(dw_flags *flags, const char *poller,
                      enum dw_driver driver, dw_watcher **out);

/* Stops and joins the thread. Armed watches are forgotten unfired, their
 * mailboxes woken; every later call but free answers DW_ECLOSED. Idempotent. */
void dw_watcher_close(dw_watcher *watcher);

/* Closes, and frees once no mailbox of it is left open. In a forked child it
 * frees memory and the child's own copies of fds and joins nothing. */
void dw_watcher_free(dw_watcher *watcher);

/* fd: a connected stream socket, or the write end of a pipe or FIFO, whose
 * reader's leaving is RESET (the next write would give EPIPE).
 * OWNERSHIP: borrows fd until detach.
 * ERRORS: DW_EBADF, DW_ENOTSOCK, DW_EEXIST (attached already), DW_ENOSPC,
 * DW_ECLOSED, DW_EFORKED. An older connection under the same fd number whose
 * socket was closed without detach is marked OWNER_CLOSED and keeps its slot
 * until its own detach, which then leaves the new registration alone. */
int dw_watcher_attach(dw_watcher *watcher, int fd, dw_conn_id *out);

/* RETURNS: 0; DW_ESTALE if it was detached before. Armed watches are dropped
 * unfired, undelivered events of its watches too. */
int dw_watcher_detach(dw_watcher *watcher, dw_conn_id conn);

/* mailbox: where to deliver, or NULL for the flag alone. flag: may be the zero
 * name, for a delivery alone. mask: the reasons that fire it.
 * RETURNS: 0 armed; 1 fired at once: what the mask asks for was seen before.
 * ERRORS: DW_ESTALE, DW_ENOMEM, DW_EFORKED; DW_ECLOSED, the watcher or the
 * mailbox; DW_EINVAL, a mailbox of another watcher. */
int dw_watcher_arm(dw_watcher *watcher, dw_conn_id conn, dw_flag flag,
                   dw_reason_mask mask, dw_mailbox *mailbox, uint64_t cookie,
                   dw_watch_id *out);

/* RETURNS: 1 it had fired, 0 it had not and now never will.
 * ERRORS: DW_ESTALE: no such watch (disarmed before, or its connection went). */
int dw_watcher_disarm(dw_watcher *watcher, dw_conn_id conn, dw_watch_id watch);

/* The owner's own word that the connection ended (connection_lost,
 * http.disconnect). RETURNS: 1 it was news, 0 another source was first.
 * ERRORS: DW_ESTALE, DW_EINVAL for a reason outside DW_MASK_ANY. */
int dw_watcher_lost(dw_watcher *watcher, dw_conn_id conn,
                    enum dw_reason reason);

/* is_blind: unread bytes stop this poller's look, or the receive window is
 * closed, so that a FIN behind what the peer could not send yet cannot come in.
 * The window is asked about here and, for armed connections, by read_stats. */
int dw_watcher_info(dw_watcher *watcher, dw_conn_id conn, dw_conn_info *out);

/* RETURNS: the reason of the first source, 0 still there; asks nobody.
 * ERRORS: as dw_watcher_info. */
int dw_watcher_reason(dw_watcher *watcher, dw_conn_id conn);

/* The opt-ins. They change options of the socket; detach, and closing the
 * watcher, put back those that the owner has not set anew meanwhile. Over
 * anything but TCP they do nothing, but for what set_probing says.
 *
 * ERRORS, of all: DW_ESTALE, DW_ECLOSED, DW_EFORKED, DW_ENOMEM, DW_EINVAL;
 * DW_EBADF: the owner closed the fd without detach. */

/* A peer that vanished without a word is TIMED_OUT: after_ms in which probes or
 * retransmissions went unanswered and nothing at all was heard. A peer that
 * answers and merely does not read is never taken for gone. Looked for while a
 * watch is armed, by a timer of the driver. vanish_bound_ms of the info says by
 * when it is told at the latest, counted from the peer's last segment or from
 * arm; a timer of the kernel's that was running before may still come once.
 * after_ms: 0 off, or 2000 to 86,400,000. Sets SO_KEEPALIVE, TCP_KEEPIDLE,
 * TCP_KEEPINTVL, TCP_KEEPCNT and, where the kernel has it, TCP_RTO_MAX_MS. */
int dw_watcher_set_vanish(dw_watcher *watcher, dw_conn_id conn,
                          uint32_t after_ms);

/* RETURNS: vanish_bound_ms, without the rest of the info; 0 not looked for. */
int dw_watcher_vanish_bound(dw_watcher *watcher, dw_conn_id conn);

/* After a FIN: has the peer only shut its sending side? Asks by keepalive each
 * second, without a byte. A peer that closed is RESET once its kernel has
 * forgotten the connection (tcp_fin_timeout, 60 s by default on Linux). Over
 * AF_UNIX the kernel tells at once, and a peer that closed is RESET now. */
int dw_watcher_set_probing(dw_watcher *watcher, dw_conn_id conn, bool is_on);

/* While the owner does not read: enlarges the receive buffer to num_bytes
 * (SO_RCVLOWAT; at most half of tcp_rmem's maximum), so that a FIN behind as
 * many unread bytes comes in. Reading blocks until reblind, which the owner has
 * to wait for. The buffer stays as large as it got. */
int dw_watcher_unblind(dw_watcher *watcher, dw_conn_id conn, int num_bytes);
int dw_watcher_reblind(dw_watcher *watcher, dw_conn_id conn);

/* Driver "loop": an fd readable while events wait (borrowed), and one round of
 * handling them, which several threads may do at once. timeout_ms as poll(2). RETURNS (poll): events handled.
 * ERRORS: DW_ENOTSUP with the thread driver. */
int dw_watcher_fd(dw_watcher *watcher);
int dw_watcher_poll(dw_watcher *watcher, int timeout_ms);

/* ERRORS: DW_EFORKED, and all counters are 0. */
int dw_watcher_read_stats(dw_watcher *watcher, dw_watcher_stats *out);

/* A mailbox: fired watches wait in it for one consumer, whose loop polls the
 * notify fd. Many threads post.
 * OWNERSHIP: returns a mailbox, closed with dw_mailbox_close. */
int dw_mailbox_create(dw_watcher *watcher, dw_mailbox **out);

/* Readable while events wait. OWNERSHIP: borrowed, valid until shut.
 * ERRORS: DW_ECLOSED, it was shut; DW_EFORKED. */
int dw_mailbox_fd(const dw_mailbox *mailbox);

/* Clears the fd, then takes up to max_events; what is left makes the fd
 * readable again. RETURNS: the number taken, 0 of one that was shut.
 * ERRORS: DW_ECLOSED, the watcher was closed; DW_EFORKED. */
int dw_mailbox_drain(dw_mailbox *mailbox, dw_event *events, size_t max_events);

/* Makes the fd readable with no event: wakes its consumer. */
void dw_mailbox_wake(dw_mailbox *mailbox);

/* Watches still armed with it stay armed and deliver nowhere; no other is taken.
 * Returns only when no thread will write its fd again, and the fd is closed. All
 * other calls may go on meanwhile and after it. Idempotent: a second call
 * returns at once. */
void dw_mailbox_shut(dw_mailbox *mailbox);

/* Shuts and frees it. */
void dw_mailbox_close(dw_mailbox *mailbox);

#endif
