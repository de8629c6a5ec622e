/* Which process hands out which slots. A process claims ranges of 1,024 slots
 * by a compare-and-swap on the range's owner word and is then the only one that
 * allocates from them, under a lock of its own. A slot whose last reference
 * another process dropped is free but not queued: it is found by a look through
 * the own ranges when the queue is empty.
 */
#include "dw_clock.h"
#include "dw_flags_table.h"

static dw_process_id self_of(dw_flags_local *local)
{
    /* Relaxed: threads that race here find the same answer. */
    dw_process_id self =
        atomic_load_explicit(&local->self, memory_order_relaxed);
    if (!self) {
        self = dw_process_self();
        atomic_store_explicit(&local->self, self, memory_order_relaxed);
    }
    return self;
}

/* Under the lock, as are all up to dw_flag_alloc. */
static void queue_push(dw_flags_local *local, uint32_t slot)
{
    if (local->num_free++)
        local->next[local->tail] = slot;
    else
        local->head = slot;
    local->tail = slot;
}

static uint32_t queue_pop(dw_flags_local *local)
{
    uint32_t slot = local->head;
    local->head = local->next[slot];
    local->num_free--;
    return slot;
}

static void queue_free_slots(dw_flags *flags, uint32_t range)
{
    uint32_t slot = range * DW_FLAGS_RANGE_SLOTS;
    for (uint32_t i = 0; i < DW_FLAGS_RANGE_SLOTS; i++, slot++) {
        /* Acquire: pairs with the foreign release in dw_flags_recycle. */
        if (refs_are_free(atomic_load_explicit(&flags->table->refs[slot],
                                               memory_order_acquire)))
            queue_push(flags->local, slot);
    }
}

static bool claim_range(dw_flags *flags, dw_process_id self)
{
    for (uint32_t range = 0; range < NUM_RANGES; range++) {
        _Atomic dw_process_id *owner = &flags->table->owners[range];
        dw_process_id none = OWNER_NONE;
        /* Acquire: pairs with the release store of who gave it up. */
        if (atomic_load_explicit(owner, memory_order_relaxed) ||
            !atomic_compare_exchange_strong_explicit(
                owner, &none, self, memory_order_acquire, memory_order_relaxed))
            continue;
        atomic_store_explicit(&flags->local->is_own[range], true,
                              memory_order_relaxed);
        flags->local->num_ranges++;
        queue_free_slots(flags, range);
        if (flags->local->num_free)
            return true; /* else all its slots are retired */
    }
    return false;
}

/* With the queue empty, what is free in the own ranges was freed by others. If
 * that is little, one more range is claimed, so that a process whose slots are
 * nearly all in use does not look through them at every alloc. */
static bool queue_refill(dw_flags *flags, dw_process_id self)
{
    dw_flags_local *local = flags->local;
    for (uint32_t range = 0; range < NUM_RANGES; range++) {
        if (atomic_load_explicit(&local->is_own[range], memory_order_relaxed))
            queue_free_slots(flags, range);
    }
    if (local->num_free >= local->num_ranges * (DW_FLAGS_RANGE_SLOTS / 8) &&
        local->num_free)
        return true;
    return claim_range(flags, self) || local->num_free;
}

int dw_flag_alloc(dw_flags *flags, dw_flag *out)
{
    *out = (dw_flag){0, 0};
    dw_flags_local *local = flags->local;
    dw_flags_table *table = flags->table;
    dw_process_id self = self_of(local);
    dw_lock_acquire(&local->lock);
    if (!local->num_free && !queue_refill(flags, self)) {
        dw_lock_release(&local->lock);
        return DW_ENOSPC;
    }
    uint32_t slot = queue_pop(local);
    DW_SYNC_POINT("flags:alloc-popped");
    /* Relaxed: a slot from the queue is nobody else's. */
    uint32_t generation = refs_generation(
        atomic_load_explicit(&table->refs[slot], memory_order_relaxed));
    if (!generation)
        generation = 1;
    atomic_store_explicit(&table->words[slot], generation << 8,
                          memory_order_relaxed);
    /* Live before the lock goes: a refill would queue it again. Release: a name
     * is good only once its word stands; pairs with ref_get in dw_flags.c. */
    atomic_store_explicit(&table->refs[slot],
                          (uint64_t)generation << REFS_GENERATION_SHIFT |
                              REFS_OWN,
                          memory_order_release);
    dw_lock_release(&local->lock);
    *out = (dw_flag){slot, generation};
    return DW_OK;
}

void dw_flags_put_slot(dw_flags *flags, uint32_t slot, uint64_t free_refs)
{
    dw_flags_local *local = flags->local;
    /* Both under the lock: between them a refill would queue the slot too. */
    dw_lock_acquire(&local->lock);
    atomic_store_explicit(&flags->table->refs[slot], free_refs,
                          memory_order_relaxed);
    DW_SYNC_POINT("flags:put-stored");
    queue_push(local, slot);
    dw_lock_release(&local->lock);
}

/* Gives a range that this process may write the owner word of back, or leaves
 * it for a later reclaim if somebody still holds a slot of it. */
static void range_give_up(dw_flags *flags, uint32_t range)
{
    dw_process_id owner = OWNER_NONE;
    uint32_t slot = range * DW_FLAGS_RANGE_SLOTS;
    for (uint32_t i = 0; i < DW_FLAGS_RANGE_SLOTS; i++, slot++) {
        uint64_t refs = atomic_load_explicit(&flags->table->refs[slot],
                                             memory_order_acquire);
        if (!refs_are_free(refs) && refs != REFS_RETIRED)
            owner = OWNER_ABANDONED;
    }
    /* Release: pairs with claim_range and dw_flags_reclaim. */
    atomic_store_explicit(&flags->table->owners[range], owner,
                          memory_order_release);
}

void dw_flags_abandon(dw_flags *flags)
{
    for (uint32_t range = 0; range < NUM_RANGES; range++) {
        if (atomic_load_explicit(&flags->local->is_own[range],
                                 memory_order_relaxed))
            range_give_up(flags, range);
    }
}

/* Drops all that the dead owner held on a slot, the reference that it died
 * cleaning up after too. */
static void drop_own_refs(dw_flags *flags, uint32_t slot)
{
    _Atomic uint64_t *refs = &flags->table->refs[slot];
    uint64_t seen = atomic_load_explicit(refs, memory_order_relaxed);
    uint64_t left;
    do {
        if (!(seen & REFS_OWN_COUNTS))
            return;
        left = seen & ~REFS_OWN_COUNTS;
        if (!(left & REFS_COUNTS))
            left |= REFS_CLEANING;
        /* Acq_rel: as in ref_put. */
    } while (!atomic_compare_exchange_weak_explicit(
        refs, &seen, left, memory_order_acq_rel, memory_order_relaxed));
    if (left & REFS_CLEANING)
        dw_flags_recycle(flags, slot, refs_generation(left));
}

static int range_cancel(dw_flags *flags, uint32_t range)
{
    int num_cancelled = 0;
    uint32_t slot = range * DW_FLAGS_RANGE_SLOTS;
    for (uint32_t i = 0; i < DW_FLAGS_RANGE_SLOTS; i++, slot++) {
        uint64_t refs = atomic_load_explicit(&flags->table->refs[slot],
                                             memory_order_acquire);
        dw_flag flag = {slot, refs_generation(refs)};
        if (refs_are_live(refs, flag.generation) &&
            dw_flag_cancel(flags, flag, DW_REASON_OWNER_CLOSED,
                           dw_clock_ns()) == 1)
            num_cancelled++;
        drop_own_refs(flags, slot);
    }
    return num_cancelled;
}

int dw_flags_reclaim(dw_flags *flags)
{
    dw_process_id self = self_of(flags->local);
    int num_cancelled = 0;
    for (uint32_t range = 0; range < NUM_RANGES; range++) {
        _Atomic dw_process_id *owner = &flags->table->owners[range];
        dw_process_id seen = atomic_load_explicit(owner, memory_order_relaxed);
        if (seen == OWNER_NONE || seen == self ||
            (seen != OWNER_ABANDONED && !dw_process_is_dead(seen)))
            continue;
        /* One reclaimer at a time; should it die at this, its own id is what
         * the next one finds. Acquire: pairs with range_give_up. */
        if (!atomic_compare_exchange_strong_explicit(
                owner, &seen, self, memory_order_acquire, memory_order_relaxed))
            continue;
        num_cancelled += range_cancel(flags, range);
        range_give_up(flags, range);
    }
    return num_cancelled;
}
