#include "dw_sock.h"

#include <fcntl.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include "dw_error.h"
#include "dw_poller.h"

/* Not in every libc's struct tcp_info: tcpi_segs_out and tcpi_segs_in of Linux
 * 4.2, tcpi_rcv_wnd of 6.2. */
#define SEGS_OUT_OFFSET 136
#define SEGS_IN_OFFSET  140
#define RCV_WND_OFFSET  232

/* Pipes are numbered apart from sockets. */
#define PIPE_COOKIE (UINT64_C(1) << 63)

/* A connection is given up after tcp_retries2 window probes; 8 is the least
 * that RFC 1122 4.2.3.5 allows. */
#define LEAST_RETRIES 8

typedef union {
    struct tcp_info known;
    uint32_t words[RCV_WND_OFFSET / 4 + 1];
} tcp_facts;

static int get_int(int fd, int name, int *out)
{
    socklen_t size = sizeof(*out);
    return getsockopt(fd, SOL_SOCKET, name, out, &size) ? -errno : DW_OK;
}

/* A pipe has one inode for both its ends. */
static uint64_t get_pipe_cookie(int fd)
{
    struct stat stat;
    if (fstat(fd, &stat) || !S_ISFIFO(stat.st_mode))
        return 0;
    return PIPE_COOKIE | ((uint64_t)stat.st_dev << 40 ^ (uint64_t)stat.st_ino);
}

/* SO_COOKIE: 0 where the kernel numbers no sockets (before Linux 4.12). */
static uint64_t get_cookie(int fd)
{
    uint64_t cookie = 0;
    socklen_t size = sizeof(cookie);
    if (getsockopt(fd, SOL_SOCKET, SO_COOKIE, &cookie, &size))
        return errno == ENOTSOCK ? get_pipe_cookie(fd) : 0;
    return cookie;
}

static int identify_pipe(int fd, dw_sock_kind *out)
{
    out->cookie = get_pipe_cookie(fd);
    if (!out->cookie || (fcntl(fd, F_GETFL) & O_ACCMODE) != O_WRONLY)
        return DW_ENOTSOCK;
    out->family = AF_UNSPEC;
    return DW_OK;
}

static int get_tcp_facts(int fd, tcp_facts *out, size_t *out_size)
{
    *out = (tcp_facts){0};
    socklen_t size = sizeof(*out);
    if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, out, &size))
        return -errno;
    *out_size = size;
    return DW_OK;
}

/* A socket before its connect() looks to a poller, and in its state, as one that
 * a reset has ended; but that one got a segment at least. getpeername() does not
 * tell the two apart over TCP; over AF_UNIX it names a peer that left, too. */
static bool was_never_connected(int fd, const dw_sock_kind *kind)
{
    if (kind->family == AF_UNIX) {
        struct sockaddr_storage peer;
        socklen_t length = sizeof(peer);
        return getpeername(fd, (struct sockaddr *)&peer, &length) &&
               errno == ENOTCONN;
    }
    tcp_facts facts;
    size_t size;
    return kind->is_tcp && !get_tcp_facts(fd, &facts, &size) &&
           facts.known.tcpi_state == TCP_CLOSE && size > SEGS_IN_OFFSET &&
           !facts.words[SEGS_OUT_OFFSET / 4] &&
           !facts.words[SEGS_IN_OFFSET / 4];
}

int dw_sock_identify(int fd, dw_sock_kind *out)
{
    *out = (dw_sock_kind){0};
    int type, is_listening, family, protocol;
    int rc = get_int(fd, SO_TYPE, &type);
    if (rc == DW_ENOTSOCK)
        return identify_pipe(fd, out);
    if (rc)
        return rc;
    rc = get_int(fd, SO_ACCEPTCONN, &is_listening);
    if (rc)
        return rc;
    if (type != SOCK_STREAM || is_listening)
        return DW_ENOTSOCK;
    rc = get_int(fd, SO_DOMAIN, &family);
    if (rc)
        return rc;
    rc = get_int(fd, SO_PROTOCOL, &protocol);
    if (rc)
        return rc;

    out->cookie = get_cookie(fd);
    out->family = family;
    out->is_tcp = protocol == IPPROTO_TCP;
    return was_never_connected(fd, out) ? DW_ENOTSOCK : DW_OK;
}

bool dw_sock_is_same(int fd, const dw_sock_kind *kind)
{
    return get_cookie(fd) == kind->cookie;
}

static uint64_t heard_ms_ago(const struct tcp_info *info)
{
    /* Data that acknowledges nothing new counts for the one and not for the
     * other. */
    return info->tcpi_last_ack_recv < info->tcpi_last_data_recv
               ? info->tcpi_last_ack_recv
               : info->tcpi_last_data_recv;
}

static uint32_t get_tcp_option(int fd, int name)
{
    uint32_t value = 0;
    socklen_t size = sizeof(value);
    getsockopt(fd, IPPROTO_TCP, name, &value, &size);
    return value;
}

/* SO_ERROR would tell, and would take the error away from the owner. */
static enum dw_reason classify_error(int fd, const struct tcp_info *info)
{
    if (info->tcpi_retransmits)
        return DW_REASON_TIMED_OUT;
    if (!info->tcpi_probes)
        return DW_REASON_RESET;
    /* The last probe may have been answered, by this reset. */
    uint32_t most_probes = get_tcp_option(fd, TCP_KEEPCNT);
    if (most_probes > LEAST_RETRIES)
        most_probes = LEAST_RETRIES;
    uint32_t timeout_ms = get_tcp_option(fd, TCP_USER_TIMEOUT);
    bool is_silent = info->tcpi_probes >= most_probes ||
                     (timeout_ms && heard_ms_ago(info) >= timeout_ms);
    return is_silent ? DW_REASON_TIMED_OUT : DW_REASON_RESET;
}

static enum dw_reason classify_end(const struct tcp_info *info)
{
    switch (info->tcpi_state) {
    case TCP_CLOSE_WAIT: /* its FIN came, ours has not gone out */
    case TCP_LAST_ACK:   /* its FIN came, then ours went out */
    case TCP_CLOSING:    /* both went out at the same time */
    case TCP_CLOSE:      /* both are done; TIME_WAIT is no socket's state */
        return DW_REASON_FIN;
    default:
        /* Our own SHUT_RD ends the stream too, and no peer has left. */
        return DW_REASON_NONE;
    }
}

/* A pipe has one direction, and its one error is that nobody reads. AF_UNIX: a
 * reset shuts both directions, too. */
static enum dw_reason classify_other(const dw_sock_kind *kind, uint32_t bits)
{
    if (kind->family == AF_UNSPEC)
        return bits & DW_POLL_ERR ? DW_REASON_RESET : DW_REASON_NONE;
    if (bits & DW_POLL_ERR && bits & DW_POLL_HUP)
        return DW_REASON_RESET;
    return bits & (DW_POLL_EOF | DW_POLL_HUP) ? DW_REASON_FIN : DW_REASON_NONE;
}

enum dw_reason dw_sock_classify(int fd, const dw_sock_kind *kind, uint32_t bits)
{
    if (!(bits & (DW_POLL_EOF | DW_POLL_HUP | DW_POLL_ERR)))
        return DW_REASON_NONE;
    if (!kind->is_tcp)
        return classify_other(kind, bits);
    tcp_facts facts;
    size_t size;
    if (get_tcp_facts(fd, &facts, &size))
        return DW_REASON_OWNER_CLOSED;
    const struct tcp_info *info = &facts.known;
    /* The bits come first: behind an end of stream the state may have moved
     * on to a reset already, which then has an event of its own. But an error
     * that has not ended the connection is none of the peer's: the owner's
     * error queue (MSG_ZEROCOPY, timestamps) looks the same to a poller. */
    if (bits & DW_POLL_ERR && info->tcpi_state == TCP_CLOSE)
        return classify_error(fd, info);
    return classify_end(info);
}

/* RETURNS: of enum dw_poll_bits, or a negative code. */
static int poll_bits(int fd)
{
    struct pollfd polled = {.fd = fd, .events = POLLRDHUP};
    int rc;
    do {
        rc = poll(&polled, 1, 0);
    } while (rc < 0 && errno == EINTR);
    if (rc < 0)
        return -errno;
    if (polled.revents & POLLNVAL)
        return DW_EBADF;
    int bits = 0;
    if (polled.revents & POLLRDHUP)
        bits |= DW_POLL_EOF;
    if (polled.revents & POLLHUP)
        bits |= DW_POLL_HUP;
    if (polled.revents & POLLERR)
        bits |= DW_POLL_ERR;
    return bits;
}

int dw_sock_is_gone(int fd)
{
    dw_sock_kind kind;
    int rc = dw_sock_identify(fd, &kind);
    if (rc)
        return rc;
    int bits = poll_bits(fd);
    return bits < 0 ? bits : (int)dw_sock_classify(fd, &kind, (uint32_t)bits);
}

bool dw_sock_is_hung_up(int fd)
{
    int bits = poll_bits(fd);
    return bits < 0 || bits & DW_POLL_HUP;
}

int dw_sock_unread(int fd)
{
    int num_bytes;
    return ioctl(fd, SIOCINQ, &num_bytes) ? -errno : num_bytes;
}

int dw_sock_silence_of(int fd, dw_sock_silence *out)
{
    tcp_facts facts;
    size_t size;
    int rc = get_tcp_facts(fd, &facts, &size);
    out->heard_ms_ago = heard_ms_ago(&facts.known);
    out->is_asking = facts.known.tcpi_probes || facts.known.tcpi_retransmits;
    return rc;
}

bool dw_sock_is_window_closed(int fd)
{
    tcp_facts facts;
    size_t size;
    if (get_tcp_facts(fd, &facts, &size) || size <= RCV_WND_OFFSET)
        return false;
    return facts.words[RCV_WND_OFFSET / 4] < facts.known.tcpi_rcv_mss;
}
