/* The races of the watch layer, each forced by stopping a thread at the one
 * line where it matters (dw_gate.h): an event for a connection that is gone, arm
 * against event, disarm against event, detach against event.
 *
 * With the loop driver there is no thread to stop: there the other side of the
 * race runs inside the sync point.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "dw_fixture.h"
#include "dw_gate.h"

/* How long a wrong core gets to go on where a right one waits. */
#define GRACE_TURNS 100

static uint32_t slot_of(dw_conn_id conn)
{
    return (uint32_t)conn;
}

/* The fixture and the connections of one race, for a hook to work on. */
typedef struct {
    fixture fx;
    watched w;
    watched next;
    int rc;
    atomic_bool is_done;
    bool was_done;
    pthread_t thread;
} race;

static void race_start(race *r, void *(*run)(void *race))
{
    CHECK_EQ(pthread_create(&r->thread, NULL, run, r), 0);
}

/* Waits a little for what must not come. */
static void race_give_grace(race *r)
{
    for (int i = 0; i < GRACE_TURNS && !atomic_load(&r->is_done); i++)
        usleep(200);
}

static void race_join(race *r)
{
    CHECK_EQ(pthread_join(r->thread, NULL), 0);
}

/* Lets the client leave, and act come between the poller's news of it and the
 * lock of the connection. */
static void leave_before_lock(race *r, enum net_leave how,
                              void (*act)(void *race))
{
    if (r->fx.setup->driver == DW_DRIVER_LOOP) {
        gate_run("watch:event-before-lock", act, r);
        net_leave(&r->w.net, how);
        CHECK(dw_watcher_poll(r->fx.watcher, -1) >= 0);
    } else {
        gate_close("watch:event-before-lock");
        net_leave(&r->w.net, how);
        gate_wait("watch:event-before-lock");
        act(r);
        gate_open("watch:event-before-lock");
    }
}

/* Detaches, and attaches connections until one has the freed slot. */
static void replace_connection(void *arg)
{
    race *r = arg;
    watched *w = &r->w;
    CHECK_EQ(dw_watcher_detach(r->fx.watcher, w->conn), 0);
    /* The new socket takes the old one's number, as accept() would. */
    int number = w->net.server;
    r->next = (watched){.net = net_open(r->fx.setup->kind)};
    CHECK_EQ(dup2(r->next.net.server, number), number);
    net_close_end(&r->next.net.server);
    r->next.net.server = number;
    w->net.server = -1;
    dw_conn_id conn;
    CHECK_EQ(dw_watcher_attach(r->fx.watcher, number, &conn), 0);
    for (int tries = 0; slot_of(conn) != slot_of(w->conn); tries++) {
        CHECK(tries < 5000);
        CHECK_EQ(dw_watcher_detach(r->fx.watcher, conn), 0);
        CHECK_EQ(dw_watcher_attach(r->fx.watcher, number, &conn), 0);
    }
    CHECK(conn != w->conn);
    r->next.conn = conn;
    CHECK_EQ(fixture_arm(&r->fx, &r->next, DW_MASK_ANY, 0), 0);
}

TEST_EACH(an_event_of_an_earlier_generation_is_dropped_and_counted, watch_setup,
          setup, all_setups)
{
    race r = {.rc = -1};
    fixture_open(&r.fx, setup);
    fixture_watch(&r.fx, &r.w);
    leave_before_lock(&r, LEAVE_FIN, replace_connection);
    fixture_settle(&r.fx);
    CHECK_EQ(fixture_stats(&r.fx).num_stale_events, 1);
    CHECK_EQ(fixture_reason(&r.fx, &r.next), DW_REASON_NONE);
    CHECK_EQ(fixture_reason(&r.fx, &r.w), DW_REASON_NONE);
    CHECK_EQ(fixture_info(&r.fx, &r.next).reason, DW_REASON_NONE);
    dw_event events[16];
    CHECK_EQ(fixture_drain(&r.fx, events), 0);
    /* And the slot's new tenant hears of its own client. */
    net_leave(&r.next.net, LEAVE_FIN);
    UNTIL(&r.fx, fixture_reason(&r.fx, &r.next) == DW_REASON_FIN);
    fixture_drop(&r.fx, &r.w);
    fixture_drop(&r.fx, &r.next);
    fixture_close(&r.fx);
}

static void *arm_second(void *arg)
{
    race *r = arg;
    r->rc = fixture_arm(&r->fx, &r->next, DW_MASK_ANY, 2);
    atomic_store(&r->is_done, true);
    return NULL;
}

TEST_EACH(a_watch_armed_just_before_the_event_is_fired_by_it, watch_setup,
          setup, thread_setups)
{
    race r = {.rc = -1};
    fixture_open(&r.fx, setup);
    fixture_attach(&r.fx, &r.w);
    r.next = r.w;
    gate_close("watch:arm-stored");
    race_start(&r, arm_second);
    gate_wait("watch:arm-stored");
    /* The event comes while arm has stored its watch and not yet looked. */
    int num_events = gate_count("watch:event-before-lock");
    net_leave(&r.next.net, LEAVE_FIN);
    WAIT_UNTIL(gate_count("watch:event-before-lock") > num_events);
    gate_open("watch:arm-stored");
    race_join(&r);
    CHECK_EQ(r.rc, 0);
    WAIT_UNTIL(fixture_reason(&r.fx, &r.next) == DW_REASON_FIN);
    fixture_settle(&r.fx);
    dw_event events[16];
    CHECK_EQ(fixture_drain(&r.fx, events), 1);
    fixture_drop(&r.fx, &r.next);
    fixture_close(&r.fx);
}

TEST_EACH(a_watch_armed_in_the_midst_of_the_event_fires_inside_arm, watch_setup,
          setup, thread_setups)
{
    const char *points[] = {"watch:event-locked", "watch:event-fired"};
    for (int i = 0; i < 2; i++) {
        race r = {.rc = -1};
        fixture_open(&r.fx, setup);
        fixture_attach(&r.fx, &r.w);
        r.next = r.w;
        gate_close(points[i]);
        net_leave(&r.next.net, LEAVE_FIN);
        gate_wait(points[i]);
        race_start(&r, arm_second);
        race_give_grace(&r);
        CHECK(!atomic_load(&r.is_done));
        gate_open(points[i]);
        race_join(&r);
        CHECK_EQ(r.rc, 1);
        CHECK_EQ(fixture_reason(&r.fx, &r.next), DW_REASON_FIN);
        fixture_settle(&r.fx);
        dw_event events[16];
        CHECK_EQ(fixture_drain(&r.fx, events), 1);
        fixture_drop(&r.fx, &r.next);
        fixture_close(&r.fx);
    }
}

static void arm_in_hook(void *arg)
{
    race *r = arg;
    CHECK_EQ(fixture_arm(&r->fx, &r->w, DW_MASK_ANY, 1), 0);
    CHECK_EQ(fixture_reason(&r->fx, &r->w), DW_REASON_NONE);
}

TEST_EACH(a_watch_armed_between_the_wait_and_the_lock_is_fired_by_the_event,
          watch_setup, setup, all_setups)
{
    race r = {.rc = -1};
    fixture_open(&r.fx, setup);
    fixture_attach(&r.fx, &r.w);
    leave_before_lock(&r, LEAVE_FIN, arm_in_hook);
    UNTIL(&r.fx, fixture_reason(&r.fx, &r.w) == DW_REASON_FIN);
    CHECK_EQ(fixture_reason(&r.fx, &r.w), DW_REASON_FIN);
    fixture_drop(&r.fx, &r.w);
    fixture_close(&r.fx);
}

static void disarm_in_hook(void *arg)
{
    race *r = arg;
    CHECK_EQ(dw_watcher_disarm(r->fx.watcher, r->w.conn, r->w.watch), 0);
}

TEST_EACH(disarm_before_the_event_has_the_lock_means_never_fired, watch_setup,
          setup, all_setups)
{
    race r = {.rc = -1};
    fixture_open(&r.fx, setup);
    fixture_watch(&r.fx, &r.w);
    leave_before_lock(&r, LEAVE_FIN, disarm_in_hook);
    fixture_settle(&r.fx);
    CHECK_EQ(fixture_info(&r.fx, &r.w).reason, DW_REASON_FIN);
    CHECK_EQ(fixture_reason(&r.fx, &r.w), DW_REASON_NONE);
    dw_event events[16];
    CHECK_EQ(fixture_drain(&r.fx, events), 0);
    fixture_drop(&r.fx, &r.w);
    fixture_close(&r.fx);
}

static void *disarm(void *arg)
{
    race *r = arg;
    r->rc = dw_watcher_disarm(r->fx.watcher, r->w.conn, r->w.watch);
    /* By the time it answers, what it says is so. */
    CHECK_EQ(fixture_reason(&r->fx, &r->w),
             r->rc == 1 ? DW_REASON_FIN : DW_REASON_NONE);
    dw_event events[16];
    CHECK_EQ(fixture_drain(&r->fx, events), 0);
    atomic_store(&r->is_done, true);
    return NULL;
}

TEST_EACH(disarm_in_the_midst_of_the_event_waits_and_says_fired, watch_setup,
          setup, thread_setups)
{
    const char *points[] = {"watch:event-locked", "watch:event-fired"};
    for (int i = 0; i < 2; i++) {
        race r = {.rc = -1};
        fixture_open(&r.fx, setup);
        fixture_watch(&r.fx, &r.w);
        gate_close(points[i]);
        net_leave(&r.w.net, LEAVE_FIN);
        gate_wait(points[i]);
        race_start(&r, disarm);
        race_give_grace(&r);
        CHECK(!atomic_load(&r.is_done));
        gate_open(points[i]);
        race_join(&r);
        CHECK_EQ(r.rc, 1);
        fixture_settle(&r.fx);
        dw_event events[16];
        CHECK_EQ(fixture_drain(&r.fx, events), 0);
        fixture_drop(&r.fx, &r.w);
        fixture_close(&r.fx);
    }
}

TEST_EACH(a_flag_is_set_before_the_event_lets_go_of_the_connection, watch_setup,
          setup, thread_setups)
{
    race r = {.rc = -1};
    fixture_open(&r.fx, setup);
    fixture_watch(&r.fx, &r.w);
    gate_close("watch:event-locked");
    gate_close("watch:event-fired");
    net_leave(&r.w.net, LEAVE_FIN);
    gate_wait("watch:event-locked");
    CHECK_EQ(fixture_reason(&r.fx, &r.w), DW_REASON_NONE);
    gate_open("watch:event-locked");
    gate_wait("watch:event-fired");
    CHECK_EQ(fixture_reason(&r.fx, &r.w), DW_REASON_FIN);
    gate_open("watch:event-fired");
    fixture_drop(&r.fx, &r.w);
    fixture_close(&r.fx);
}

static void *detach(void *arg)
{
    race *r = arg;
    r->rc = dw_watcher_detach(r->fx.watcher, r->w.conn);
    atomic_store(&r->is_done, true);
    return NULL;
}

static void note_whether_done(void *arg)
{
    race *r = arg;
    r->was_done = atomic_load(&r->is_done);
}

TEST_EACH(detach_waits_for_the_thread_that_is_inside, watch_setup, setup,
          thread_setups)
{
    race r = {.rc = -1};
    fixture_open(&r.fx, setup);
    fixture_watch(&r.fx, &r.w);
    gate_close("watch:event-locked");
    gate_run("watch:event-fired", note_whether_done, &r);
    int num_detaches = gate_count("watch:detach-begin");
    net_leave(&r.w.net, LEAVE_FIN);
    gate_wait("watch:event-locked");
    race_start(&r, detach);
    WAIT_UNTIL(gate_count("watch:detach-begin") > num_detaches);
    race_give_grace(&r);
    CHECK(!atomic_load(&r.is_done));
    gate_open("watch:event-locked");
    race_join(&r);
    CHECK(!r.was_done);
    CHECK_EQ(r.rc, 0);
    /* The event came first, so the watch fired; detach took it back. */
    CHECK_EQ(fixture_reason(&r.fx, &r.w), DW_REASON_FIN);
    fixture_settle(&r.fx);
    dw_event events[16];
    CHECK_EQ(fixture_drain(&r.fx, events), 0);
    CHECK_EQ(fixture_stats(&r.fx).num_stale_events, 0);
    fixture_drop(&r.fx, &r.w);
    fixture_close(&r.fx);
}

static void lose_in_hook(void *arg)
{
    race *r = arg;
    CHECK_EQ(dw_watcher_lost(r->fx.watcher, r->w.conn, DW_REASON_OWNER_CLOSED),
             1);
}

TEST_EACH(the_owners_word_that_overtakes_the_event_decides_the_reason,
          watch_setup, setup, all_setups)
{
    race r = {.rc = -1};
    fixture_open(&r.fx, setup);
    fixture_watch(&r.fx, &r.w);
    leave_before_lock(&r, LEAVE_FIN, lose_in_hook);
    UNTIL(&r.fx, fixture_stats(&r.fx).num_second_sources == 1);
    CHECK_EQ(fixture_reason(&r.fx, &r.w), DW_REASON_OWNER_CLOSED);
    dw_event events[16];
    CHECK_EQ(fixture_drain(&r.fx, events), 1);
    CHECK_EQ(events[0].reason, DW_REASON_OWNER_CLOSED);
    fixture_drop(&r.fx, &r.w);
    fixture_close(&r.fx);
}

static void reuse_number(void *arg)
{
    race *r = arg;
    int number = r->w.net.server;
    r->next = (watched){.net = net_open(r->fx.setup->kind)};
    CHECK_EQ(dup2(r->next.net.server, number), number);
    net_close_end(&r->next.net.server);
    r->next.net.server = number;
    r->w.net.server = -1;
}

TEST_EACH(an_event_that_finds_the_number_reused_is_not_read_off_the_new_socket,
          watch_setup, setup, all_setups)
{
    race r = {.rc = -1};
    fixture_open(&r.fx, setup);
    fixture_watch(&r.fx, &r.w);
    leave_before_lock(&r, LEAVE_HALF_CLOSE, reuse_number);
    /* Whether the FIN could be told first or not: the owner closed it. */
    UNTIL(&r.fx,
          fixture_info(&r.fx, &r.w).seen & DW_MASK(DW_REASON_OWNER_CLOSED));
    CHECK(fixture_reason(&r.fx, &r.w) != DW_REASON_NONE);
    CHECK_EQ(fixture_info(&r.fx, &r.w).unread, -1);
    CHECK_EQ(dw_watcher_detach(r.fx.watcher, r.w.conn), 0);
    CHECK_EQ(dw_watcher_attach(r.fx.watcher, r.next.net.server, &r.next.conn),
             0);
    CHECK_EQ(fixture_arm(&r.fx, &r.next, DW_MASK_ANY, 0), 0);
    net_leave(&r.next.net, LEAVE_FIN);
    UNTIL(&r.fx, fixture_reason(&r.fx, &r.next) == DW_REASON_FIN);
    fixture_drop(&r.fx, &r.w);
    fixture_drop(&r.fx, &r.next);
    fixture_close(&r.fx);
}

TEST(a_connection_replaced_within_a_batch_of_events_is_left_alone)
{
    race r = {.rc = -1};
    fixture_open(&r.fx, &tcp_setups[1]);
    CHECK_EQ(r.fx.setup->driver, DW_DRIVER_LOOP);
    watched first;
    fixture_watch(&r.fx, &first);
    fixture_watch(&r.fx, &r.w);
    net_leave(&first.net, LEAVE_FIN);
    net_leave(&r.w.net, LEAVE_FIN);
    /* The first event finds the second one's connection replaced. */
    gate_run("watch:event-before-lock", replace_connection, &r);
    CHECK(dw_watcher_poll(r.fx.watcher, -1) >= 1);
    CHECK_EQ(fixture_reason(&r.fx, &first), DW_REASON_FIN);
    CHECK_EQ(fixture_reason(&r.fx, &r.next), DW_REASON_NONE);
    CHECK_EQ(fixture_stats(&r.fx).num_stale_events, 1);
    fixture_drop(&r.fx, &first);
    fixture_drop(&r.fx, &r.w);
    fixture_drop(&r.fx, &r.next);
    fixture_close(&r.fx);
}
