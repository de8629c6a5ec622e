/* Watches and their connections: armed, fired, disarmed, detached; what is
 * refused; what is counted.
 */
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include "dw_fixture.h"

#define NUM_WATCHES 40

TEST_EACH(all_watches_of_a_connection_fire_and_ids_never_recur, watch_setup,
          setup, tcp_setups)
{
    fixture fx;
    fixture_open(&fx, setup);
    watched w;
    fixture_attach(&fx, &w);
    watched armed[NUM_WATCHES];
    dw_watch_id last = 0;
    for (int i = 0; i < NUM_WATCHES; i++) {
        armed[i] = w;
        CHECK_EQ(fixture_arm(&fx, &armed[i], DW_MASK_ANY, 0), 0);
        for (int j = 0; j < i; j++)
            CHECK(armed[i].watch != armed[j].watch);
        last = armed[i].watch;
    }
    CHECK_EQ(fixture_stats(&fx).num_armed, NUM_WATCHES);
    /* Every other one goes before the client does. */
    for (int i = 0; i < NUM_WATCHES; i += 2)
        CHECK_EQ(dw_watcher_disarm(fx.watcher, w.conn, armed[i].watch), 0);
    CHECK_EQ(fixture_stats(&fx).num_armed, NUM_WATCHES / 2);
    net_leave(&w.net, LEAVE_FIN);
    UNTIL(&fx, fixture_reason(&fx, &armed[NUM_WATCHES - 1]));
    fixture_settle(&fx);
    for (int i = 0; i < NUM_WATCHES; i++) {
        CHECK_EQ(fixture_reason(&fx, &armed[i]),
                 i % 2 ? DW_REASON_FIN : DW_REASON_NONE);
        CHECK_EQ(dw_watcher_disarm(fx.watcher, w.conn, armed[i].watch),
                 i % 2 ? 1 : DW_ESTALE);
        dw_flag_release(fx.flags, armed[i].flag);
    }
    CHECK_EQ(fixture_stats(&fx).num_fired, NUM_WATCHES / 2 + 1);
    dw_watch_id next;
    CHECK_EQ(dw_watcher_arm(fx.watcher, w.conn, (dw_flag){0, 0}, DW_MASK_ANY,
                            NULL, 0, &next),
             1);
    CHECK(next != last);
    fixture_drop(&fx, &w);
    fixture_close(&fx);
}

TEST_EACH(a_kept_alive_connection_is_armed_again_and_again, watch_setup, setup,
          all_setups)
{
    fixture fx;
    fixture_open(&fx, setup);
    watched w;
    fixture_attach(&fx, &w);
    dw_watch_id last = 0;
    for (int request = 0; request < 1000; request++) {
        CHECK_EQ(fixture_arm(&fx, &w, DW_MASK_ANY, 0), 0);
        CHECK(w.watch != last);
        CHECK_EQ(dw_watcher_disarm(fx.watcher, w.conn, last), DW_ESTALE);
        last = w.watch;
        CHECK_EQ(dw_watcher_disarm(fx.watcher, w.conn, w.watch), 0);
        CHECK_EQ(fixture_reason(&fx, &w), DW_REASON_NONE);
        dw_flag_release(fx.flags, w.flag);
    }
    CHECK_EQ(fixture_arm(&fx, &w, DW_MASK_ANY, 0), 0);
    net_leave(&w.net, LEAVE_FIN);
    UNTIL(&fx, fixture_reason(&fx, &w) == DW_REASON_FIN);
    fixture_drop(&fx, &w);
    fixture_close(&fx);
}

TEST_EACH(a_disarmed_watch_never_fires, watch_setup, setup, all_setups)
{
    fixture fx;
    fixture_open(&fx, setup);
    watched w;
    fixture_watch(&fx, &w);
    CHECK_EQ(dw_watcher_disarm(fx.watcher, w.conn, w.watch), 0);
    net_leave(&w.net, LEAVE_FIN);
    UNTIL(&fx, fixture_info(&fx, &w).reason == DW_REASON_FIN);
    CHECK_EQ(fixture_reason(&fx, &w), DW_REASON_NONE);
    dw_event events[16];
    CHECK_EQ(fixture_drain(&fx, events), 0);
    CHECK_EQ(dw_watcher_disarm(fx.watcher, w.conn, w.watch), DW_ESTALE);
    fixture_drop(&fx, &w);
    fixture_close(&fx);
}

TEST_EACH(a_flag_that_ended_before_its_watch_fires_changes_nothing, watch_setup,
          setup, tcp_setups)
{
    fixture fx;
    fixture_open(&fx, setup);
    watched cancelled, released;
    fixture_watch(&fx, &cancelled);
    fixture_watch(&fx, &released);
    CHECK_EQ(dw_flag_cancel(fx.flags, cancelled.flag, DW_REASON_ABORTED, 1), 1);
    dw_flag_release(fx.flags, released.flag);
    net_leave(&cancelled.net, LEAVE_FIN);
    net_leave(&released.net, LEAVE_FIN);
    fixture_settle(&fx);
    CHECK_EQ(fixture_reason(&fx, &cancelled), DW_REASON_ABORTED);
    /* Whoever waits at the mailbox is told all the same. */
    dw_event events[16];
    CHECK_EQ(fixture_drain(&fx, events), 2);
    CHECK_EQ(events[0].reason, DW_REASON_FIN);
    CHECK_EQ(events[1].reason, DW_REASON_FIN);
    released.flag = (dw_flag){0, 0};
    fixture_drop(&fx, &cancelled);
    fixture_drop(&fx, &released);
    fixture_close(&fx);
}

TEST_EACH(a_watch_may_have_no_flag_or_no_mailbox, watch_setup, setup,
          tcp_setups)
{
    fixture fx;
    fixture_open(&fx, setup);
    watched w;
    fixture_attach(&fx, &w);
    CHECK_EQ(dw_flag_alloc(fx.flags, &w.flag), 0);
    dw_watch_id delivered, flagged;
    CHECK_EQ(dw_watcher_arm(fx.watcher, w.conn, (dw_flag){0, 0}, DW_MASK_ANY,
                            fx.mailbox, 9, &delivered),
             0);
    CHECK_EQ(dw_watcher_arm(fx.watcher, w.conn, w.flag, DW_MASK_ANY, NULL, 0,
                            &flagged),
             0);
    net_leave(&w.net, LEAVE_FIN);
    UNTIL(&fx, fixture_reason(&fx, &w) == DW_REASON_FIN);
    fixture_settle(&fx);
    dw_event events[16];
    CHECK_EQ(fixture_drain(&fx, events), 1);
    CHECK_EQ(events[0].watch, delivered);
    CHECK_EQ(events[0].cookie, 9);
    CHECK_EQ(dw_watcher_disarm(fx.watcher, w.conn, delivered), 1);
    CHECK_EQ(dw_watcher_disarm(fx.watcher, w.conn, flagged), 1);
    fixture_drop(&fx, &w);
    fixture_close(&fx);
}

TEST_EACH(the_owners_word_fires_first_and_the_kernels_is_counted, watch_setup,
          setup, all_setups)
{
    fixture fx;
    fixture_open(&fx, setup);
    watched w;
    fixture_watch(&fx, &w);
    CHECK_EQ(dw_watcher_lost(fx.watcher, w.conn, DW_REASON_OWNER_CLOSED), 1);
    CHECK_EQ(fixture_reason(&fx, &w), DW_REASON_OWNER_CLOSED);
    dw_event events[16];
    CHECK_EQ(fixture_drain(&fx, events), 1);
    CHECK_EQ(events[0].reason, DW_REASON_OWNER_CLOSED);
    net_leave(&w.net, LEAVE_FIN);
    UNTIL(&fx, fixture_stats(&fx).num_second_sources == 1);
    CHECK_EQ(fixture_reason(&fx, &w), DW_REASON_OWNER_CLOSED);
    dw_conn_info info = fixture_info(&fx, &w);
    CHECK_EQ(info.reason, DW_REASON_OWNER_CLOSED);
    CHECK_EQ(info.seen,
             DW_MASK(DW_REASON_OWNER_CLOSED) | DW_MASK(DW_REASON_FIN));
    CHECK_EQ(fixture_drain(&fx, events), 0);
    CHECK_EQ(fixture_stats(&fx).num_signals[DW_REASON_OWNER_CLOSED], 1);
    CHECK_EQ(fixture_stats(&fx).num_signals[DW_REASON_FIN], 0);
    fixture_drop(&fx, &w);
    fixture_close(&fx);
}

TEST_EACH(the_kernels_word_fires_first_and_the_owners_is_counted, watch_setup,
          setup, all_setups)
{
    fixture fx;
    fixture_open(&fx, setup);
    watched w;
    fixture_watch(&fx, &w);
    net_leave(&w.net, LEAVE_FIN);
    UNTIL(&fx, fixture_reason(&fx, &w) == DW_REASON_FIN);
    CHECK_EQ(dw_watcher_lost(fx.watcher, w.conn, DW_REASON_OWNER_CLOSED), 0);
    CHECK_EQ(fixture_reason(&fx, &w), DW_REASON_FIN);
    CHECK_EQ(fixture_info(&fx, &w).reason, DW_REASON_FIN);
    CHECK_EQ(fixture_stats(&fx).num_second_sources, 1);
    CHECK_EQ(fixture_stats(&fx).num_signals[DW_REASON_FIN], 1);
    fixture_drop(&fx, &w);
    fixture_close(&fx);
}

TEST_EACH(detach_drops_armed_and_undelivered_watches, watch_setup, setup,
          all_setups)
{
    fixture fx;
    fixture_open(&fx, setup);
    watched armed, fired;
    fixture_watch(&fx, &armed);
    fixture_watch(&fx, &fired);
    net_leave(&fired.net, LEAVE_FIN);
    UNTIL(&fx, fixture_reason(&fx, &fired) == DW_REASON_FIN);
    CHECK_EQ(fixture_stats(&fx).num_armed, 1);
    CHECK_EQ(dw_watcher_detach(fx.watcher, armed.conn), 0);
    CHECK_EQ(dw_watcher_detach(fx.watcher, fired.conn), 0);
    CHECK_EQ(fixture_stats(&fx).num_armed, 0);
    CHECK_EQ(fixture_stats(&fx).num_connections, 0);
    net_leave(&armed.net, LEAVE_FIN);
    fixture_settle(&fx);
    CHECK_EQ(fixture_reason(&fx, &armed), DW_REASON_NONE);
    dw_event events[16];
    CHECK_EQ(fixture_drain(&fx, events), 0);
    fixture_drop(&fx, &armed);
    fixture_drop(&fx, &fired);
    fixture_close(&fx);
}

TEST_EACH(a_detached_connection_is_stale_in_every_call, watch_setup, setup,
          tcp_setups)
{
    fixture fx;
    fixture_open(&fx, setup);
    watched w, next;
    fixture_watch(&fx, &w);
    CHECK_EQ(dw_watcher_detach(fx.watcher, w.conn), 0);
    fixture_watch(&fx, &next); /* most likely in the same slot */
    const dw_conn_id names[] = {w.conn, 0, ~(dw_conn_id)0};
    for (int i = 0; i < 3; i++) {
        dw_watch_id watch;
        dw_conn_info info;
        CHECK_EQ(dw_watcher_detach(fx.watcher, names[i]), DW_ESTALE);
        CHECK_EQ(dw_watcher_arm(fx.watcher, names[i], w.flag, DW_MASK_ANY, NULL,
                                0, &watch),
                 DW_ESTALE);
        CHECK_EQ(watch, 0);
        CHECK_EQ(dw_watcher_disarm(fx.watcher, names[i], w.watch), DW_ESTALE);
        CHECK_EQ(dw_watcher_lost(fx.watcher, names[i], DW_REASON_FIN),
                 DW_ESTALE);
        CHECK_EQ(dw_watcher_info(fx.watcher, names[i], &info), DW_ESTALE);
    }
    CHECK_EQ(fixture_reason(&fx, &next), DW_REASON_NONE);
    CHECK_EQ(dw_watcher_disarm(fx.watcher, next.conn, next.watch), 0);
    CHECK_EQ(dw_watcher_disarm(fx.watcher, next.conn, 0), DW_ESTALE);
    fixture_drop(&fx, &w);
    fixture_drop(&fx, &next);
    fixture_close(&fx);
}

TEST_EACH(lost_takes_only_the_reasons_of_a_connection, watch_setup, setup,
          tcp_setups)
{
    fixture fx;
    fixture_open(&fx, setup);
    watched w;
    fixture_watch(&fx, &w);
    const int others[] = {DW_REASON_NONE,     DW_REASON_ABORTED,
                          DW_REASON_DEADLINE, DW_REASON_SHUTDOWN,
                          DW_REASON_MAX + 1,  40};
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++)
        CHECK_EQ(dw_watcher_lost(fx.watcher, w.conn, (enum dw_reason)others[i]),
                 DW_EINVAL);
    CHECK_EQ(fixture_reason(&fx, &w), DW_REASON_NONE);
    CHECK_EQ(dw_watcher_lost(fx.watcher, w.conn, DW_REASON_TIMED_OUT), 1);
    CHECK_EQ(fixture_reason(&fx, &w), DW_REASON_TIMED_OUT);
    fixture_drop(&fx, &w);
    fixture_close(&fx);
}

TEST_EACH(attach_refuses_what_has_no_peer_to_leave, watch_setup, setup,
          tcp_setups)
{
    fixture fx;
    fixture_open(&fx, setup);
    dw_conn_id conn = 1;
    int ends[2];
    CHECK_EQ(pipe(ends), 0);
    int file = open("/dev/null", O_RDONLY);
    int datagram = socket(AF_INET, SOCK_DGRAM, 0);
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    CHECK_EQ(listen(listener, 1), 0);
    const int fds[] = {ends[0], file, datagram, listener};
    for (size_t i = 0; i < sizeof fds / sizeof fds[0]; i++) {
        CHECK_EQ(dw_watcher_attach(fx.watcher, fds[i], &conn), DW_ENOTSOCK);
        CHECK_EQ(conn, 0);
        CHECK_EQ(close(fds[i]), 0);
        CHECK_EQ(dw_watcher_attach(fx.watcher, fds[i], &conn), DW_EBADF);
    }
    close(ends[1]);
    CHECK_EQ(dw_watcher_attach(fx.watcher, -1, &conn), DW_EBADF);

    watched w;
    fixture_attach(&fx, &w);
    CHECK_EQ(dw_watcher_attach(fx.watcher, w.net.server, &conn), DW_EEXIST);
    CHECK_EQ(conn, 0);
    /* The refusal left the first one as it was. */
    CHECK_EQ(fixture_arm(&fx, &w, DW_MASK_ANY, 0), 0);
    net_leave(&w.net, LEAVE_FIN);
    UNTIL(&fx, fixture_reason(&fx, &w) == DW_REASON_FIN);
    fixture_drop(&fx, &w);
    fixture_close(&fx);
}

TEST(a_watcher_needs_a_known_poller_and_a_driver_that_goes_with_it)
{
    dw_flags *flags;
    CHECK_EQ(dw_flags_create(&flags), 0);
    dw_watcher *watcher = (dw_watcher *)&flags;
    CHECK_EQ(dw_watcher_create(flags, "kqueue", DW_DRIVER_THREAD, &watcher),
             DW_EINVAL);
    CHECK(!watcher);
    CHECK_EQ(dw_watcher_create(flags, "poll", DW_DRIVER_LOOP, &watcher),
             DW_ENOTSUP);
    CHECK(!watcher);
    dw_watcher_free(NULL);
    CHECK_EQ(dw_watcher_create(flags, NULL, DW_DRIVER_THREAD, &watcher), 0);
    dw_watcher_stats stats;
    dw_watcher_read_stats(watcher, &stats);
    CHECK_STR(stats.poller, "epoll");
    CHECK_EQ(stats.driver, DW_DRIVER_THREAD);
    dw_watcher_free(watcher);
    dw_flags_free(flags);
}

/* The owner closes a socket without a word, and the next one gets its number. */
static void reuse_number(watched *old, watched *new, enum net_kind kind)
{
    int number = old->net.server;
    *new = (watched){.net = net_open(kind)};
    CHECK_EQ(dup2(new->net.server, number), number);
    net_close_end(&new->net.server);
    new->net.server = number;
    old->net.server = -1;
}

TEST_EACH(a_number_reused_without_detach_is_a_new_connection, watch_setup,
          setup, all_setups)
{
    fixture fx;
    fixture_open(&fx, setup);
    watched w[3];
    fixture_watch(&fx, &w[0]);
    int number = w[0].net.server;
    for (int i = 1; i < 3; i++) {
        watched *old = &w[i - 1], *new = &w[i];
        reuse_number(old, new, setup->kind);
        CHECK_EQ(dw_watcher_attach(fx.watcher, number, &new->conn), 0);
        CHECK_EQ(fixture_arm(&fx, new, DW_MASK_ANY, 0), 0);
        CHECK_EQ(fixture_info(&fx, old).reason, DW_REASON_OWNER_CLOSED);
        CHECK_EQ(fixture_reason(&fx, old), DW_REASON_OWNER_CLOSED);
        CHECK_EQ(fixture_reason(&fx, new), DW_REASON_NONE);
        /* The late detach must not take the new registration with it. */
        CHECK_EQ(dw_watcher_detach(fx.watcher, old->conn), 0);
        dw_conn_id again;
        CHECK_EQ(dw_watcher_attach(fx.watcher, number, &again), DW_EEXIST);
    }
    net_leave(&w[2].net, LEAVE_FIN);
    UNTIL(&fx, fixture_reason(&fx, &w[2]) == DW_REASON_FIN);
    for (int i = 0; i < 3; i++)
        fixture_drop(&fx, &w[i]);
    fixture_close(&fx);
}

TEST(a_blind_connection_that_was_closed_is_counted_as_blind_no_more)
{
    fixture fx;
    fixture_open(&fx, &tcp_setups[2]);
    CHECK_STR(fx.setup->poller, "poll");
    watched old, new;
    fixture_watch(&fx, &old);
    net_send(old.net.client, 100);
    UNTIL(&fx, fixture_stats(&fx).num_blind == 1);
    reuse_number(&old, &new, NET_TCP);
    CHECK_EQ(dw_watcher_attach(fx.watcher, new.net.server, &new.conn), 0);
    CHECK_EQ(fixture_stats(&fx).num_blind, 0);
    fixture_drop(&fx, &old);
    fixture_drop(&fx, &new);
    fixture_close(&fx);
}

/* All that a connection remembers must be gone with it. */
TEST_EACH(a_slot_starts_afresh_with_its_next_connection, watch_setup, setup,
          tcp_setups)
{
    fixture fx;
    fixture_open(&fx, setup);
    watched old, new;
    fixture_watch(&fx, &old);
    CHECK_EQ(dw_watcher_lost(fx.watcher, old.conn, DW_REASON_TIMED_OUT), 1);
    net_send(old.net.client, 100);
    fixture_settle(&fx); /* blind by now, where bytes blind */
    fixture_drop(&fx, &old);
    fixture_watch(&fx, &new);
    CHECK_EQ((uint32_t)new.conn, (uint32_t)old.conn); /* the same slot */
    dw_conn_info info = fixture_info(&fx, &new);
    CHECK_EQ(info.reason, DW_REASON_NONE);
    CHECK_EQ(info.seen, 0);
    CHECK_EQ(info.seen_ns, 0);
    CHECK_EQ(info.unread, -1);
    CHECK(!info.is_blind);
    uint64_t before = fixture_stats(&fx).num_second_sources;
    net_leave(&new.net, LEAVE_FIN);
    UNTIL(&fx, fixture_reason(&fx, &new) == DW_REASON_FIN);
    CHECK_EQ(dw_watcher_lost(fx.watcher, new.conn, DW_REASON_OWNER_CLOSED), 0);
    CHECK_EQ(fixture_stats(&fx).num_second_sources, before + 1);
    fixture_drop(&fx, &new);
    fixture_close(&fx);
}

/* A dup keeps the old socket, and with it epoll's registration, alive. */
TEST_EACH(a_reused_number_stays_apart_from_a_dup_of_its_former_socket,
          watch_setup, setup, all_setups)
{
    fixture fx;
    fixture_open(&fx, setup);
    watched old, new;
    fixture_watch(&fx, &old);
    int kept = dup(old.net.server);
    reuse_number(&old, &new, setup->kind);
    old.net.server = kept;
    CHECK_EQ(dw_watcher_attach(fx.watcher, new.net.server, &new.conn), 0);
    CHECK_EQ(fixture_arm(&fx, &new, DW_MASK_ANY, 0), 0);
    CHECK_EQ(fixture_reason(&fx, &old), DW_REASON_OWNER_CLOSED);
    net_leave(&old.net, LEAVE_FIN);
    fixture_settle(&fx);
    CHECK_EQ(fixture_reason(&fx, &new), DW_REASON_NONE);
    CHECK_EQ(fixture_info(&fx, &new).reason, DW_REASON_NONE);
    net_leave(&new.net, LEAVE_RST);
    UNTIL(&fx, fixture_reason(&fx, &new) == DW_REASON_RESET);
    fixture_drop(&fx, &old);
    fixture_drop(&fx, &new);
    fixture_close(&fx);
}

TEST_EACH(an_owner_that_closes_without_detach_harms_no_other, watch_setup,
          setup, all_setups)
{
    fixture fx;
    fixture_open(&fx, setup);
    watched closed, other;
    fixture_watch(&fx, &closed);
    fixture_watch(&fx, &other);
    /* The number goes to a file meanwhile: were it the witness's client, poll()
     * would hold that open (see the head of dw_poller_poll.c). */
    int file = open("/dev/null", O_RDONLY | O_CLOEXEC);
    CHECK_EQ(dup2(file, closed.net.server), closed.net.server);
    close(file);
    fixture_settle(&fx);
    /* No copy of the fd was kept: the peer hears of the close. */
    CHECK_EQ(net_try_receive(closed.net.client), 0);
    net_leave(&other.net, LEAVE_FIN);
    UNTIL(&fx, fixture_reason(&fx, &other) == DW_REASON_FIN);
    CHECK_EQ(dw_watcher_detach(fx.watcher, closed.conn), 0);
    fixture_drop(&fx, &closed);
    fixture_drop(&fx, &other);
    fixture_close(&fx);
}

TEST_EACH(a_closed_watcher_forgets_its_watches_and_refuses_all, watch_setup,
          setup, tcp_setups)
{
    fixture fx;
    fixture_open(&fx, setup);
    watched w;
    fixture_watch(&fx, &w);
    dw_watch_id second; /* which has memory of its own */
    CHECK_EQ(dw_watcher_arm(fx.watcher, w.conn, w.flag, DW_MASK_ANY, NULL, 0,
                            &second),
             0);
    dw_watcher_close(fx.watcher);
    dw_watcher_close(fx.watcher);
    CHECK(net_is_readable(dw_mailbox_fd(fx.mailbox)));
    dw_event events[16];
    CHECK_EQ(fixture_drain(&fx, events), DW_ECLOSED);
    net_leave(&w.net, LEAVE_FIN);
    CHECK_EQ(fixture_reason(&fx, &w), DW_REASON_NONE);
    dw_conn_id conn;
    dw_watch_id watch;
    dw_conn_info info;
    CHECK_EQ(dw_watcher_attach(fx.watcher, w.net.server, &conn), DW_ECLOSED);
    CHECK_EQ(dw_watcher_arm(fx.watcher, w.conn, w.flag, DW_MASK_ANY, NULL, 0,
                            &watch),
             DW_ECLOSED);
    CHECK_EQ(dw_watcher_disarm(fx.watcher, w.conn, w.watch), DW_ECLOSED);
    CHECK_EQ(dw_watcher_lost(fx.watcher, w.conn, DW_REASON_FIN), DW_ECLOSED);
    CHECK_EQ(dw_watcher_info(fx.watcher, w.conn, &info), DW_ECLOSED);
    CHECK_EQ(dw_watcher_detach(fx.watcher, w.conn), DW_ECLOSED);
    if (setup->driver == DW_DRIVER_LOOP)
        CHECK_EQ(dw_watcher_poll(fx.watcher, 0), DW_ECLOSED);
    dw_flag_release(fx.flags, w.flag);
    net_close(&w.net);
    dw_mailbox_close(fx.mailbox);
    dw_watcher_free(fx.watcher);
    dw_flags_free(fx.flags);
}

TEST_EACH(the_loop_driver_tells_by_its_fd_and_the_thread_has_none, watch_setup,
          setup, tcp_setups)
{
    fixture fx;
    fixture_open(&fx, setup);
    watched w;
    fixture_watch(&fx, &w);
    if (setup->driver == DW_DRIVER_THREAD) {
        CHECK_EQ(dw_watcher_poll(fx.watcher, 0), DW_ENOTSUP);
        CHECK_EQ(dw_watcher_fd(fx.watcher), DW_ENOTSUP);
    } else {
        int fd = dw_watcher_fd(fx.watcher);
        CHECK_EQ(dw_watcher_poll(fx.watcher, 0), 0);
        CHECK(!net_is_readable(fd));
        net_leave(&w.net, LEAVE_FIN);
        CHECK(net_is_readable(fd));
        CHECK_EQ(fixture_reason(&fx, &w), DW_REASON_NONE);
        CHECK_EQ(dw_watcher_poll(fx.watcher, -1), 1);
        CHECK_EQ(fixture_reason(&fx, &w), DW_REASON_FIN);
        CHECK(!net_is_readable(fd));
    }
    fixture_drop(&fx, &w);
    fixture_close(&fx);
}

TEST_EACH(stats_count_every_connection_watch_and_signal, watch_setup, setup,
          tcp_setups)
{
    fixture fx;
    fixture_open(&fx, setup);
    dw_watcher_stats stats = fixture_stats(&fx);
    CHECK_STR(stats.poller, setup->poller);
    CHECK_EQ(stats.driver, setup->driver);
    CHECK_EQ(stats.num_connections, 0);
    watched w[3];
    for (int i = 0; i < 3; i++)
        fixture_watch(&fx, &w[i]);
    CHECK_EQ(fixture_stats(&fx).num_connections, 3);
    CHECK_EQ(fixture_stats(&fx).num_armed, 3);
    CHECK_EQ(fixture_stats(&fx).num_fired, 0);
    net_leave(&w[0].net, LEAVE_FIN);
    net_leave(&w[1].net, LEAVE_RST);
    UNTIL(&fx, fixture_stats(&fx).num_fired == 2);
    stats = fixture_stats(&fx);
    CHECK_EQ(stats.num_armed, 1);
    CHECK_EQ(stats.num_connections, 3);
    CHECK_EQ(stats.num_signals[DW_REASON_FIN], 1);
    CHECK_EQ(stats.num_signals[DW_REASON_RESET], 1);
    CHECK_EQ(stats.num_second_sources, 0);
    CHECK_EQ(stats.num_stale_events, 0);
    CHECK_EQ(stats.num_blind, 0);
    CHECK(stats.num_wakeups >= 1);
    for (int i = 0; i < 3; i++)
        fixture_drop(&fx, &w[i]);
    CHECK_EQ(fixture_stats(&fx).num_connections, 0);
    fixture_close(&fx);
}
