/* Fired watches on their way to one consumer. */
#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "dw_fixture.h"
#include "dw_gate.h"

#define NUM_CLIENTS 10

TEST_EACH(a_mailbox_is_drained_in_pieces_and_stays_readable_between,
          watch_setup, setup, tcp_setups)
{
    fixture fx;
    fixture_open(&fx, setup);
    watched w[NUM_CLIENTS];
    for (int i = 0; i < NUM_CLIENTS; i++) {
        fixture_attach(&fx, &w[i]);
        CHECK_EQ(fixture_arm(&fx, &w[i], DW_MASK_ANY, (uint64_t)i + 1), 0);
    }
    int fd = dw_mailbox_fd(fx.mailbox);
    CHECK(!net_is_readable(fd));
    for (int i = 0; i < NUM_CLIENTS; i++) {
        net_leave(&w[i].net, LEAVE_FIN);
        UNTIL(&fx, fixture_reason(&fx, &w[i]) == DW_REASON_FIN);
    }
    fixture_settle(&fx);
    /* In the order in which they fired, none twice, none missing. */
    uint64_t next = 1;
    while (net_is_readable(fd)) {
        dw_event events[3];
        int count = dw_mailbox_drain(fx.mailbox, events, 3);
        CHECK(count <= 3);
        for (int i = 0; i < count; i++)
            CHECK_EQ(events[i].cookie, next++);
    }
    CHECK_EQ(next, NUM_CLIENTS + 1);
    for (int i = 0; i < NUM_CLIENTS; i++)
        fixture_drop(&fx, &w[i]);
    fixture_close(&fx);
}

TEST_EACH(disarm_takes_an_undelivered_watch_off_its_mailbox, watch_setup, setup,
          tcp_setups)
{
    fixture fx;
    fixture_open(&fx, setup);
    watched w[3];
    for (int i = 0; i < 3; i++) {
        fixture_attach(&fx, &w[i]);
        CHECK_EQ(fixture_arm(&fx, &w[i], DW_MASK_ANY, (uint64_t)i), 0);
        net_leave(&w[i].net, LEAVE_FIN);
        UNTIL(&fx, fixture_reason(&fx, &w[i]) == DW_REASON_FIN);
    }
    /* From the middle, then the head and tail that are left. */
    const int order[] = {1, 0, 2};
    dw_event events[16];
    for (int i = 0; i < 3; i++) {
        watched *gone = &w[order[i]];
        CHECK_EQ(dw_watcher_disarm(fx.watcher, gone->conn, gone->watch), 1);
    }
    CHECK_EQ(fixture_drain(&fx, events), 0);
    for (int i = 0; i < 3; i++)
        fixture_drop(&fx, &w[i]);
    fixture_close(&fx);
}

TEST_EACH(what_was_armed_last_is_delivered_after_a_disarm_of_the_tail,
          watch_setup, setup, tcp_setups)
{
    fixture fx;
    fixture_open(&fx, setup);
    watched w[3];
    for (int i = 0; i < 3; i++)
        fixture_watch(&fx, &w[i]);
    dw_event events[16];
    for (int i = 0; i < 2; i++) {
        net_leave(&w[i].net, LEAVE_FIN);
        UNTIL(&fx, fixture_reason(&fx, &w[i]) == DW_REASON_FIN);
    }
    CHECK_EQ(dw_watcher_disarm(fx.watcher, w[1].conn, w[1].watch), 1);
    net_leave(&w[2].net, LEAVE_FIN);
    UNTIL(&fx, fixture_reason(&fx, &w[2]) == DW_REASON_FIN);
    fixture_settle(&fx);
    CHECK_EQ(fixture_drain(&fx, events), 2);
    CHECK_EQ(events[0].conn, w[0].conn);
    CHECK_EQ(events[1].conn, w[2].conn);
    for (int i = 0; i < 3; i++)
        fixture_drop(&fx, &w[i]);
    fixture_close(&fx);
}

TEST_EACH(a_wake_makes_the_fd_readable_without_an_event, watch_setup, setup,
          tcp_setups)
{
    fixture fx;
    fixture_open(&fx, setup);
    dw_mailbox_wake(fx.mailbox);
    dw_mailbox_wake(fx.mailbox);
    CHECK(net_is_readable(dw_mailbox_fd(fx.mailbox)));
    dw_event events[16];
    CHECK_EQ(fixture_drain(&fx, events), 0);
    CHECK(!net_is_readable(dw_mailbox_fd(fx.mailbox)));
    fixture_close(&fx);
}

TEST_EACH(each_mailbox_gets_its_own_watches, watch_setup, setup, tcp_setups)
{
    fixture fx;
    fixture_open(&fx, setup);
    dw_mailbox *second;
    CHECK_EQ(dw_mailbox_create(fx.watcher, &second), 0);
    watched w;
    fixture_attach(&fx, &w);
    CHECK_EQ(fixture_arm(&fx, &w, DW_MASK_ANY, 1), 0);
    dw_watch_id watch;
    CHECK_EQ(dw_watcher_arm(fx.watcher, w.conn, (dw_flag){0, 0}, DW_MASK_ANY,
                            second, 2, &watch),
             0);
    net_leave(&w.net, LEAVE_FIN);
    dw_event events[16];
    UNTIL(&fx, net_is_readable(dw_mailbox_fd(second)));
    UNTIL(&fx, net_is_readable(dw_mailbox_fd(fx.mailbox)));
    CHECK_EQ(fixture_drain(&fx, events), 1);
    CHECK_EQ(events[0].cookie, 1);
    CHECK_EQ(dw_mailbox_drain(second, events, 16), 1);
    CHECK_EQ(events[0].cookie, 2);
    fixture_drop(&fx, &w);
    dw_mailbox_close(second);
    fixture_close(&fx);
}

TEST_EACH(watches_outlive_their_mailbox_and_deliver_nowhere, watch_setup, setup,
          tcp_setups)
{
    fixture fx;
    fixture_open(&fx, setup);
    watched fired, armed;
    fixture_watch(&fx, &fired);
    fixture_watch(&fx, &armed);
    net_leave(&fired.net, LEAVE_FIN);
    UNTIL(&fx, fixture_reason(&fx, &fired) == DW_REASON_FIN);
    dw_mailbox_close(fx.mailbox); /* with one undelivered, one armed */
    fx.mailbox = NULL;
    net_leave(&armed.net, LEAVE_FIN);
    UNTIL(&fx, fixture_reason(&fx, &armed) == DW_REASON_FIN);
    CHECK_EQ(dw_watcher_disarm(fx.watcher, fired.conn, fired.watch), 1);
    CHECK_EQ(dw_watcher_disarm(fx.watcher, armed.conn, armed.watch), 1);
    fixture_drop(&fx, &fired);
    fixture_drop(&fx, &armed);
    fixture_close(&fx);
}

/* What comes by the number of a closed fd next belongs to somebody else. */
static int take_number(int number)
{
    int fd = eventfd(1, EFD_NONBLOCK | EFD_CLOEXEC);
    CHECK_EQ(fd, number);
    return fd;
}

static void give_untouched(int fd)
{
    eventfd_t count;
    CHECK_EQ(eventfd_read(fd, &count), 0);
    CHECK_EQ(count, 1);
    close(fd);
}

TEST_EACH(a_shut_mailbox_answers_everybody_and_leaves_its_number_alone,
          watch_setup, setup, tcp_setups)
{
    fixture fx;
    fixture_open(&fx, setup);
    watched w;
    fixture_watch(&fx, &w);
    int number = dw_mailbox_fd(fx.mailbox);
    dw_mailbox_shut(fx.mailbox);
    int reuse = take_number(number);
    dw_watch_id watch;
    CHECK_EQ(dw_watcher_arm(fx.watcher, w.conn, (dw_flag){0, 0}, DW_MASK_ANY,
                            fx.mailbox, 1, &watch),
             DW_ECLOSED);
    CHECK_EQ(watch, 0);
    CHECK_EQ(dw_mailbox_fd(fx.mailbox), DW_ECLOSED);
    dw_event events[16];
    CHECK_EQ(dw_mailbox_drain(fx.mailbox, events, 16), 0);
    dw_mailbox_wake(fx.mailbox);
    dw_mailbox_shut(fx.mailbox);
    net_leave(&w.net, LEAVE_FIN);
    UNTIL(&fx, fixture_reason(&fx, &w) == DW_REASON_FIN);
    give_untouched(reuse);
    fixture_drop(&fx, &w);
    fixture_close(&fx);
}

typedef struct {
    dw_mailbox *mailbox;
    pthread_t *thread;
} shutting;

static void *shut(void *mailbox)
{
    dw_mailbox_shut(mailbox);
    return NULL;
}

static void begin_to_shut(void *arg)
{
    shutting *it = arg;
    CHECK_EQ(pthread_create(it->thread, NULL, shut, it->mailbox), 0);
    gate_wait("mailbox:shut-begun");
}

TEST_EACH(no_watch_gets_a_mailbox_that_is_being_shut, watch_setup, setup,
          tcp_setups)
{
    fixture fx;
    fixture_open(&fx, setup);
    watched w;
    fixture_attach(&fx, &w);
    pthread_t thread;
    gate_close("mailbox:shut-begun");
    /* It has not looked at any connection yet. */
    begin_to_shut(&(shutting){.mailbox = fx.mailbox, .thread = &thread});
    dw_watch_id watch;
    CHECK_EQ(dw_watcher_arm(fx.watcher, w.conn, (dw_flag){0, 0}, DW_MASK_ANY,
                            fx.mailbox, 1, &watch),
             DW_ECLOSED);
    gate_open("mailbox:shut-begun");
    pthread_join(thread, NULL);
    fixture_drop(&fx, &w);
    fixture_close(&fx);
}

TEST_EACH(a_watch_armed_just_before_is_taken_off_a_mailbox_that_is_shut,
          watch_setup, setup, tcp_setups)
{
    fixture fx;
    fixture_open(&fx, setup);
    watched w;
    fixture_attach(&fx, &w);
    pthread_t thread;
    int number = dw_mailbox_fd(fx.mailbox);
    gate_close("mailbox:shut-begun");
    /* Shutting begins once arm, inside the connection, has looked. */
    gate_run("watch:arm-stored", begin_to_shut,
             &(shutting){.mailbox = fx.mailbox, .thread = &thread});
    CHECK_EQ(fixture_arm(&fx, &w, DW_MASK_ANY, 1), 0);
    gate_open("mailbox:shut-begun");
    pthread_join(thread, NULL);
    int reuse = take_number(number);
    net_leave(&w.net, LEAVE_FIN);
    UNTIL(&fx, fixture_reason(&fx, &w) == DW_REASON_FIN);
    CHECK_EQ(dw_watcher_disarm(fx.watcher, w.conn, w.watch), 1);
    give_untouched(reuse);
    fixture_drop(&fx, &w);
    fixture_close(&fx);
}

TEST_EACH(arm_refuses_the_mailbox_of_another_watcher, watch_setup, setup,
          tcp_setups)
{
    fixture fx, other;
    fixture_open(&fx, setup);
    fixture_open(&other, setup);
    watched w;
    fixture_watch(&fx, &w);
    dw_watch_id watch;
    CHECK_EQ(dw_watcher_arm(fx.watcher, w.conn, (dw_flag){0, 0}, DW_MASK_ANY,
                            other.mailbox, 1, &watch),
             DW_EINVAL);
    fixture_close(&other);
    net_leave(&w.net, LEAVE_FIN);
    UNTIL(&fx, fixture_reason(&fx, &w) == DW_REASON_FIN);
    fixture_drop(&fx, &w);
    fixture_close(&fx);
}

TEST_EACH(a_mailbox_may_be_closed_after_its_watcher_was_freed, watch_setup,
          setup, tcp_setups)
{
    fixture fx;
    fixture_open(&fx, setup);
    watched w;
    fixture_watch(&fx, &w);
    net_leave(&w.net, LEAVE_FIN);
    UNTIL(&fx, fixture_reason(&fx, &w) == DW_REASON_FIN);
    fixture_drop(&fx, &w);
    dw_watcher_free(fx.watcher);
    dw_event events[16];
    CHECK(net_is_readable(dw_mailbox_fd(fx.mailbox)));
    CHECK_EQ(fixture_drain(&fx, events), DW_ECLOSED);
    dw_mailbox_close(fx.mailbox);
    dw_flags_free(fx.flags);
}

TEST_EACH(a_drain_before_the_write_takes_it_from_nobody, watch_setup, setup,
          thread_setups)
{
    dw_mailbox *second;
    dw_watch_id id;
    dw_event events[16];
    watched w, other;
    fixture fx;
    fixture_open(&fx, setup);
    CHECK_EQ(dw_mailbox_create(fx.watcher, &second), DW_OK);
    fixture_attach(&fx, &w);
    fixture_watch(&fx, &other);
    CHECK_EQ(dw_watcher_arm(fx.watcher, w.conn, (dw_flag){0}, DW_MASK_ANY,
                            fx.mailbox, 1, &id),
             0);
    CHECK_EQ(dw_watcher_arm(fx.watcher, w.conn, (dw_flag){0}, DW_MASK_ANY,
                            second, 2, &id),
             0);

    /* The thread has posted to both and written to neither (see OWED in
     * dw_mailbox.h). */
    gate_close("mailbox:ring-owed");
    net_leave(&w.net, LEAVE_FIN);
    gate_wait("mailbox:ring-owed");
    CHECK(!net_is_readable(dw_mailbox_fd(fx.mailbox)));
    CHECK_EQ(dw_mailbox_drain(fx.mailbox, events, 16), 1);
    CHECK_EQ(dw_watcher_lost(fx.watcher, other.conn, DW_REASON_RESET), 1);
    gate_open("mailbox:ring-owed");
    WAIT_UNTIL(net_is_readable(dw_mailbox_fd(fx.mailbox)));
    WAIT_UNTIL(net_is_readable(dw_mailbox_fd(second)));
    CHECK_EQ(dw_mailbox_drain(fx.mailbox, events, 16), 1);
    CHECK_EQ(events[0].reason, DW_REASON_RESET);
    CHECK_EQ(dw_mailbox_drain(second, events, 16), 1);
    CHECK_EQ(events[0].cookie, 2);
    fixture_drop(&fx, &w);
    fixture_drop(&fx, &other);
    dw_mailbox_close(second);
    fixture_close(&fx);
}
