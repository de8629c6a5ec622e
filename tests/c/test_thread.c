/* The native thread: what it takes part in, and what it leaves alone. */
#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "dw_fixture.h"
#include "dw_gate.h"
#include "dw_thread.h"

#define NUM_CLIENTS 32
#define NUM_THREADS 4
#define NUM_ROUNDS  50

/* Reads a file of the watcher's thread, the one that is not the main one and
 * has our name. RETURNS: false if there is none. */
static bool read_thread_file(const char *file, char *out, size_t size)
{
    DIR *tasks = opendir("/proc/self/task");
    CHECK(tasks);
    bool is_found = false;
    struct dirent *entry;
    while (!is_found && (entry = readdir(tasks))) {
        if (entry->d_name[0] == '.' || atoi(entry->d_name) == getpid())
            continue;
        char path[300], name[64] = "";
        snprintf(path, sizeof path, "/proc/self/task/%s/comm", entry->d_name);
        FILE *comm = fopen(path, "re");
        if (!comm)
            continue;
        is_found =
            fgets(name, sizeof name, comm) && !strncmp(name, "dw-watcher", 10);
        fclose(comm);
        if (!is_found)
            continue;
        snprintf(path, sizeof path, "/proc/self/task/%s/%s", entry->d_name,
                 file);
        FILE *wanted = fopen(path, "re");
        CHECK(wanted);
        out[fread(out, 1, size - 1, wanted)] = '\0';
        fclose(wanted);
    }
    closedir(tasks);
    return is_found;
}

TEST_EACH(the_thread_has_a_name_and_blocks_all_signals, watch_setup, setup,
          thread_setups)
{
    fixture fx;
    watched w;
    fixture_open(&fx, setup);
    /* glibc blocks all signals in a thread that has not begun yet. */
    fixture_watch(&fx, &w);
    net_leave(&w.net, LEAVE_FIN);
    WAIT_UNTIL(fixture_reason(&fx, &w) == DW_REASON_FIN);
    char status[4096];
    WAIT_UNTIL(read_thread_file("status", status, sizeof status));
    const char *blocked = strstr(status, "SigBlk:");
    CHECK(blocked);
    unsigned long long mask = strtoull(blocked + strlen("SigBlk:"), NULL, 16);
    for (int number = 1; number < 32; number++) {
        if (number != SIGKILL && number != SIGSTOP)
            CHECK(mask >> (number - 1) & 1);
    }
    fixture_drop(&fx, &w);
    fixture_close(&fx);
}

/* The length of a thread's turn at the CPU; 0 for the kernel's own choice. */
static uint64_t turn_ns_of(int tid)
{
    uint64_t attr[6]; /* sched_attr; the fourth is sched_runtime */
    CHECK_EQ(syscall(SYS_sched_getattr, tid, attr, sizeof attr, 0), 0);
    return attr[3];
}

static void *get_short_turns(void *out)
{
    dw_thread_prefer_short_turns();
    *(uint64_t *)out = turn_ns_of(0);
    return NULL;
}

TEST_EACH(the_thread_asks_for_short_turns_where_the_kernel_grants_them,
          watch_setup, setup, thread_setups)
{
    pthread_t other;
    uint64_t granted_ns;
    CHECK_EQ(pthread_create(&other, NULL, get_short_turns, &granted_ns), 0);
    CHECK_EQ(pthread_join(other, NULL), 0);
    CHECK(granted_ns == 100000 || granted_ns == 0); /* 0: before Linux 6.12 */
    uint64_t ours_ns = turn_ns_of(0);

    fixture fx;
    fixture_open(&fx, setup);
    char stat[4096];
    WAIT_UNTIL(read_thread_file("stat", stat, sizeof stat) &&
               turn_ns_of(atoi(stat)) == granted_ns);
    CHECK_EQ(turn_ns_of(0), ours_ns);
    fixture_close(&fx);
}

TEST(who_makes_a_watcher_keeps_its_own_signal_mask)
{
    sigset_t usr1, after;
    sigemptyset(&usr1);
    sigaddset(&usr1, SIGUSR1);
    CHECK(!pthread_sigmask(SIG_SETMASK, &usr1, NULL));
    fixture fx;
    fixture_open(&fx, &thread_setups[0]);
    CHECK(!pthread_sigmask(SIG_SETMASK, NULL, &after));
    CHECK_EQ(sigismember(&after, SIGUSR1), 1);
    CHECK_EQ(sigismember(&after, SIGUSR2), 0);
    fixture_close(&fx);
}

TEST_EACH(a_signal_to_the_process_never_lands_on_the_thread, watch_setup, setup,
          thread_setups)
{
    fixture fx;
    fixture_open(&fx, setup);
    fixture_settle(&fx);
    sigset_t usr1;
    sigemptyset(&usr1);
    sigaddset(&usr1, SIGUSR1);
    CHECK_EQ(pthread_sigmask(SIG_BLOCK, &usr1, NULL), 0);
    /* Its default action ends the process, were any thread to take it. */
    CHECK_EQ(kill(getpid(), SIGUSR1), 0);
    fixture_settle(&fx);
    CHECK_EQ(sigtimedwait(&usr1, NULL, &(struct timespec){.tv_sec = 10}),
             SIGUSR1);
    fixture_close(&fx);
}

typedef struct {
    fixture fx;
    atomic_int rc;
} polling;

static void ignore_signal(int number)
{
    (void)number;
}

static void *poll_once(void *arg)
{
    polling *p = arg;
    atomic_store(&p->rc, dw_watcher_poll(p->fx.watcher, -1));
    return NULL;
}

TEST(a_signal_ends_a_poll_of_the_loop_driver_without_an_error)
{
    polling p = {.rc = 1};
    fixture_open(&p.fx, &tcp_setups[1]);
    CHECK_EQ(p.fx.setup->driver, DW_DRIVER_LOOP);
    struct sigaction action = {.sa_handler = ignore_signal};
    CHECK_EQ(sigaction(SIGUSR1, &action, NULL), 0);
    pthread_t thread;
    CHECK_EQ(pthread_create(&thread, NULL, poll_once, &p), 0);
    /* Again and again, since the first may come before it waits. */
    WAIT_UNTIL(pthread_kill(thread, SIGUSR1) || atomic_load(&p.rc) != 1);
    CHECK_EQ(pthread_join(thread, NULL), 0);
    CHECK_EQ(atomic_load(&p.rc), 0);
    fixture_close(&p.fx);
}

TEST_EACH(one_thread_a_watcher_and_none_with_the_loop_driver, watch_setup,
          setup, tcp_setups)
{
    int before = dw_test_count_threads();
    fixture fx;
    fixture_open(&fx, setup);
    CHECK_EQ(dw_test_count_threads() - before,
             setup->driver == DW_DRIVER_THREAD);
    watched w[8];
    for (int i = 0; i < 8; i++)
        fixture_watch(&fx, &w[i]);
    CHECK_EQ(dw_test_count_threads() - before,
             setup->driver == DW_DRIVER_THREAD);
    for (int i = 0; i < 8; i++)
        fixture_drop(&fx, &w[i]);
    fixture_close(&fx);
}

TEST(request_bytes_do_not_wake_epoll)
{
    fixture fx;
    fixture_open(&fx, &tcp_setups[0]);
    watched w;
    fixture_watch(&fx, &w);
    fixture_settle(&fx);
    uint64_t before = fixture_stats(&fx).num_wakeups;
    fixture_settle(&fx);
    uint64_t by_settling = fixture_stats(&fx).num_wakeups - before;
    before = fixture_stats(&fx).num_wakeups;
    for (int i = 0; i < 100; i++) {
        net_send(w.net.client, 100);
        if (i % 2)
            net_receive(w.net.server, 150); /* so that some lie unread */
    }
    fixture_settle(&fx);
    CHECK_EQ(fixture_stats(&fx).num_wakeups - before, by_settling);
    CHECK_EQ(fixture_reason(&fx, &w), DW_REASON_NONE);
    fixture_drop(&fx, &w);
    fixture_close(&fx);
}

/* What stays as it is may be told once; told again and again it would wake the
 * thread thousands of times in the time that this takes. */
static void check_not_busy(fixture *fx)
{
    uint64_t before = fixture_stats(fx).num_wakeups;
    for (int i = 0; i < NUM_ROUNDS; i++)
        fixture_settle(fx);
    /* A round is an attach, an event and a detach; a blind connection is looked
     * at by a timer. */
    CHECK(fixture_stats(fx).num_wakeups - before <= 4 * NUM_ROUNDS);
}

static void half_close(net_pair *net)
{
    net_leave(net, LEAVE_HALF_CLOSE);
}

static void reset(net_pair *net)
{
    net_leave(net, LEAVE_RST);
}

static void shut_down_ours(net_pair *net)
{
    CHECK_EQ(shutdown(net->server, SHUT_RDWR), 0);
}

static void leave_bytes_unread(net_pair *net)
{
    net_send(net->client, 100);
}

typedef struct {
    const char *label;
    void (*enter)(net_pair *net);
    int reason;
} lasting_state;

static const lasting_state lasting_states[] = {
    {"half-closed", half_close, DW_REASON_FIN},
    {"reset", reset, DW_REASON_RESET},
    {"our own shutdown", shut_down_ours, DW_REASON_NONE},
    {"unread bytes", leave_bytes_unread, DW_REASON_NONE},
};

TEST_CROSS(no_state_that_lasts_keeps_the_thread_busy, lasting_state, state,
           lasting_states, watch_setup, setup, thread_setups)
{
    fixture fx;
    fixture_open(&fx, setup);
    watched w;
    fixture_watch(&fx, &w);
    state->enter(&w.net);
    UNTIL(&fx, fixture_reason(&fx, &w) == state->reason);
    check_not_busy(&fx);
    CHECK_EQ(fixture_reason(&fx, &w), state->reason);
    fixture_drop(&fx, &w);
    fixture_close(&fx);
}

/* Leaving clients, armed and disarmed watches on one side; close on the other. */
typedef struct {
    fixture fx;
    watched w[NUM_CLIENTS];
    atomic_int num_rounds;
    atomic_bool is_closed;
} load_test;

static void *arm_and_disarm(void *arg)
{
    load_test *load = arg;
    while (!atomic_load(&load->is_closed)) {
        for (int i = 0; i < NUM_CLIENTS; i++) {
            dw_watch_id watch;
            int rc = dw_watcher_arm(load->fx.watcher, load->w[i].conn,
                                    load->w[i].flag, DW_MASK_ANY,
                                    load->fx.mailbox, 0, &watch);
            CHECK(rc == 0 || rc == 1 || rc == DW_ECLOSED);
            if (rc < 0)
                continue;
            rc = dw_watcher_disarm(load->fx.watcher, load->w[i].conn, watch);
            CHECK(rc == 0 || rc == 1 || rc == DW_ECLOSED);
        }
        atomic_fetch_add(&load->num_rounds, 1);
    }
    return NULL;
}

static void *leave_one_by_one(void *arg)
{
    load_test *load = arg;
    for (int i = 0; i < NUM_CLIENTS; i++) {
        int rounds = atomic_load(&load->num_rounds);
        net_leave(&load->w[i].net, i % 2 ? LEAVE_FIN : LEAVE_RST);
        WAIT_UNTIL(atomic_load(&load->num_rounds) != rounds ||
                   atomic_load(&load->is_closed));
    }
    return NULL;
}

TEST_EACH(close_under_load_ends_and_leaves_nothing, watch_setup, setup,
          thread_setups)
{
    static load_test load;
    fixture_open(&load.fx, setup);
    for (int i = 0; i < NUM_CLIENTS; i++)
        fixture_watch(&load.fx, &load.w[i]);
    pthread_t arming, leaving;
    CHECK_EQ(pthread_create(&arming, NULL, arm_and_disarm, &load), 0);
    CHECK_EQ(pthread_create(&leaving, NULL, leave_one_by_one, &load), 0);
    WAIT_UNTIL(fixture_stats(&load.fx).num_fired >= NUM_CLIENTS / 2);
    dw_watcher_close(load.fx.watcher);
    atomic_store(&load.is_closed, true);
    pthread_join(arming, NULL);
    pthread_join(leaving, NULL);
    for (int i = 0; i < NUM_CLIENTS; i++) {
        dw_flag_release(load.fx.flags, load.w[i].flag);
        net_close(&load.w[i].net);
    }
    dw_mailbox_close(load.fx.mailbox);
    dw_watcher_free(load.fx.watcher);
    dw_flags_free(load.fx.flags);
}

typedef struct {
    fixture fx;
    int number;
    int reuse;
    atomic_bool is_done;
} mailbox_close;

static void *close_mailbox(void *arg)
{
    mailbox_close *c = arg;
    c->number = dw_mailbox_fd(c->fx.mailbox);
    dw_mailbox_close(c->fx.mailbox);
    /* What comes by that number next belongs to somebody else. */
    c->reuse = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    atomic_store(&c->is_done, true);
    return NULL;
}

TEST_EACH(a_closed_mailboxs_fd_is_never_written_by_who_was_posting, watch_setup,
          setup, thread_setups)
{
    const char *points[] = {"watch:event-fired", "mailbox:ring-owed"};
    for (int i = 0; i < 2; i++) {
        mailbox_close c = {.reuse = -1};
        fixture_open(&c.fx, setup);
        watched w;
        fixture_watch(&c.fx, &w);
        gate_close(points[i]);
        net_leave(&w.net, LEAVE_FIN);
        gate_wait(points[i]);
        pthread_t thread;
        CHECK_EQ(pthread_create(&thread, NULL, close_mailbox, &c), 0);
        /* A wrong close is done by the end of this; a right one waits. */
        for (int turn = 0; turn < 100 && !atomic_load(&c.is_done); turn++)
            usleep(200);
        CHECK(!atomic_load(&c.is_done));
        gate_open(points[i]);
        CHECK_EQ(pthread_join(thread, NULL), 0);
        fixture_settle(&c.fx);
        uint64_t count;
        CHECK_EQ(c.reuse, c.number);
        CHECK_EQ(read(c.reuse, &count, sizeof count), -1);
        close(c.reuse);
        c.fx.mailbox = NULL;
        fixture_drop(&c.fx, &w);
        fixture_close(&c.fx);
    }
}

static void *serve_clients(void *arg)
{
    fixture *fx = arg;
    for (int round = 0; round < NUM_ROUNDS; round++) {
        watched w;
        fixture_watch(fx, &w);
        if (round % 3 == 0)
            CHECK_EQ(dw_watcher_disarm(fx->watcher, w.conn, w.watch), 0);
        net_leave(&w.net, round % 2 ? LEAVE_FIN : LEAVE_RST);
        if (round % 3 == 1)
            WAIT_UNTIL(fixture_reason(fx, &w) != DW_REASON_NONE);
        fixture_drop(fx, &w);
    }
    return NULL;
}

TEST_EACH(many_threads_watch_clients_of_their_own_on_one_watcher, watch_setup,
          setup, thread_setups)
{
    fixture fx;
    fixture_open(&fx, setup);
    pthread_t threads[NUM_THREADS];
    for (int i = 0; i < NUM_THREADS; i++)
        CHECK_EQ(pthread_create(&threads[i], NULL, serve_clients, &fx), 0);
    for (int i = 0; i < NUM_THREADS; i++)
        CHECK_EQ(pthread_join(threads[i], NULL), 0);
    dw_event events[16];
    CHECK_EQ(fixture_drain(&fx, events), 0);
    fixture_close(&fx);
}
