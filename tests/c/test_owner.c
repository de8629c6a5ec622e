/* The owner of a watched socket must not be able to tell that it is watched:
 * its bytes, its end of stream, its error and its options stay as they were.
 */
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "dw_fixture.h"

TEST_EACH(the_owner_gets_every_byte_and_then_the_end, watch_setup, setup,
          all_setups)
{
    fixture fx;
    fixture_open(&fx, setup);
    watched w;
    fixture_watch(&fx, &w);
    char sent[300], got[301];
    for (size_t i = 0; i < sizeof sent; i++)
        sent[i] = (char)i;
    CHECK_EQ(send(w.net.client, sent, 100, 0), 100);
    fixture_settle(&fx);
    CHECK_EQ(send(w.net.client, sent + 100, 200, 0), 200);
    net_leave(&w.net, LEAVE_FIN);
    fixture_settle(&fx);
    size_t length = 0;
    while (length < sizeof sent) {
        ssize_t part = recv(w.net.server, got + length, sizeof got - length, 0);
        CHECK(part > 0);
        length += (size_t)part;
    }
    CHECK_EQ(length, sizeof sent);
    CHECK(!memcmp(got, sent, sizeof sent));
    UNTIL(&fx, fixture_reason(&fx, &w) == DW_REASON_FIN);
    CHECK_EQ(net_try_receive(w.net.server), 0);
    fixture_drop(&fx, &w);
    fixture_close(&fx);
}

typedef struct {
    const char *label;
    size_t num_unread;
} unread_case;

static const unread_case unreads[] = {{"no bytes", 0}, {"behind bytes", 100}};

TEST_CROSS(the_owner_gets_the_reset_that_the_watcher_saw, watch_setup, setup,
           all_setups, unread_case, unread, unreads)
{
    fixture fx;
    fixture_open(&fx, setup);
    watched w;
    fixture_watch(&fx, &w);
    net_send(w.net.client, unread->num_unread);
    fixture_settle(&fx);
    net_leave(&w.net, LEAVE_RST);
    UNTIL(&fx, fixture_reason(&fx, &w) == DW_REASON_RESET);
    fixture_settle(&fx);
    net_receive(w.net.server, unread->num_unread);
    CHECK_EQ(net_try_receive(w.net.server), -ECONNRESET);
    CHECK_EQ(net_try_receive(w.net.server), 0);
    fixture_drop(&fx, &w);
    fixture_close(&fx);
}

TEST_EACH(the_pending_error_stays_for_the_owner_to_ask, watch_setup, setup,
          all_setups)
{
    fixture fx;
    fixture_open(&fx, setup);
    watched w;
    fixture_watch(&fx, &w);
    net_leave(&w.net, LEAVE_RST);
    UNTIL(&fx, fixture_reason(&fx, &w) == DW_REASON_RESET);
    int error = 0;
    socklen_t length = sizeof error;
    CHECK_EQ(getsockopt(w.net.server, SOL_SOCKET, SO_ERROR, &error, &length),
             0);
    CHECK_EQ(error, ECONNRESET);
    fixture_drop(&fx, &w);
    fixture_close(&fx);
}

typedef struct {
    int values[12];
} socket_options;

static socket_options read_options(int fd, bool is_tcp)
{
    const int names[][2] = {
        {SOL_SOCKET, SO_RCVLOWAT},   {SOL_SOCKET, SO_RCVBUF},
        {SOL_SOCKET, SO_SNDBUF},     {SOL_SOCKET, SO_KEEPALIVE},
        {SOL_SOCKET, SO_OOBINLINE},  {IPPROTO_TCP, TCP_NODELAY},
        {IPPROTO_TCP, TCP_KEEPIDLE}, {IPPROTO_TCP, TCP_USER_TIMEOUT},
    };
    socket_options read = {.values = {fcntl(fd, F_GETFL), fcntl(fd, F_GETFD),
                                      fcntl(fd, F_GETOWN)}};
    for (int i = 0; i < 8; i++) {
        socklen_t length = sizeof(int);
        if (is_tcp || names[i][0] == SOL_SOCKET)
            CHECK_EQ(getsockopt(fd, names[i][0], names[i][1],
                                &read.values[3 + i], &length),
                     0);
    }
    return read;
}

TEST_EACH(no_flag_or_option_of_the_socket_is_changed, watch_setup, setup,
          all_setups)
{
    fixture fx;
    fixture_open(&fx, setup);
    bool is_tcp = setup->kind != NET_UNIX;
    watched w = {.net = net_open(setup->kind)};
    socket_options before = read_options(w.net.server, is_tcp);
    CHECK_EQ(dw_watcher_attach(fx.watcher, w.net.server, &w.conn), 0);
    CHECK_EQ(fixture_arm(&fx, &w, DW_MASK_ANY, 0), 0);
    fixture_settle(&fx);
    socket_options watched_ = read_options(w.net.server, is_tcp);
    CHECK(!memcmp(&before, &watched_, sizeof before));
    net_leave(&w.net, LEAVE_HALF_CLOSE);
    UNTIL(&fx, fixture_reason(&fx, &w) == DW_REASON_FIN);
    CHECK_EQ(dw_watcher_detach(fx.watcher, w.conn), 0);
    socket_options after = read_options(w.net.server, is_tcp);
    CHECK(!memcmp(&before, &after, sizeof before));
    fixture_drop(&fx, &w);
    fixture_close(&fx);
}

TEST_EACH(the_peer_hears_at_once_when_the_owner_closes, watch_setup, setup,
          all_setups)
{
    fixture fx;
    fixture_open(&fx, setup);
    watched w;
    fixture_watch(&fx, &w);
    CHECK_EQ(dw_watcher_detach(fx.watcher, w.conn), 0);
    CHECK_EQ(net_try_receive(w.net.client), -EAGAIN);
    net_close_end(&w.net.server);
    CHECK_EQ(net_try_receive(w.net.client), 0);
    fixture_drop(&fx, &w);
    fixture_close(&fx);
}

TEST_EACH(a_half_closed_client_still_gets_its_response, watch_setup, setup,
          all_setups)
{
    fixture fx;
    fixture_open(&fx, setup);
    watched w;
    fixture_watch(&fx, &w);
    net_leave(&w.net, LEAVE_HALF_CLOSE);
    UNTIL(&fx, fixture_reason(&fx, &w) == DW_REASON_FIN);
    net_send(w.net.server, 50);
    net_receive(w.net.client, 50);
    fixture_drop(&fx, &w);
    fixture_close(&fx);
}
