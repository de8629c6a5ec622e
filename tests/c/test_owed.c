/* Between an event and the write that tells its mailbox of it (dw_mailbox.h,
 * OWED), and who has to wait for whom there. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "dw_fixture.h"
#include "dw_gate.h"

/* How long a wrong core gets to go on where a right one waits. */
#define GRACE_TURNS 100

/* One call on a thread of its own. */
typedef struct {
    fixture fx;
    void (*call)(fixture *fx);
    pthread_t thread;
    atomic_int tid;
    atomic_bool is_done;
} caller;

static void *run_call(void *arg)
{
    caller *it = arg;
    atomic_store(&it->tid, gettid());
    it->call(&it->fx);
    atomic_store(&it->is_done, true);
    return NULL;
}

static void call_start(caller *it, void (*call)(fixture *fx))
{
    it->call = call;
    CHECK(!pthread_create(&it->thread, NULL, run_call, it));
}

static void check_it_waits(caller *it)
{
    for (int i = 0; i < GRACE_TURNS; i++)
        usleep(200);
    CHECK(!atomic_load(&it->is_done));
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

    /* The thread has posted to both and written to neither. */
    gate_close("watch:event-unlocked");
    net_leave(&w.net, LEAVE_FIN);
    gate_wait("watch:event-unlocked");
    CHECK(!net_is_readable(dw_mailbox_fd(fx.mailbox)));
    CHECK_EQ(dw_mailbox_drain(fx.mailbox, events, 16), 1);
    CHECK_EQ(dw_watcher_lost(fx.watcher, other.conn, DW_REASON_RESET), 1);
    gate_open("watch:event-unlocked");
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

static void close_mailbox(fixture *fx)
{
    dw_mailbox_close(fx->mailbox);
    fx->mailbox = NULL;
}

TEST_EACH(close_waits_for_the_write_that_is_owed, watch_setup, setup,
          thread_setups)
{
    caller it = {.is_done = false};
    watched w;
    fixture_open(&it.fx, setup);
    fixture_watch(&it.fx, &w);
    gate_close("watch:event-unlocked");
    net_leave(&w.net, LEAVE_FIN);
    gate_wait("watch:event-unlocked");
    call_start(&it, close_mailbox);
    check_it_waits(&it);
    gate_open("watch:event-unlocked");
    pthread_join(it.thread, NULL);
    fixture_drop(&it.fx, &w);
    fixture_close(&it.fx);
}

static void poll_until_closed(fixture *fx)
{
    int rc;
    do {
        rc = dw_watcher_poll(fx->watcher, -1);
    } while (rc >= 0);
    CHECK_EQ(rc, DW_ECLOSED);
}

static void close_watcher(fixture *fx)
{
    dw_watcher_close(fx->watcher);
}

static const watch_setup loop_only[] = {
    {"epoll loop", "epoll", DW_DRIVER_LOOP, NET_TCP},
};

TEST_EACH(close_waits_for_the_caller_who_polls, watch_setup, setup, loop_only)
{
    caller polling = {.is_done = false};
    watched w;
    fixture_open(&polling.fx, setup);
    fixture_watch(&polling.fx, &w);
    caller closing = {.fx = polling.fx};
    gate_close("watch:event-before-lock");
    call_start(&polling, poll_until_closed);
    net_leave(&w.net, LEAVE_FIN);
    gate_wait("watch:event-before-lock");
    call_start(&closing, close_watcher);
    check_it_waits(&closing);
    gate_open("watch:event-before-lock");
    pthread_join(polling.thread, NULL);
    pthread_join(closing.thread, NULL);
    dw_flag_release(polling.fx.flags, w.flag);
    net_close(&w.net);
    fixture_close(&polling.fx);
}

/* What is left of them shows as a leak under AddressSanitizer. */
TEST_EACH(close_drops_all_watches_fired_and_armed, watch_setup, setup,
          tcp_setups)
{
    watched w;
    fixture fx;
    dw_watch_id id;
    fixture_open(&fx, setup);
    fixture_attach(&fx, &w);
    for (unsigned reason = DW_REASON_FIN; reason <= DW_REASON_RESET; reason++) {
        for (int i = 0; i < 2; i++)
            CHECK_EQ(dw_watcher_arm(fx.watcher, w.conn, (dw_flag){0},
                                    DW_MASK(reason), fx.mailbox, 0, &id),
                     0);
    }
    CHECK_EQ(dw_watcher_lost(fx.watcher, w.conn, DW_REASON_RESET), 1);
    close_watcher(&fx);
    net_close(&w.net);
    fixture_close(&fx);
}

static void use_the_parents_mailbox(void *arg)
{
    fixture *fx = arg;
    dw_event events[16];
    dw_mailbox *made;
    CHECK_EQ(dw_mailbox_fd(fx->mailbox), DW_EFORKED);
    CHECK_EQ(dw_mailbox_drain(fx->mailbox, events, 16), DW_EFORKED);
    CHECK_EQ(dw_mailbox_create(fx->watcher, &made), DW_EFORKED);
    dw_mailbox_wake(fx->mailbox);
    dw_watcher_free(fx->watcher);
    dw_mailbox_close(fx->mailbox);
}

TEST_EACH(a_child_takes_nothing_from_its_parents_mailbox, watch_setup, setup,
          tcp_setups)
{
    dw_event events[16];
    watched w;
    fixture fx;
    fixture_open(&fx, setup);
    fixture_watch(&fx, &w);
    int fd = dw_mailbox_fd(fx.mailbox);
    CHECK_IN_CHILD(use_the_parents_mailbox, &fx);
    CHECK(!net_is_readable(fd));
    net_leave(&w.net, LEAVE_FIN);
    UNTIL(&fx, net_is_readable(fd));
    CHECK_IN_CHILD(use_the_parents_mailbox, &fx);
    CHECK(net_is_readable(fd));
    CHECK_EQ(fixture_drain(&fx, events), 1);
    fixture_drop(&fx, &w);
    fixture_close(&fx);
}

static void poll_once(fixture *fx)
{
    CHECK_EQ(dw_watcher_poll(fx->watcher, -1), DW_ECLOSED);
}

/* Asleep in the kernel, by /proc: for poll_once that can only be the wait. */
static bool is_asleep(caller *it)
{
    char path[64], line[512];
    snprintf(path, sizeof path, "/proc/self/task/%d/stat",
             atomic_load(&it->tid));
    FILE *stat = fopen(path, "re");
    if (!stat)
        return false; /* not started yet */
    bool is_read = fgets(line, sizeof line, stat);
    fclose(stat);
    return is_read && strstr(line, ") S ");
}

TEST_EACH(close_ends_the_wait_of_the_caller_who_polls, watch_setup, setup,
          loop_only)
{
    caller polling = {.is_done = false};
    fixture_open(&polling.fx, setup);
    call_start(&polling, poll_once);
    WAIT_UNTIL(is_asleep(&polling));
    close_watcher(&polling.fx);
    pthread_join(polling.thread, NULL);
    fixture_close(&polling.fx);
}
