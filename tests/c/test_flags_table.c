/* The flag table from the inside: guards that its interface alone does not
 * show, with the layout of dw_flags_table.h at hand.
 */
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "dw_flags_table.h"
#include "dw_gate.h"
#include "dw_test.h"

/* Two handles on one table: to each, the other's ranges are another's. */
typedef struct {
    dw_flags *own;
    dw_flags *other;
} tables;

static tables tables_open(void)
{
    tables t;
    CHECK_EQ(dw_flags_create(&t.own), 0);
    CHECK_EQ(dw_flags_map(dw_flags_memfd(t.own), &t.other), 0);
    return t;
}

static void tables_close(tables *t)
{
    dw_flags_free(t->own);
    dw_flags_free(t->other);
}

static dw_flags_stats read_stats(const dw_flags *flags)
{
    dw_flags_stats stats;
    dw_flags_read_stats(flags, &stats);
    return stats;
}

TEST(a_release_too_many_takes_no_reference_of_another_process)
{
    tables t = tables_open();
    dw_flag flag;
    CHECK_EQ(dw_flag_alloc(t.own, &flag), 0);
    CHECK_EQ(dw_flag_retain(t.other, flag), 0);
    for (int i = 0; i < 3; i++)
        dw_flag_release(t.own, flag);
    CHECK_EQ(t.own->table->refs[flag.slot] & REFS_COUNTS, REFS_FOREIGN);
    CHECK_EQ(dw_flag_reason(t.other, flag), 0);
    CHECK_EQ(dw_flag_cancel(t.own, flag, DW_REASON_FIN, 1), 1);
    dw_flag_release(t.other, flag);
    CHECK_EQ(dw_flag_reason(t.other, flag), DW_ESTALE);
    tables_close(&t);
}

TEST(a_count_of_references_is_full_before_it_runs_over)
{
    tables t = tables_open();
    dw_flags *const holders[] = {t.own, t.other};
    for (int i = 0; i < 2; i++) {
        dw_flags *holder = holders[i];
        dw_flag flag;
        CHECK_EQ(dw_flag_alloc(t.own, &flag), 0);
        uint32_t num_retained = 0;
        while (dw_flag_retain(holder, flag) == 0)
            num_retained++;
        /* The owner has the alloc's, too. */
        CHECK_EQ(num_retained, REFS_OWN_COUNTS - (holder == t.own));
        CHECK_EQ(dw_flag_retain(holder, flag), DW_ENOSPC);
        CHECK_EQ(dw_flag_cancel(holder, flag, DW_REASON_FIN, 1), DW_ENOSPC);
        dw_flag_release(holder, flag);
        CHECK_EQ(dw_flag_retain(holder, flag), 0);
        while (num_retained--)
            dw_flag_release(holder, flag);
        CHECK_EQ(dw_flag_reason(t.own, flag), 0);
        dw_flag_release(t.own, flag);
        CHECK_EQ(dw_flag_reason(t.own, flag), DW_ESTALE);
    }
    tables_close(&t);
}

/* What one race is about, for a hook to work on. */
typedef struct {
    dw_flags *flags;
    dw_flag flag;
    dw_flag next;
    dw_flags_stats stats;
    atomic_bool is_done;
    int rc;
} race;

static void recycle_and_cancel(void *arg)
{
    race *r = arg;
    dw_flag_release(r->flags, r->flag);
    /* Round the queue to the same slot. */
    do {
        CHECK_EQ(dw_flag_alloc(r->flags, &r->next), 0);
        if (r->next.slot != r->flag.slot)
            dw_flag_release(r->flags, r->next);
    } while (r->next.slot != r->flag.slot);
    CHECK_EQ(dw_flag_cancel(r->flags, r->next, DW_REASON_RESET, 99), 1);
}

TEST(times_read_while_the_slot_changes_hands_are_stale)
{
    race r = {.rc = 0};
    CHECK_EQ(dw_flags_create(&r.flags), 0);
    CHECK_EQ(dw_flag_alloc(r.flags, &r.flag), 0);
    CHECK_EQ(dw_flag_cancel(r.flags, r.flag, DW_REASON_FIN, 11), 1);
    gate_run("flags:times-read", recycle_and_cancel, &r);
    uint64_t at_ns, stored_ns;
    CHECK_EQ(dw_flag_times(r.flags, r.flag, &at_ns, &stored_ns), DW_ESTALE);
    CHECK_EQ(at_ns, 0);
    CHECK_EQ(stored_ns, 0);
    CHECK_EQ(dw_flag_times(r.flags, r.next, &at_ns, &stored_ns), 1);
    CHECK_EQ(at_ns, 99);
    dw_flag_release(r.flags, r.next);
    dw_flags_free(r.flags);
}

static void note_stats(void *arg)
{
    race *r = arg;
    r->stats = read_stats(r->flags);
}

TEST(a_slot_that_is_being_cleaned_up_is_not_counted_as_live)
{
    race r = {.rc = 0};
    CHECK_EQ(dw_flags_create(&r.flags), 0);
    CHECK_EQ(dw_flag_alloc(r.flags, &r.flag), 0);
    CHECK_EQ(read_stats(r.flags).num_live, 1);
    gate_run("flags:release-last", note_stats, &r);
    r.stats.num_live = 77;
    dw_flag_release(r.flags, r.flag);
    CHECK_EQ(r.stats.num_live, 0);
    dw_flags_free(r.flags);
}

static off_t memory_of(const dw_flags *flags)
{
    struct stat stat;
    CHECK_EQ(fstat(dw_flags_memfd(flags), &stat), 0);
    return stat.st_blocks * 512;
}

TEST(only_pages_that_were_used_cost_memory)
{
    dw_flags *flags;
    CHECK_EQ(dw_flags_create(&flags), 0);
    dw_flag flag;
    CHECK_EQ(dw_flag_alloc(flags, &flag), 0);
    CHECK_EQ(dw_flag_cancel(flags, flag, DW_REASON_FIN, 1), 1);
    CHECK_EQ(read_stats(flags).num_live, 1);
    CHECK_EQ(dw_flags_reclaim(flags), 0);
    dw_flag_release(flags, flag);
    CHECK(memory_of(flags) <= 256 * 1024);
    dw_flags_free(flags);
}

/* Changes a table's header and asks for a second handle on it. */
static int map_with(void (*change)(dw_flags_table *table))
{
    dw_flags *flags, *second;
    CHECK_EQ(dw_flags_create(&flags), 0);
    change(flags->table);
    int rc = dw_flags_map(dw_flags_memfd(flags), &second);
    CHECK(!second == !!rc);
    dw_flags_free(second);
    dw_flags_free(flags);
    return rc;
}

static void change_nothing(dw_flags_table *table)
{
    (void)table;
}

static void change_magic(dw_flags_table *table)
{
    table->magic++;
}

static void change_layout(dw_flags_table *table)
{
    table->layout++;
}

static void change_num_slots(dw_flags_table *table)
{
    table->num_slots /= 2;
}

TEST(a_table_of_another_layout_is_refused)
{
    CHECK_EQ(map_with(change_nothing), 0);
    CHECK_EQ(map_with(change_magic), DW_EINVAL);
    CHECK_EQ(map_with(change_layout), DW_EINVAL);
    CHECK_EQ(map_with(change_num_slots), DW_EINVAL);
}

TEST(a_freed_handles_ranges_are_free_for_others_but_for_what_is_referenced)
{
    tables t = tables_open();
    dw_flag idle, held;
    CHECK_EQ(dw_flag_alloc(t.own, &idle), 0);
    dw_flag_release(t.own, idle);
    dw_flags_free(t.own);
    CHECK_EQ(t.other->table->owners[0], OWNER_NONE);

    CHECK_EQ(dw_flags_map(dw_flags_memfd(t.other), &t.own), 0);
    CHECK_EQ(dw_flag_alloc(t.own, &held), 0);
    CHECK_EQ(held.slot / DW_FLAGS_RANGE_SLOTS, 0);
    CHECK_EQ(dw_flag_retain(t.other, held), 0);
    dw_flags_free(t.own);
    CHECK_EQ(t.other->table->owners[0], OWNER_ABANDONED);
    CHECK_EQ(dw_flag_reason(t.other, held), 0);
    CHECK_EQ(dw_flags_reclaim(t.other), 1);
    CHECK_EQ(dw_flag_reason(t.other, held), DW_REASON_OWNER_CLOSED);
    CHECK_EQ(t.other->table->owners[0], OWNER_ABANDONED);
    dw_flag_release(t.other, held);
    CHECK_EQ(dw_flag_reason(t.other, held), DW_ESTALE);
    CHECK_EQ(dw_flags_reclaim(t.other), 0);
    CHECK_EQ(t.other->table->owners[0], OWNER_NONE);
    CHECK_EQ(read_stats(t.other).num_stale, 0);
    dw_flags_free(t.other);
}

TEST(a_retired_slot_does_not_keep_its_range_from_the_next_owner)
{
    tables t = tables_open();
    CHECK_EQ(dw_flags_set_generation(t.own, 0, DW_FLAGS_MAX_GENERATION), 0);
    dw_flag flag;
    CHECK_EQ(dw_flag_alloc(t.own, &flag), 0);
    CHECK_EQ(flag.slot, 0);
    dw_flag_release(t.own, flag);
    CHECK_EQ(read_stats(t.own).num_retired, 1);
    dw_flags_free(t.own);
    CHECK_EQ(t.other->table->owners[0], OWNER_NONE);
    CHECK_EQ(dw_flag_alloc(t.other, &flag), 0);
    CHECK_EQ(flag.slot, 1);
    dw_flag_release(t.other, flag);
    dw_flags_free(t.other);
}

TEST(a_range_of_retired_slots_alone_is_passed_over)
{
    dw_flags *flags;
    CHECK_EQ(dw_flags_create(&flags), 0);
    for (uint32_t slot = 0; slot < DW_FLAGS_RANGE_SLOTS; slot++)
        flags->table->refs[slot] = REFS_RETIRED;
    dw_flag flag;
    CHECK_EQ(dw_flag_alloc(flags, &flag), 0);
    CHECK_EQ(flag.slot, DW_FLAGS_RANGE_SLOTS);
    dw_flag_release(flags, flag);
    dw_flags_free(flags);
}

TEST(a_look_through_the_ranges_that_finds_little_claims_one_more)
{
    tables t = tables_open();
    dw_flag flags[DW_FLAGS_RANGE_SLOTS];
    for (uint32_t i = 0; i < DW_FLAGS_RANGE_SLOTS; i++)
        CHECK_EQ(dw_flag_alloc(t.own, &flags[i]), 0);
    CHECK_EQ(t.own->table->owners[1], OWNER_NONE);
    /* The last reference goes elsewhere, so the slot is free and not queued. */
    CHECK_EQ(dw_flag_retain(t.other, flags[5]), 0);
    dw_flag_release(t.own, flags[5]);
    dw_flag_release(t.other, flags[5]);
    CHECK_EQ(dw_flag_alloc(t.own, &flags[5]), 0);
    CHECK_EQ(flags[5].slot, 5);
    CHECK_EQ(flags[5].generation, 2);
    CHECK(t.own->table->owners[1] != OWNER_NONE);

    /* And one that finds much is content with it. */
    dw_flag more[DW_FLAGS_RANGE_SLOTS];
    for (uint32_t i = 0; i < DW_FLAGS_RANGE_SLOTS; i++)
        CHECK_EQ(dw_flag_alloc(t.own, &more[i]), 0);
    for (uint32_t i = 0; i < DW_FLAGS_RANGE_SLOTS; i++) {
        CHECK_EQ(dw_flag_retain(t.other, more[i]), 0);
        dw_flag_release(t.own, more[i]);
        dw_flag_release(t.other, more[i]);
    }
    CHECK_EQ(dw_flag_alloc(t.own, &more[0]), 0);
    CHECK_EQ(t.own->table->owners[2], OWNER_NONE);
    dw_flag_release(t.own, more[0]);
    for (uint32_t i = 0; i < DW_FLAGS_RANGE_SLOTS; i++)
        dw_flag_release(t.own, flags[i]);
    tables_close(&t);
}

static void *alloc_next(void *arg)
{
    race *r = arg;
    r->rc = dw_flag_alloc(r->flags, &r->next);
    atomic_store(&r->is_done, true);
    return NULL;
}

static void *release_flag(void *arg)
{
    race *r = arg;
    dw_flag_release(r->flags, r->flag);
    atomic_store(&r->is_done, true);
    return NULL;
}

static void wait_a_little_for(race *r)
{
    for (int i = 0; i < 100 && !atomic_load(&r->is_done); i++)
        usleep(200);
}

static void check_distinct(const dw_flag *flags, size_t num_flags)
{
    for (size_t i = 0; i < num_flags; i++) {
        for (size_t j = 0; j < i; j++)
            CHECK(flags[i].slot != flags[j].slot);
    }
}

/* In these two, one thread is stopped between the halves of taking a slot, or of
 * giving one back, while another finds the queue empty and looks for itself. */
TEST(a_slot_that_is_being_taken_is_not_found_free)
{
    race first = {.rc = -1}, second = {.rc = -1};
    CHECK_EQ(dw_flags_create(&first.flags), 0);
    second.flags = first.flags;
    dw_flag flags[DW_FLAGS_RANGE_SLOTS + 1];
    for (uint32_t i = 0; i < DW_FLAGS_RANGE_SLOTS - 1; i++)
        CHECK_EQ(dw_flag_alloc(first.flags, &flags[i]), 0);
    pthread_t threads[2];
    gate_close("flags:alloc-popped"); /* with the last of the queue */
    CHECK_EQ(pthread_create(&threads[0], NULL, alloc_next, &first), 0);
    gate_wait("flags:alloc-popped");
    CHECK_EQ(pthread_create(&threads[1], NULL, alloc_next, &second), 0);
    wait_a_little_for(&second);
    gate_open("flags:alloc-popped");
    for (int i = 0; i < 2; i++)
        CHECK_EQ(pthread_join(threads[i], NULL), 0);
    CHECK_EQ(first.rc, 0);
    CHECK_EQ(second.rc, 0);
    flags[DW_FLAGS_RANGE_SLOTS - 1] = first.next;
    flags[DW_FLAGS_RANGE_SLOTS] = second.next;
    check_distinct(flags, DW_FLAGS_RANGE_SLOTS + 1);
    for (uint32_t i = 0; i <= DW_FLAGS_RANGE_SLOTS; i++)
        dw_flag_release(first.flags, flags[i]);
    dw_flags_free(first.flags);
}

TEST(a_slot_that_is_being_given_back_is_not_queued_twice)
{
    race first = {.rc = -1}, second = {.rc = -1};
    CHECK_EQ(dw_flags_create(&first.flags), 0);
    second.flags = first.flags;
    dw_flag flags[2 * DW_FLAGS_RANGE_SLOTS + 1];
    for (uint32_t i = 0; i < DW_FLAGS_RANGE_SLOTS; i++)
        CHECK_EQ(dw_flag_alloc(first.flags, &flags[i]), 0);
    first.flag = flags[0];
    pthread_t threads[2];
    gate_close("flags:put-stored");
    CHECK_EQ(pthread_create(&threads[0], NULL, release_flag, &first), 0);
    gate_wait("flags:put-stored");
    CHECK_EQ(pthread_create(&threads[1], NULL, alloc_next, &second), 0);
    wait_a_little_for(&second);
    gate_open("flags:put-stored");
    for (int i = 0; i < 2; i++)
        CHECK_EQ(pthread_join(threads[i], NULL), 0);
    CHECK_EQ(second.rc, 0);
    flags[0] = second.next;
    /* All that was queued since; a second range, if one was claimed. */
    for (uint32_t i = 0; i <= DW_FLAGS_RANGE_SLOTS; i++)
        CHECK_EQ(dw_flag_alloc(first.flags, &flags[DW_FLAGS_RANGE_SLOTS + i]),
                 0);
    check_distinct(flags, 2 * DW_FLAGS_RANGE_SLOTS + 1);
    for (uint32_t i = 0; i <= 2 * DW_FLAGS_RANGE_SLOTS; i++)
        dw_flag_release(first.flags, flags[i]);
    dw_flags_free(first.flags);
}

static void end_process(void *unused)
{
    (void)unused;
    _exit(0);
}

static void die_while_cleaning_up(void *arg)
{
    dw_flags *flags = arg;
    dw_flag flag;
    CHECK_EQ(dw_flag_alloc(flags, &flag), 0);
    gate_run("flags:release-last", end_process, NULL);
    dw_flag_release(flags, flag);
    CHECK(false);
}

TEST(a_slot_that_its_owner_died_cleaning_up_is_free_after_a_reclaim)
{
    dw_flags *flags;
    CHECK_EQ(dw_flags_create(&flags), 0);
    CHECK_IN_CHILD(die_while_cleaning_up, flags);
    CHECK(flags->table->owners[0] != OWNER_NONE);
    CHECK_EQ(dw_flags_reclaim(flags), 0);
    CHECK_EQ(flags->table->owners[0], OWNER_NONE);
    CHECK_EQ(read_stats(flags).num_stale, 0);
    dw_flag flag;
    CHECK_EQ(dw_flag_alloc(flags, &flag), 0);
    CHECK_EQ(flag.slot, 0);
    CHECK_EQ(flag.generation, 2);
    dw_flag_release(flags, flag);
    dw_flags_free(flags);
}

static void cancel_it(void *arg)
{
    race *r = arg;
    CHECK_EQ(dw_flag_cancel(r->flags, r->flag, DW_REASON_FIN, 1), 1);
}

TEST(a_flag_set_as_the_wait_times_out_is_reported)
{
    race r = {.rc = 0};
    CHECK_EQ(dw_flags_create(&r.flags), 0);
    CHECK_EQ(dw_flag_alloc(r.flags, &r.flag), 0);
    gate_run("flags:wait-slept", cancel_it, &r);
    CHECK_EQ(dw_flags_wait(r.flags, &r.flag, 1, 1000), 0);
    CHECK_EQ(r.flags->table->flag_bell.waiters, 0);
    CHECK_EQ(dw_flags_wait_bell(r.flags, dw_flags_bell(r.flags), 1000),
             DW_ETIMEDOUT);
    CHECK_EQ(r.flags->table->doorbell.waiters, 0);
    dw_flag_release(r.flags, r.flag);
    dw_flags_free(r.flags);
}

TEST(a_wait_for_what_is_no_flag_ends_at_once)
{
    dw_flags *flags;
    CHECK_EQ(dw_flags_create(&flags), 0);
    dw_flag which[2];
    CHECK_EQ(dw_flag_alloc(flags, &which[0]), 0);
    const dw_flag none[] = {{0, 0}, {900, 0}, {UINT32_MAX, 1}};
    for (int i = 0; i < 3; i++) {
        which[1] = none[i];
        CHECK_EQ(dw_flags_wait(flags, which, 2, -1), 1);
    }
    CHECK_EQ(dw_flags_wait(flags, which, 1, 1000), DW_ETIMEDOUT);
    CHECK_EQ(dw_flags_wait(flags, which, 0, 1000), DW_ETIMEDOUT);
    dw_flag_release(flags, which[0]);
    dw_flags_free(flags);
}

TEST(a_flag_that_merely_ends_does_not_ring_the_doorbell)
{
    dw_flags *flags;
    CHECK_EQ(dw_flags_create(&flags), 0);
    uint32_t seen = dw_flags_bell(flags);
    dw_flag flag;
    CHECK_EQ(dw_flag_alloc(flags, &flag), 0);
    dw_flag_release(flags, flag);
    CHECK_EQ(dw_flags_bell(flags), seen);
    dw_flags_free(flags);
}

static void *wait_for_bell(void *arg)
{
    race *r = arg;
    uint32_t seen = dw_flags_bell(r->flags);
    r->rc = dw_flags_wait_bell(r->flags, seen, -1);
    CHECK(dw_flags_bell(r->flags) != seen);
    return NULL;
}

/* The kernel may end a sleep for no reason; here the test does. */
TEST(a_sleep_that_ends_for_nothing_goes_on)
{
    race r = {.rc = -1};
    CHECK_EQ(dw_flags_create(&r.flags), 0);
    pthread_t thread;
    CHECK_EQ(pthread_create(&thread, NULL, wait_for_bell, &r), 0);
    WAIT_UNTIL(syscall(SYS_futex, &r.flags->table->doorbell.count, FUTEX_WAKE,
                       1, NULL, NULL, 0) == 1);
    dw_flags_ring(r.flags);
    CHECK_EQ(pthread_join(thread, NULL), 0);
    CHECK_EQ(r.rc, 0);
    dw_flags_free(r.flags);
}

#define NUM_ROUNDS 10000

typedef struct {
    dw_flags *flags;
    dw_flag flag[NUM_ROUNDS];
    atomic_int num_ready[NUM_ROUNDS];
    atomic_int num_first[NUM_ROUNDS];
} contest;

static void *cancel_all(void *arg)
{
    contest *c = arg;
    for (int i = 0; i < NUM_ROUNDS; i++) {
        bool is_last = atomic_fetch_add(&c->num_ready[i], 1) == 1;
        /* The one that waits hears of the other a little late: so that one waits
         * too, from round to round a little longer. */
        for (volatile int spins = 0; is_last && spins < i % 256;)
            spins++;
        for (int spins = 0; atomic_load(&c->num_ready[i]) < 2; spins++) {
            if (spins > 1000)
                sched_yield();
        }
        if (dw_flag_cancel(c->flags, c->flag[i], DW_REASON_ABORTED, 1) == 1)
            atomic_fetch_add(&c->num_first[i], 1);
    }
    return NULL;
}

TEST(of_two_cancels_at_the_same_time_one_is_the_first)
{
    static contest c;
    CHECK_EQ(dw_flags_create(&c.flags), 0);
    for (int i = 0; i < NUM_ROUNDS; i++)
        CHECK_EQ(dw_flag_alloc(c.flags, &c.flag[i]), 0);
    pthread_t threads[2];
    for (int i = 0; i < 2; i++)
        CHECK_EQ(pthread_create(&threads[i], NULL, cancel_all, &c), 0);
    for (int i = 0; i < 2; i++)
        CHECK_EQ(pthread_join(threads[i], NULL), 0);
    for (int i = 0; i < NUM_ROUNDS; i++) {
        CHECK_EQ(c.num_first[i], 1);
        dw_flag_release(c.flags, c.flag[i]);
    }
    CHECK_EQ(read_stats(c.flags).num_cancels, NUM_ROUNDS);
    dw_flags_free(c.flags);
}
