/* One look at a socket that is registered nowhere. */
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include "dw_fixture.h"
#include "dw_sock.h"

typedef struct {
    const char *label;
    enum net_kind kind;
} kind_case;

static const kind_case kinds[] = {
    {"tcp", NET_TCP}, {"tcp6", NET_TCP6}, {"unix", NET_UNIX}};

typedef struct {
    const char *label;
    enum net_leave how;
    size_t num_unread;
    enum dw_reason reason;
} leave_case;

static const leave_case leaves[] = {
    {"fin", LEAVE_FIN, 0, DW_REASON_FIN},
    {"half-close", LEAVE_HALF_CLOSE, 0, DW_REASON_FIN},
    {"rst", LEAVE_RST, 0, DW_REASON_RESET},
    {"unread response", LEAVE_UNREAD_RESPONSE, 0, DW_REASON_RESET},
    {"fin behind bytes", LEAVE_FIN, 100, DW_REASON_FIN},
    {"rst behind bytes", LEAVE_RST, 100, DW_REASON_RESET},
};

TEST_CROSS(is_gone_tells_how_and_takes_nothing, kind_case, kind, kinds,
           leave_case, leave, leaves)
{
    net_pair net = net_open(kind->kind);
    CHECK_EQ(dw_sock_is_gone(net.server), DW_REASON_NONE);
    net_send(net.client, leave->num_unread);
    CHECK_EQ(dw_sock_is_gone(net.server), DW_REASON_NONE);
    net_leave(&net, leave->how);
    for (int look = 0; look < 3; look++) {
        CHECK_EQ(dw_sock_is_gone(net.server), leave->reason);
        CHECK_EQ(dw_sock_unread(net.server), leave->num_unread);
    }
    net_receive(net.server, leave->num_unread);
    CHECK_EQ(dw_sock_is_gone(net.server), leave->reason);
    CHECK_EQ(net_try_receive(net.server),
             leave->reason == DW_REASON_RESET ? -ECONNRESET : 0);
    net_close(&net);
}

TEST(is_gone_sees_no_leave_in_the_own_shutdown)
{
    net_pair net = net_open(NET_TCP);
    CHECK_EQ(shutdown(net.server, SHUT_RD), 0);
    CHECK_EQ(dw_sock_is_gone(net.server), DW_REASON_NONE);
    CHECK_EQ(shutdown(net.server, SHUT_WR), 0);
    CHECK_EQ(dw_sock_is_gone(net.server), DW_REASON_NONE);
    net_leave(&net, LEAVE_FIN);
    CHECK_EQ(dw_sock_is_gone(net.server), DW_REASON_FIN);
    net_close(&net);
}

TEST(is_gone_refuses_what_is_no_stream_socket)
{
    CHECK_EQ(dw_sock_is_gone(-1), DW_EBADF);
    int file = open("/dev/null", O_RDONLY);
    int datagram = socket(AF_INET, SOCK_DGRAM, 0);
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    CHECK_EQ(listen(listener, 1), 0);
    const int fds[] = {file, datagram, listener};
    for (int i = 0; i < 3; i++) {
        CHECK_EQ(dw_sock_is_gone(fds[i]), DW_ENOTSOCK);
        close(fds[i]);
        CHECK_EQ(dw_sock_is_gone(fds[i]), DW_EBADF);
    }
}

TEST(is_gone_refuses_what_was_never_connected)
{
    /* Symptom: it had left, by FIN. */
    static const int families[] = {AF_INET, AF_INET6, AF_UNIX};
    for (int i = 0; i < 3; i++) {
        int fd = socket(families[i], SOCK_STREAM, 0);
        CHECK_EQ(dw_sock_is_gone(fd), DW_ENOTSOCK);
        close(fd);
    }
}

TEST(is_gone_takes_what_is_connecting)
{
    struct sockaddr_in address = {.sin_family = AF_INET};
    socklen_t length = sizeof address;
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    CHECK_EQ(listen(listener, 0), 0);
    CHECK_EQ(getsockname(listener, (struct sockaddr *)&address, &length), 0);
    /* The one that fits the backlog, and one that has to wait. */
    int first = socket(AF_INET, SOCK_STREAM, 0);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    CHECK_EQ(connect(first, (struct sockaddr *)&address, length), 0);
    CHECK_EQ(connect(fd, (struct sockaddr *)&address, length), -1);
    CHECK_EQ(errno, EINPROGRESS);
    CHECK_EQ(net_tcp_state(fd), TCP_SYN_SENT);
    CHECK_EQ(dw_sock_is_gone(fd), DW_REASON_NONE);
    close(fd);
    close(first);
    close(listener);
}

TEST_EACH(is_gone_sees_a_reset_that_its_owner_has_read, kind_case, kind, kinds)
{
    net_pair net = net_open(kind->kind);
    net_leave(&net, LEAVE_RST);
    CHECK_EQ(net_try_receive(net.server), -ECONNRESET);
    CHECK(dw_sock_is_gone(net.server) > 0);
    net_close(&net);
}

TEST_EACH(every_socket_has_a_number_of_its_own, kind_case, kind, kinds)
{
    net_pair net = net_open(kind->kind);
    dw_sock_kind server, client, copy;
    int dup_fd = dup(net.server);
    CHECK_EQ(dw_sock_identify(net.server, &server), 0);
    CHECK_EQ(dw_sock_identify(net.client, &client), 0);
    CHECK_EQ(dw_sock_identify(dup_fd, &copy), 0);
    CHECK(server.cookie != client.cookie);
    CHECK_EQ(server.cookie, copy.cookie);
    CHECK_EQ(server.is_tcp, kind->kind != NET_UNIX);
    close(dup_fd);
    net_close(&net);
}
