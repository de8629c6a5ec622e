/* Sleeping on the flag table's doorbell. */
#include "dw_flags.h"

#include <pthread.h>
#include <signal.h>

#include "dw_clock.h"
#include "dw_gate.h"
#include "dw_table.h"
#include "dw_test.h"

#define FOREVER      (-1)
#define NS_PER_MS    INT64_C(1000000)
#define MAX_WATCHED  32
#define NOT_BACK_YET INT32_MIN

/* A thread that waits for flags, or for the bell if it has none. */
typedef struct {
    dw_flags *flags;
    dw_flag which[MAX_WATCHED];
    size_t num_which;
    int64_t timeout_ns;
    uint32_t seen; /* the bell's count */
    pthread_t thread;
    pthread_mutex_t lock; /* guards rc */
    int rc;
} waiter;

static void *wait_in_thread(void *arg)
{
    waiter *self = arg;
    int rc = self->num_which ? dw_flags_wait(self->flags, self->which,
                                             self->num_which, self->timeout_ns)
                             : dw_flags_wait_bell(self->flags, self->seen,
                                                  self->timeout_ns);
    pthread_mutex_lock(&self->lock);
    self->rc = rc;
    pthread_mutex_unlock(&self->lock);
    return NULL;
}

static int rc_of(waiter *self)
{
    pthread_mutex_lock(&self->lock);
    int rc = self->rc;
    pthread_mutex_unlock(&self->lock);
    return rc;
}

static void start(waiter *self, int64_t timeout_ns)
{
    pthread_mutex_init(&self->lock, NULL);
    self->rc = NOT_BACK_YET;
    self->timeout_ns = timeout_ns;
    CHECK(!pthread_create(&self->thread, NULL, wait_in_thread, self));
}

static int finish(waiter *self)
{
    pthread_join(self->thread, NULL);
    pthread_mutex_destroy(&self->lock);
    return self->rc;
}

static void cancel(dw_flags *flags, dw_flag flag)
{
    CHECK_EQ(dw_flag_cancel(flags, flag, DW_REASON_FIN, 1), 1);
}

TEST(a_flag_cancelled_before_the_wait_ends_it_at_once)
{
    dw_flags *flags = make_table();
    dw_flag which[] = {make_flag(flags), make_flag(flags), make_flag(flags)};

    cancel(flags, which[2]);
    CHECK_EQ(dw_flags_wait(flags, which, 3, FOREVER), 2);
    cancel(flags, which[1]);
    CHECK_EQ(dw_flags_wait(flags, which, 3, FOREVER), 1);
    dw_flags_free(flags);
}

TEST(a_stale_name_ends_the_wait_at_once)
{
    dw_flags *flags = make_table();
    dw_flag which[] = {make_flag(flags), make_flag(flags)};

    dw_flag_release(flags, which[1]);
    CHECK_EQ(dw_flags_wait(flags, which, 2, FOREVER), 1);
    dw_flags_free(flags);
}

typedef struct {
    const char *point;
} wait_point;

static const wait_point wait_points[] = {{"flags:wait-registered"},
                                         {"flags:wait-looked"}};

TEST_EACH(a_cancel_before_the_waiter_sleeps_is_not_missed, wait_point, at,
          wait_points)
{
    waiter self = {.flags = make_table(), .num_which = 1};

    self.which[0] = make_flag(self.flags);
    gate_close(at->point);
    start(&self, FOREVER);
    gate_wait(at->point);
    cancel(self.flags, self.which[0]);
    gate_open(at->point);
    CHECK_EQ(finish(&self), 0);
    dw_flags_free(self.flags);
}

TEST(a_cancel_wakes_the_waiters_of_that_flag_and_no_others)
{
    dw_flags *flags = make_table();
    dw_flag one = make_flag(flags), other = make_flag(flags);
    waiter first = {.flags = flags, .which = {one}, .num_which = 1};
    waiter second = {.flags = flags, .which = {other, one}, .num_which = 2};
    waiter third = {.flags = flags, .which = {other}, .num_which = 1};

    CHECK_EQ(gate_count("flags:wait-registered"), 0);
    start(&first, FOREVER);
    start(&second, FOREVER);
    start(&third, FOREVER);
    WAIT_UNTIL(gate_count("flags:wait-registered") >= 3);
    cancel(flags, one);
    CHECK_EQ(finish(&first), 0);
    CHECK_EQ(finish(&second), 1);
    CHECK_EQ(rc_of(&third), NOT_BACK_YET);
    cancel(flags, other);
    CHECK_EQ(finish(&third), 0);
    dw_flags_free(flags);
}

TEST(a_flag_that_is_released_ends_the_wait_for_it)
{
    waiter self = {.flags = make_table(), .num_which = 1};

    self.which[0] = make_flag(self.flags);
    CHECK_EQ(gate_count("flags:wait-registered"), 0);
    start(&self, FOREVER);
    WAIT_UNTIL(gate_count("flags:wait-registered"));
    dw_flag_release(self.flags, self.which[0]);
    CHECK_EQ(finish(&self), 0);
    dw_flags_free(self.flags);
}

TEST(a_wait_with_a_timeout_lasts_at_least_as_long)
{
    dw_flags *flags = make_table();
    dw_flag flag = make_flag(flags);
    uint64_t before_ns = dw_clock_ns();

    CHECK_EQ(dw_flags_wait(flags, &flag, 1, 0), DW_ETIMEDOUT);
    CHECK_EQ(dw_flags_wait(flags, &flag, 1, 3 * NS_PER_MS), DW_ETIMEDOUT);
    CHECK(dw_clock_ns() - before_ns >= (uint64_t)(3 * NS_PER_MS));
    dw_flags_free(flags);
}

TEST(cancels_of_other_flags_do_not_stretch_the_timeout)
{
    waiter self = {.flags = make_table(), .num_which = MAX_WATCHED};
    dw_flags *flags = self.flags;

    /* So many that any other's bell is theirs too. Each cancel comes well
     * before the end of a timeout that were started anew at the last. */
    for (int i = 0; i < MAX_WATCHED; i++)
        self.which[i] = make_flag(flags);
    start(&self, 200 * NS_PER_MS);
    while (rc_of(&self) == NOT_BACK_YET) {
        dw_flag other = make_flag(flags);
        cancel(flags, other);
        dw_flag_release(flags, other);
    }
    CHECK_EQ(finish(&self), DW_ETIMEDOUT);
    dw_flags_free(flags);
}

static void ignore(int signal_number)
{
    (void)signal_number;
}

TEST(a_signal_ends_the_wait)
{
    waiter on_flag = {.flags = make_table(), .num_which = 1};
    waiter on_bell = {.flags = on_flag.flags};
    struct sigaction action = {.sa_handler = ignore};

    CHECK(!sigaction(SIGUSR1, &action, NULL));
    on_flag.which[0] = make_flag(on_flag.flags);
    on_bell.seen = dw_flags_bell(on_bell.flags);
    start(&on_flag, FOREVER);
    start(&on_bell, FOREVER);
    /* One that comes before the sleep has no effect, hence again. */
    WAIT_UNTIL(rc_of(&on_flag) != NOT_BACK_YET ||
               pthread_kill(on_flag.thread, SIGUSR1));
    WAIT_UNTIL(rc_of(&on_bell) != NOT_BACK_YET ||
               pthread_kill(on_bell.thread, SIGUSR1));
    CHECK_EQ(finish(&on_flag), DW_EINTR);
    CHECK_EQ(finish(&on_bell), DW_EINTR);
    dw_flags_free(on_flag.flags);
}

TEST(the_bell_counts_what_a_waiter_might_have_missed)
{
    dw_flags *flags = make_table();
    uint32_t seen = dw_flags_bell(flags);

    cancel(flags, make_flag(flags));
    CHECK(dw_flags_bell(flags) != seen);
    CHECK_EQ(dw_flags_wait_bell(flags, seen, FOREVER), DW_OK);
    seen = dw_flags_bell(flags);
    CHECK_EQ(dw_flags_wait_bell(flags, seen, NS_PER_MS), DW_ETIMEDOUT);
    dw_flags_ring(flags);
    CHECK_EQ(dw_flags_wait_bell(flags, seen, FOREVER), DW_OK);
    dw_flags_free(flags);
}

TEST(ringing_wakes_all_who_wait_for_the_bell)
{
    waiter first = {.flags = make_table()};
    waiter second = {.flags = first.flags};

    first.seen = second.seen = dw_flags_bell(first.flags);
    start(&first, FOREVER);
    start(&second, FOREVER);
    dw_flags_ring(first.flags);
    CHECK_EQ(finish(&first), DW_OK);
    CHECK_EQ(finish(&second), DW_OK);
    dw_flags_free(first.flags);
}

TEST(a_cancel_wakes_all_who_wait_for_the_bell)
{
    waiter first = {.flags = make_table()};
    waiter second = {.flags = first.flags};

    first.seen = second.seen = dw_flags_bell(first.flags);
    start(&first, FOREVER);
    start(&second, FOREVER);
    cancel(first.flags, make_flag(first.flags));
    CHECK_EQ(finish(&first), DW_OK);
    CHECK_EQ(finish(&second), DW_OK);
    dw_flags_free(first.flags);
}
