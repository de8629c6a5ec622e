#include "dw_net.h"

#include <errno.h>
#include <linux/filter.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "dw_check.h"

static net_pair open_inet(int family)
{
    struct sockaddr_storage address;
    memset(&address, 0, sizeof address);
    address.ss_family = (sa_family_t)family;
    socklen_t length = sizeof(struct sockaddr_in);
    if (family == AF_INET) {
        ((struct sockaddr_in *)&address)->sin_addr.s_addr =
            htonl(INADDR_LOOPBACK);
    } else {
        ((struct sockaddr_in6 *)&address)->sin6_addr = in6addr_loopback;
        length = sizeof(struct sockaddr_in6);
    }
    int listener = socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    int rc = bind(listener, (struct sockaddr *)&address, length);
    if (rc && family == AF_INET6)
        dw_test_skip("this machine has no IPv6 loopback");
    CHECK_EQ(rc, 0);
    CHECK_EQ(listen(listener, 1), 0);
    CHECK_EQ(getsockname(listener, (struct sockaddr *)&address, &length), 0);
    net_pair pair;
    pair.client = socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK(pair.client >= 0);
    CHECK_EQ(connect(pair.client, (struct sockaddr *)&address, length), 0);
    pair.server = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    CHECK(pair.server >= 0);
    close(listener);
    return pair;
}

net_pair net_open(enum net_kind kind)
{
    if (kind != NET_UNIX)
        return open_inet(kind == NET_TCP ? AF_INET : AF_INET6);
    int ends[2];
    CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
    return (net_pair){.server = ends[0], .client = ends[1]};
}

void net_close_end(int *fd)
{
    if (*fd >= 0)
        CHECK_EQ(close(*fd), 0);
    *fd = -1;
}

void net_close(net_pair *pair)
{
    net_close_end(&pair->server);
    net_close_end(&pair->client);
}

static bool is_unix(int fd)
{
    int domain;
    socklen_t length = sizeof domain;
    CHECK_EQ(getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &length), 0);
    return domain == AF_UNIX;
}

void net_leave(net_pair *pair, enum net_leave how)
{
    struct linger at_once = {.l_onoff = 1, .l_linger = 0};
    switch (how) {
    case LEAVE_HALF_CLOSE:
        CHECK_EQ(shutdown(pair->client, SHUT_WR), 0);
        return;
    case LEAVE_RST:
        if (!is_unix(pair->client)) {
            CHECK_EQ(setsockopt(pair->client, SOL_SOCKET, SO_LINGER, &at_once,
                                sizeof at_once),
                     0);
            break;
        }
        /* fall through */
    case LEAVE_UNREAD_RESPONSE:
        net_send(pair->server, 10);
        WAIT_UNTIL(net_is_readable(pair->client));
        break;
    case LEAVE_FIN:
        break;
    }
    net_close_end(&pair->client);
}

void net_vanish(int fd)
{
    /* A socket filter that drops every segment before TCP sees it. */
    struct sock_filter drop = BPF_STMT(BPF_RET | BPF_K, 0);
    struct sock_fprog filter = {.len = 1, .filter = &drop};
    CHECK_EQ(
        setsockopt(fd, SOL_SOCKET, SO_ATTACH_FILTER, &filter, sizeof filter),
        0);
}

void net_set_option(int fd, int level, int option, int value)
{
    CHECK_EQ(setsockopt(fd, level, option, &value, sizeof value), 0);
}

void net_send(int fd, size_t num_bytes)
{
    static const char zeros[4096];
    while (num_bytes) {
        size_t size = num_bytes < sizeof zeros ? num_bytes : sizeof zeros;
        ssize_t sent = send(fd, zeros, size, MSG_NOSIGNAL);
        CHECK(sent > 0);
        num_bytes -= (size_t)sent;
    }
}

void net_fill(int fd)
{
    static const char zeros[65536];
    /* Once the socket takes no more for good: an acknowledgement that is under
     * way may still free a little. */
    struct pollfd writable = {.fd = fd, .events = POLLOUT};
    do {
        while (send(fd, zeros, sizeof zeros, MSG_DONTWAIT | MSG_NOSIGNAL) > 0)
            continue;
        CHECK(errno == EAGAIN);
    } while (poll(&writable, 1, 20) > 0);
}

void net_receive(int fd, size_t num_bytes)
{
    char bytes[4096];
    while (num_bytes) {
        size_t size = num_bytes < sizeof bytes ? num_bytes : sizeof bytes;
        ssize_t got = recv(fd, bytes, size, 0);
        CHECK(got > 0);
        num_bytes -= (size_t)got;
    }
}

int net_try_receive(int fd)
{
    char bytes[4096];
    ssize_t got = recv(fd, bytes, sizeof bytes, MSG_DONTWAIT);
    return got < 0 ? -errno : (int)got;
}

int net_tcp_state(int fd)
{
    struct tcp_info info;
    socklen_t length = sizeof info;
    CHECK_EQ(getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length), 0);
    return info.tcpi_state;
}

bool net_is_readable(int fd)
{
    struct pollfd readable = {.fd = fd, .events = POLLIN};
    return poll(&readable, 1, 0) == 1;
}

void net_fill_error_queue(net_pair *net)
{
    char bytes[100] = "";
    int on = 1;
    CHECK(!setsockopt(net->server, SOL_SOCKET, SO_ZEROCOPY, &on, sizeof on));
    CHECK_EQ(send(net->server, bytes, sizeof bytes, MSG_ZEROCOPY),
             sizeof bytes);
    net_receive(net->client, sizeof bytes);
    struct pollfd polled = {.fd = net->server};
    WAIT_UNTIL(poll(&polled, 1, 0) == 1 && polled.revents == POLLERR);
}

void net_drain_error_queue(net_pair *net)
{
    char control[100];
    struct msghdr message = {.msg_control = control,
                             .msg_controllen = sizeof control};
    CHECK_EQ(recvmsg(net->server, &message, MSG_ERRQUEUE), 0);
}
