/* What every module needs: asserts, the small lock, and the sync points that
 * let a test stop a thread at one exact line.
 *
 * THREADS: everything here may be used from any thread.
 */
#ifndef DW_BASE_H
#define DW_BASE_H

#include <assert.h>
#include <sched.h>
#include <stdatomic.h>

/* The binding's shared object exports nothing but its module init. */
#define DW_INTERNAL __attribute__((visibility("hidden")))

/* A lock of four bytes for sections of a few dozen instructions that make no
 * system call, except that a connection's lock is held while its fd goes into
 * or out of a poller, while the socket is asked what happened, and while an
 * opt-in sets its options. pthread
 * mutexes are 40 bytes, and one sits in each of 18,000 connections. It yields
 * rather than spins, so a preempted holder costs its time slice and no more.
 */
typedef struct {
    atomic_uint state; /* 0 free, 1 held */
} dw_lock;

static inline void dw_lock_acquire(dw_lock *lock)
{
    /* Acquire: pairs with the release store in dw_lock_release. */
    while (atomic_exchange_explicit(&lock->state, 1U, memory_order_acquire))
        sched_yield();
}

static inline void dw_lock_release(dw_lock *lock)
{
    /* Release: pairs with the acquiring exchange in dw_lock_acquire. */
    atomic_store_explicit(&lock->state, 0U, memory_order_release);
}

#ifdef DW_TESTING
/* One hook for the whole test program; called with the point's name from the
 * thread that reached it. Set before threads start, cleared after they end.
 */
extern void (*dw_sync_hook)(const char *point, void *arg);
extern void *dw_sync_arg;
#define DW_SYNC_POINT(point)                    \
    do {                                        \
        if (dw_sync_hook)                       \
            dw_sync_hook((point), dw_sync_arg); \
    } while (0)
#else
#define DW_SYNC_POINT(point) ((void)0)
#endif

#endif
