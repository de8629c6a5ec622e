/* Watch connections and read cancel flags from C, C++ or Cython, without the
 * GIL. Compile with -I of disconnect_watch.get_include(); link with nothing:
 * the functions are reached through a table that the extension module keeps.
 *
 *     const dw_api *dw = dw_import();                    with the GIL, once
 *     dw_watcher *watcher = dw->watcher_of(py_watcher, &flags);
 *
 *     dw->flag_alloc(flags, &flag);                      from here on without
 *     dw->watcher_attach(watcher, fd, &conn);
 *     dw->watcher_arm(watcher, conn, flag, DW_MASK_ANY, NULL, 0, &watch);
 *     const uint32_t *word = dw->flag_address(flags, flag.slot);
 *     while (!dw_flag_is_cancelled(word))                one load
 *         work();
 *     dw->watcher_disarm(watcher, conn, watch);          1: it had fired
 *     dw->watcher_detach(watcher, conn);                 now close fd
 *     dw->flag_release(flags, flag);
 *
 * OWNERSHIP: a dw_watcher and a dw_flags are borrowed from the Python Watcher.
 * Take a reference to that object (Py_INCREF) and give it back after the last
 * call; it keeps the flag table alive too. Nothing more is needed:
 * closing it meanwhile is safe, calls then answer DW_ECLOSED. At its exit
 * the interpreter closes the process-wide watcher, but no other.
 *   A token's flag lives as long as the token, or as a reference of your own
 * (flag_retain). A fd is borrowed from attach to detach: detach before you
 * close it. Connections and watches are numbers: one that is over is answered
 * with DW_ESTALE, never taken for another.
 *
 * THREADS: any thread may call any function, with or without the GIL, even
 * one that Python knows nothing of; only watcher_of and flag_of need it. No
 * function calls into Python. After fork() the child's calls on a watcher
 * answer DW_EFORKED, while flags work on.
 *
 * RETURNS: 0 or more on success; a negative DW_E code, which is a negated
 * errno, on failure. Results go through the last pointer.
 */
#ifndef DISCONNECT_WATCH_H
#define DISCONNECT_WATCH_H

#include <errno.h>
#ifndef __cplusplus
#include <stdbool.h>
#endif
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Raised when something here changes its meaning or its place. Functions that
 * are added come last in dw_api, which its size tells: code that was compiled
 * with an older header goes on working, code that needs more than the installed
 * package has is refused by dw_import. */
#define DW_ABI_VERSION 1

#define DW_API_CAPSULE "disconnect_watch._core._C_API"

#define DW_OK        0
#define DW_ENOMEM    (-ENOMEM)
#define DW_EINVAL    (-EINVAL)
#define DW_EBADF     (-EBADF)      /* not an open file descriptor */
#define DW_ENOTSOCK  (-ENOTSOCK)   /* open, but nothing we can watch */
#define DW_EEXIST    (-EEXIST)     /* this fd is attached already */
#define DW_ENOSPC    (-ENOSPC)     /* a fixed table is full */
#define DW_ESTALE    (-ESTALE)     /* the generation has moved on */
#define DW_ECLOSED   (-ESHUTDOWN)  /* the handle was closed */
#define DW_EFORKED   (-EOWNERDEAD) /* made before fork(), used in the child */
#define DW_ETIMEDOUT (-ETIMEDOUT)
#define DW_EINTR     (-EINTR)
#define DW_ENOTSUP   (-EOPNOTSUPP) /* this poller or kernel cannot do it */

/* Why a flag was set; the low byte of its word. */
enum dw_reason {
    DW_REASON_NONE = 0,
    DW_REASON_FIN = 1,          /* the peer closed its sending side */
    DW_REASON_RESET = 2,        /* the peer reset the connection */
    DW_REASON_TIMED_OUT = 3,    /* the peer vanished */
    DW_REASON_OWNER_CLOSED = 4, /* the owner lost or closed the connection */
    DW_REASON_ABORTED = 5,      /* somebody asked by name */
    DW_REASON_DEADLINE = 6,
    DW_REASON_SHUTDOWN = 7,
    DW_REASON_MAX = 7
};

/* A set of reasons: bit 1 << DW_REASON_x. */
typedef uint32_t dw_reason_mask;
#define DW_MASK(reason) (1U << (reason))
/* Every way but a FIN, for those who serve half-closed clients. */
#define DW_MASK_GONE                                           \
    (DW_MASK(DW_REASON_RESET) | DW_MASK(DW_REASON_TIMED_OUT) | \
     DW_MASK(DW_REASON_OWNER_CLOSED))
/* A FIN alone: the peer closed, or only shut its sending side. */
#define DW_MASK_FIN DW_MASK(DW_REASON_FIN)
#define DW_MASK_ANY (DW_MASK_GONE | DW_MASK_FIN)

typedef struct dw_flags dw_flags;
typedef struct dw_watcher dw_watcher;
typedef struct dw_mailbox dw_mailbox;

/* The name of one flag. A zero generation names nothing. */
typedef struct {
    uint32_t slot;
    uint32_t generation;
} dw_flag;

/* generation << 32 | slot; 0 names nothing. */
typedef uint64_t dw_conn_id;

/* Unique on its connection for the connection's life; 0 names nothing. */
typedef uint32_t dw_watch_id;

/* One fired watch, as a mailbox delivers it. */
typedef struct {
    dw_conn_id conn;
    dw_watch_id watch;
    uint32_t reason;
    uint64_t at_ns;  /* when the event was seen */
    uint64_t cookie; /* the caller's own, from arm */
} dw_event;

/* The one load of the hot path. Relaxed: everything a reader needs, generation
 * and reason, is in this word. */
static inline uint32_t dw_flag_load(const uint32_t *address)
{
    return __atomic_load_n(address, __ATOMIC_RELAXED);
}

/* For who holds a reference to the flag: its generation cannot have moved. */
static inline int dw_flag_is_cancelled(const uint32_t *address)
{
    return (dw_flag_load(address) & 0xff) != 0;
}

/* Words of dw_latch_rows.control. */
enum dw_control {
    DW_CONTROL_STEP = 0,       /* latches so far; 0 is passed over at a wrap */
    DW_CONTROL_STEPS_LEFT = 1, /* that the loop may still run */
    DW_CONTROL_NUM_LIVE = 2,
    DW_CONTROL_GO = 3, /* 1: run one more step */
    DW_CONTROL_WORDS = 4
};

/* A batch's rows, [num_rows] each. */
typedef struct {
    size_t num_rows;
    const int32_t *slots; /* of each row's flag; -1: it has none */
    const int32_t *generations;
    int32_t *live;         /* 1, and 0 once the row is dead or done */
    int32_t *seq_lens;     /* how many tokens the row attends to */
    int64_t *slot_mapping; /* where its key and value go; -1: nowhere */
    uint32_t *control;
} dw_latch_rows;

struct _object; /* PyObject */

typedef struct {
    uint32_t abi_version;
    uint32_t size; /* of this struct, as the extension module knows it */

    /* Both with the GIL, and with a Python exception set on failure.
     * The handle of a disconnect_watch.Watcher and of its flag table; flags may
     * be NULL. RETURNS: NULL on failure. */
    dw_watcher *(*watcher_of)(struct _object *watcher, dw_flags **flags);
    /* The name and the table of a disconnect_watch.CancelToken. RETURNS: 0, or
     * -1 on failure. */
    int (*flag_of)(struct _object *token, dw_flags **flags, dw_flag *out);

    /* A short sentence; constant, never NULL. */
    const char *(*strerror)(int code);
    /* CLOCK_MONOTONIC, nanoseconds, as time.monotonic_ns(). */
    uint64_t (*clock_ns)(void);

    /* A live flag with one reference held by the caller.
     * ERRORS: DW_ENOSPC when all 2^20 are taken. */
    int (*flag_alloc)(dw_flags *flags, dw_flag *out);
    /* ERRORS: DW_ESTALE when the last reference is gone; DW_ENOSPC. */
    int (*flag_retain)(dw_flags *flags, dw_flag flag);
    void (*flag_release)(dw_flags *flags, dw_flag flag);
    /* at_ns: when the cause was seen. Wakes who waits, in every process.
     * RETURNS: 1 this call set it, 0 it was set before.
     * ERRORS: DW_ESTALE; DW_EINVAL for no reason of the enum. */
    int (*flag_cancel)(dw_flags *flags, dw_flag flag, enum dw_reason reason,
                       uint64_t at_ns);
    /* RETURNS: the reason, 0 while live. ERRORS: DW_ESTALE. */
    int (*flag_reason)(const dw_flags *flags, dw_flag flag);
    /* The flag's word, for dw_flag_is_cancelled; while you hold a reference. */
    const uint32_t *(*flag_address)(const dw_flags *flags, uint32_t slot);
    /* Sleeps until one of the flags is cancelled or stale; timeout_ns < 0: for
     * ever. RETURNS: its index. ERRORS: DW_ETIMEDOUT; DW_EINTR, a signal. */
    int (*flags_wait)(dw_flags *flags, const dw_flag *which, size_t num_which,
                      int64_t timeout_ns);

    /* One look, registered nowhere. RETURNS: the reason, 0 while nothing says
     * that the peer left. ERRORS: DW_EBADF, DW_ENOTSOCK. */
    int (*sock_is_gone)(int fd);

    /* OWNERSHIP: borrows fd until detach.
     * ERRORS: DW_EBADF, DW_ENOTSOCK, DW_EEXIST, DW_ENOSPC, DW_ENOMEM,
     * DW_ECLOSED, DW_EFORKED. */
    int (*watcher_attach)(dw_watcher *watcher, int fd, dw_conn_id *out);
    /* Returns when no other thread is inside the connection; its watches are
     * dropped unfired. ERRORS: DW_ESTALE, DW_ECLOSED, DW_EFORKED. */
    int (*watcher_detach)(dw_watcher *watcher, dw_conn_id conn);
    /* flag: of the watcher's table, or {0, 0} for a delivery alone. mailbox:
     * where to deliver, or NULL. Makes no system call.
     * RETURNS: 0 armed; 1 fired at once, the peer had left before.
     * ERRORS: DW_ESTALE, DW_ENOMEM, DW_ECLOSED, DW_EFORKED; DW_EINVAL for a
     * mailbox of another watcher. */
    int (*watcher_arm)(dw_watcher *watcher, dw_conn_id conn, dw_flag flag,
                       dw_reason_mask mask, dw_mailbox *mailbox,
                       uint64_t cookie, dw_watch_id *out);
    /* After it neither flag nor mailbox hears of the watch.
     * RETURNS: 1 it had fired; 0 it had not and never will.
     * ERRORS: DW_ESTALE, DW_ECLOSED, DW_EFORKED. */
    int (*watcher_disarm)(dw_watcher *watcher, dw_conn_id conn,
                          dw_watch_id watch);
    /* The owner's own word that the connection ended (read() gave 0, or an
     * error). RETURNS: 1 it was news, 0 somebody was first.
     * ERRORS: DW_ESTALE; DW_EINVAL for no reason of DW_MASK_ANY; DW_ECLOSED,
     * DW_EFORKED. */
    int (*watcher_lost)(dw_watcher *watcher, dw_conn_id conn,
                        enum dw_reason reason);

    /* A queue of fired watches for one consumer, whose loop polls its fd.
     * Close it before you give the Watcher back.
     * ERRORS: DW_ENOMEM, DW_ECLOSED, DW_EFORKED, no fd left (-EMFILE). */
    int (*mailbox_create)(dw_watcher *watcher, dw_mailbox **out);
    /* Readable while events wait. OWNERSHIP: borrowed. ERRORS: DW_EFORKED. */
    int (*mailbox_fd)(const dw_mailbox *mailbox);
    /* RETURNS: how many it took; with more left the fd stays readable.
     * ERRORS: DW_ECLOSED when the watcher was closed; DW_EFORKED. */
    int (*mailbox_drain)(dw_mailbox *mailbox, dw_event *events,
                         size_t max_events);
    void (*mailbox_wake)(dw_mailbox *mailbox);
    void (*mailbox_close)(dw_mailbox *mailbox);

    /* RETURNS: the reason told first, 0 while the peer is there; asks nobody.
     * ERRORS: DW_ESTALE, DW_ECLOSED, DW_EFORKED. */
    int (*watcher_reason)(dw_watcher *watcher, dw_conn_id conn);

    /* The opt-ins. They set options of the socket, and detach puts back those
     * that the owner has not set anew meanwhile. Over anything but TCP they do
     * nothing, but for what set_probing says.
     * ERRORS, of all: DW_ESTALE, DW_ECLOSED, DW_EFORKED, DW_ENOMEM, DW_EINVAL;
     * DW_EBADF: the owner closed the fd without detach. */

    /* A peer that vanished without a word is TIMED_OUT: probes or
     * retransmissions went unanswered and nothing at all was heard for after_ms,
     * 2000 to 86,400,000; 0 looks no more. A peer that answers and merely does
     * not read is never taken for gone. Looked for while a watch is armed. */
    int (*watcher_set_vanish)(dw_watcher *watcher, dw_conn_id conn,
                              uint32_t after_ms);
    /* RETURNS: by when it is told at the latest, in milliseconds from the
     * peer's last segment or from arm; 0 it is not looked for. */
    int (*watcher_vanish_bound)(dw_watcher *watcher, dw_conn_id conn);
    /* After a FIN: has the peer only shut its sending side? Asks by keepalive
     * each second; one that closed is RESET once its kernel has forgotten the
     * connection (tcp_fin_timeout, 60 s on Linux). Over AF_UNIX at once. To be
     * told of a FIN and still serve who only shut its side, arm twice: with
     * DW_MASK_GONE for what ends the work, with DW_MASK_FIN for when to ask. */
    int (*watcher_set_probing)(dw_watcher *watcher, dw_conn_id conn,
                               bool is_on);
    /* While you do not read: lets a FIN in behind num_bytes unread bytes, of
     * which the kernel allows half of tcp_rmem's maximum. Reading then waits
     * for as many, so reblind before you read. The buffer stays as large. */
    int (*watcher_unblind)(dw_watcher *watcher, dw_conn_id conn, int num_bytes);
    int (*watcher_reblind)(dw_watcher *watcher, dw_conn_id conn);

    /* For an engine's loop, `while (dw->latch(flags, &rows)) step();`. Rows whose
     * flag has fired become dead: live 0, seq_len 0, slot_mapping -1, and the
     * flag's ack is the number of this latch. Hold a reference to the flag of
     * each row until it has ended.
     * RETURNS: 1 go on; 0 every row is dead or done, or no step is left. */
    int (*latch)(dw_flags *flags, const dw_latch_rows *rows);
    /* The same ack by hand: nothing of that request is left, and in which step
     * that was, from 1. ERRORS: DW_ESTALE; DW_EINVAL for step 0. */
    int (*flag_ack)(dw_flags *flags, dw_flag flag, uint32_t step);
} dw_api;

#ifdef Py_PYTHON_H
/* The table, constant and there until the process ends; NULL with ImportError
 * set when the package is missing or was built with another layout. With the
 * GIL. Include Python.h first. */
static inline const dw_api *dw_import(void)
{
    const dw_api *api = (const dw_api *)PyCapsule_Import(DW_API_CAPSULE, 0);
    if (!api)
        return NULL;
    if (api->abi_version != DW_ABI_VERSION || api->size < sizeof(dw_api)) {
        PyErr_Format(PyExc_ImportError,
                     "the installed disconnect_watch has native interface %u "
                     "of %u bytes, and this module was compiled for %u of %u: "
                     "compile it again, or install a newer disconnect_watch",
                     (unsigned)api->abi_version, (unsigned)api->size,
                     (unsigned)DW_ABI_VERSION, (unsigned)sizeof(dw_api));
        return NULL;
    }
    return api;
}
#endif

#ifdef __cplusplus
}
#endif

#endif
