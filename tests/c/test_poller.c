/* What both pollers promise (dw_poller.h), without the watch layer above. */
#include "dw_poller.h"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "dw_clock.h"
#include "dw_net.h"
#include "dw_test.h"

#define MAX_EVENTS 8
#define NS_PER_MS  1000000U

typedef struct {
    const char *label;
    const dw_poller_ops *ops;
} poller_case;

static const poller_case pollers[] = {
    {"epoll", &dw_poller_epoll},
    {"poll", &dw_poller_poll},
};

typedef struct {
    const dw_poller_ops *ops;
    dw_poller *poller;
    int fds[2]; /* the watched end and its peer */
    dw_poll_event events[MAX_EVENTS];
} setup;

static void open_pair(int fds[2])
{
    CHECK(!socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds));
}

static void close_pair(int fds[2])
{
    close(fds[0]);
    close(fds[1]);
}

static void start(setup *s, const poller_case *param)
{
    s->ops = param->ops;
    CHECK_EQ(s->ops->open(&s->poller), DW_OK);
    open_pair(s->fds);
}

static void finish(setup *s)
{
    s->ops->close(s->poller);
    close_pair(s->fds);
}

static int wait_ms(setup *s, int timeout_ms)
{
    return s->ops->wait(s->poller, s->events, MAX_EVENTS, timeout_ms);
}

TEST_EACH(what_cannot_be_watched_is_refused, poller_case, param, pollers)
{
    setup s;
    start(&s, param);
    FILE *file = tmpfile();
    int closed = dup(s.fds[0]);
    close(closed);

    CHECK_EQ(s.ops->add(s.poller, closed, 1), DW_EBADF);
    CHECK_EQ(s.ops->add(s.poller, fileno(file), 1), DW_ENOTSOCK);
    CHECK_EQ(s.ops->add(s.poller, s.fds[0], 1), DW_OK);
    CHECK_EQ(s.ops->add(s.poller, s.fds[0], 2), DW_EEXIST);
    CHECK_EQ(s.ops->remove(s.poller, s.fds[1], 3), -ENOENT);
    fclose(file);
    finish(&s);
}

TEST_EACH(each_change_is_reported_once_with_its_key, poller_case, param,
          pollers)
{
    const uint64_t key = (uint64_t)7 << 32 | 9;
    setup s;
    start(&s, param);

    CHECK_EQ(s.ops->add(s.poller, s.fds[0], key), DW_OK);
    CHECK_EQ(wait_ms(&s, 0), 0);
    CHECK(!shutdown(s.fds[1], SHUT_WR));
    CHECK_EQ(wait_ms(&s, -1), 1);
    CHECK_EQ(s.events[0].key, key);
    CHECK_EQ(s.events[0].bits, DW_POLL_EOF);
    CHECK_EQ(wait_ms(&s, 0), 0);
    /* Closed with a byte of ours unread: a reset. */
    CHECK_EQ(write(s.fds[0], "x", 1), 1);
    close(s.fds[1]);
    CHECK_EQ(wait_ms(&s, -1), 1);
    CHECK_EQ(s.events[0].key, key);
    CHECK(s.events[0].bits & DW_POLL_HUP);
    CHECK(s.events[0].bits & DW_POLL_ERR);
    CHECK_EQ(wait_ms(&s, 0), 0);
    finish(&s);
}

TEST_EACH(a_peer_that_left_before_add_is_reported, poller_case, param, pollers)
{
    setup s;
    start(&s, param);
    close(s.fds[1]);
    CHECK_EQ(s.ops->add(s.poller, s.fds[0], 1), DW_OK);
    CHECK_EQ(wait_ms(&s, -1), 1);
    CHECK(s.events[0].bits & DW_POLL_EOF);
    finish(&s);
}

TEST_EACH(what_was_removed_is_not_reported, poller_case, param, pollers)
{
    int first[2], last[2];
    setup s;
    start(&s, param);
    open_pair(first);
    open_pair(last);
    CHECK_EQ(s.ops->add(s.poller, first[0], 1), DW_OK);
    CHECK_EQ(s.ops->add(s.poller, s.fds[0], 2), DW_OK);
    CHECK_EQ(s.ops->add(s.poller, last[0], 3), DW_OK);
    CHECK(!shutdown(first[1], SHUT_WR));
    CHECK(!shutdown(s.fds[1], SHUT_WR));
    CHECK(!shutdown(last[1], SHUT_WR));
    CHECK_EQ(s.ops->remove(s.poller, first[0], 1), DW_OK);
    CHECK_EQ(s.ops->remove(s.poller, first[0], 1), -ENOENT);
    CHECK_EQ(wait_ms(&s, -1), 2);
    CHECK_EQ(s.events[0].key + s.events[1].key, 2 + 3);
    close_pair(first);
    close_pair(last);
    finish(&s);
}

TEST_EACH(events_that_do_not_fit_come_with_the_next_wait, poller_case, param,
          pollers)
{
    enum { NUM_PAIRS = 40, NUM_PER_WAIT = 3 };
    int pairs[NUM_PAIRS][2];
    int num_seen[NUM_PAIRS] = {0};
    int num_events = 0;
    setup s;
    start(&s, param);

    for (int i = 0; i < NUM_PAIRS; i++) {
        open_pair(pairs[i]);
        CHECK_EQ(s.ops->add(s.poller, pairs[i][0], (uint64_t)i), DW_OK);
        CHECK(!shutdown(pairs[i][1], SHUT_WR));
    }
    while (num_events < NUM_PAIRS) {
        int num = s.ops->wait(s.poller, s.events, NUM_PER_WAIT, -1);
        CHECK(1 <= num && num <= NUM_PER_WAIT);
        for (int i = 0; i < num; i++)
            num_seen[s.events[i].key]++;
        num_events += num;
    }
    CHECK_EQ(wait_ms(&s, 0), 0);
    for (int i = 0; i < NUM_PAIRS; i++) {
        CHECK_EQ(num_seen[i], 1);
        CHECK_EQ(s.ops->remove(s.poller, pairs[i][0], (uint64_t)i), DW_OK);
        close_pair(pairs[i]);
    }
    finish(&s);
}

TEST_EACH(a_wake_ends_the_next_wait_and_no_other, poller_case, param, pollers)
{
    setup s;
    start(&s, param);
    CHECK_EQ(s.ops->wake(s.poller), DW_OK);
    CHECK_EQ(s.ops->wake(s.poller), DW_OK);
    CHECK_EQ(wait_ms(&s, -1), 0);
    uint64_t before_ns = dw_clock_ns();
    CHECK_EQ(wait_ms(&s, 3), 0);
    CHECK(dw_clock_ns() - before_ns >= 3 * NS_PER_MS);
    finish(&s);
}

/* A thread that waits, once. */
typedef struct {
    setup *s;
    pthread_t thread;
    atomic_int thread_id;
    atomic_int rc;
    atomic_bool is_back;
} waiter;

static void *wait_in_thread(void *arg)
{
    waiter *self = arg;
    atomic_store(&self->thread_id, gettid());
    atomic_store(&self->rc, wait_ms(self->s, -1));
    atomic_store(&self->is_back, true);
    return NULL;
}

static void wait_start(waiter *self, setup *s)
{
    *self = (waiter){.s = s};
    CHECK(!pthread_create(&self->thread, NULL, wait_in_thread, self));
}

/* Is it in its system call? Nothing else of wait sleeps. */
static bool is_asleep(waiter *self)
{
    char path[64], text[512];
    snprintf(path, sizeof path, "/proc/self/task/%d/stat",
             atomic_load(&self->thread_id));
    FILE *file = fopen(path, "r");
    if (!file)
        return false; /* it has not told its id yet */
    size_t size = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    text[size] = '\0';
    const char *state = strrchr(text, ')');
    return state && state[2] == 'S';
}

static int wait_finish(waiter *self)
{
    pthread_join(self->thread, NULL);
    return atomic_load(&self->rc);
}

static void ignore(int signal_number)
{
    (void)signal_number;
}

TEST_EACH(a_signal_is_no_error, poller_case, param, pollers)
{
    struct sigaction action = {.sa_handler = ignore};
    waiter self;
    setup s;
    start(&s, param);
    CHECK(!sigaction(SIGUSR1, &action, NULL));
    wait_start(&self, &s);
    /* One that comes before the sleep has no effect, hence again. */
    WAIT_UNTIL(atomic_load(&self.is_back) ||
               pthread_kill(self.thread, SIGUSR1));
    CHECK_EQ(wait_finish(&self), 0);
    finish(&s);
}

TEST_EACH(what_is_added_during_a_wait_takes_part_in_it, poller_case, param,
          pollers)
{
    waiter self;
    setup s;
    start(&s, param);
    CHECK(!shutdown(s.fds[1], SHUT_WR));
    wait_start(&self, &s);
    CHECK_EQ(s.ops->add(s.poller, s.fds[0], 5), DW_OK);
    /* The add itself may have ended that wait. */
    if (!wait_finish(&self))
        CHECK_EQ(wait_ms(&s, -1), 1);
    CHECK_EQ(s.events[0].key, 5);
    finish(&s);
}

TEST_EACH(after_remove_the_owners_close_is_the_last, poller_case, param,
          pollers)
{
    char byte;
    setup s;
    start(&s, param);
    CHECK_EQ(s.ops->add(s.poller, s.fds[0], 1), DW_OK);
    for (int i = 0; i < 5; i++) {
        waiter self;
        int fds[2];
        open_pair(fds);
        CHECK_EQ(s.ops->add(s.poller, fds[0], 2), DW_OK);
        wait_start(&self, &s);
        /* A wake that was left over from the last time ends it at once. */
        WAIT_UNTIL(is_asleep(&self) || atomic_load(&self.is_back));
        CHECK_EQ(s.ops->remove(s.poller, fds[0], 2), DW_OK);
        close(fds[0]);
        CHECK_EQ(recv(fds[1], &byte, 1, MSG_DONTWAIT), 0);
        CHECK_EQ(s.ops->wake(s.poller), DW_OK);
        CHECK_EQ(wait_finish(&self), 0);
        close(fds[1]);
    }
    finish(&s);
}

TEST_EACH(ticks_come_beside_events_until_they_are_called_off, poller_case,
          param, pollers)
{
    setup s;
    start(&s, param);
    CHECK_EQ(s.ops->set_tick(s.poller, 0), DW_OK);
    CHECK_EQ(s.ops->add(s.poller, s.fds[0], 7), DW_OK);
    CHECK_EQ(s.ops->set_tick(s.poller, 60000), DW_OK);
    CHECK_EQ(s.ops->wait(s.poller, s.events, MAX_EVENTS, 0), 0);
    uint64_t start_ns = dw_clock_ns();
    CHECK_EQ(s.ops->set_tick(s.poller, 20), DW_OK);
    for (int i = 0; i < 3; i++) {
        CHECK_EQ(s.ops->wait(s.poller, s.events, MAX_EVENTS, 10000), 1);
        CHECK(s.events[0].key == DW_POLL_TICK);
        CHECK_EQ(s.events[0].bits, 0);
    }
    uint64_t took_ns = dw_clock_ns() - start_ns;
    CHECK(took_ns >= 3 * 20 * NS_PER_MS);
    CHECK(took_ns < UINT64_C(9000) * NS_PER_MS); /* not as often as wait ends */
    CHECK_EQ(s.ops->set_tick(s.poller, 0), DW_OK);
    CHECK_EQ(s.ops->wait(s.poller, s.events, MAX_EVENTS, 60), 0);
    shutdown(s.fds[1], SHUT_WR);
    CHECK_EQ(s.ops->wait(s.poller, s.events, MAX_EVENTS, 10000), 1);
    CHECK_EQ(s.events[0].key, 7);
    finish(&s);
}

TEST(bytes_do_not_wake_epoll_and_hide_nothing_from_it)
{
    setup s;
    start(&s, &pollers[0]);
    CHECK(!s.ops->is_blinded_by_unread);
    CHECK_EQ(s.ops->add(s.poller, s.fds[0], 1), DW_OK);
    CHECK_EQ(write(s.fds[1], "abc", 3), 3);
    CHECK_EQ(wait_ms(&s, 0), 0);
    CHECK(!shutdown(s.fds[1], SHUT_WR));
    CHECK_EQ(wait_ms(&s, -1), 1);
    CHECK_EQ(s.events[0].bits, DW_POLL_EOF);
    finish(&s);
}

/* What this thread has used: a wait that sleeps uses next to nothing. */
static uint64_t cpu_ns(void)
{
    struct timespec used;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used);
    return (uint64_t)used.tv_sec * 1000 * NS_PER_MS + (uint64_t)used.tv_nsec;
}

static long num_sleeps(void)
{
    struct rusage usage;
    CHECK(!getrusage(RUSAGE_THREAD, &usage));
    return usage.ru_nvcsw;
}

TEST(poll_says_when_it_goes_blind_and_when_it_sees_again)
{
    char bytes[3];
    setup s;
    start(&s, &pollers[1]);
    CHECK(s.ops->is_blinded_by_unread);
    CHECK_EQ(s.ops->add(s.poller, s.fds[0], 1), DW_OK);
    CHECK_EQ(write(s.fds[1], "abc", 3), 3);
    CHECK_EQ(wait_ms(&s, -1), 1);
    CHECK_EQ(s.events[0].bits, DW_POLL_BLIND);
    /* Neither does it spin, nor does its timer end the wait. */
    uint64_t before_ns = dw_clock_ns();
    uint64_t before_cpu_ns = cpu_ns();
    CHECK_EQ(wait_ms(&s, 100), 0);
    CHECK(dw_clock_ns() - before_ns >= 100 * NS_PER_MS);
    CHECK(cpu_ns() - before_cpu_ns < 20 * NS_PER_MS);

    CHECK_EQ(read(s.fds[0], bytes, 3), 3);
    CHECK_EQ(wait_ms(&s, -1), 1);
    CHECK_EQ(s.events[0].bits, 0);
    CHECK_EQ(write(s.fds[1], "abc", 3), 3);
    CHECK_EQ(wait_ms(&s, -1), 1);
    CHECK_EQ(s.events[0].bits, DW_POLL_BLIND);

    /* Blind as it is, the end shows once the bytes have been read. */
    CHECK(!shutdown(s.fds[1], SHUT_WR));
    CHECK_EQ(wait_ms(&s, 0), 0);
    CHECK_EQ(read(s.fds[0], bytes, 3), 3);
    CHECK_EQ(wait_ms(&s, -1), 1);
    CHECK_EQ(s.events[0].bits, DW_POLL_EOF);
    CHECK_EQ(wait_ms(&s, 0), 0);
    finish(&s);
}

TEST_EACH(an_error_that_ends_nothing_is_reported_once, poller_case, param,
          pollers)
{
    setup s;
    start(&s, param);
    net_pair net = net_open(NET_TCP);
    net_fill_error_queue(&net);
    CHECK_EQ(s.ops->add(s.poller, net.server, 1), DW_OK);
    CHECK_EQ(wait_ms(&s, 1000), 1);
    CHECK_EQ(s.events[0].bits, DW_POLL_ERR);
    CHECK_EQ(wait_ms(&s, 30), 0);
    s.ops->remove(s.poller, net.server, 1);
    net_close(&net);
    finish(&s);
}

TEST(poll_goes_back_to_sleep_once_the_doubt_is_gone)
{
    setup s;
    start(&s, &pollers[1]);
    net_pair net = net_open(NET_TCP);
    net_fill_error_queue(&net);
    CHECK_EQ(s.ops->add(s.poller, net.server, 1), DW_OK);
    for (int i = 0; i < 2; i++) {
        CHECK_EQ(wait_ms(&s, -1), 1);
        CHECK_EQ(s.events[0].bits, DW_POLL_ERR);
        s.ops->recheck(s.poller, net.server, 1);
    }
    net_drain_error_queue(&net);
    CHECK_EQ(wait_ms(&s, 50), 0);
    long before = num_sleeps();
    CHECK_EQ(wait_ms(&s, 200), 0);
    CHECK(num_sleeps() - before < 5);
    /* And it still sees. */
    net_send(net.client, 1);
    CHECK_EQ(wait_ms(&s, -1), 1);
    CHECK_EQ(s.events[0].bits, DW_POLL_BLIND);
    s.ops->remove(s.poller, net.server, 1);
    net_close(&net);
    finish(&s);
}

TEST(poll_keeps_no_timer_for_what_was_removed)
{
    setup s;
    start(&s, &pollers[1]);
    CHECK_EQ(s.ops->add(s.poller, s.fds[0], 1), DW_OK);
    CHECK_EQ(write(s.fds[1], "abc", 3), 3);
    CHECK_EQ(wait_ms(&s, -1), 1);
    CHECK_EQ(s.ops->remove(s.poller, s.fds[0], 1), DW_OK);
    /* Each turn of the timer would be one more sleep. */
    long before = num_sleeps();
    CHECK_EQ(wait_ms(&s, 200), 0);
    CHECK(num_sleeps() - before < 5);
    finish(&s);
}

TEST(poll_sees_an_unbelieved_end_again_and_again)
{
    setup s;
    start(&s, &pollers[1]);
    CHECK_EQ(s.ops->add(s.poller, s.fds[0], 1), DW_OK);
    CHECK(!shutdown(s.fds[1], SHUT_WR));
    for (int i = 0; i < 3; i++) {
        CHECK_EQ(wait_ms(&s, -1), 1);
        CHECK_EQ(s.events[0].bits, DW_POLL_EOF);
        s.ops->recheck(s.poller, s.fds[0], 1);
    }
    CHECK_EQ(wait_ms(&s, -1), 1);
    CHECK_EQ(wait_ms(&s, 30), 0);
    finish(&s);
}

static bool is_readable(int fd)
{
    struct pollfd polled = {.fd = fd, .events = POLLIN};
    return poll(&polled, 1, 0) == 1;
}

TEST(the_fd_of_epoll_is_readable_while_a_wait_would_return)
{
    setup s;
    start(&s, &pollers[0]);
    int fd = s.ops->fd(s.poller);
    CHECK_EQ(s.ops->add(s.poller, s.fds[0], 1), DW_OK);
    CHECK(!is_readable(fd));
    CHECK(!shutdown(s.fds[1], SHUT_WR));
    CHECK(is_readable(fd));
    CHECK_EQ(wait_ms(&s, 0), 1);
    CHECK(!is_readable(fd));
    CHECK_EQ(s.ops->wake(s.poller), DW_OK);
    CHECK(is_readable(fd));
    CHECK_EQ(wait_ms(&s, 0), 0);
    CHECK(!is_readable(fd));
    finish(&s);
}

TEST(poll_has_no_fd_to_hand_out)
{
    setup s;
    start(&s, &pollers[1]);
    CHECK_EQ(s.ops->fd(s.poller), DW_ENOTSUP);
    finish(&s);
}
