#include "dw_thread.h"

#include <signal.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "dw_base.h"

/* A thread named longer than 15 bytes is refused by Linux. */
#define THREAD_NAME "dw-watcher"

/* The thread's frames are small, so this is room to spare; a sanitizer's
 * runtime takes frames of its own. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define THREAD_STACK_BYTES (1024UL * 1024UL)
#else
#define THREAD_STACK_BYTES (256UL * 1024UL)
#endif

/* A turn at the CPU, in nanoseconds: the least that Linux grants. */
#define THREAD_TURN_NS 100000U

/* The first version of the kernel's struct. linux/sched/types.h, which has it,
 * cannot be included beside pthread.h: both define sched_param. */
typedef struct {
    uint32_t size;
    uint32_t policy;
    uint64_t flags;
    int32_t nice;
    uint32_t priority;
    uint64_t runtime_ns;
    uint64_t deadline_ns;
    uint64_t period_ns;
} sched_attr;

static_assert(sizeof(sched_attr) == 48, "SCHED_ATTR_SIZE_VER0");

/* Guards the list. Held across fork() by the thread that forks, so that the
 * child never inherits it from a thread that is not there to release it.
 */
static dw_lock fork_lock;
static dw_fork_guard *fork_list;
static pthread_once_t fork_once = PTHREAD_ONCE_INIT;
static int fork_once_rc;

static void fork_prepare(void)
{
    dw_lock_acquire(&fork_lock);
}

static void fork_parent(void)
{
    dw_lock_release(&fork_lock);
}

static void fork_child(void)
{
    for (dw_fork_guard *guard = fork_list; guard; guard = guard->next) {
        /* Relaxed: the only thread there is now will start all others. */
        atomic_store_explicit(&guard->is_forked, true, memory_order_relaxed);
    }
    dw_lock_release(&fork_lock);
}

static void fork_init(void)
{
    fork_once_rc = -pthread_atfork(fork_prepare, fork_parent, fork_child);
}

int dw_fork_register(dw_fork_guard *guard)
{
    pthread_once(&fork_once, fork_init);
    if (fork_once_rc)
        return fork_once_rc;
    atomic_init(&guard->is_forked, false);
    guard->prev = NULL;
    dw_lock_acquire(&fork_lock);
    DW_SYNC_POINT("fork:list-locked");
    guard->next = fork_list;
    if (fork_list)
        fork_list->prev = guard;
    fork_list = guard;
    dw_lock_release(&fork_lock);
    return DW_OK;
}

void dw_fork_unregister(dw_fork_guard *guard)
{
    dw_lock_acquire(&fork_lock);
    if (guard->prev)
        guard->prev->next = guard->next;
    else
        fork_list = guard->next;
    if (guard->next)
        guard->next->prev = guard->prev;
    dw_lock_release(&fork_lock);
}

int dw_thread_start(pthread_t *out, void *(*run)(void *), void *arg)
{
    sigset_t all, before;
    pthread_attr_t attr;
    int rc = pthread_attr_init(&attr);
    if (rc)
        return -rc;
    rc = pthread_attr_setstacksize(&attr, THREAD_STACK_BYTES);
    if (rc)
        goto destroy_attr;

    /* A thread inherits the mask of its creator: blocked here, no signal can
     * land on it between its first instruction and a mask set by itself. */
    sigfillset(&all);
    rc = pthread_sigmask(SIG_SETMASK, &all, &before);
    if (rc)
        goto destroy_attr;
    rc = pthread_create(out, &attr, run, arg);
    /* EINVAL: the libraries of this process keep more thread-local data than
     * the stack has room for (glibc takes it from there). */
    if (rc == EINVAL)
        rc = pthread_create(out, NULL, run, arg);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!rc)
        pthread_setname_np(*out, THREAD_NAME);

destroy_attr:
    pthread_attr_destroy(&attr);
    return -rc;
}

void dw_thread_prefer_short_turns(void)
{
#ifdef SYS_sched_setattr
    /* Among threads of the same weight Linux 6.12 and later runs the one first
     * whose turn ends first, so who asks for short turns waits less and gets
     * no more. Older kernels ignore it, and a sandbox may refuse: no matter. */
    sched_attr attr;
    if (syscall(SYS_sched_getattr, 0, &attr, sizeof attr, 0) ||
        attr.policy != SCHED_OTHER)
        return;
    attr.runtime_ns = THREAD_TURN_NS;
    syscall(SYS_sched_setattr, 0, &attr, 0);
#endif
}
