#include "dw_sock.h"

#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include "dw_poller.h"

static int get_int(int fd, int name, int *out)
{
    socklen_t size = sizeof(*out);
    return getsockopt(fd, SOL_SOCKET, name, out, &size) ? -errno : DW_OK;
}

/* 0 where the kernel numbers no sockets (before Linux 4.12). */
static uint64_t get_cookie(int fd)
{
    uint64_t cookie = 0;
    socklen_t size = sizeof(cookie);
    if (getsockopt(fd, SOL_SOCKET, SO_COOKIE, &cookie, &size))
        return 0;
    return cookie;
}

int dw_sock_identify(int fd, dw_sock_kind *out)
{
    *out = (dw_sock_kind){0};
    int type, is_listening, family, protocol;
    int rc = get_int(fd, SO_TYPE, &type);
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
    return DW_OK;
}

bool dw_sock_is_same(int fd, const dw_sock_kind *kind)
{
    return get_cookie(fd) == kind->cookie;
}

static enum dw_reason classify_error(const struct tcp_info *info)
{
    /* SO_ERROR would tell, and would take the error away from the owner. */
    if (info->tcpi_probes || info->tcpi_retransmits)
        return DW_REASON_TIMED_OUT;
    return DW_REASON_RESET;
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

/* AF_UNIX: a reset shuts both directions, too. */
static enum dw_reason classify_other(uint32_t bits)
{
    if (bits & DW_POLL_ERR && bits & DW_POLL_HUP)
        return DW_REASON_RESET;
    return bits & (DW_POLL_EOF | DW_POLL_HUP) ? DW_REASON_FIN : DW_REASON_NONE;
}

enum dw_reason dw_sock_classify(int fd, const dw_sock_kind *kind, uint32_t bits)
{
    if (!(bits & (DW_POLL_EOF | DW_POLL_HUP | DW_POLL_ERR)))
        return DW_REASON_NONE;
    if (!kind->is_tcp)
        return classify_other(bits);
    struct tcp_info info = {0};
    socklen_t size = sizeof(info);
    if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size))
        return DW_REASON_OWNER_CLOSED;
    /* The bits come first: behind an end of stream the state may have moved
     * on to a reset already, which then has an event of its own. But an error
     * that has not ended the connection is none of the peer's: the owner's
     * error queue (MSG_ZEROCOPY, timestamps) looks the same to a poller. */
    if (bits & DW_POLL_ERR && info.tcpi_state == TCP_CLOSE)
        return classify_error(&info);
    return classify_end(&info);
}

int dw_sock_is_gone(int fd)
{
    dw_sock_kind kind;
    int rc = dw_sock_identify(fd, &kind);
    if (rc)
        return rc;
    struct pollfd polled = {.fd = fd, .events = POLLRDHUP};
    do {
        rc = poll(&polled, 1, 0);
    } while (rc < 0 && errno == EINTR);
    if (rc < 0)
        return -errno;
    if (polled.revents & POLLNVAL)
        return DW_EBADF;
    uint32_t bits = 0;
    if (polled.revents & POLLRDHUP)
        bits |= DW_POLL_EOF;
    if (polled.revents & POLLHUP)
        bits |= DW_POLL_HUP;
    if (polled.revents & POLLERR)
        bits |= DW_POLL_ERR;
    return (int)dw_sock_classify(fd, &kind, bits);
}

int dw_sock_unread(int fd)
{
    int num_bytes;
    return ioctl(fd, SIOCINQ, &num_bytes) ? -errno : num_bytes;
}
