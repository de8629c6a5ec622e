# The public header for Cython: `from disconnect_watch.native cimport dw_api, dw_import`,
# and compile with disconnect_watch.get_include(). What each does is said in the header.
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

cdef extern from "disconnect_watch.h" nogil:
    uint32_t DW_ABI_VERSION
    const char *DW_API_CAPSULE

    int DW_ENOMEM
    int DW_EINVAL
    int DW_EBADF
    int DW_ENOTSOCK
    int DW_EEXIST
    int DW_ENOSPC
    int DW_ESTALE
    int DW_ECLOSED
    int DW_EFORKED
    int DW_ETIMEDOUT
    int DW_EINTR
    int DW_ENOTSUP

    enum dw_reason:
        DW_REASON_NONE
        DW_REASON_FIN
        DW_REASON_RESET
        DW_REASON_TIMED_OUT
        DW_REASON_OWNER_CLOSED
        DW_REASON_ABORTED
        DW_REASON_DEADLINE
        DW_REASON_SHUTDOWN
        DW_REASON_MAX
    ctypedef uint32_t dw_reason_mask
    dw_reason_mask DW_MASK(int reason)
    dw_reason_mask DW_MASK_GONE
    dw_reason_mask DW_MASK_FIN
    dw_reason_mask DW_MASK_ANY

    ctypedef struct dw_flags:
        pass
    ctypedef struct dw_watcher:
        pass
    ctypedef struct dw_mailbox:
        pass
    ctypedef struct dw_flag:
        uint32_t slot
        uint32_t generation
    ctypedef uint64_t dw_conn_id
    ctypedef uint32_t dw_watch_id
    ctypedef struct dw_event:
        dw_conn_id conn
        dw_watch_id watch
        uint32_t reason
        uint64_t at_ns
        uint64_t cookie

    enum dw_control:
        DW_CONTROL_STEP
        DW_CONTROL_STEPS_LEFT
        DW_CONTROL_NUM_LIVE
        DW_CONTROL_GO
        DW_CONTROL_WORDS
    ctypedef struct dw_latch_rows:
        size_t num_rows
        const int32_t *slots
        const int32_t *generations
        int32_t *live
        int32_t *seq_lens
        int64_t *slot_mapping
        uint32_t *control

    uint32_t dw_flag_load(const uint32_t *address) noexcept
    bint dw_flag_is_cancelled(const uint32_t *address) noexcept

cdef extern from "disconnect_watch.h":
    ctypedef struct dw_api:
        uint32_t abi_version
        uint32_t size
        dw_watcher *(*watcher_of)(object watcher, dw_flags **flags) except NULL
        int (*flag_of)(object token, dw_flags **flags, dw_flag *out) except -1
        const char *(*strerror)(int code) noexcept nogil
        uint64_t (*clock_ns)() noexcept nogil
        int (*flag_alloc)(dw_flags *flags, dw_flag *out) noexcept nogil
        int (*flag_retain)(dw_flags *flags, dw_flag flag) noexcept nogil
        void (*flag_release)(dw_flags *flags, dw_flag flag) noexcept nogil
        int (*flag_cancel)(
            dw_flags *flags, dw_flag flag, dw_reason reason, uint64_t at_ns
        ) noexcept nogil
        int (*flag_reason)(const dw_flags *flags, dw_flag flag) noexcept nogil
        const uint32_t *(*flag_address)(const dw_flags *flags, uint32_t slot) noexcept nogil
        int (*flags_wait)(
            dw_flags *flags, const dw_flag *which, size_t num_which, int64_t timeout_ns
        ) noexcept nogil
        int (*sock_is_gone)(int fd) noexcept nogil
        int (*watcher_attach)(dw_watcher *watcher, int fd, dw_conn_id *out) noexcept nogil
        int (*watcher_detach)(dw_watcher *watcher, dw_conn_id conn) noexcept nogil
        int (*watcher_arm)(
            dw_watcher *watcher, dw_conn_id conn, dw_flag flag, dw_reason_mask mask,
            dw_mailbox *mailbox, uint64_t cookie, dw_watch_id *out
        ) noexcept nogil
        int (*watcher_disarm)(
            dw_watcher *watcher, dw_conn_id conn, dw_watch_id watch
        ) noexcept nogil
        int (*watcher_lost)(dw_watcher *watcher, dw_conn_id conn, dw_reason reason) noexcept nogil
        int (*mailbox_create)(dw_watcher *watcher, dw_mailbox **out) noexcept nogil
        int (*mailbox_fd)(const dw_mailbox *mailbox) noexcept nogil
        int (*mailbox_drain)(
            dw_mailbox *mailbox, dw_event *events, size_t max_events
        ) noexcept nogil
        void (*mailbox_wake)(dw_mailbox *mailbox) noexcept nogil
        void (*mailbox_close)(dw_mailbox *mailbox) noexcept nogil
        int (*watcher_reason)(dw_watcher *watcher, dw_conn_id conn) noexcept nogil
        int (*watcher_set_vanish)(
            dw_watcher *watcher, dw_conn_id conn, uint32_t after_ms
        ) noexcept nogil
        int (*watcher_vanish_bound)(dw_watcher *watcher, dw_conn_id conn) noexcept nogil
        int (*watcher_set_probing)(
            dw_watcher *watcher, dw_conn_id conn, bint is_on
        ) noexcept nogil
        int (*watcher_unblind)(
            dw_watcher *watcher, dw_conn_id conn, int num_bytes
        ) noexcept nogil
        int (*watcher_reblind)(dw_watcher *watcher, dw_conn_id conn) noexcept nogil
        int (*latch)(dw_flags *flags, const dw_latch_rows *rows) noexcept nogil
        int (*flag_ack)(dw_flags *flags, dw_flag flag, uint32_t step) noexcept nogil
    const dw_api *dw_import() except NULL
