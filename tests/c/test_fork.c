/* What a child of fork() may do, and that its parent does not notice. */
#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

#include "dw_fixture.h"
#include "dw_gate.h"

/* What the parent held when it forked. */
typedef struct {
    fixture fx;
    watched w;
    int num_fds_before;
} held;

static void held_open(held *h, const watch_setup *setup)
{
    h->num_fds_before = dw_test_count_fds();
    fixture_open(&h->fx, setup);
    fixture_watch(&h->fx, &h->w);
    /* So that the parent's thread has begun. Under AddressSanitizer, in one run of
     * a thousand on a busy machine, the thread of a child never got going. */
    fixture_settle(&h->fx);
}

static void held_check_and_close(held *h)
{
    CHECK_EQ(fixture_reason(&h->fx, &h->w), DW_REASON_NONE);
    net_leave(&h->w.net, LEAVE_FIN);
    UNTIL(&h->fx, fixture_reason(&h->fx, &h->w) == DW_REASON_FIN);
    dw_event events[16];
    fixture_settle(&h->fx);
    CHECK_EQ(fixture_drain(&h->fx, events), 1);
    fixture_drop(&h->fx, &h->w);
    fixture_close(&h->fx);
}

static void use_the_parents_watcher(void *arg)
{
    held *h = arg;
    dw_watcher *watcher = h->fx.watcher;
    dw_conn_id conn = 1;
    dw_watch_id watch = 1;
    dw_conn_info info;
    net_pair net = net_open(NET_TCP);
    CHECK_EQ(dw_watcher_attach(watcher, net.server, &conn), DW_EFORKED);
    CHECK_EQ(conn, 0);
    CHECK_EQ(dw_watcher_arm(watcher, h->w.conn, h->w.flag, DW_MASK_ANY, NULL, 0,
                            &watch),
             DW_EFORKED);
    CHECK_EQ(watch, 0);
    CHECK_EQ(dw_watcher_disarm(watcher, h->w.conn, h->w.watch), DW_EFORKED);
    CHECK_EQ(dw_watcher_lost(watcher, h->w.conn, DW_REASON_FIN), DW_EFORKED);
    CHECK_EQ(dw_watcher_info(watcher, h->w.conn, &info), DW_EFORKED);
    CHECK_EQ(dw_watcher_reason(watcher, h->w.conn), DW_EFORKED);
    CHECK_EQ(dw_watcher_set_vanish(watcher, h->w.conn, 2000), DW_EFORKED);
    CHECK_EQ(dw_watcher_vanish_bound(watcher, h->w.conn), DW_EFORKED);
    CHECK_EQ(dw_watcher_set_probing(watcher, h->w.conn, true), DW_EFORKED);
    CHECK_EQ(dw_watcher_unblind(watcher, h->w.conn, 1), DW_EFORKED);
    CHECK_EQ(dw_watcher_reblind(watcher, h->w.conn), DW_EFORKED);
    CHECK_EQ(dw_watcher_detach(watcher, h->w.conn), DW_EFORKED);
    if (h->fx.setup->driver == DW_DRIVER_LOOP)
        CHECK_EQ(dw_watcher_poll(watcher, 0), DW_EFORKED);
    net_close(&net);
}

TEST_EACH(the_parents_watcher_answers_forked_to_every_call, watch_setup, setup,
          tcp_setups)
{
    held h;
    held_open(&h, setup);
    CHECK_IN_CHILD(use_the_parents_watcher, &h);
    held_check_and_close(&h);
}

static void use_the_parents_mailbox(void *arg)
{
    held *h = arg;
    dw_event events[16];
    CHECK_EQ(fixture_drain(&h->fx, events), DW_EFORKED);
    CHECK_EQ(dw_mailbox_fd(h->fx.mailbox), DW_EFORKED);
    dw_mailbox *mailbox;
    CHECK_EQ(dw_mailbox_create(h->fx.watcher, &mailbox), DW_EFORKED);
}

static void wake_the_parents_mailbox(void *arg)
{
    held *h = arg;
    dw_mailbox_wake(h->fx.mailbox);
}

/* They share the fd: a child that clears it would take the news away. */
TEST_EACH(a_child_takes_nothing_out_of_the_parents_mailbox, watch_setup, setup,
          tcp_setups)
{
    held h;
    held_open(&h, setup);
    watched leaving;
    fixture_watch(&h.fx, &leaving);
    CHECK_IN_CHILD(wake_the_parents_mailbox, &h);
    CHECK(!net_is_readable(dw_mailbox_fd(h.fx.mailbox)));
    net_leave(&leaving.net, LEAVE_FIN);
    UNTIL(&h.fx, net_is_readable(dw_mailbox_fd(h.fx.mailbox)));
    CHECK_IN_CHILD(use_the_parents_mailbox, &h);
    CHECK(net_is_readable(dw_mailbox_fd(h.fx.mailbox)));
    dw_event events[16];
    CHECK_EQ(fixture_drain(&h.fx, events), 1);
    CHECK_EQ(events[0].conn, leaving.conn);
    fixture_drop(&h.fx, &leaving);
    held_check_and_close(&h);
}

static void free_the_parents_watcher(void *arg)
{
    held *h = arg;
    dw_mailbox_close(h->fx.mailbox);
    dw_watcher_close(h->fx.watcher);
    dw_watcher_free(h->fx.watcher);
    dw_flags_free(h->fx.flags);
    net_close(&h->w.net);
    CHECK_EQ(dw_test_count_fds(), h->num_fds_before);
}

TEST_EACH(a_child_frees_its_copy_and_the_parent_watches_on, watch_setup, setup,
          tcp_setups)
{
    held h;
    held_open(&h, setup);
    CHECK_IN_CHILD(free_the_parents_watcher, &h);
    held_check_and_close(&h);
}

/* In a child of fork() ThreadSanitizer still counts the parent's threads and
 * dies of a new one with the same id, so these run without it. */
#ifndef __SANITIZE_THREAD__

static void watch_in_the_child(void *arg)
{
    held *h = arg;
    fixture fx;
    fixture_open(&fx, h->fx.setup);
    watched w;
    fixture_watch(&fx, &w);
    net_leave(&w.net, LEAVE_FIN);
    UNTIL(&fx, fixture_reason(&fx, &w) == DW_REASON_FIN);
    fixture_drop(&fx, &w);
    fixture_close(&fx);
}

TEST_EACH(a_child_makes_a_watcher_of_its_own, watch_setup, setup, all_setups)
{
    held h;
    held_open(&h, setup);
    CHECK_IN_CHILD(watch_in_the_child, &h);
    held_check_and_close(&h);
}

static void use_own_watcher_on_the_parents_flags(void *arg)
{
    held *h = arg;
    dw_watcher *watcher;
    CHECK_EQ(dw_watcher_create(h->fx.flags, h->fx.setup->poller,
                               DW_DRIVER_THREAD, &watcher),
             0);
    net_pair net = net_open(NET_TCP);
    dw_conn_id conn;
    dw_watch_id watch;
    CHECK_EQ(dw_watcher_attach(watcher, net.server, &conn), 0);
    CHECK_EQ(
        dw_watcher_arm(watcher, conn, h->w.flag, DW_MASK_ANY, NULL, 0, &watch),
        0);
    net_leave(&net, LEAVE_RST);
    WAIT_UNTIL(fixture_reason(&h->fx, &h->w) == DW_REASON_RESET);
    dw_watcher_free(watcher);
    net_close(&net);
}

TEST_EACH(a_childs_watcher_fires_a_flag_that_the_parent_sees, watch_setup,
          setup, tcp_setups)
{
    held h;
    held_open(&h, setup);
    CHECK_IN_CHILD(use_own_watcher_on_the_parents_flags, &h);
    CHECK_EQ(fixture_reason(&h.fx, &h.w), DW_REASON_RESET);
    fixture_drop(&h.fx, &h.w);
    fixture_close(&h.fx);
}

#endif

static void release_and_cancel(void *arg)
{
    held *h = arg;
    dw_flags *flags = h->fx.flags;
    CHECK_EQ(dw_flag_reason(flags, h->w.flag), DW_REASON_NONE);
    for (int i = 0; i < 3; i++)
        dw_flag_release(flags, h->w.flag);
    CHECK_EQ(dw_flag_reason(flags, h->w.flag), DW_REASON_NONE);
    /* What it retains itself it may give back, and no more than that. */
    CHECK_EQ(dw_flag_retain(flags, h->w.flag), 0);
    dw_flag_release(flags, h->w.flag);
    dw_flag_release(flags, h->w.flag);
    dw_flag own;
    CHECK_EQ(dw_flag_alloc(flags, &own), 0);
    CHECK(own.slot / DW_FLAGS_RANGE_SLOTS !=
          h->w.flag.slot / DW_FLAGS_RANGE_SLOTS);
    dw_flag_release(flags, own);
    CHECK_EQ(dw_flag_reason(flags, own), DW_ESTALE);
    CHECK_EQ(dw_flag_cancel(flags, h->w.flag, DW_REASON_ABORTED, 3), 1);
}

TEST(a_child_reads_and_cancels_flags_and_its_release_frees_nothing)
{
    held h;
    held_open(&h, &tcp_setups[0]);
    CHECK_IN_CHILD(release_and_cancel, &h);
    CHECK_EQ(fixture_reason(&h.fx, &h.w), DW_REASON_ABORTED);
    fixture_drop(&h.fx, &h.w);
    fixture_close(&h.fx);
}

typedef struct {
    held h;
    dw_flag own;
} generation;

static void grandchild(void *arg)
{
    generation *g = arg;
    dw_flags *flags = g->h.fx.flags;
    dw_flag_release(flags, g->own);
    CHECK_EQ(dw_flag_reason(flags, g->own), DW_REASON_NONE);
    dw_flag flag;
    CHECK_EQ(dw_flag_alloc(flags, &flag), 0);
    CHECK(flag.slot / DW_FLAGS_RANGE_SLOTS !=
          g->own.slot / DW_FLAGS_RANGE_SLOTS);
    use_the_parents_watcher(&g->h);
}

static void child_that_forks(void *arg)
{
    generation *g = arg;
    CHECK_EQ(dw_flag_alloc(g->h.fx.flags, &g->own), 0);
    CHECK_IN_CHILD(grandchild, g);
    dw_flag_release(g->h.fx.flags, g->own);
    CHECK_EQ(dw_flag_reason(g->h.fx.flags, g->own), DW_ESTALE);
}

TEST(a_grandchild_frees_nothing_of_a_childs_either)
{
    generation g;
    held_open(&g.h, &tcp_setups[0]);
    CHECK_IN_CHILD(child_that_forks, &g);
    /* The grandchild kept one, and is dead. */
    CHECK_EQ(dw_flags_reclaim(g.h.fx.flags), 1);
    held_check_and_close(&g.h);
}

TEST_EACH(a_fork_while_the_thread_holds_a_connection_leaves_no_child_stuck,
          watch_setup, setup, thread_setups)
{
    held h;
    held_open(&h, setup);
    watched leaving;
    fixture_watch(&h.fx, &leaving);
    gate_close("watch:event-locked");
    net_leave(&leaving.net, LEAVE_FIN);
    gate_wait("watch:event-locked");
    CHECK_IN_CHILD(use_the_parents_watcher, &h);
    h.num_fds_before++; /* the server's end of the second pair */
    CHECK_IN_CHILD(free_the_parents_watcher, &h);
    gate_open("watch:event-locked");
    WAIT_UNTIL(fixture_reason(&h.fx, &leaving) == DW_REASON_FIN);
    CHECK_EQ(dw_watcher_disarm(h.fx.watcher, leaving.conn, leaving.watch), 1);
    fixture_drop(&h.fx, &leaving);
    held_check_and_close(&h);
}

static void *alloc_a_flag(void *arg)
{
    held *h = arg;
    dw_flag flag;
    CHECK_EQ(dw_flag_alloc(h->fx.flags, &flag), 0);
    dw_flag_release(h->fx.flags, flag);
    return NULL;
}

static void alloc_in_the_child(void *arg)
{
    alloc_a_flag(arg);
}

TEST(a_fork_in_the_midst_of_an_alloc_leaves_no_child_stuck)
{
    held h;
    held_open(&h, &tcp_setups[0]);
    gate_close("flags:alloc-popped");
    pthread_t thread;
    CHECK_EQ(pthread_create(&thread, NULL, alloc_a_flag, &h), 0);
    gate_wait("flags:alloc-popped");
    CHECK_IN_CHILD(alloc_in_the_child, &h);
    gate_open("flags:alloc-popped");
    CHECK_EQ(pthread_join(thread, NULL), 0);
    held_check_and_close(&h);
}

static void *detach_it(void *arg)
{
    held *h = arg;
    CHECK_EQ(dw_watcher_detach(h->fx.watcher, h->w.conn), 0);
    return NULL;
}

TEST_EACH(a_fork_while_a_detach_waits_leaves_no_child_stuck, watch_setup, setup,
          thread_setups)
{
    held h;
    held_open(&h, setup);
    gate_close("watch:event-locked");
    net_leave(&h.w.net, LEAVE_FIN);
    gate_wait("watch:event-locked");
    /* It holds the table's lock and waits for the connection's. */
    pthread_t thread;
    int num_detaches = gate_count("watch:detach-begin");
    CHECK_EQ(pthread_create(&thread, NULL, detach_it, &h), 0);
    WAIT_UNTIL(gate_count("watch:detach-begin") > num_detaches);
    for (int i = 0; i < 20; i++)
        CHECK_IN_CHILD(free_the_parents_watcher, &h);
    gate_open("watch:event-locked");
    CHECK_EQ(pthread_join(thread, NULL), 0);
    fixture_drop(&h.fx, &h.w);
    fixture_close(&h.fx);
}

static void make_and_free_a_watcher(void *unused)
{
    (void)unused;
    fixture fx;
    /* The loop driver: see above for threads in a child. */
    fixture_open(&fx, &tcp_setups[1]);
    fixture_close(&fx);
}

static void *make_in_thread(void *unused)
{
    make_and_free_a_watcher(unused);
    return NULL;
}

static void *fork_in_thread(void *is_done)
{
    CHECK_IN_CHILD(make_and_free_a_watcher, NULL);
    atomic_store((atomic_bool *)is_done, true);
    return NULL;
}

TEST(a_fork_waits_for_who_changes_the_list_of_handles)
{
    atomic_bool is_done = false;
    pthread_t making, forking;
    gate_close("fork:list-locked");
    CHECK_EQ(pthread_create(&making, NULL, make_in_thread, NULL), 0);
    gate_wait("fork:list-locked");
    CHECK_EQ(pthread_create(&forking, NULL, fork_in_thread, &is_done), 0);
    for (int i = 0; i < 100; i++)
        usleep(200);
    CHECK(!atomic_load(&is_done));
    gate_open("fork:list-locked");
    CHECK_EQ(pthread_join(making, NULL), 0);
    CHECK_EQ(pthread_join(forking, NULL), 0);
}

/* What is left in the list of a watcher that is gone shows under
 * AddressSanitizer. */
TEST(a_fork_does_not_touch_a_watcher_that_was_freed)
{
    fixture first, second;
    fixture_open(&first, &tcp_setups[0]);
    fixture_open(&second, &tcp_setups[0]);
    fixture_close(&first);
    CHECK_IN_CHILD(make_and_free_a_watcher, NULL);
    fixture_close(&second);
    CHECK_IN_CHILD(make_and_free_a_watcher, NULL);
}
