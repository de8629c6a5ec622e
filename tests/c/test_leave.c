/* Every way to leave, seen by every poller and driver on every kind of socket:
 * while watched, between attach and arm, and before attach.
 */
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include "dw_clock.h"
#include "dw_fixture.h"
#include "dw_sock.h"

typedef struct {
    const char *label;
    enum net_leave how;
    size_t num_unread; /* bytes sent ahead of it that nobody reads */
    enum dw_reason reason;
    bool is_hidden_from_poll; /* by those bytes */
} leave_case;

static const leave_case leaves[] = {
    {"fin", LEAVE_FIN, 0, DW_REASON_FIN, false},
    {"half-close", LEAVE_HALF_CLOSE, 0, DW_REASON_FIN, false},
    {"rst", LEAVE_RST, 0, DW_REASON_RESET, false},
    {"unread response", LEAVE_UNREAD_RESPONSE, 0, DW_REASON_RESET, false},
    {"fin behind bytes", LEAVE_FIN, 100, DW_REASON_FIN, true},
    {"half-close behind bytes", LEAVE_HALF_CLOSE, 100, DW_REASON_FIN, true},
    {"rst behind bytes", LEAVE_RST, 100, DW_REASON_RESET, false},
};

static bool is_hidden(const watch_setup *setup, const leave_case *leave)
{
    /* poll() itself tells of a hang-up, which AF_UNIX reports with every
     * close: no bytes hide that. */
    bool is_hangup = setup->kind == NET_UNIX && leave->how != LEAVE_HALF_CLOSE;
    return leave->is_hidden_from_poll && setup->poller[0] == 'p' && !is_hangup;
}

static void go(watched *w, const leave_case *leave)
{
    net_send(w->net.client, leave->num_unread);
    net_leave(&w->net, leave->how);
}

TEST_CROSS(a_leave_fires_the_flag_and_the_mailbox_once, watch_setup, setup,
           all_setups, leave_case, leave, leaves)
{
    fixture fx;
    fixture_open(&fx, setup);
    watched w;
    fixture_attach(&fx, &w);
    CHECK_EQ(fixture_arm(&fx, &w, DW_MASK_ANY, 77), 0);
    uint64_t before_ns = dw_clock_ns();
    go(&w, leave);
    dw_event events[16];
    if (is_hidden(setup, leave)) {
        UNTIL(&fx, fixture_info(&fx, &w).is_blind);
        CHECK_EQ(fixture_reason(&fx, &w), DW_REASON_NONE);
        CHECK_EQ(fixture_stats(&fx).num_blind, 1);
        net_receive(w.net.server, leave->num_unread);
    }
    UNTIL(&fx, fixture_reason(&fx, &w) != DW_REASON_NONE);
    CHECK_EQ(fixture_reason(&fx, &w), leave->reason);
    fixture_settle(&fx);

    uint64_t at_ns, stored_ns;
    CHECK_EQ(dw_flag_times(fx.flags, w.flag, &at_ns, &stored_ns), 1);
    CHECK(before_ns <= at_ns && at_ns <= stored_ns);
    CHECK(stored_ns <= dw_clock_ns());
    CHECK_EQ(fixture_drain(&fx, events), 1);
    CHECK_EQ(events[0].conn, w.conn);
    CHECK_EQ(events[0].watch, w.watch);
    CHECK_EQ(events[0].reason, leave->reason);
    CHECK_EQ(events[0].cookie, 77);
    CHECK_EQ(events[0].at_ns, at_ns);
    dw_conn_info info = fixture_info(&fx, &w);
    CHECK_EQ(info.reason, leave->reason);
    CHECK_EQ(info.seen, DW_MASK(leave->reason));
    CHECK_EQ(info.seen_ns, at_ns);
    CHECK_EQ(info.fd, w.net.server);
    CHECK(!info.is_blind);
    CHECK_EQ(fixture_stats(&fx).num_blind, 0);

    CHECK_EQ(dw_watcher_disarm(fx.watcher, w.conn, w.watch), 1);
    CHECK_EQ(dw_watcher_disarm(fx.watcher, w.conn, w.watch), DW_ESTALE);
    fixture_drop(&fx, &w);
    fixture_close(&fx);
}

TEST_CROSS(a_leave_before_attach_fires, watch_setup, setup, all_setups,
           leave_case, leave, leaves)
{
    fixture fx;
    fixture_open(&fx, setup);
    watched w = {.net = net_open(setup->kind)};
    go(&w, leave);
    CHECK_EQ(dw_watcher_attach(fx.watcher, w.net.server, &w.conn), 0);
    fixture_arm(&fx, &w, DW_MASK_ANY, 0);
    if (is_hidden(setup, leave)) {
        UNTIL(&fx, fixture_info(&fx, &w).is_blind);
        net_receive(w.net.server, leave->num_unread);
    }
    UNTIL(&fx, fixture_reason(&fx, &w) != DW_REASON_NONE);
    CHECK_EQ(fixture_reason(&fx, &w), leave->reason);
    fixture_settle(&fx);
    dw_event events[16];
    CHECK_EQ(fixture_drain(&fx, events), 1);
    fixture_drop(&fx, &w);
    fixture_close(&fx);
}

TEST_CROSS(a_leave_between_attach_and_arm_fires_inside_arm, watch_setup, setup,
           all_setups, leave_case, leave, leaves)
{
    if (is_hidden(setup, leave))
        return;
    fixture fx;
    fixture_open(&fx, setup);
    watched w;
    fixture_attach(&fx, &w);
    go(&w, leave);
    UNTIL(&fx, fixture_info(&fx, &w).reason != DW_REASON_NONE);
    CHECK_EQ(fixture_arm(&fx, &w, DW_MASK_ANY, 5), 1);
    CHECK_EQ(fixture_reason(&fx, &w), leave->reason);
    dw_event events[16];
    CHECK_EQ(fixture_drain(&fx, events), 1);
    CHECK_EQ(events[0].cookie, 5);
    CHECK_EQ(events[0].reason, leave->reason);
    CHECK_EQ(events[0].at_ns, fixture_info(&fx, &w).seen_ns);
    CHECK_EQ(dw_watcher_disarm(fx.watcher, w.conn, w.watch), 1);
    fixture_drop(&fx, &w);
    fixture_close(&fx);
}

TEST_CROSS(unread_bytes_behind_the_fin_are_counted, watch_setup, setup,
           tcp_setups, leave_case, leave, leaves)
{
    if (leave->reason != DW_REASON_FIN || is_hidden(setup, leave))
        return;
    fixture fx;
    fixture_open(&fx, setup);
    watched w;
    fixture_watch(&fx, &w);
    CHECK_EQ(fixture_info(&fx, &w).unread, -1);
    go(&w, leave);
    UNTIL(&fx, fixture_reason(&fx, &w) != DW_REASON_NONE);
    CHECK_EQ(fixture_info(&fx, &w).unread, leave->num_unread);
    fixture_drop(&fx, &w);
    fixture_close(&fx);
}

TEST_EACH(a_reset_after_a_half_close_is_a_second_event, watch_setup, setup,
          all_setups)
{
    fixture fx;
    fixture_open(&fx, setup);
    watched any, gone;
    fixture_watch(&fx, &any);
    gone = any;
    CHECK_EQ(fixture_arm(&fx, &gone, DW_MASK_GONE, 1), 0);
    net_leave(&any.net, LEAVE_HALF_CLOSE);
    UNTIL(&fx, fixture_reason(&fx, &any) == DW_REASON_FIN);
    fixture_settle(&fx);
    CHECK_EQ(fixture_reason(&fx, &gone), DW_REASON_NONE);
    CHECK_EQ(fixture_info(&fx, &any).seen, DW_MASK(DW_REASON_FIN));

    net_leave(&any.net, LEAVE_RST);
    UNTIL(&fx, fixture_reason(&fx, &gone) == DW_REASON_RESET);
    CHECK_EQ(fixture_reason(&fx, &any), DW_REASON_FIN);
    dw_conn_info info = fixture_info(&fx, &any);
    CHECK_EQ(info.reason, DW_REASON_FIN);
    CHECK_EQ(info.seen, DW_MASK(DW_REASON_FIN) | DW_MASK(DW_REASON_RESET));
    /* One source, which had more to say. */
    CHECK_EQ(fixture_stats(&fx).num_second_sources, 0);
    CHECK_EQ(fixture_stats(&fx).num_fired, 3); /* and the witness's */

    dw_flag_release(fx.flags, gone.flag);
    fixture_drop(&fx, &any);
    fixture_close(&fx);
}

TEST_EACH(a_watch_armed_after_both_fires_with_the_first_that_its_mask_holds,
          watch_setup, setup, all_setups)
{
    fixture fx;
    fixture_open(&fx, setup);
    watched any, gone;
    fixture_attach(&fx, &any);
    net_leave(&any.net, LEAVE_HALF_CLOSE);
    UNTIL(&fx, fixture_info(&fx, &any).reason == DW_REASON_FIN);
    net_leave(&any.net, LEAVE_RST);
    UNTIL(&fx, fixture_info(&fx, &any).seen & DW_MASK(DW_REASON_RESET));
    gone = any;
    CHECK_EQ(fixture_arm(&fx, &any, DW_MASK_ANY, 0), 1);
    CHECK_EQ(fixture_arm(&fx, &gone, DW_MASK_GONE, 0), 1);
    CHECK_EQ(fixture_reason(&fx, &any), DW_REASON_FIN);
    CHECK_EQ(fixture_reason(&fx, &gone), DW_REASON_RESET);
    dw_event events[16];
    CHECK_EQ(fixture_drain(&fx, events), 2);
    CHECK_EQ(events[0].at_ns, fixture_info(&fx, &any).seen_ns);
    CHECK(events[1].at_ns > events[0].at_ns);
    dw_flag_release(fx.flags, gone.flag);
    fixture_drop(&fx, &any);
    fixture_close(&fx);
}

TEST_EACH(a_mask_without_fin_is_not_fired_by_arm_after_a_fin, watch_setup,
          setup, all_setups)
{
    fixture fx;
    fixture_open(&fx, setup);
    watched w;
    fixture_attach(&fx, &w);
    net_leave(&w.net, LEAVE_HALF_CLOSE);
    UNTIL(&fx, fixture_info(&fx, &w).reason == DW_REASON_FIN);
    CHECK_EQ(fixture_arm(&fx, &w, DW_MASK_GONE, 0), 0);
    CHECK_EQ(fixture_reason(&fx, &w), DW_REASON_NONE);
    net_leave(&w.net, LEAVE_RST);
    UNTIL(&fx, fixture_reason(&fx, &w) == DW_REASON_RESET);
    fixture_drop(&fx, &w);
    fixture_close(&fx);
}

TEST_EACH(the_own_shut_rd_is_no_leave_and_hides_none, watch_setup, setup,
          tcp_setups)
{
    for (enum net_leave how = LEAVE_FIN; how <= LEAVE_RST; how++) {
        fixture fx;
        fixture_open(&fx, setup);
        watched w;
        fixture_watch(&fx, &w);
        CHECK_EQ(shutdown(w.net.server, SHUT_RD), 0);
        fixture_settle(&fx);
        CHECK_EQ(fixture_reason(&fx, &w), DW_REASON_NONE);
        net_leave(&w.net, how);
        UNTIL(&fx, fixture_reason(&fx, &w) != DW_REASON_NONE);
        CHECK_EQ(fixture_reason(&fx, &w),
                 how == LEAVE_RST ? DW_REASON_RESET : DW_REASON_FIN);
        fixture_drop(&fx, &w);
        fixture_close(&fx);
    }
}

static void shut_then_leave(const watch_setup *setup, int how)
{
    fixture fx;
    fixture_open(&fx, setup);
    watched w;
    fixture_watch(&fx, &w);
    CHECK_EQ(shutdown(w.net.server, how), 0);
    fixture_settle(&fx);
    CHECK_EQ(fixture_reason(&fx, &w), DW_REASON_NONE);
    net_leave(&w.net, LEAVE_FIN);
    UNTIL(&fx, fixture_reason(&fx, &w) != DW_REASON_NONE);
    CHECK_EQ(fixture_reason(&fx, &w), DW_REASON_FIN);
    fixture_drop(&fx, &w);
    fixture_close(&fx);
}

TEST_EACH(the_own_shut_wr_is_no_leave_and_the_peers_fin_after_it_is,
          watch_setup, setup, all_setups)
{
    shut_then_leave(setup, SHUT_WR);
}

TEST_EACH(the_own_shutdown_of_both_is_no_leave_and_the_peers_fin_after_it_is,
          watch_setup, setup, tcp_setups)
{
    shut_then_leave(setup, SHUT_RDWR);
}

/* Both FINs under way at once, which takes a peer that hears nothing more. */
TEST_EACH(a_fin_that_crosses_the_own_one_is_a_leave, watch_setup, setup,
          tcp_setups)
{
    fixture fx;
    fixture_open(&fx, setup);
    watched w;
    fixture_watch(&fx, &w);
    net_vanish(w.net.client);
    CHECK_EQ(shutdown(w.net.server, SHUT_WR), 0);
    fixture_settle(&fx);
    CHECK_EQ(fixture_reason(&fx, &w), DW_REASON_NONE);
    net_leave(&w.net, LEAVE_HALF_CLOSE);
    CHECK_EQ(net_tcp_state(w.net.server), TCP_CLOSING);
    UNTIL(&fx, fixture_reason(&fx, &w) != DW_REASON_NONE);
    CHECK_EQ(fixture_reason(&fx, &w), DW_REASON_FIN);
    fixture_drop(&fx, &w);
    fixture_close(&fx);
}

TEST_EACH(a_fin_that_the_own_one_has_answered_is_a_leave, watch_setup, setup,
          tcp_setups)
{
    fixture fx;
    fixture_open(&fx, setup);
    watched w = {.net = net_open(setup->kind)};
    net_leave(&w.net, LEAVE_HALF_CLOSE);
    net_vanish(w.net.client);
    CHECK_EQ(shutdown(w.net.server, SHUT_WR), 0);
    CHECK_EQ(net_tcp_state(w.net.server), TCP_LAST_ACK);
    CHECK_EQ(dw_watcher_attach(fx.watcher, w.net.server, &w.conn), 0);
    fixture_arm(&fx, &w, DW_MASK_ANY, 0);
    UNTIL(&fx, fixture_reason(&fx, &w) != DW_REASON_NONE);
    CHECK_EQ(fixture_reason(&fx, &w), DW_REASON_FIN);
    fixture_drop(&fx, &w);
    fixture_close(&fx);
}

TEST_EACH(a_client_that_leaves_before_a_full_send_buffer_resets, watch_setup,
          setup, all_setups)
{
    fixture fx;
    fixture_open(&fx, setup);
    watched w;
    fixture_watch(&fx, &w);
    net_fill(w.net.server);
    fixture_settle(&fx);
    CHECK_EQ(fixture_reason(&fx, &w), DW_REASON_NONE);
    net_leave(&w.net, LEAVE_FIN);
    UNTIL(&fx, fixture_reason(&fx, &w) != DW_REASON_NONE);
    CHECK_EQ(fixture_reason(&fx, &w), DW_REASON_RESET);
    fixture_drop(&fx, &w);
    fixture_close(&fx);
}

/* The kernel gives the connection up; how soon is for the owner's own option to
 * say. */
TEST_EACH(a_client_that_vanished_has_timed_out, watch_setup, setup, tcp_setups)
{
    fixture fx;
    fixture_open(&fx, setup);
    watched w;
    fixture_watch(&fx, &w);
    net_set_option(w.net.server, IPPROTO_TCP, TCP_USER_TIMEOUT, 50 /* ms */);
    net_vanish(w.net.client);
    net_send(w.net.server, 10);
    UNTIL(&fx, fixture_reason(&fx, &w) != DW_REASON_NONE);
    CHECK_EQ(fixture_reason(&fx, &w), DW_REASON_TIMED_OUT);
    CHECK_EQ(net_try_receive(w.net.server), -ETIMEDOUT);
    fixture_drop(&fx, &w);
    fixture_close(&fx);
}

/* Nothing is under way: only a probe that nobody answers can tell. */
TEST_EACH(an_idle_client_that_vanished_has_timed_out_by_keepalive, watch_setup,
          setup, thread_setups)
{
    fixture fx;
    fixture_open(&fx, setup);
    watched w;
    fixture_watch(&fx, &w);
    const int names[] = {TCP_KEEPIDLE, TCP_KEEPINTVL, TCP_KEEPCNT};
    net_set_option(w.net.server, SOL_SOCKET, SO_KEEPALIVE, 1);
    for (int i = 0; i < 3; i++)
        net_set_option(w.net.server, IPPROTO_TCP, names[i], 1);
    net_vanish(w.net.client);
    UNTIL(&fx, fixture_reason(&fx, &w) != DW_REASON_NONE);
    CHECK_EQ(fixture_reason(&fx, &w), DW_REASON_TIMED_OUT);
    CHECK_EQ(dw_sock_is_gone(w.net.server), DW_REASON_TIMED_OUT);
    fixture_drop(&fx, &w);
    fixture_close(&fx);
}

TEST_EACH(the_owners_error_queue_is_no_leave_and_hides_none, watch_setup, setup,
          tcp_setups)
{
    for (int is_drained = 0; is_drained < 2; is_drained++) {
        fixture fx;
        watched w;
        fixture_open(&fx, setup);
        fixture_watch(&fx, &w);
        net_fill_error_queue(&w.net);
        fixture_settle(&fx);
        CHECK_EQ(fixture_info(&fx, &w).reason, DW_REASON_NONE);
        CHECK_EQ(dw_sock_is_gone(w.net.server), DW_REASON_NONE);
        if (is_drained)
            net_drain_error_queue(&w.net);
        net_leave(&w.net, LEAVE_HALF_CLOSE);
        UNTIL(&fx, fixture_reason(&fx, &w) == DW_REASON_FIN);
        CHECK_EQ(dw_sock_is_gone(w.net.server), DW_REASON_FIN);
        net_leave(&w.net, LEAVE_RST);
        UNTIL(&fx, fixture_info(&fx, &w).seen & DW_MASK(DW_REASON_RESET));
        fixture_drop(&fx, &w);
        fixture_close(&fx);
    }
}

TEST_EACH(a_watch_armed_late_prefers_the_first_source, watch_setup, setup,
          tcp_setups)
{
    fixture fx;
    watched w, late;
    dw_event events[16];
    fixture_open(&fx, setup);
    fixture_watch(&fx, &w);
    late = w;
    CHECK_EQ(dw_watcher_lost(fx.watcher, w.conn, DW_REASON_OWNER_CLOSED), 1);
    net_leave(&w.net, LEAVE_HALF_CLOSE);
    UNTIL(&fx, fixture_info(&fx, &w).seen & DW_MASK(DW_REASON_FIN));
    CHECK_EQ(fixture_drain(&fx, events), 1);
    CHECK_EQ(events[0].reason, DW_REASON_OWNER_CLOSED);

    CHECK_EQ(fixture_arm(&fx, &late, DW_MASK_ANY, 0), 1);
    CHECK_EQ(fixture_drain(&fx, events), 1);
    CHECK_EQ(events[0].reason, DW_REASON_OWNER_CLOSED);
    dw_flag_release(fx.flags, late.flag);
    CHECK_EQ(fixture_arm(&fx, &late, DW_MASK(DW_REASON_FIN), 0), 1);
    CHECK_EQ(fixture_drain(&fx, events), 1);
    CHECK_EQ(events[0].reason, DW_REASON_FIN);
    dw_flag_release(fx.flags, late.flag);
    fixture_drop(&fx, &w);
    fixture_close(&fx);
}

/* What no method can see, pinned so that a kernel that tells is noticed. */
TEST_EACH(a_fin_behind_a_full_window_stays_hidden_and_a_reset_does_not,
          watch_setup, setup, tcp_setups)
{
    fixture fx;
    fixture_open(&fx, setup);
    watched w;
    fixture_watch(&fx, &w);
    net_fill(w.net.client);
    net_leave(&w.net, LEAVE_HALF_CLOSE);
    fixture_settle(&fx);
    CHECK_EQ(fixture_reason(&fx, &w), DW_REASON_NONE);
    net_leave(&w.net, LEAVE_RST);
    UNTIL(&fx, fixture_reason(&fx, &w) == DW_REASON_RESET);
    fixture_drop(&fx, &w);
    fixture_close(&fx);
}
