/* Sleeping until a flag is set. There are two bells. The doorbell counts every
 * cancel, so that who reads it, looks at other things and then waits can miss
 * none. dw_flags_wait sleeps on a bell of its own, which is also rung when a
 * live flag ends uncancelled: an idle engine on the doorbell need not wake for
 * each request that merely finished.
 */
#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "dw_clock.h"
#include "dw_flags_table.h"

#define FOREVER UINT64_MAX

static uint64_t deadline_after(int64_t timeout_ns)
{
    if (timeout_ns < 0)
        return FOREVER;
    return dw_clock_ns() + (uint64_t)timeout_ns;
}

/* A waiter for one flag sleeps through the rings of 31 flags of 32. */
static uint32_t slot_bit(uint32_t slot)
{
    return 1U << (slot % 32);
}

/* RETURNS: 0 woken, or the count was no longer `seen`. */
static int bell_sleep(dw_bell *bell, uint32_t seen, uint64_t deadline_ns,
                      uint32_t bits)
{
    struct timespec until = {
        .tv_sec = (time_t)(deadline_ns / 1000000000U),
        .tv_nsec = (long)(deadline_ns % 1000000000U),
    };
    /* Not PRIVATE: the other side may be another process. An absolute time of
     * CLOCK_MONOTONIC, which is what FUTEX_WAIT_BITSET takes. */
    if (!syscall(SYS_futex, &bell->count, FUTEX_WAIT_BITSET, seen,
                 deadline_ns == FOREVER ? NULL : &until, NULL, bits) ||
        errno == EAGAIN)
        return DW_OK;
    return -errno;
}

static void bell_wake(dw_bell *bell, uint32_t bits)
{
    syscall(SYS_futex, &bell->count, FUTEX_WAKE_BITSET, INT_MAX, NULL, NULL,
            bits);
}

/* Seq_cst on both sides: a waiter counts itself and then has the kernel compare
 * the count; a ringer moves the count and then looks for waiters. One of the
 * two sees the other. */
static void ring_always(dw_bell *bell)
{
    atomic_fetch_add_explicit(&bell->count, 1, memory_order_seq_cst);
    if (atomic_load_explicit(&bell->waiters, memory_order_seq_cst))
        bell_wake(bell, FUTEX_BITSET_MATCH_ANY);
}

/* Here it is the flag's word, stored seq_cst by the caller, that the waiter
 * looks at after it has counted itself; the count only closes the gap between
 * that look and its sleep. */
static void ring_flag_bell(dw_flags *flags, uint32_t slot)
{
    dw_bell *bell = &flags->table->flag_bell;
    if (!atomic_load_explicit(&bell->waiters, memory_order_seq_cst))
        return;
    atomic_fetch_add_explicit(&bell->count, 1, memory_order_seq_cst);
    bell_wake(bell, slot_bit(slot));
}

void dw_flags_ring_cancel(dw_flags *flags, uint32_t slot)
{
    ring_always(&flags->table->doorbell);
    ring_flag_bell(flags, slot);
}

void dw_flags_ring_stale(dw_flags *flags, uint32_t slot)
{
    ring_flag_bell(flags, slot);
}

void dw_flags_ring(dw_flags *flags)
{
    ring_always(&flags->table->doorbell);
}

uint32_t dw_flags_bell(const dw_flags *flags)
{
    /* Acquire: what the ringer did before is seen with the count it made. */
    return atomic_load_explicit(&flags->table->doorbell.count,
                                memory_order_acquire);
}

int dw_flags_wait_bell(dw_flags *flags, uint32_t seen, int64_t timeout_ns)
{
    dw_bell *bell = &flags->table->doorbell;
    uint64_t deadline_ns = deadline_after(timeout_ns);
    int rc = DW_OK;
    /* Seq_cst: pairs with ring_always. */
    atomic_fetch_add_explicit(&bell->waiters, 1, memory_order_seq_cst);
    while (!rc && dw_flags_bell(flags) == seen)
        rc = bell_sleep(bell, seen, deadline_ns, FUTEX_BITSET_MATCH_ANY);
    atomic_fetch_sub_explicit(&bell->waiters, 1, memory_order_relaxed);
    return rc;
}

/* RETURNS: the index of the first that is cancelled or stale, or -1. */
static int first_ended(const dw_flags *flags, const dw_flag *which,
                       size_t num_which)
{
    for (size_t i = 0; i < num_which; i++) {
        dw_flag flag = which[i];
        if (flag.slot >= DW_FLAGS_NUM_SLOTS || !flag.generation)
            return (int)i;
        /* Seq_cst: pairs with the stores of dw_flag_cancel and
         * dw_flags_recycle; see ring_flag_bell. */
        if (atomic_load_explicit(&flags->table->words[flag.slot],
                                 memory_order_seq_cst) != flag.generation << 8)
            return (int)i;
    }
    return -1;
}

int dw_flags_wait(dw_flags *flags, const dw_flag *which, size_t num_which,
                  int64_t timeout_ns)
{
    dw_bell *bell = &flags->table->flag_bell;
    uint64_t deadline_ns = deadline_after(timeout_ns);
    uint32_t bits = 0;
    for (size_t i = 0; i < num_which; i++)
        bits |= slot_bit(which[i].slot);
    if (!bits)
        bits = FUTEX_BITSET_MATCH_ANY; /* none: sleeps the timeout out */

    /* Seq_cst: counted before the look; pairs with ring_flag_bell. */
    atomic_fetch_add_explicit(&bell->waiters, 1, memory_order_seq_cst);
    DW_SYNC_POINT("flags:wait-registered");
    int index = -1;
    int rc = DW_OK;
    while (!rc) {
        /* Acquire, before the look: a ring after it ends the sleep at once. */
        uint32_t seen =
            atomic_load_explicit(&bell->count, memory_order_acquire);
        index = first_ended(flags, which, num_which);
        if (index >= 0)
            break;
        DW_SYNC_POINT("flags:wait-looked");
        rc = bell_sleep(bell, seen, deadline_ns, bits);
        DW_SYNC_POINT("flags:wait-slept");
    }
    atomic_fetch_sub_explicit(&bell->waiters, 1, memory_order_relaxed);
    /* A flag set in the same instant outweighs the timeout or the signal. */
    if (index < 0)
        index = first_ended(flags, which, num_which);
    return index < 0 ? rc : index;
}
