/* One look at a borrowed socket, or at the write end of a pipe: what has its
 * peer done? Takes no byte and no error: TCP_INFO, SIOCINQ and a zero-timeout
 * poll() only (never SO_ERROR, never MSG_PEEK on Linux: a peek can take the
 * reset away from the owner).
 */
#ifndef DW_SOCK_H
#define DW_SOCK_H

#include <stdbool.h>
#include <stdint.h>

#include "dw_flags.h"

typedef struct {
    uint64_t cookie; /* this socket's own number; 0 unknown */
    int family;      /* AF_UNSPEC: a pipe */
    bool is_tcp;
} dw_sock_kind;

/* How long a TCP peer has been silent. */
typedef struct {
    uint64_t heard_ms_ago; /* the last segment of any kind */
    bool is_asking;        /* a probe or a retransmission is unanswered */
} dw_sock_silence;

/* ERRORS: DW_EBADF, DW_ENOTSOCK: no stream socket and no write end of a pipe or
 * FIFO, a listening socket, one that was never connected, or a FIFO open both
 * ways (it is its own reader). A socket that connects is one already. */
int dw_sock_identify(int fd, dw_sock_kind *out);

/* False when fd is closed, or names another socket than it did. */
bool dw_sock_is_same(int fd, const dw_sock_kind *kind);

/* Turns what a poller saw (dw_poll_bits) into a reason, asking the kernel
 * where the bits alone do not tell: an end of stream is believed of a TCP
 * socket only if its state says that the peer's FIN came (our own SHUT_RD
 * looks the same to a poller), and an error only if it ended the connection; it
 * is TIMED_OUT when probes or retransmissions went unanswered, else RESET. A
 * pipe whose reader left is RESET: there is no half of it that lives on, and the
 * owner's next write fails as after a reset (EPIPE).
 * RETURNS: the reason, or DW_REASON_NONE when the peer is still there. */
enum dw_reason dw_sock_classify(int fd, const dw_sock_kind *kind,
                                uint32_t bits);

/* Registered nowhere: is the peer gone, by what can be seen right now?
 * RETURNS: the reason, 0 not gone. ERRORS: DW_EBADF, DW_ENOTSOCK. */
int dw_sock_is_gone(int fd);

/* RETURNS: unread bytes in the receive queue (SIOCINQ), or a negative code. */
int dw_sock_unread(int fd);

/* ERRORS: of getsockopt. TCP only. */
int dw_sock_silence_of(int fd, dw_sock_silence *out);

/* True if our advertised receive window has no room for a segment: a FIN behind
 * bytes that the peer could not send yet cannot arrive. TCP only; false where
 * the kernel does not tell (before Linux 6.2). */
bool dw_sock_is_window_closed(int fd);

/* True if both directions are shut, or the fd has no peer any more. */
bool dw_sock_is_hung_up(int fd);

#endif
