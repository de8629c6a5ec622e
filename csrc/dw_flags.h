/* The flag table: one 32-bit word a request, in memory that every process of
 * a group (and its GPU) maps: the watcher stores a reason, the engine reads.
 *
 *     word = generation << 8 | reason          reason 0: live
 *
 *            alloc                cancel (one CAS, first reason wins)
 *     free ────────► gen<<8 | 0 ─────────────► gen<<8 | reason
 *      ▲                 │                            │
 *      └─────────────────┴──── last release ◄─────────┘
 *                    generation moves on, slot goes to the end of the queue
 *
 * A flag is named by slot and generation. Whoever holds a name from an earlier
 * generation gets DW_ESTALE and changes nothing: a late cancel cannot hit the
 * slot's next tenant, and because the generation moves only when the last
 * reference goes, neither can recycling lose a cancel that is under way.
 *
 * While a slot is free its word is 0, which matches no name.
 *
 * The table is a sparse memfd of fixed size, mapped whole and never grown, so
 * that a device registers its pages once. Timestamps, acks and reference
 * counts lie beside the words, not between them. Each process allocates from
 * ranges that it owns (pid and start time in the range's header); the ranges
 * of a dead process are cancelled and taken back by dw_flags_reclaim. That holds
 * within one pid namespace. What a process that died had retained of others'
 * flags is not known, and keeps those slots.
 *
 * Generations run 1 ... 2^23-1 (so that a signed shift on a device is safe);
 * a slot whose generation would wrap is retired, never reused.
 *
 * THREADS: every function may be called from any thread and any process that
 * maps the table. A child of fork() may read, wait and cancel; its alloc
 * claims ranges of its own, and its release of what the parent held is a no-op.
 * A reference goes back through the handle that took it.
 *
 * Never: blocks (but dw_flags_wait), calls back, or logs.
 *
 * Names and reasons are in disconnect_watch.h, which native users share.
 */
#ifndef DW_FLAGS_H
#define DW_FLAGS_H

#include <stddef.h>
#include <stdint.h>

#include "dw_error.h"

#define DW_FLAGS_NUM_SLOTS      (1U << 20)
#define DW_FLAGS_MAX_GENERATION ((1U << 23) - 1)
#define DW_FLAGS_RANGE_SLOTS    1024U

typedef struct {
    uint64_t num_live;    /* slots with at least one reference */
    uint64_t num_retired; /* slots whose generation would have wrapped */
    uint64_t num_cancels; /* words set, each once */
    uint64_t num_stale;   /* cancels refused for their generation */
} dw_flags_stats;

/* OWNERSHIP: returns a new table, freed with dw_flags_free, which unmaps it
 * and closes the memfd; flags still referenced elsewhere live on there, until a
 * reclaim there cancels them as those of a dead process.
 * ERRORS: DW_ENOTSUP before Linux 4.14 (MADV_WIPEONFORK). */
int dw_flags_create(dw_flags **out);

/* Maps the table behind a memfd of dw_flags_create, in another process.
 * OWNERSHIP: borrows memfd (a private duplicate is kept).
 * ERRORS: DW_EINVAL if the file is no flag table of this layout. */
int dw_flags_map(int memfd, dw_flags **out);

void dw_flags_free(dw_flags *flags);

/* OWNERSHIP: the table's own fd; borrowed, valid until dw_flags_free. */
int dw_flags_memfd(const dw_flags *flags);

/* Takes a slot and makes it live, with one reference held by the caller.
 * ERRORS: DW_ENOSPC when no slot is free. */
int dw_flag_alloc(dw_flags *flags, dw_flag *out);

/* ERRORS: DW_ESTALE when the flag has no reference left or moved on; DW_ENOSPC
 * when it has 2^20 - 1 of them in this process or in the others together. */
int dw_flag_retain(dw_flags *flags, dw_flag flag);

/* Gives a reference back; the last one moves the generation on. */
void dw_flag_release(dw_flags *flags, dw_flag flag);

/* Sets the reason unless one is set, and rings the doorbell.
 * at_ns: when the cause was seen (dw_clock_ns), kept beside the word.
 * RETURNS: 1 this call set it; 0 it was set before.
 * ERRORS: DW_ESTALE, and DW_EINVAL for a reason outside the enum. */
int dw_flag_cancel(dw_flags *flags, dw_flag flag, enum dw_reason reason,
                   uint64_t at_ns);

/* RETURNS: the reason, 0 while live. ERRORS: DW_ESTALE. */
int dw_flag_reason(const dw_flags *flags, dw_flag flag);

/* One look at many flags, for who asks at every step and hears no nearly every
 * time. A stale name has not fired: its request has ended.
 * RETURNS: 1 one of them is cancelled; 0 none is. */
int dw_flags_any(const dw_flags *flags, const dw_flag *which, size_t num_which);

/* When the cause was seen and when the word was set, in dw_clock_ns.
 * RETURNS: 1 both are there; 0 not cancelled, or the winner has not written
 * them yet (it does so right after its CAS). ERRORS: DW_ESTALE. */
int dw_flag_times(const dw_flags *flags, dw_flag flag, uint64_t *at_ns,
                  uint64_t *stored_ns);

/* The step number that a device or engine acknowledged the cancel with.
 * RETURNS: 0, and in step 0 while there is none.
 * ERRORS: DW_ESTALE; DW_EINVAL for an ack of step 0. */
int dw_flag_ack(dw_flags *flags, dw_flag flag, uint32_t step);
int dw_flag_acked(const dw_flags *flags, dw_flag flag, uint32_t *step);

/* OWNERSHIP: borrowed, valid while the caller holds a reference. Readers load
 * it relaxed: all they need is in the one word. */
const uint32_t *dw_flag_address(const dw_flags *flags, uint32_t slot);

/* Where a device stores the step that dw_flag_acked reads. It stores under a
 * reference that its engine holds: nothing here checks the generation.
 * OWNERSHIP: as dw_flag_address. */
uint32_t *dw_flag_ack_address(const dw_flags *flags, uint32_t slot);

/* Sleeps on the table's doorbell until one of the flags is cancelled (or
 * stale), the timeout ends, or a signal arrives. timeout_ns < 0: no timeout.
 * RETURNS: the index of the first such flag.
 * ERRORS: DW_ETIMEDOUT, DW_EINTR. */
int dw_flags_wait(dw_flags *flags, const dw_flag *which, size_t num_which,
                  int64_t timeout_ns);

/* The doorbell itself, for those who wait for more than flags: read the count,
 * look at your own state, then wait until the count is no longer that.
 * dw_flags_ring wakes every waiter of every process.
 * ERRORS (wait): DW_ETIMEDOUT, DW_EINTR. */
uint32_t dw_flags_bell(const dw_flags *flags);
int dw_flags_wait_bell(dw_flags *flags, uint32_t seen, int64_t timeout_ns);
void dw_flags_ring(dw_flags *flags);

/* Cancels (OWNER_CLOSED) the live flags of dead processes and frees the ranges
 * of which no reference by a living process remains (references taken by the
 * dead owner's own tokens are dropped; an engine's reference keeps its slot
 * until it releases). RETURNS: the number of flags cancelled. */
int dw_flags_reclaim(dw_flags *flags);

void dw_flags_read_stats(const dw_flags *flags, dw_flags_stats *out);

#ifdef DW_TESTING
/* Sets the generation that a free slot is next handed out with, since none can
 * be brought to its end by use. ERRORS: DW_EINVAL if the slot is not free. */
int dw_flags_set_generation(dw_flags *flags, uint32_t slot,
                            uint32_t generation);
#endif

#endif
