/* Closing a watcher that another thread polls: the loop driver's close. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "dw_fixture.h"
#include "dw_gate.h"

#define NUM_CALLERS 8

static const watch_setup loop_only[] = {
    {"epoll loop", "epoll", DW_DRIVER_LOOP, NET_TCP},
};

/* One call on a thread of its own. */
typedef struct {
    dw_watcher *watcher;
    pthread_t thread;
    atomic_int tid;
    atomic_bool is_done;
} caller;

static void *poll_until_closed(void *arg)
{
    caller *it = arg;
    int rc;
    do {
        rc = dw_watcher_poll(it->watcher, -1);
    } while (rc >= 0);
    CHECK_EQ(rc, DW_ECLOSED);
    return NULL;
}

static void *poll_once(void *arg)
{
    caller *it = arg;
    atomic_store(&it->tid, gettid());
    CHECK_EQ(dw_watcher_poll(it->watcher, -1), DW_ECLOSED);
    return NULL;
}

static void *close_it(void *arg)
{
    caller *it = arg;
    dw_watcher_close(it->watcher);
    atomic_store(&it->is_done, true);
    return NULL;
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

TEST_EACH(close_ends_the_wait_of_all_who_poll, watch_setup, setup, loop_only)
{
    fixture fx;
    fixture_open(&fx, setup);
    caller polling[NUM_CALLERS] = {0};
    for (int i = 0; i < NUM_CALLERS; i++) {
        caller *it = &polling[i];
        it->watcher = fx.watcher;
        CHECK(!pthread_create(&it->thread, NULL, poll_once, it));
        WAIT_UNTIL(is_asleep(it));
    }
    dw_watcher_close(fx.watcher);
    for (int i = 0; i < NUM_CALLERS; i++)
        pthread_join(polling[i].thread, NULL);
    fixture_close(&fx);
}

/* Ends a test of a close that has begun while who polls stands at the gate. */
static void finish_handling(fixture *fx, watched *w, caller *polling,
                            caller *closing)
{
    /* A wrong close is done by the end of this; a right one waits. */
    for (int turn = 0; turn < 100 && !atomic_load(&closing->is_done); turn++)
        usleep(200);
    CHECK(!atomic_load(&closing->is_done));
    gate_open("watch:event-before-lock");
    pthread_join(polling->thread, NULL);
    pthread_join(closing->thread, NULL);
    dw_flag_release(fx->flags, w->flag);
    net_close(&w->net);
    fixture_close(fx);
}

TEST_EACH(close_waits_for_who_is_handling_an_event, watch_setup, setup,
          loop_only)
{
    watched w;
    fixture fx;
    fixture_open(&fx, setup);
    fixture_watch(&fx, &w);
    caller polling = {.watcher = fx.watcher};
    caller closing = {.watcher = fx.watcher};
    gate_close("watch:event-before-lock");
    CHECK(!pthread_create(&polling.thread, NULL, poll_until_closed, &polling));
    net_leave(&w.net, LEAVE_FIN);
    gate_wait("watch:event-before-lock");
    CHECK(!pthread_create(&closing.thread, NULL, close_it, &closing));
    finish_handling(&fx, &w, &polling, &closing);
}

TEST_EACH(close_waits_for_each_of_those_who_poll, watch_setup, setup, loop_only)
{
    watched w;
    fixture fx;
    fixture_open(&fx, setup);
    fixture_watch(&fx, &w);
    caller polling = {.watcher = fx.watcher};
    caller closing = {.watcher = fx.watcher};
    gate_close("watch:event-before-lock");
    CHECK(!pthread_create(&polling.thread, NULL, poll_until_closed, &polling));
    net_leave(&w.net, LEAVE_FIN);
    gate_wait("watch:event-before-lock");
    /* One comes and goes meanwhile; the event is the other's. */
    CHECK_EQ(dw_watcher_poll(fx.watcher, 0), 0);
    CHECK(!pthread_create(&closing.thread, NULL, close_it, &closing));
    finish_handling(&fx, &w, &polling, &closing);
}
