/* What a poller is: it holds a set of borrowed fds and says which of them
 * have something to tell about their peer. dw_poller_epoll.c is the one for
 * Linux; dw_poller_poll.c is for any POSIX system and declares where it is
 * blind. Neither ever consumes a byte or an error of the socket.
 *
 * A poller reports each change once (edge-triggered): the first end of the
 * peer's sending, and later a reset, are two events. It carries back the
 * 64-bit key that the fd was added with and knows nothing of connections.
 *
 * THREADS: add, remove, set_tick and wake from any thread, set_tick
 * from one at a time; wait from one at a time.
 */
#ifndef DW_POLLER_H
#define DW_POLLER_H

#include <stdbool.h>
#include <stdint.h>

#include "dw_error.h"

/* What was seen; an event without bits says that an fd is blind no more. The watch layer asks the socket itself (TCP_INFO) before it
 * believes an end of stream; see dw_sock.h. */
enum dw_poll_bits {
    DW_POLL_EOF = 1,   /* the peer sends no more */
    DW_POLL_HUP = 2,   /* both directions are shut */
    DW_POLL_ERR = 4,   /* an error is pending on the socket */
    DW_POLL_BLIND = 8, /* unread bytes hide what is behind them (poll only) */
};

typedef struct {
    uint64_t key;
    uint32_t bits;
} dw_poll_event;

/* The key of a tick; no caller's, whose low half is a slot. */
#define DW_POLL_TICK (UINT64_MAX - 1)

typedef struct dw_poller dw_poller;

typedef struct {
    const char *name;

    /* ERRORS: DW_ENOTSUP if the running kernel lacks what the poller needs:
     * epoll is probed with a socketpair, not trusted to the headers. */
    int (*open)(dw_poller **out);
    void (*close)(dw_poller *poller);

    /* OWNERSHIP: borrows fd until remove, or until the owner closed it.
     * ERRORS: DW_EBADF, DW_EEXIST, DW_ENOTSOCK (nothing to poll), DW_ENOMEM. */
    int (*add)(dw_poller *poller, int fd, uint64_t key);

    /* ERRORS: DW_EBADF and -ENOENT when the owner closed the fd first; the
     * set no longer holds it then either way. */
    int (*remove)(dw_poller *poller, int fd, uint64_t key);

    /* The end of stream or the error reported last was not the peer's (the
     * owner's own SHUT_RD looks the same, as does its error queue): goes on
     * looking for the real one. */
    void (*recheck)(dw_poller *poller, int fd, uint64_t key);

    /* From now on wait also reports DW_POLL_TICK, without bits, every so many
     * milliseconds; 0: no more. ERRORS: of timerfd_create; then as before. */
    int (*set_tick)(dw_poller *poller, uint32_t every_ms);

    /* timeout_ms < 0: until something happens. RETURNS: the number of events;
     * 0 on timeout or after wake. A signal is not an error. */
    int (*wait)(dw_poller *poller, dw_poll_event *events, int max_events,
                int timeout_ms);

    /* Makes a wait in progress, or else the next one, return. */
    int (*wake)(dw_poller *poller);

    /* An fd that polls readable while wait would return at once, or
     * DW_ENOTSUP: then only a thread can drive this poller. Borrowed. */
    int (*fd)(const dw_poller *poller);

    /* True where unread bytes can hide the peer's leaving. */
    bool is_blinded_by_unread;
} dw_poller_ops;

extern const dw_poller_ops dw_poller_poll;
#ifdef __linux__
extern const dw_poller_ops dw_poller_epoll;
#endif

#endif
