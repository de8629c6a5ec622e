#include "dw_flags.h"

#include "dw_clock.h"
#include "dw_flags_table.h"

static uint64_t refs_unit(const dw_flags *flags, uint32_t slot)
{
    return is_own_slot(flags, slot) ? REFS_OWN : REFS_FOREIGN;
}

static int ref_get(dw_flags *flags, dw_flag flag, uint64_t unit)
{
    _Atomic uint64_t *refs = &flags->table->refs[flag.slot];
    uint64_t seen = atomic_load_explicit(refs, memory_order_relaxed);
    uint64_t all = unit * REFS_OWN_COUNTS;
    do {
        if (!refs_are_live(seen, flag.generation))
            return DW_ESTALE;
        if ((seen & all) == all)
            return DW_ENOSPC;
        /* Acquire: pairs with the release store in dw_flag_alloc. */
    } while (!atomic_compare_exchange_weak_explicit(
        refs, &seen, seen + unit, memory_order_acquire, memory_order_relaxed));
    return DW_OK;
}

static void ref_put(dw_flags *flags, dw_flag flag, uint64_t unit)
{
    _Atomic uint64_t *refs = &flags->table->refs[flag.slot];
    uint64_t seen = atomic_load_explicit(refs, memory_order_relaxed);
    uint64_t left;
    do {
        if (!refs_are_live(seen, flag.generation) ||
            !(seen & (unit * REFS_OWN_COUNTS)))
            return;
        left = seen - unit;
        /* The last one stays in the word while its holder cleans up, so that
         * a reclaim knows whether it was the dead owner who did. */
        if (!(left & REFS_COUNTS))
            left = seen | REFS_CLEANING;
        /* Release: what was done under this reference comes before the slot's
         * next use. Acquire: pairs with it in whoever drops the last one. */
    } while (!atomic_compare_exchange_weak_explicit(
        refs, &seen, left, memory_order_acq_rel, memory_order_relaxed));
    if (left & REFS_CLEANING)
        dw_flags_recycle(flags, flag.slot, flag.generation);
}

void dw_flags_recycle(dw_flags *flags, uint32_t slot, uint32_t generation)
{
    dw_flags_table *table = flags->table;
    DW_SYNC_POINT("flags:release-last");
    /* Seq_cst: either a waiter that has counted itself sees the word gone, or
     * dw_flags_ring_stale sees the waiter. */
    uint32_t word =
        atomic_exchange_explicit(&table->words[slot], 0, memory_order_seq_cst);
    /* A cancelled slot alone has touched this page; at_ns counts for nothing
     * while stored_ns is 0. Release: a reader that meets the zero sees the
     * reference word that came before it, and so that its name is stale; pairs
     * with the acquire loads of its readers. */
    if (word & 0xff)
        atomic_store_explicit(&table->stored_ns[slot], 0, memory_order_release);
    if (atomic_load_explicit(&table->acks[slot], memory_order_relaxed))
        atomic_store_explicit(&table->acks[slot], 0, memory_order_release);

    uint64_t free_refs = (uint64_t)(generation + 1) << REFS_GENERATION_SHIFT;
    if (generation == DW_FLAGS_MAX_GENERATION) {
        atomic_store_explicit(&table->refs[slot], REFS_RETIRED,
                              memory_order_relaxed);
        atomic_fetch_add_explicit(&table->num_retired, 1, memory_order_relaxed);
    } else if (is_own_slot(flags, slot)) {
        dw_flags_put_slot(flags, slot, free_refs);
    } else {
        /* Release: pairs with the acquire load of the owner that finds it. */
        atomic_store_explicit(&table->refs[slot], free_refs,
                              memory_order_release);
    }
    if (!(word & 0xff))
        dw_flags_ring_stale(flags, slot);
}

int dw_flag_retain(dw_flags *flags, dw_flag flag)
{
    if (flag.slot >= DW_FLAGS_NUM_SLOTS)
        return DW_ESTALE;
    uint64_t unit = refs_unit(flags, flag.slot);
    int rc = ref_get(flags, flag, unit);
    if (!rc && unit == REFS_FOREIGN)
        atomic_fetch_add_explicit(&flags->local->foreign[flag.slot], 1,
                                  memory_order_relaxed);
    return rc;
}

/* One of the references that this process took on another's slot; false if it
 * has none, as a forked child has none of what its parent held. */
static bool foreign_take(dw_flags *flags, uint32_t slot)
{
    _Atomic uint32_t *held = &flags->local->foreign[slot];
    uint32_t seen = atomic_load_explicit(held, memory_order_relaxed);
    do {
        if (!seen)
            return false;
        /* Relaxed: a count of this process's own; the reference word orders. */
    } while (!atomic_compare_exchange_weak_explicit(
        held, &seen, seen - 1, memory_order_relaxed, memory_order_relaxed));
    return true;
}

void dw_flag_release(dw_flags *flags, dw_flag flag)
{
    if (flag.slot >= DW_FLAGS_NUM_SLOTS)
        return;
    if (is_own_slot(flags, flag.slot)) {
        ref_put(flags, flag, REFS_OWN);
        return;
    }
    /* The name first: a stale one must not use up the count of a good one.
     * Relaxed: while this process holds the name its generation stands. */
    uint64_t refs = atomic_load_explicit(&flags->table->refs[flag.slot],
                                         memory_order_relaxed);
    if (refs_are_live(refs, flag.generation) && foreign_take(flags, flag.slot))
        ref_put(flags, flag, REFS_FOREIGN);
}

int dw_flag_cancel(dw_flags *flags, dw_flag flag, enum dw_reason reason,
                   uint64_t at_ns)
{
    if ((int)reason <= DW_REASON_NONE || (int)reason > DW_REASON_MAX)
        return DW_EINVAL;
    dw_flags_table *table = flags->table;
    uint64_t unit = REFS_FOREIGN;
    int rc = DW_ESTALE;
    if (flag.slot < DW_FLAGS_NUM_SLOTS) {
        unit = refs_unit(flags, flag.slot);
        rc = ref_get(flags, flag, unit);
    }
    if (rc) {
        if (rc == DW_ESTALE)
            atomic_fetch_add_explicit(&table->num_stale, 1,
                                      memory_order_relaxed);
        return rc;
    }
    DW_SYNC_POINT("flags:cancel-retained");
    uint32_t live = flag.generation << 8;
    /* Seq_cst: either dw_flags_wait, which counts itself before it looks, sees
     * the word, or dw_flags_ring_cancel sees the waiter. */
    bool is_first = atomic_compare_exchange_strong_explicit(
        &table->words[flag.slot], &live, live | (uint32_t)reason,
        memory_order_seq_cst, memory_order_relaxed);
    if (is_first) {
        DW_SYNC_POINT("flags:cancel-stored");
        /* Release, twice: stored_ns publishes at_ns, and a reader of an earlier
         * generation that meets either sees that its name is stale; pair with
         * the loads in dw_flag_times. */
        atomic_store_explicit(&table->at_ns[flag.slot], at_ns,
                              memory_order_release);
        atomic_store_explicit(&table->stored_ns[flag.slot], dw_clock_ns(),
                              memory_order_release);
        atomic_fetch_add_explicit(&table->num_cancels, 1, memory_order_relaxed);
        dw_flags_ring_cancel(flags, flag.slot);
    }
    ref_put(flags, flag, unit);
    return is_first;
}

int dw_flag_reason(const dw_flags *flags, dw_flag flag)
{
    if (flag.slot >= DW_FLAGS_NUM_SLOTS || !flag.generation)
        return DW_ESTALE;
    /* Relaxed: all there is to know is in the one word. */
    uint32_t word = atomic_load_explicit(&flags->table->words[flag.slot],
                                         memory_order_relaxed);
    return word >> 8 == flag.generation ? (int)(word & 0xff) : DW_ESTALE;
}

int dw_flags_any(const dw_flags *flags, const dw_flag *which, size_t num_which)
{
    for (size_t i = 0; i < num_which; i++) {
        if (dw_flag_reason(flags, which[i]) > 0)
            return 1;
    }
    return 0;
}

/* What was read beside the word belongs to this flag if the name is still good
 * afterwards: whoever overwrites it moves the reference word on first. */
static bool is_still_live(const dw_flags *flags, dw_flag flag)
{
    /* Relaxed: ordered by the caller's acquire loads before it. */
    uint64_t refs = atomic_load_explicit(&flags->table->refs[flag.slot],
                                         memory_order_relaxed);
    return refs_are_live(refs, flag.generation);
}

int dw_flag_times(const dw_flags *flags, dw_flag flag, uint64_t *at_ns,
                  uint64_t *stored_ns)
{
    *at_ns = 0;
    *stored_ns = 0;
    int reason = dw_flag_reason(flags, flag);
    if (reason <= 0)
        return reason;
    /* Acquire, twice: pair with the winner's release stores in dw_flag_cancel
     * and with the zero of dw_flags_recycle. */
    uint64_t stored = atomic_load_explicit(&flags->table->stored_ns[flag.slot],
                                           memory_order_acquire);
    uint64_t at = atomic_load_explicit(&flags->table->at_ns[flag.slot],
                                       memory_order_acquire);
    DW_SYNC_POINT("flags:times-read");
    if (!is_still_live(flags, flag))
        return DW_ESTALE;
    if (!stored)
        return 0;
    *at_ns = at;
    *stored_ns = stored;
    return 1;
}

int dw_flag_ack(dw_flags *flags, dw_flag flag, uint32_t step)
{
    if (!step)
        return DW_EINVAL;
    if (flag.slot >= DW_FLAGS_NUM_SLOTS)
        return DW_ESTALE;
    /* Under a reference, so that it cannot land on the slot's next tenant. */
    uint64_t unit = refs_unit(flags, flag.slot);
    int rc = ref_get(flags, flag, unit);
    if (rc)
        return rc;
    /* Release: what the engine did before it acknowledged is seen by who reads
     * the ack; pairs with dw_flag_acked. */
    atomic_store_explicit(&flags->table->acks[flag.slot], step,
                          memory_order_release);
    ref_put(flags, flag, unit);
    return DW_OK;
}

int dw_flag_acked(const dw_flags *flags, dw_flag flag, uint32_t *step)
{
    *step = 0;
    if (flag.slot >= DW_FLAGS_NUM_SLOTS)
        return DW_ESTALE;
    /* Acquire: pairs with dw_flag_ack, and with a device's store. */
    uint32_t ack = atomic_load_explicit(&flags->table->acks[flag.slot],
                                        memory_order_acquire);
    if (!is_still_live(flags, flag))
        return DW_ESTALE;
    *step = ack;
    return DW_OK;
}

const uint32_t *dw_flag_address(const dw_flags *flags, uint32_t slot)
{
    return (const uint32_t *)&flags->table->words[slot];
}

uint32_t *dw_flag_ack_address(const dw_flags *flags, uint32_t slot)
{
    return (uint32_t *)&flags->table->acks[slot];
}

#ifdef DW_TESTING
int dw_flags_set_generation(dw_flags *flags, uint32_t slot, uint32_t generation)
{
    _Atomic uint64_t *refs = &flags->table->refs[slot];
    if (!refs_are_free(atomic_load_explicit(refs, memory_order_relaxed)))
        return DW_EINVAL;
    atomic_store_explicit(refs, (uint64_t)generation << REFS_GENERATION_SHIFT,
                          memory_order_relaxed);
    return DW_OK;
}
#endif
