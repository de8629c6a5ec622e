/* The flag table between processes: a second mapping, a child of fork(), and
 * what becomes of the flags of a process that has died. */
#include "dw_flags.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "dw_gate.h"
#include "dw_test.h"

#define NUM_CHILD_FLAGS 3

/* What parent and child tell each other, in memory that both map. The pipes
 * carry one byte a turn: whoever reads goes on once the other has written. */
typedef struct {
    dw_flags *flags;
    dw_flag flag;
    dw_flag of_child[NUM_CHILD_FLAGS];
    int to_parent[2];
    int to_child[2];
} dialogue;

static dialogue *make_dialogue(void)
{
    dialogue *it = mmap(NULL, sizeof *it, PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(it != MAP_FAILED);
    CHECK_EQ(dw_flags_create(&it->flags), DW_OK);
    CHECK_EQ(dw_flag_alloc(it->flags, &it->flag), DW_OK);
    CHECK(!pipe(it->to_parent) && !pipe(it->to_child));
    return it;
}

static void end_dialogue(dialogue *it)
{
    dw_flags_free(it->flags);
    for (int i = 0; i < 2; i++) {
        close(it->to_parent[i]);
        close(it->to_child[i]);
    }
    munmap(it, sizeof *it);
}

static void tell(const int ends[2])
{
    CHECK_EQ(write(ends[1], "", 1), 1);
}

static void hear(const int ends[2])
{
    char byte;
    CHECK_EQ(read(ends[0], &byte, 1), 1);
}

static pid_t start_child(void (*body)(dialogue *), dialogue *it)
{
    pid_t child = fork();
    CHECK(child >= 0);
    if (!child) {
        alarm(60);
        body(it);
        _exit(0);
    }
    return child;
}

static void end_child(pid_t child)
{
    int status;
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK_EQ(status, 0);
}

static dw_flags_stats stats_of(const dw_flags *flags)
{
    dw_flags_stats stats;
    dw_flags_read_stats(flags, &stats);
    return stats;
}

static void *wait_for_the_flag(void *arg)
{
    dialogue *it = arg;
    CHECK_EQ(dw_flags_wait(it->flags, &it->flag, 1, -1), 0);
    return NULL;
}

static void cancel_through_a_mapping_of_its_own(void *arg)
{
    dialogue *it = arg;
    dw_flags *mapped;

    CHECK_EQ(dw_flags_map(dw_flags_memfd(it->flags), &mapped), DW_OK);
    CHECK(dw_flags_memfd(mapped) != dw_flags_memfd(it->flags));
    CHECK_EQ(dw_flag_reason(mapped, it->flag), DW_REASON_NONE);
    CHECK_EQ(dw_flag_cancel(mapped, it->flag, DW_REASON_ABORTED, 5), 1);
    dw_flags_free(mapped);
}

TEST(a_cancel_in_another_process_wakes_the_waiter)
{
    dialogue *it = make_dialogue();
    uint64_t at_ns, stored_ns;
    pthread_t thread;

    CHECK_EQ(gate_count("flags:wait-registered"), 0);
    CHECK(!pthread_create(&thread, NULL, wait_for_the_flag, it));
    WAIT_UNTIL(gate_count("flags:wait-registered"));
    CHECK_IN_CHILD(cancel_through_a_mapping_of_its_own, it);
    pthread_join(thread, NULL);
    CHECK_EQ(dw_flag_reason(it->flags, it->flag), DW_REASON_ABORTED);
    CHECK_EQ(dw_flag_times(it->flags, it->flag, &at_ns, &stored_ns), 1);
    CHECK_EQ(at_ns, 5);
    end_dialogue(it);
}

TEST(a_file_that_is_no_flag_table_is_refused)
{
    dw_flags *flags = (dw_flags *)1;
    int memfd = memfd_create("not-a-table", MFD_CLOEXEC);

    CHECK_EQ(dw_flags_map(memfd, &flags), DW_EINVAL);
    CHECK(!flags);
    close(memfd);
    CHECK_EQ(dw_flags_map(memfd, &flags), DW_EBADF);
}

typedef struct {
    const char *label;
    size_t flipped; /* which byte of the head is wrong; NONE: it is right */
    off_t num_more; /* bytes than a table has */
    int seals;
} forgery;

#define NONE      SIZE_MAX
#define ALL_SEALS (F_SEAL_SHRINK | F_SEAL_GROW)

static const forgery forgeries[] = {
    {"other magic", 0, 0, ALL_SEALS},
    {"other layout", 8, 0, ALL_SEALS},
    {"other number of slots", 12, 0, ALL_SEALS},
    {"too long", NONE, 4096, ALL_SEALS},
    {"too short", NONE, -4096, ALL_SEALS},
    {"can shrink", NONE, 0, F_SEAL_GROW},
};

TEST_EACH(a_file_that_is_not_quite_a_flag_table_is_refused, forgery, it,
          forgeries)
{
    char head[4096];
    struct stat stat;
    dw_flags *flags, *mapped;
    int memfd = memfd_create("forged", MFD_CLOEXEC | MFD_ALLOW_SEALING);

    CHECK_EQ(dw_flags_create(&flags), DW_OK);
    CHECK(!fstat(dw_flags_memfd(flags), &stat));
    CHECK_EQ(pread(dw_flags_memfd(flags), head, sizeof head, 0), sizeof head);
    if (it->flipped != NONE)
        head[it->flipped] ^= 1;
    CHECK_EQ(write(memfd, head, sizeof head), sizeof head);
    CHECK(!ftruncate(memfd, stat.st_size + it->num_more));
    CHECK(!fcntl(memfd, F_ADD_SEALS, it->seals));
    CHECK_EQ(dw_flags_map(memfd, &mapped), DW_EINVAL);
    close(memfd);
    dw_flags_free(flags);
}

TEST(a_table_lives_on_for_those_who_mapped_it)
{
    dialogue *it = make_dialogue();
    dw_flags *mapped;

    CHECK_EQ(dw_flags_map(dw_flags_memfd(it->flags), &mapped), DW_OK);
    dw_flags_free(it->flags);
    CHECK_EQ(dw_flag_reason(mapped, it->flag), DW_REASON_NONE);
    it->flags = mapped;
    end_dialogue(it);
}

static void read_cancel_and_release(void *arg)
{
    dialogue *it = arg;

    CHECK_EQ(dw_flag_reason(it->flags, it->flag), DW_REASON_NONE);
    CHECK_EQ(dw_flag_cancel(it->flags, it->flag, DW_REASON_FIN, 5), 1);
    CHECK_EQ(dw_flags_wait(it->flags, &it->flag, 1, -1), 0);
    for (int i = 0; i < 3; i++)
        dw_flag_release(it->flags, it->flag);
    dw_flags_free(it->flags);
}

TEST(a_forked_child_reads_and_cancels_but_releases_nothing_of_its_parents)
{
    dialogue *it = make_dialogue();

    CHECK_IN_CHILD(read_cancel_and_release, it);
    CHECK_EQ(dw_flag_reason(it->flags, it->flag), DW_REASON_FIN);
    CHECK_EQ(stats_of(it->flags).num_live, 1);
    dw_flag_release(it->flags, it->flag);
    CHECK_EQ(dw_flag_reason(it->flags, it->flag), DW_ESTALE);
    end_dialogue(it);
}

static void retain_while_the_parent_lets_go(dialogue *it)
{
    CHECK_EQ(dw_flag_retain(it->flags, it->flag), DW_OK);
    tell(it->to_parent);
    hear(it->to_child);
    /* A stale name uses up nothing. */
    dw_flag stale = {it->flag.slot, it->flag.generation + 1};
    dw_flag_release(it->flags, stale);
    dw_flag_release(it->flags, it->flag);
    /* It had one, and a second release takes none from others. */
    dw_flag_release(it->flags, it->flag);
}

static void release_what_is_not_held(void *arg)
{
    dialogue *it = arg;
    dw_flag_release(it->flags, it->flag);
}

TEST(the_reference_of_another_process_holds_the_slot)
{
    dialogue *it = make_dialogue();
    pid_t child = start_child(retain_while_the_parent_lets_go, it);

    hear(it->to_parent);
    dw_flag_release(it->flags, it->flag);
    CHECK_EQ(dw_flag_reason(it->flags, it->flag), DW_REASON_NONE);
    CHECK_IN_CHILD(release_what_is_not_held, it);
    CHECK_EQ(dw_flag_reason(it->flags, it->flag), DW_REASON_NONE);
    tell(it->to_child);
    end_child(child);
    CHECK_EQ(dw_flag_reason(it->flags, it->flag), DW_ESTALE);
    end_dialogue(it);
}

static void alloc_of_its_own(dialogue *it)
{
    for (int i = 0; i < NUM_CHILD_FLAGS; i++)
        CHECK_EQ(dw_flag_alloc(it->flags, &it->of_child[i]), DW_OK);
    tell(it->to_parent);
    hear(it->to_child);
}

TEST(a_forked_child_allocates_from_ranges_of_its_own)
{
    dialogue *it = make_dialogue();
    pid_t child = start_child(alloc_of_its_own, it);

    hear(it->to_parent);
    for (int i = 0; i < NUM_CHILD_FLAGS; i++) {
        CHECK(it->of_child[i].slot / DW_FLAGS_RANGE_SLOTS !=
              it->flag.slot / DW_FLAGS_RANGE_SLOTS);
        CHECK_EQ(dw_flag_reason(it->flags, it->of_child[i]), DW_REASON_NONE);
    }
    tell(it->to_child);
    end_child(child);
    end_dialogue(it);
}

TEST(the_flags_of_a_living_process_are_not_reclaimed)
{
    dialogue *it = make_dialogue();
    pid_t child = start_child(alloc_of_its_own, it);

    hear(it->to_parent);
    CHECK_EQ(dw_flags_reclaim(it->flags), 0);
    CHECK_EQ(dw_flag_reason(it->flags, it->flag), DW_REASON_NONE);
    CHECK_EQ(dw_flag_reason(it->flags, it->of_child[0]), DW_REASON_NONE);
    tell(it->to_child);
    end_child(child);
    end_dialogue(it);
}

TEST(the_flags_of_a_dead_process_are_cancelled_and_freed)
{
    dialogue *it = make_dialogue();
    pid_t child = start_child(alloc_of_its_own, it);
    dw_flag kept;

    hear(it->to_parent);
    kept = it->of_child[0];
    /* Held by us as an engine would, so it is cancelled but not given back;
     * the second was cancelled by somebody else before. */
    CHECK_EQ(dw_flag_retain(it->flags, kept), DW_OK);
    CHECK_EQ(dw_flag_cancel(it->flags, it->of_child[1], DW_REASON_ABORTED, 5),
             1);
    tell(it->to_child);
    end_child(child);

    CHECK_EQ(dw_flags_reclaim(it->flags), NUM_CHILD_FLAGS - 1);
    CHECK_EQ(dw_flag_reason(it->flags, kept), DW_REASON_OWNER_CLOSED);
    CHECK_EQ(dw_flag_reason(it->flags, it->of_child[1]), DW_ESTALE);
    CHECK_EQ(dw_flag_reason(it->flags, it->of_child[2]), DW_ESTALE);
    CHECK_EQ(dw_flag_reason(it->flags, it->flag), DW_REASON_NONE);
    CHECK_EQ(dw_flags_reclaim(it->flags), 0);

    dw_flag_release(it->flags, kept);
    CHECK_EQ(dw_flag_reason(it->flags, kept), DW_ESTALE);
    end_dialogue(it);
}

/* One thread alone, and a minute under ThreadSanitizer. */
#ifndef __SANITIZE_THREAD__
TEST(the_ranges_of_a_dead_process_are_used_again)
{
    dialogue *it = make_dialogue();
    pid_t child = start_child(alloc_of_its_own, it);
    dw_flag kept, flag;

    hear(it->to_parent);
    kept = it->of_child[0];
    CHECK_EQ(dw_flag_retain(it->flags, kept), DW_OK);
    tell(it->to_child);
    end_child(child);
    CHECK_EQ(dw_flags_reclaim(it->flags), NUM_CHILD_FLAGS);
    for (uint32_t i = 1; i < DW_FLAGS_NUM_SLOTS - DW_FLAGS_RANGE_SLOTS; i++)
        CHECK_EQ(dw_flag_alloc(it->flags, &flag), DW_OK);
    /* A reference of ours still holds the child's range. */
    CHECK_EQ(dw_flag_alloc(it->flags, &flag), DW_ENOSPC);
    dw_flag_release(it->flags, kept);
    dw_flags_reclaim(it->flags);
    for (uint32_t i = 0; i < DW_FLAGS_RANGE_SLOTS; i++)
        CHECK_EQ(dw_flag_alloc(it->flags, &flag), DW_OK);
    CHECK_EQ(dw_flag_alloc(it->flags, &flag), DW_ENOSPC);
    end_dialogue(it);
}

TEST(a_slot_freed_by_another_process_is_found_in_a_full_table)
{
    dialogue *it = make_dialogue();
    dw_flag flag;

    for (uint32_t i = 1; i < DW_FLAGS_NUM_SLOTS; i++)
        CHECK_EQ(dw_flag_alloc(it->flags, &flag), DW_OK);
    pid_t child = start_child(retain_while_the_parent_lets_go, it);
    hear(it->to_parent);
    dw_flag_release(it->flags, it->flag);
    CHECK_EQ(dw_flag_alloc(it->flags, &flag), DW_ENOSPC);
    tell(it->to_child);
    end_child(child);
    CHECK_EQ(dw_flag_alloc(it->flags, &flag), DW_OK);
    CHECK_EQ(flag.slot, it->flag.slot);
    CHECK_EQ(dw_flag_alloc(it->flags, &flag), DW_ENOSPC);
    end_dialogue(it);
}
#endif

TEST(a_killed_process_is_dead_before_it_is_waited_for)
{
    dialogue *it = make_dialogue();
    pid_t child = start_child(alloc_of_its_own, it);
    siginfo_t info;
    int status;

    hear(it->to_parent);
    CHECK(!kill(child, SIGKILL));
    CHECK(!waitid(P_PID, (id_t)child, &info, WEXITED | WNOWAIT));
    CHECK_EQ(dw_flags_reclaim(it->flags), NUM_CHILD_FLAGS);
    CHECK_EQ(waitpid(child, &status, 0), child);
    end_dialogue(it);
}
