/* The native thread that blocks in the poller, and what fork() does to us.
 *
 * The thread blocks all signals, takes no GIL and calls nothing in Python: it
 * waits, hands events to the watch layer, and writes notify fds.
 *
 * After fork() the child has no such thread, while its copy of the epoll fd
 * still names the parent's set. pthread_atfork marks every registered handle,
 * and each call on a marked one answers DW_EFORKED. The list of handles is the
 * one piece of state of this core that hangs off no handle: the child's half of
 * pthread_atfork gets no argument.
 */
#ifndef DW_THREAD_H
#define DW_THREAD_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "dw_error.h"

/* A handle's place in the fork list; embedded in what it marks. */
typedef struct dw_fork_guard {
    atomic_bool is_forked;
    struct dw_fork_guard *next;
    struct dw_fork_guard *prev;
} dw_fork_guard;

/* ERRORS: DW_ENOMEM if the process can take no more fork handlers. */
int dw_fork_register(dw_fork_guard *guard);
void dw_fork_unregister(dw_fork_guard *guard);

static inline bool dw_fork_is_child(const dw_fork_guard *guard)
{
    /* Relaxed: pairs with the store in the fork handler, which ran on the
     * only thread that the child had then. */
    return atomic_load_explicit(&guard->is_forked, memory_order_relaxed);
}

/* Starts `run(arg)` on a thread named "dw-watcher" with all signals blocked
 * and a small stack. Joined with pthread_join. ERRORS: those of pthread_create
 * (-EAGAIN: too many threads). */
int dw_thread_start(pthread_t *out, void *(*run)(void *), void *arg);

/* Has the scheduler let the calling thread in soon after it wakes, on a machine
 * whose CPUs are all busy. Where the running kernel cannot: does nothing. */
void dw_thread_prefer_short_turns(void);

#endif
