/* The flag table within one process: words, generations, references, and the
 * race between a cancel and the last release. */
#include "dw_flags.h"

#include <pthread.h>

#include "dw_clock.h"
#include "dw_gate.h"
#include "dw_table.h"
#include "dw_test.h"

static dw_flags_stats stats_of(const dw_flags *flags)
{
    dw_flags_stats stats;
    dw_flags_read_stats(flags, &stats);
    return stats;
}

/* The next flag in this slot, which is free. Every other one that the queue
 * hands out before it goes to the queue's end again. */
static dw_flag next_tenant(dw_flags *flags, uint32_t slot)
{
    for (uint32_t i = 0; i < 2 * DW_FLAGS_RANGE_SLOTS; i++) {
        dw_flag flag = make_flag(flags);
        if (flag.slot == slot)
            return flag;
        dw_flag_release(flags, flag);
    }
    dw_test_fail(__FILE__, __LINE__, "slot %u never came again", slot);
}

TEST(a_new_flag_is_live_and_has_no_times_and_no_ack)
{
    dw_flags *flags = make_table();
    dw_flag flag = make_flag(flags);
    uint64_t at_ns, stored_ns;
    uint32_t step = 1;

    CHECK(flag.generation >= 1);
    CHECK_EQ(dw_flag_reason(flags, flag), DW_REASON_NONE);
    CHECK_EQ(dw_flag_times(flags, flag, &at_ns, &stored_ns), 0);
    CHECK_EQ(dw_flag_acked(flags, flag, &step), DW_OK);
    CHECK_EQ(step, 0);
    CHECK_EQ(stats_of(flags).num_live, 1);
    dw_flag_release(flags, flag);
    CHECK_EQ(stats_of(flags).num_live, 0);
    dw_flags_free(flags);
}

TEST(the_word_is_the_generation_and_the_reason)
{
    dw_flags *flags = make_table();
    dw_flag flag = make_flag(flags);
    const uint32_t *word = dw_flag_address(flags, flag.slot);

    CHECK_EQ(dw_flag_load(word), flag.generation << 8);
    CHECK_EQ(dw_flag_cancel(flags, flag, DW_REASON_DEADLINE, 1), 1);
    CHECK_EQ(dw_flag_load(word), flag.generation << 8 | DW_REASON_DEADLINE);
    CHECK_EQ(dw_flag_reason(flags, flag), DW_REASON_DEADLINE);
    dw_flag_release(flags, flag);
    CHECK_EQ(dw_flag_load(word), 0);
    dw_flags_free(flags);
}

TEST(a_second_cancel_changes_neither_reason_nor_times)
{
    dw_flags *flags = make_table();
    dw_flag flag = make_flag(flags);
    uint64_t at_ns, stored_ns, stored_again_ns;

    CHECK_EQ(dw_flag_cancel(flags, flag, DW_REASON_FIN, 10), 1);
    CHECK_EQ(dw_flag_times(flags, flag, &at_ns, &stored_ns), 1);
    CHECK_EQ(dw_flag_cancel(flags, flag, DW_REASON_ABORTED, 20), 0);
    CHECK_EQ(dw_flag_reason(flags, flag), DW_REASON_FIN);
    CHECK_EQ(dw_flag_times(flags, flag, &at_ns, &stored_again_ns), 1);
    CHECK_EQ(at_ns, 10);
    CHECK_EQ(stored_again_ns, stored_ns);
    CHECK_EQ(stats_of(flags).num_cancels, 1);
    dw_flag_release(flags, flag);
    dw_flags_free(flags);
}

TEST(the_time_of_the_store_is_taken_by_the_cancel_itself)
{
    dw_flags *flags = make_table();
    dw_flag flag = make_flag(flags);
    uint64_t at_ns, stored_ns;
    uint64_t before_ns = dw_clock_ns();

    CHECK_EQ(dw_flag_cancel(flags, flag, DW_REASON_FIN, 10), 1);
    CHECK_EQ(dw_flag_times(flags, flag, &at_ns, &stored_ns), 1);
    CHECK(before_ns <= stored_ns && stored_ns <= dw_clock_ns());
    dw_flag_release(flags, flag);
    dw_flags_free(flags);
}

TEST(a_reason_outside_the_enum_is_refused)
{
    dw_flags *flags = make_table();
    dw_flag flag = make_flag(flags);
    const int reasons[] = {0, DW_REASON_MAX + 1, 255, 256 + DW_REASON_FIN, -1};

    for (size_t i = 0; i < sizeof reasons / sizeof reasons[0]; i++) {
        enum dw_reason reason = (enum dw_reason)reasons[i];
        CHECK_EQ(dw_flag_cancel(flags, flag, reason, 1), DW_EINVAL);
    }
    CHECK_EQ(dw_flag_reason(flags, flag), DW_REASON_NONE);
    dw_flag_release(flags, flag);
    dw_flags_free(flags);
}

TEST(one_look_at_many_flags_finds_the_one_that_fired_and_no_stale_name)
{
    dw_flags *flags;
    dw_flag which[3];
    CHECK_EQ(dw_flags_create(&flags), DW_OK);
    CHECK_EQ(dw_flags_any(flags, NULL, 0), 0);
    for (int i = 0; i < 3; i++)
        CHECK_EQ(dw_flag_alloc(flags, &which[i]), DW_OK);
    CHECK_EQ(dw_flags_any(flags, which, 3), 0);
    CHECK_EQ(dw_flag_cancel(flags, which[2], DW_REASON_FIN, 1), 1);
    CHECK_EQ(dw_flags_any(flags, which, 3), 1);
    CHECK_EQ(dw_flags_any(flags, which, 2), 0);
    dw_flag stale = which[2];
    stale.generation++;
    CHECK_EQ(dw_flags_any(flags, &stale, 1), 0);
    for (int i = 0; i < 3; i++)
        dw_flag_release(flags, which[i]);
    dw_flags_free(flags);
}

TEST(an_ack_is_kept_until_the_slot_ends)
{
    dw_flags *flags = make_table();
    dw_flag flag = make_flag(flags);
    uint32_t step;

    CHECK_EQ(dw_flag_ack(flags, flag, 0), DW_EINVAL);
    CHECK_EQ(dw_flag_ack(flags, flag, 41), DW_OK);
    CHECK_EQ(dw_flag_acked(flags, flag, &step), DW_OK);
    CHECK_EQ(step, 41);
    dw_flag_release(flags, flag);
    dw_flags_free(flags);
}

static void check_refused_everywhere(dw_flags *flags, dw_flag flag)
{
    uint64_t num_stale = stats_of(flags).num_stale;
    uint64_t at_ns, stored_ns;
    uint32_t step;

    CHECK_EQ(dw_flag_reason(flags, flag), DW_ESTALE);
    CHECK_EQ(dw_flag_retain(flags, flag), DW_ESTALE);
    CHECK_EQ(dw_flag_times(flags, flag, &at_ns, &stored_ns), DW_ESTALE);
    CHECK_EQ(dw_flag_ack(flags, flag, 1), DW_ESTALE);
    CHECK_EQ(dw_flag_acked(flags, flag, &step), DW_ESTALE);
    CHECK_EQ(dw_flag_cancel(flags, flag, DW_REASON_FIN, 1), DW_ESTALE);
    CHECK_EQ(stats_of(flags).num_stale, num_stale + 1);
}

TEST(a_stale_name_is_refused_everywhere_while_the_slot_is_free)
{
    dw_flags *flags = make_table();
    dw_flag flag = make_flag(flags);

    dw_flag_release(flags, flag);
    check_refused_everywhere(flags, flag);
    dw_flags_free(flags);
}

TEST(a_stale_name_does_nothing_to_the_slots_next_tenant)
{
    dw_flags *flags = make_table();
    dw_flag old = make_flag(flags);

    dw_flag_release(flags, old);
    dw_flag tenant = next_tenant(flags, old.slot);
    CHECK(tenant.generation != old.generation);
    check_refused_everywhere(flags, old);
    dw_flag_release(flags, old);
    CHECK_EQ(dw_flag_reason(flags, tenant), DW_REASON_NONE);
    CHECK_EQ(stats_of(flags).num_live, 1);
    dw_flag_release(flags, tenant);
    dw_flags_free(flags);
}

TEST(a_name_of_no_flag_is_refused_everywhere)
{
    dw_flags *flags = make_table();
    dw_flag flag = make_flag(flags);
    const dw_flag names[] = {
        {.slot = flag.slot, .generation = 0},
        {.slot = DW_FLAGS_NUM_SLOTS - 1, .generation = 0},
        {.slot = DW_FLAGS_NUM_SLOTS - 1, .generation = 1},
        {.slot = DW_FLAGS_NUM_SLOTS, .generation = 1},
        {.slot = UINT32_MAX, .generation = 1},
        {.slot = flag.slot, .generation = flag.generation | 1U << 24},
    };

    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        check_refused_everywhere(flags, names[i]);
        dw_flag_release(flags, names[i]);
    }
    CHECK_EQ(dw_flag_reason(flags, flag), DW_REASON_NONE);
    dw_flag_release(flags, flag);
    dw_flags_free(flags);
}

TEST(the_generation_moves_only_at_the_last_release)
{
    dw_flags *flags = make_table();
    dw_flag flag = make_flag(flags);

    CHECK_EQ(dw_flag_retain(flags, flag), DW_OK);
    CHECK_EQ(dw_flag_retain(flags, flag), DW_OK);
    dw_flag_release(flags, flag);
    dw_flag_release(flags, flag);
    CHECK_EQ(dw_flag_cancel(flags, flag, DW_REASON_RESET, 1), 1);
    CHECK_EQ(dw_flag_reason(flags, flag), DW_REASON_RESET);
    dw_flag_release(flags, flag);
    CHECK_EQ(dw_flag_reason(flags, flag), DW_ESTALE);
    dw_flags_free(flags);
}

TEST(nothing_of_a_flag_is_left_to_the_next_tenant)
{
    dw_flags *flags = make_table();
    dw_flag old = make_flag(flags);
    uint64_t at_ns, stored_ns;
    uint32_t step;

    CHECK_EQ(dw_flag_cancel(flags, old, DW_REASON_FIN, 10), 1);
    CHECK_EQ(dw_flag_ack(flags, old, 41), DW_OK);
    dw_flag_release(flags, old);
    dw_flag tenant = next_tenant(flags, old.slot);
    CHECK_EQ(dw_flag_reason(flags, tenant), DW_REASON_NONE);
    CHECK_EQ(dw_flag_times(flags, tenant, &at_ns, &stored_ns), 0);
    CHECK_EQ(dw_flag_acked(flags, tenant, &step), DW_OK);
    CHECK_EQ(step, 0);
    dw_flag_release(flags, tenant);
    dw_flags_free(flags);
}

TEST(a_released_slot_goes_to_the_end_of_the_queue)
{
    dw_flags *flags = make_table();
    dw_flag first = make_flag(flags);
    uint32_t num_others = 0;

    dw_flag_release(flags, first);
    for (;; num_others++) {
        dw_flag flag = make_flag(flags);
        dw_flag_release(flags, flag);
        if (flag.slot == first.slot)
            break;
    }
    CHECK_EQ(num_others, DW_FLAGS_RANGE_SLOTS - 1);
    dw_flags_free(flags);
}

TEST(a_slot_whose_generation_would_wrap_is_never_used_again)
{
    dw_flags *flags = make_table();
    dw_flag flag = make_flag(flags);

    dw_flag_release(flags, flag);
    CHECK_EQ(dw_flags_set_generation(flags, flag.slot, DW_FLAGS_MAX_GENERATION),
             DW_OK);
    dw_flag last = next_tenant(flags, flag.slot);
    CHECK_EQ(last.generation, DW_FLAGS_MAX_GENERATION);
    CHECK_EQ(dw_flag_cancel(flags, last, DW_REASON_FIN, 1), 1);
    CHECK_EQ(dw_flag_load(dw_flag_address(flags, last.slot)),
             DW_FLAGS_MAX_GENERATION << 8 | DW_REASON_FIN);
    CHECK_EQ(stats_of(flags).num_retired, 0);
    dw_flag_release(flags, last);
    CHECK_EQ(stats_of(flags).num_retired, 1);
    check_refused_everywhere(flags, last);
    for (uint32_t i = 0; i < 2 * DW_FLAGS_RANGE_SLOTS; i++) {
        dw_flag other = make_flag(flags);
        CHECK(other.slot != last.slot);
        dw_flag_release(flags, other);
    }
    dw_flags_free(flags);
}

/* One thread alone, and a minute under ThreadSanitizer. */
#ifndef __SANITIZE_THREAD__
TEST(a_full_table_says_so_and_goes_on_after_a_release)
{
    dw_flags *flags = make_table();
    dw_flag flag, one = {0};

    for (uint32_t i = 0; i < DW_FLAGS_NUM_SLOTS; i++)
        one = make_flag(flags);
    CHECK_EQ(dw_flag_alloc(flags, &flag), DW_ENOSPC);
    CHECK_EQ(stats_of(flags).num_live, DW_FLAGS_NUM_SLOTS);
    dw_flag_release(flags, one);
    flag = make_flag(flags);
    CHECK_EQ(flag.slot, one.slot);
    dw_flags_free(flags);
}
#endif

#define NUM_RACERS 4
#define NUM_ROUNDS 300

typedef struct {
    dw_flags *flags;
    dw_flag flag[NUM_ROUNDS];
    int num_winners[NUM_ROUNDS];
    enum dw_reason winner[NUM_ROUNDS];
    pthread_barrier_t barrier;
    pthread_mutex_t lock; /* guards num_winners and winner */
} race;

typedef struct {
    race *shared;
    enum dw_reason reason;
} racer;

static void *cancel_all(void *arg)
{
    racer *self = arg;
    race *shared = self->shared;

    for (int i = 0; i < NUM_ROUNDS; i++) {
        pthread_barrier_wait(&shared->barrier);
        int rc = dw_flag_cancel(shared->flags, shared->flag[i], self->reason,
                                self->reason);
        CHECK(rc == 0 || rc == 1);
        if (!rc)
            continue;
        pthread_mutex_lock(&shared->lock);
        shared->num_winners[i]++;
        shared->winner[i] = self->reason;
        pthread_mutex_unlock(&shared->lock);
    }
    return NULL;
}

TEST(of_four_threads_the_first_to_cancel_wins)
{
    static race shared = {.lock = PTHREAD_MUTEX_INITIALIZER};
    pthread_t threads[NUM_RACERS];
    racer racers[NUM_RACERS];

    shared.flags = make_table();
    pthread_barrier_init(&shared.barrier, NULL, NUM_RACERS);
    for (int i = 0; i < NUM_ROUNDS; i++)
        shared.flag[i] = make_flag(shared.flags);
    for (int i = 0; i < NUM_RACERS; i++) {
        racers[i] = (racer){&shared, (enum dw_reason)(DW_REASON_FIN + i)};
        CHECK(!pthread_create(&threads[i], NULL, cancel_all, &racers[i]));
    }
    for (int i = 0; i < NUM_RACERS; i++)
        pthread_join(threads[i], NULL);
    for (int i = 0; i < NUM_ROUNDS; i++) {
        uint64_t at_ns, stored_ns;
        CHECK_EQ(shared.num_winners[i], 1);
        CHECK_EQ(dw_flag_reason(shared.flags, shared.flag[i]),
                 shared.winner[i]);
        CHECK_EQ(
            dw_flag_times(shared.flags, shared.flag[i], &at_ns, &stored_ns), 1);
        CHECK_EQ(at_ns, shared.winner[i]);
        dw_flag_release(shared.flags, shared.flag[i]);
    }
    CHECK_EQ(stats_of(shared.flags).num_cancels, NUM_ROUNDS);
    pthread_barrier_destroy(&shared.barrier);
    dw_flags_free(shared.flags);
}

/* What one thread does to one flag, and what came of it. */
typedef struct {
    dw_flags *flags;
    dw_flag flag;
    int rc;
} deed;

static void *do_cancel(void *arg)
{
    deed *it = arg;
    it->rc = dw_flag_cancel(it->flags, it->flag, DW_REASON_FIN, 7);
    return NULL;
}

static void *do_release(void *arg)
{
    deed *it = arg;
    dw_flag_release(it->flags, it->flag);
    return NULL;
}

TEST(a_release_during_a_cancel_neither_loses_nor_misdirects_it)
{
    dw_flags *flags = make_table();
    deed cancel = {.flags = flags, .flag = make_flag(flags)};
    pthread_t thread;

    gate_close("flags:cancel-retained");
    CHECK(!pthread_create(&thread, NULL, do_cancel, &cancel));
    gate_wait("flags:cancel-retained");
    dw_flag_release(flags, cancel.flag);
    /* The canceller's own reference holds the slot. */
    CHECK_EQ(dw_flag_reason(flags, cancel.flag), DW_REASON_NONE);
    for (uint32_t i = 0; i < 2 * DW_FLAGS_RANGE_SLOTS; i++) {
        dw_flag other = make_flag(flags);
        CHECK(other.slot != cancel.flag.slot);
        dw_flag_release(flags, other);
    }
    gate_open("flags:cancel-retained");
    pthread_join(thread, NULL);
    CHECK_EQ(cancel.rc, 1);
    CHECK_EQ(dw_flag_reason(flags, cancel.flag), DW_ESTALE);
    dw_flag tenant = next_tenant(flags, cancel.flag.slot);
    CHECK_EQ(dw_flag_reason(flags, tenant), DW_REASON_NONE);
    dw_flag_release(flags, tenant);
    dw_flags_free(flags);
}

TEST(a_cancel_during_the_last_release_is_refused)
{
    dw_flags *flags = make_table();
    deed release = {.flags = flags, .flag = make_flag(flags)};
    pthread_t thread;

    gate_close("flags:release-last");
    CHECK(!pthread_create(&thread, NULL, do_release, &release));
    gate_wait("flags:release-last");
    CHECK_EQ(dw_flag_cancel(flags, release.flag, DW_REASON_FIN, 7), DW_ESTALE);
    CHECK_EQ(dw_flag_retain(flags, release.flag), DW_ESTALE);
    dw_flag_release(flags, release.flag);
    gate_open("flags:release-last");
    pthread_join(thread, NULL);
    dw_flag tenant = next_tenant(flags, release.flag.slot);
    CHECK_EQ(tenant.generation, release.flag.generation + 1);
    CHECK_EQ(dw_flag_reason(flags, tenant), DW_REASON_NONE);
    dw_flag_release(flags, tenant);
    CHECK_EQ(stats_of(flags).num_live, 0);
    dw_flags_free(flags);
}

TEST(a_flag_is_seen_cancelled_before_its_times_are_there)
{
    dw_flags *flags = make_table();
    deed cancel = {.flags = flags, .flag = make_flag(flags)};
    uint64_t at_ns, stored_ns;
    pthread_t thread;

    /* In a slot that was cancelled before: its old times are gone too. */
    CHECK_EQ(dw_flag_cancel(flags, cancel.flag, DW_REASON_RESET, 5), 1);
    dw_flag_release(flags, cancel.flag);
    cancel.flag = next_tenant(flags, cancel.flag.slot);
    gate_close("flags:cancel-stored");
    CHECK(!pthread_create(&thread, NULL, do_cancel, &cancel));
    gate_wait("flags:cancel-stored");
    CHECK_EQ(dw_flag_reason(flags, cancel.flag), DW_REASON_FIN);
    CHECK_EQ(dw_flag_times(flags, cancel.flag, &at_ns, &stored_ns), 0);
    /* Its times are written to this slot, so it must not be recycled yet. */
    dw_flag_release(flags, cancel.flag);
    CHECK_EQ(dw_flag_reason(flags, cancel.flag), DW_REASON_FIN);
    gate_open("flags:cancel-stored");
    pthread_join(thread, NULL);
    CHECK_EQ(dw_flag_reason(flags, cancel.flag), DW_ESTALE);
    dw_flags_free(flags);
}

#define NUM_TENANTS 5000

/* The names a recycler has told of; the canceller cancels the newest. */
typedef struct {
    dw_flags *flags;
    pthread_mutex_t lock; /* guards the two below */
    dw_flag told;
    bool is_over;
} recycling;

static void *cancel_what_is_told(void *arg)
{
    recycling *it = arg;
    bool is_over;

    do {
        pthread_mutex_lock(&it->lock);
        dw_flag flag = it->told;
        is_over = it->is_over;
        pthread_mutex_unlock(&it->lock);
        int rc = dw_flag_cancel(it->flags, flag, DW_REASON_FIN, 7);
        CHECK(rc == 0 || rc == 1 || rc == DW_ESTALE);
    } while (!is_over);
    return NULL;
}

TEST(no_tenant_is_born_cancelled_while_others_are_being_cancelled)
{
    static recycling it = {.lock = PTHREAD_MUTEX_INITIALIZER};
    dw_flag flags_of_range[DW_FLAGS_RANGE_SLOTS];
    pthread_t thread;

    it.flags = make_table();
    /* All slots of the range but one, so that it is this one every time. */
    for (uint32_t i = 1; i < DW_FLAGS_RANGE_SLOTS; i++)
        flags_of_range[i] = make_flag(it.flags);
    it.told = make_flag(it.flags);
    dw_flag_release(it.flags, it.told);
    CHECK(!pthread_create(&thread, NULL, cancel_what_is_told, &it));
    for (int i = 0; i < NUM_TENANTS; i++) {
        dw_flag tenant = make_flag(it.flags);
        CHECK_EQ(dw_flag_reason(it.flags, tenant), DW_REASON_NONE);
        pthread_mutex_lock(&it.lock);
        it.told = tenant;
        pthread_mutex_unlock(&it.lock);
        dw_flag_release(it.flags, tenant);
    }
    pthread_mutex_lock(&it.lock);
    it.is_over = true;
    pthread_mutex_unlock(&it.lock);
    pthread_join(thread, NULL);
    for (uint32_t i = 1; i < DW_FLAGS_RANGE_SLOTS; i++)
        dw_flag_release(it.flags, flags_of_range[i]);
    CHECK_EQ(stats_of(it.flags).num_live, 0);
    dw_flags_free(it.flags);
}

TEST(freeing_no_table_is_allowed)
{
    dw_flags_free(NULL);
}
