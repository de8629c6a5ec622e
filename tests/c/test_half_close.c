/* A peer that shut its sending side, told from one that closed. */
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include "dw_fixture.h"

/* A peer whose kernel forgets the connection a second after its close. */
TEST_EACH(a_probed_peer_that_closed_resets_and_one_that_half_closed_does_not,
          watch_setup, setup, tcp_setups)
{
    fixture fx;
    watched closed, half_closed;
    fixture_open(&fx, setup);
    fixture_attach(&fx, &closed);
    fixture_attach(&fx, &half_closed);
    fixture_arm(&fx, &closed, DW_MASK_GONE, 0);
    fixture_arm(&fx, &half_closed, DW_MASK_GONE, 0);
    net_set_option(closed.net.client, IPPROTO_TCP, TCP_LINGER2, 1 /* s */);
    net_leave(&closed.net, LEAVE_FIN);
    net_leave(&half_closed.net, LEAVE_HALF_CLOSE);
    UNTIL(&fx, dw_watcher_reason(fx.watcher, closed.conn) == DW_REASON_FIN);
    CHECK_EQ(dw_watcher_set_probing(fx.watcher, closed.conn, true), 0);
    CHECK_EQ(dw_watcher_set_probing(fx.watcher, half_closed.conn, true), 0);
    UNTIL(&fx, fixture_reason(&fx, &closed) != DW_REASON_NONE);
    CHECK_EQ(fixture_reason(&fx, &closed), DW_REASON_RESET);
    CHECK_EQ(fixture_reason(&fx, &half_closed), DW_REASON_NONE);
    CHECK_EQ(net_try_receive(half_closed.net.client), -EAGAIN);
    fixture_drop(&fx, &closed);
    fixture_drop(&fx, &half_closed);
    fixture_close(&fx);
}

/* HUP is both directions, of which the owner shut one. */
TEST_EACH(over_tcp_the_own_shutdown_makes_no_reset_of_a_half_close, watch_setup,
          setup, tcp_setups)
{
    fixture fx;
    watched w;
    fixture_open(&fx, setup);
    fixture_attach(&fx, &w);
    fixture_arm(&fx, &w, DW_MASK_GONE, 0);
    CHECK_EQ(dw_watcher_set_probing(fx.watcher, w.conn, true), 0);
    CHECK_EQ(shutdown(w.net.server, SHUT_WR), 0);
    net_leave(&w.net, LEAVE_HALF_CLOSE);
    UNTIL(&fx, dw_watcher_reason(fx.watcher, w.conn) == DW_REASON_FIN);
    fixture_settle(&fx);
    CHECK_EQ(fixture_reason(&fx, &w), DW_REASON_NONE);
    fixture_drop(&fx, &w);
    fixture_close(&fx);
}

static const watch_setup unix_setups[] = {
    {"epoll thread", "epoll", DW_DRIVER_THREAD, NET_UNIX},
    {"epoll loop", "epoll", DW_DRIVER_LOOP, NET_UNIX},
    {"poll thread", "poll", DW_DRIVER_THREAD, NET_UNIX},
};

TEST_EACH(over_unix_a_probed_peer_is_told_at_once, watch_setup, setup,
          unix_setups)
{
    fixture fx;
    watched w;
    fixture_open(&fx, setup);
    fixture_attach(&fx, &w);
    fixture_arm(&fx, &w, DW_MASK_GONE, 0);
    net_leave(&w.net, LEAVE_FIN);
    UNTIL(&fx, dw_watcher_reason(fx.watcher, w.conn) == DW_REASON_FIN);
    CHECK_EQ(fixture_reason(&fx, &w), DW_REASON_NONE);
    CHECK_EQ(dw_watcher_set_probing(fx.watcher, w.conn, true), 0);
    CHECK_EQ(fixture_reason(&fx, &w), DW_REASON_RESET);
    dw_event events[16];
    CHECK_EQ(fixture_drain(&fx, events), 1);
    fixture_drop(&fx, &w);
    fixture_close(&fx);
}

TEST_EACH(over_unix_a_probed_half_close_is_none_until_the_close, watch_setup,
          setup, unix_setups)
{
    fixture fx;
    watched w;
    fixture_open(&fx, setup);
    fixture_attach(&fx, &w);
    fixture_arm(&fx, &w, DW_MASK_GONE, 0);
    CHECK_EQ(dw_watcher_set_probing(fx.watcher, w.conn, true), 0);
    net_leave(&w.net, LEAVE_HALF_CLOSE);
    UNTIL(&fx, dw_watcher_reason(fx.watcher, w.conn) == DW_REASON_FIN);
    CHECK_EQ(dw_watcher_set_probing(fx.watcher, w.conn, true), 0);
    fixture_settle(&fx);
    CHECK_EQ(fixture_reason(&fx, &w), DW_REASON_NONE);
    net_leave(&w.net, LEAVE_FIN);
    UNTIL(&fx, fixture_reason(&fx, &w) == DW_REASON_RESET);
    fixture_drop(&fx, &w);
    fixture_close(&fx);
}
