/* What several threads of a binding look at without a lock: no GIL is assumed.
 *
 * THREADS: everything here may be used from any thread. Zeroed memory is an
 * empty one of either.
 */
#ifndef DW_SHARED_H
#define DW_SHARED_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

/* The name of something in the core, which knows by its generation whether it is
 * still there. So a thread may use a name that another has just dropped. */
typedef struct {
    _Atomic uint64_t id; /* 0 none */
} dw_shared_id;

static inline uint64_t dw_shared_id_load(const dw_shared_id *shared)
{
    /* Relaxed, as the store: all that belongs to the id is in the core, under
     * the core's locks. */
    return atomic_load_explicit(&shared->id, memory_order_relaxed);
}

static inline void dw_shared_id_store(dw_shared_id *shared, uint64_t id)
{
    atomic_store_explicit(&shared->id, id, memory_order_relaxed);
}

/* A pointer that is set once, and stays: many first users may each make the
 * thing, and the first to set it wins. Other than a lock, it is in no state that
 * a forked child could inherit for ever. */
typedef struct {
    _Atomic(void *) first;
} dw_once;

/* RETURNS: NULL while nobody has set it. */
static inline void *dw_once_load(const dw_once *once)
{
    /* Acquire: pairs with the release in dw_once_set. */
    return atomic_load_explicit(&once->first, memory_order_acquire);
}

/* RETURNS: what is set from now on, value or that of whoever was first. */
static inline void *dw_once_set(dw_once *once, void *value)
{
    void *first = NULL;
    /* Release: pairs with the acquires here and in dw_once_load. */
    if (atomic_compare_exchange_strong_explicit(&once->first, &first, value,
                                                memory_order_acq_rel,
                                                memory_order_acquire))
        return value;
    return first;
}

#endif
