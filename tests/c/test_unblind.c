/* A FIN behind a receive window that is full. */
#include <sys/socket.h>
#include <unistd.h>

#include "dw_fixture.h"
#include "dw_sock.h"

/* The client's last bytes and its FIN stay in its own buffer. */
static void leave_behind_full_window(net_pair *net)
{
    net_fill(net->client);
    net_leave(net, LEAVE_HALF_CLOSE);
}

static size_t receive_all(int fd)
{
    static char bytes[1 << 16];
    size_t num_bytes = 0;
    ssize_t got;
    while ((got = recv(fd, bytes, sizeof bytes, 0)) > 0)
        num_bytes += (size_t)got;
    CHECK_EQ(got, 0);
    return num_bytes;
}

static const watch_setup epoll_setups[] = {
    {"thread", "epoll", DW_DRIVER_THREAD, NET_TCP},
    {"loop", "epoll", DW_DRIVER_LOOP, NET_TCP},
    {"tcp6", "epoll", DW_DRIVER_THREAD, NET_TCP6},
};

TEST_EACH(unblinding_lets_a_fin_in_behind_a_full_window, watch_setup, setup,
          epoll_setups)
{
    fixture fx;
    watched w;
    fixture_open(&fx, setup);
    fixture_watch(&fx, &w);
    net_set_option(w.net.client, SOL_SOCKET, SO_SNDBUF, 1 << 16);
    CHECK(!fixture_info(&fx, &w).is_blind);
    leave_behind_full_window(&w.net);
    fixture_settle(&fx);
    CHECK_EQ(fixture_reason(&fx, &w), DW_REASON_NONE);
    /* The last of the window is taken by the client's timer. */
    UNTIL(&fx, fixture_info(&fx, &w).is_blind);
    CHECK_EQ(fixture_stats(&fx).num_blind, 1);

    CHECK_EQ(dw_watcher_unblind(fx.watcher, w.conn, 1 << 20), 0);
    UNTIL(&fx, fixture_reason(&fx, &w) == DW_REASON_FIN);
    CHECK(!fixture_info(&fx, &w).is_blind);
    CHECK_EQ(fixture_stats(&fx).num_blind, 0);
    CHECK_EQ(dw_watcher_reblind(fx.watcher, w.conn), 0);
    CHECK_EQ(receive_all(w.net.server), fixture_info(&fx, &w).unread);
    fixture_drop(&fx, &w);
    fixture_close(&fx);
}

TEST(a_connection_that_is_gone_is_not_blind_however_full_its_window)
{
    fixture fx;
    watched w;
    fixture_open(&fx, &tcp_setups[0]);
    fixture_watch(&fx, &w);
    net_fill(w.net.client);
    UNTIL(&fx, fixture_info(&fx, &w).is_blind);
    net_leave(&w.net, LEAVE_RST);
    UNTIL(&fx, fixture_reason(&fx, &w) == DW_REASON_RESET);
    CHECK(!fixture_info(&fx, &w).is_blind);
    CHECK_EQ(fixture_stats(&fx).num_blind, 0);
    fixture_drop(&fx, &w);
    fixture_close(&fx);
}

TEST(a_socket_that_took_the_number_makes_no_connection_blind)
{
    fixture fx;
    watched w;
    fixture_open(&fx, &tcp_setups[0]);
    fixture_watch(&fx, &w);
    net_pair full = net_open(NET_TCP);
    net_fill(full.client);
    WAIT_UNTIL(dw_sock_is_window_closed(full.server));
    CHECK_EQ(dup2(full.server, w.net.server), w.net.server);
    CHECK(!fixture_info(&fx, &w).is_blind);
    net_close(&full);
    fixture_drop(&fx, &w);
    fixture_close(&fx);
}

TEST(a_connection_that_nobody_watches_is_not_asked_whether_it_is_blind)
{
    fixture fx;
    watched w;
    fixture_open(&fx, &tcp_setups[0]);
    fixture_attach(&fx, &w);
    net_fill(w.net.client);
    UNTIL(&fx, fixture_info(&fx, &w).is_blind);
    CHECK_EQ(fixture_stats(&fx).num_blind, 0);
    fixture_arm(&fx, &w, DW_MASK_ANY, 0);
    CHECK_EQ(fixture_stats(&fx).num_blind, 1);
    fixture_drop(&fx, &w);
    fixture_close(&fx);
}
