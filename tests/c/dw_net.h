/* Connected pairs over loopback, and the ways in which a client leaves. */
#ifndef DW_NET_H
#define DW_NET_H

#include <stdbool.h>
#include <stddef.h>

enum net_kind { NET_TCP, NET_TCP6, NET_UNIX };

/* The watched end and the one that leaves; -1 once closed. */
typedef struct {
    int server;
    int client;
} net_pair;

enum net_leave {
    LEAVE_FIN,             /* close() */
    LEAVE_HALF_CLOSE,      /* shutdown(SHUT_WR) */
    LEAVE_RST,             /* SO_LINGER 0; AF_UNIX: closed with bytes unread */
    LEAVE_UNREAD_RESPONSE, /* closed with the server's bytes unread */
};

net_pair net_open(enum net_kind kind);

/* Closes what is still open. */
void net_close(net_pair *pair);
void net_close_end(int *fd);

/* After it the leave is in the server's socket: loopback is synchronous. */
void net_leave(net_pair *pair, enum net_leave how);

/* From now on the socket's host neither hears nor answers, as if it had lost its
 * cable. Over TCP. */
void net_vanish(int fd);

void net_set_option(int fd, int level, int option, int value);

void net_send(int fd, size_t num_bytes);

/* Sends until the peer's window and the own buffer are full. */
void net_fill(int fd);

/* TCP: fills the server's error queue, which a poller shows as an error though
 * the socket has none. */
void net_fill_error_queue(net_pair *pair);
void net_drain_error_queue(net_pair *pair);

/* Reads exactly so many bytes. */
void net_receive(int fd, size_t num_bytes);

/* RETURNS: what recv without waiting says: 0 end of stream, -errno, or bytes. */
int net_try_receive(int fd);

/* As the kernel has it, such as TCP_CLOSE_WAIT. */
int net_tcp_state(int fd);

bool net_is_readable(int fd);

#endif
