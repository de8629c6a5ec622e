/* Which of several reasons a watch fires with, and that nothing of them stays
 * in the slot for the next connection. */
#include <sys/socket.h>
#include <unistd.h>

#include "dw_fixture.h"
#include "dw_sock.h"

static dw_event next_event(fixture *fx)
{
    dw_event events[16];
    int num_events;
    /* The flag is set before the mail is posted. */
    UNTIL(fx, (num_events = fixture_drain(fx, events)) != 0);
    CHECK_EQ(num_events, 1);
    return events[0];
}

TEST_EACH(a_watch_armed_late_fires_with_the_first_reason_that_it_asks_for,
          watch_setup, setup, tcp_setups)
{
    fixture fx;
    watched w, late;
    fixture_open(&fx, setup);
    fixture_watch(&fx, &w);
    late = w;
    CHECK_EQ(dw_watcher_lost(fx.watcher, w.conn, DW_REASON_OWNER_CLOSED), 1);
    net_leave(&w.net, LEAVE_HALF_CLOSE);
    UNTIL(&fx, fixture_info(&fx, &w).seen & DW_MASK(DW_REASON_FIN));
    CHECK_EQ(next_event(&fx).reason, DW_REASON_OWNER_CLOSED);

    CHECK_EQ(fixture_arm(&fx, &late, DW_MASK_ANY, 0), 1);
    CHECK_EQ(next_event(&fx).reason, DW_REASON_OWNER_CLOSED);
    dw_flag_release(fx.flags, late.flag);
    CHECK_EQ(fixture_arm(&fx, &late, DW_MASK(DW_REASON_FIN), 0), 1);
    CHECK_EQ(next_event(&fx).reason, DW_REASON_FIN);
    dw_flag_release(fx.flags, late.flag);
    fixture_drop(&fx, &w);
    fixture_close(&fx);
}

TEST_EACH(a_watch_armed_late_carries_the_time_of_its_reason, watch_setup, setup,
          tcp_setups)
{
    fixture fx;
    watched w, late;
    fixture_open(&fx, setup);
    fixture_watch(&fx, &w);
    late = w;
    net_leave(&w.net, LEAVE_HALF_CLOSE);
    UNTIL(&fx, fixture_reason(&fx, &w) == DW_REASON_FIN);
    uint64_t fin_ns = next_event(&fx).at_ns;
    CHECK_EQ(fixture_info(&fx, &w).seen_ns, fin_ns);
    net_leave(&w.net, LEAVE_RST);
    UNTIL(&fx, fixture_info(&fx, &w).seen & DW_MASK(DW_REASON_RESET));

    CHECK_EQ(fixture_arm(&fx, &late, DW_MASK_ANY, 0), 1);
    CHECK_EQ(next_event(&fx).at_ns, fin_ns);
    dw_flag_release(fx.flags, late.flag);
    CHECK_EQ(fixture_arm(&fx, &late, DW_MASK_GONE, 0), 1);
    CHECK(next_event(&fx).at_ns > fin_ns);
    dw_flag_release(fx.flags, late.flag);
    CHECK_EQ(fixture_info(&fx, &w).seen_ns, fin_ns);
    fixture_drop(&fx, &w);
    fixture_close(&fx);
}

/* Attaches a new connection in the slot of w's, which is detached. */
static void replace(fixture *fx, watched *w)
{
    uint32_t slot = (uint32_t)w->conn;
    fixture_drop(fx, w);
    fixture_attach(fx, w);
    CHECK_EQ((uint32_t)w->conn, slot);
}

TEST_EACH(nothing_of_a_connection_is_left_to_the_next_in_its_slot, watch_setup,
          setup, tcp_setups)
{
    fixture fx;
    watched w;
    fixture_open(&fx, setup);
    fixture_attach(&fx, &w);
    CHECK_EQ(dw_watcher_lost(fx.watcher, w.conn, DW_REASON_TIMED_OUT), 1);
    replace(&fx, &w);

    dw_conn_info info = fixture_info(&fx, &w);
    CHECK_EQ(info.reason, DW_REASON_NONE);
    CHECK_EQ(info.seen, 0);
    CHECK_EQ(info.seen_ns, 0);
    CHECK_EQ(info.unread, -1);
    CHECK_EQ(fixture_arm(&fx, &w, DW_MASK_ANY, 0), 0);
    net_leave(&w.net, LEAVE_FIN);
    UNTIL(&fx, fixture_reason(&fx, &w) == DW_REASON_FIN);
    CHECK_EQ(fixture_info(&fx, &w).reason, DW_REASON_FIN);
    /* The owner has not spoken of this one: it is the second source. */
    CHECK_EQ(dw_watcher_lost(fx.watcher, w.conn, DW_REASON_OWNER_CLOSED), 0);
    CHECK_EQ(fixture_stats(&fx).num_second_sources, 1);
    fixture_drop(&fx, &w);
    fixture_close(&fx);
}

/* Gives w's fd number to a new socket, attached as next; the owner closes the old one
 * without a word. */
static void take_number(fixture *fx, watched *w, watched *next)
{
    *next = (watched){.net = net_open(fx->setup->kind)};
    CHECK_EQ(dup2(next->net.server, w->net.server), w->net.server);
    net_close_end(&next->net.server);
    next->net.server = w->net.server;
    w->net.server = -1;
    CHECK_EQ(dw_watcher_attach(fx->watcher, next->net.server, &next->conn), 0);
}

static const watch_setup poll_only[] = {
    {"poll", "poll", DW_DRIVER_THREAD, NET_TCP},
};

TEST_EACH(a_connection_is_blind_no_longer_than_it_has_its_socket, watch_setup,
          setup, poll_only)
{
    fixture fx;
    watched w, next;
    fixture_open(&fx, setup);
    fixture_attach(&fx, &w);
    net_send(w.net.client, 3);
    WAIT_UNTIL(fixture_info(&fx, &w).is_blind);
    replace(&fx, &w);
    CHECK(!fixture_info(&fx, &w).is_blind);
    net_send(w.net.client, 3);
    WAIT_UNTIL(fixture_stats(&fx).num_blind == 1);

    take_number(&fx, &w, &next);
    CHECK_EQ(fixture_info(&fx, &w).reason, DW_REASON_OWNER_CLOSED);
    CHECK_EQ(fixture_stats(&fx).num_blind, 0);
    fixture_drop(&fx, &w);
    fixture_drop(&fx, &next);
    fixture_close(&fx);
}

TEST_EACH(a_late_detach_leaves_the_number_to_who_has_it_now, watch_setup, setup,
          tcp_setups)
{
    fixture fx;
    watched first, second, third;
    fixture_open(&fx, setup);
    fixture_attach(&fx, &first);
    take_number(&fx, &first, &second);
    CHECK_EQ(dw_watcher_detach(fx.watcher, first.conn), 0);
    /* Were the number forgotten with it, this would go unnoticed. */
    take_number(&fx, &second, &third);
    CHECK_EQ(fixture_info(&fx, &second).reason, DW_REASON_OWNER_CLOSED);
    CHECK_EQ(fixture_info(&fx, &third).reason, DW_REASON_NONE);
    fixture_drop(&fx, &first);
    fixture_drop(&fx, &second);
    fixture_drop(&fx, &third);
    fixture_close(&fx);
}

static const watch_setup epoll_only[] = {
    {"epoll thread", "epoll", DW_DRIVER_THREAD, NET_TCP},
    {"epoll loop", "epoll", DW_DRIVER_LOOP, NET_TCP},
};

/* The dup keeps epoll's registration, whose event comes under a number that is
 * another socket's by now. */
TEST_EACH(an_event_under_anothers_number_says_that_the_owner_closed,
          watch_setup, setup, epoll_only)
{
    fixture fx;
    watched w;
    fixture_open(&fx, setup);
    fixture_watch(&fx, &w);
    net_pair other = net_open(setup->kind);
    int number = w.net.server;
    w.net.server = dup(number);
    CHECK_EQ(dup2(other.server, number), number);
    net_leave(&w.net, LEAVE_FIN);
    UNTIL(&fx, fixture_reason(&fx, &w) == DW_REASON_OWNER_CLOSED);
    CHECK_EQ(fixture_info(&fx, &w).seen, DW_MASK(DW_REASON_OWNER_CLOSED));
    fixture_drop(&fx, &w);
    close(number);
    net_close(&other);
    fixture_close(&fx);
}

static void drain_error_queue(net_pair *net)
{
    char control[100];
    struct msghdr message = {.msg_control = control,
                             .msg_controllen = sizeof control};
    CHECK_EQ(recvmsg(net->server, &message, MSG_ERRQUEUE), 0);
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
            drain_error_queue(&w.net);
        net_leave(&w.net, LEAVE_HALF_CLOSE);
        UNTIL(&fx, fixture_reason(&fx, &w) == DW_REASON_FIN);
        CHECK_EQ(dw_sock_is_gone(w.net.server), DW_REASON_FIN);
        net_leave(&w.net, LEAVE_RST);
        UNTIL(&fx, fixture_info(&fx, &w).seen & DW_MASK(DW_REASON_RESET));
        fixture_drop(&fx, &w);
        fixture_close(&fx);
    }
}
