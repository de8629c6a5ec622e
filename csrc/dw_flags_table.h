/* The flag table's memory, for dw_flags*.c alone: what all processes share,
 * and what each keeps to itself.
 *
 * A slot's references are one word, so that a slot is taken, shared and given
 * back without a lock:
 *
 *     63 ........ 41 | 40       | 39 ..... 20 | 19 ... 0
 *     generation     | cleaning | foreign     | own
 *
 *     (0, 0, 0, 0)   free and never used: generation 1 comes next
 *     (g, 0, 0, 0)   free: generation g comes next
 *     (g, 0, f, o)   live: f + o references
 *     (g, 1, f, o)   dead: the holder of the last reference cleans up
 *     (0, 1, 0, 0)   retired
 *
 * `own` are references held by the process that owns the slot's range,
 * `foreign` by all others. Keeping them apart is what lets the references of a
 * dead owner be dropped and an engine's be kept.
 *
 * While a slot is free its flag word is 0, which matches no name.
 */
#ifndef DW_FLAGS_TABLE_H
#define DW_FLAGS_TABLE_H

#include <assert.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>

#include "dw_base.h"
#include "dw_flags.h"
#include "dw_process.h"

#define NUM_RANGES (DW_FLAGS_NUM_SLOTS / DW_FLAGS_RANGE_SLOTS)

#define TABLE_MAGIC  0x73676c6677640a01U
#define TABLE_LAYOUT 1U
/* Arrays begin on the largest page size in use, so that the layout is the same
 * for all and the words alone can be registered with a device. */
#define TABLE_ALIGN 65536

#define REFS_OWN              ((uint64_t)1)
#define REFS_FOREIGN          ((uint64_t)1 << 20)
#define REFS_OWN_COUNTS       (REFS_FOREIGN - 1)
#define REFS_COUNTS           (((uint64_t)1 << 40) - 1)
#define REFS_CLEANING         ((uint64_t)1 << 40)
#define REFS_RETIRED          REFS_CLEANING
#define REFS_GENERATION_SHIFT 41

/* The owner word of a range whose owner gave up the table but not every
 * reference. No process has it: a pid is never 0. */
#define OWNER_NONE      ((dw_process_id)0)
#define OWNER_ABANDONED ((dw_process_id)1 << 63)

/* A futex and how many sleep on it. A waiter that dies asleep leaves `waiters`
 * too high, which costs a needless wake-up call a ring and nothing else. */
typedef struct {
    _Atomic uint32_t count;
    _Atomic uint32_t waiters;
} dw_bell;

/* Shared by all processes that map it. */
typedef struct {
    uint64_t magic;
    uint32_t layout;
    uint32_t num_slots;
    dw_bell doorbell;  /* counts every cancel; dw_flags_wait_bell */
    dw_bell flag_bell; /* dw_flags_wait's own: rung when a slot ends too */
    _Atomic uint64_t num_retired;
    _Atomic uint64_t num_cancels;
    _Atomic uint64_t num_stale;
    _Atomic dw_process_id owners[NUM_RANGES];
    uint8_t padding[TABLE_ALIGN - 56 - 8 * NUM_RANGES];
    _Atomic uint32_t words[DW_FLAGS_NUM_SLOTS];
    _Atomic uint64_t refs[DW_FLAGS_NUM_SLOTS];
    _Atomic uint64_t at_ns[DW_FLAGS_NUM_SLOTS];
    _Atomic uint64_t stored_ns[DW_FLAGS_NUM_SLOTS];
    _Atomic uint32_t acks[DW_FLAGS_NUM_SLOTS];
} dw_flags_table;

static_assert(sizeof(_Atomic uint32_t) == 4 && sizeof(_Atomic uint64_t) == 8,
              "processes and devices share plain words");
static_assert(offsetof(dw_flags_table, owners) == 56, "layout 1");
static_assert(offsetof(dw_flags_table, words) == TABLE_ALIGN, "layout 1");
static_assert(sizeof(dw_flags_table) ==
                  TABLE_ALIGN + 32 * (size_t)DW_FLAGS_NUM_SLOTS,
              "layout 1");

/* One process's own. It lies in memory that a child of fork() finds zeroed
 * (MADV_WIPEONFORK), and zeroed is the right start: the lock free, no range
 * owned, nothing queued, no reference held. */
typedef struct {
    dw_lock lock;               /* guards the queue, and claiming ranges */
    _Atomic dw_process_id self; /* 0: not asked yet */
    uint32_t head;              /* of the queue of free slots */
    uint32_t tail;
    uint32_t num_free;
    uint32_t num_ranges;
    atomic_bool is_own[NUM_RANGES];
    uint32_t next[DW_FLAGS_NUM_SLOTS];
    /* References this process holds on slots of others' ranges. */
    _Atomic uint32_t foreign[DW_FLAGS_NUM_SLOTS];
} dw_flags_local;

struct dw_flags {
    int memfd;
    dw_flags_table *table;
    dw_flags_local *local;
};

static inline uint32_t refs_generation(uint64_t refs)
{
    return (uint32_t)(refs >> REFS_GENERATION_SHIFT);
}

static inline bool refs_are_free(uint64_t refs)
{
    return !(refs & (REFS_COUNTS | REFS_CLEANING));
}

static inline bool refs_are_live(uint64_t refs, uint32_t generation)
{
    return refs_generation(refs) == generation && (refs & REFS_COUNTS) &&
           !(refs & REFS_CLEANING);
}

static inline bool is_own_slot(const dw_flags *flags, uint32_t slot)
{
    /* Relaxed: set before the range's first slot is handed out, so whoever
     * holds a name from it has been told since. */
    return atomic_load_explicit(
        &flags->local->is_own[slot / DW_FLAGS_RANGE_SLOTS],
        memory_order_relaxed);
}

/* dw_flags.c. Cleans up a slot that its caller has set to cleaning. */
void dw_flags_recycle(dw_flags *flags, uint32_t slot, uint32_t generation);

/* dw_flags_ranges.c. Stores the word that makes an own slot free, and queues
 * the slot. */
void dw_flags_put_slot(dw_flags *flags, uint32_t slot, uint64_t free_refs);
/* Gives all ranges of this process up. */
void dw_flags_abandon(dw_flags *flags);

/* dw_flags_wait.c. After a word was set, and after a live word was cleared. */
void dw_flags_ring_cancel(dw_flags *flags, uint32_t slot);
void dw_flags_ring_stale(dw_flags *flags, uint32_t slot);

#endif
