# The C core's headers, in order, and only what _core.pyx uses of them. What the public
# header has is in native.pxd.
from libc.stdint cimport int64_t, uint32_t, uint64_t

from disconnect_watch.native cimport (
    DW_API_CAPSULE,
    DW_ECLOSED,
    DW_EFORKED,
    DW_EINTR,
    DW_EINVAL,
    DW_ENOTSOCK,
    DW_ESTALE,
    DW_ETIMEDOUT,
    DW_MASK_ANY,
    DW_MASK_GONE,
    DW_REASON_MAX,
    dw_api,
    dw_conn_id,
    dw_event,
    dw_flag,
    dw_flag_load,
    dw_flags,
    dw_latch_rows,
    dw_mailbox,
    dw_reason,
    dw_reason_mask,
    dw_watch_id,
    dw_watcher,
)

cdef extern from "dw_error.h" nogil:
    const char *dw_strerror(int code) noexcept

cdef extern from "dw_shared.h" nogil:
    ctypedef struct dw_shared_id:
        pass
    uint64_t dw_shared_id_load(const dw_shared_id *shared) noexcept
    void dw_shared_id_store(dw_shared_id *shared, uint64_t id) noexcept
    ctypedef struct dw_once:
        pass
    void *dw_once_load(const dw_once *once) noexcept
    void *dw_once_set(dw_once *once, void *value) noexcept

cdef extern from "dw_clock.h" nogil:
    uint64_t dw_clock_ns() noexcept

cdef extern from "dw_flags.h" nogil:
    const uint32_t DW_FLAGS_NUM_SLOTS
    ctypedef struct dw_flags_stats:
        uint64_t num_live
        uint64_t num_retired
        uint64_t num_cancels
        uint64_t num_stale
    int dw_flags_create(dw_flags **out) noexcept
    int dw_flags_map(int memfd, dw_flags **out) noexcept
    void dw_flags_free(dw_flags *flags) noexcept
    int dw_flags_memfd(const dw_flags *flags) noexcept
    int dw_flag_alloc(dw_flags *flags, dw_flag *out) noexcept
    int dw_flag_retain(dw_flags *flags, dw_flag flag) noexcept
    void dw_flag_release(dw_flags *flags, dw_flag flag) noexcept
    int dw_flag_cancel(dw_flags *flags, dw_flag flag, int reason, uint64_t at_ns) noexcept
    int dw_flag_reason(const dw_flags *flags, dw_flag flag) noexcept
    int dw_flags_any(
        const dw_flags *flags, const dw_flag *which, size_t num_which
    ) noexcept
    int dw_flag_times(
        const dw_flags *flags, dw_flag flag, uint64_t *at_ns, uint64_t *stored_ns
    ) noexcept
    int dw_flag_ack(dw_flags *flags, dw_flag flag, uint32_t step) noexcept
    int dw_flag_acked(const dw_flags *flags, dw_flag flag, uint32_t *step) noexcept
    const uint32_t *dw_flag_address(const dw_flags *flags, uint32_t slot) noexcept
    uint32_t *dw_flag_ack_address(const dw_flags *flags, uint32_t slot) noexcept
    int dw_flags_wait(
        dw_flags *flags, const dw_flag *which, size_t num_which, int64_t timeout_ns
    ) noexcept
    uint32_t dw_flags_bell(const dw_flags *flags) noexcept
    int dw_flags_wait_bell(dw_flags *flags, uint32_t seen, int64_t timeout_ns) noexcept
    void dw_flags_ring(dw_flags *flags) noexcept
    int dw_flags_reclaim(dw_flags *flags) noexcept
    void dw_flags_read_stats(const dw_flags *flags, dw_flags_stats *out) noexcept

cdef extern from "dw_latch.h" nogil:
    int dw_latch_many(
        dw_flags *flags, const dw_latch_rows *rows, size_t flags_per_row
    ) noexcept

cdef extern from "dw_sock.h" nogil:
    int dw_sock_is_gone(int fd) noexcept

cdef extern from "dw_watch.h" nogil:
    enum dw_driver:
        DW_DRIVER_THREAD
        DW_DRIVER_LOOP
    ctypedef struct dw_conn_info:
        int fd
        uint32_t seen
        uint32_t reason
        int64_t unread
        uint64_t seen_ns
        bint is_blind
        uint32_t vanish_bound_ms
    ctypedef struct dw_watcher_stats:
        const char *poller
        dw_driver driver
        uint64_t num_connections
        uint64_t num_armed
        uint64_t num_blind
        uint64_t num_fired
        uint64_t num_stale_events
        uint64_t num_second_sources
        uint64_t num_wakeups
        uint64_t *num_signals
    int dw_watcher_create(
        dw_flags *flags, const char *poller, dw_driver driver, dw_watcher **out
    ) noexcept
    void dw_watcher_close(dw_watcher *watcher) noexcept
    void dw_watcher_free(dw_watcher *watcher) noexcept
    int dw_watcher_attach(dw_watcher *watcher, int fd, dw_conn_id *out) noexcept
    int dw_watcher_detach(dw_watcher *watcher, dw_conn_id conn) noexcept
    int dw_watcher_arm(
        dw_watcher *watcher, dw_conn_id conn, dw_flag flag, uint32_t mask,
        dw_mailbox *mailbox, uint64_t cookie, dw_watch_id *out
    ) noexcept
    int dw_watcher_disarm(dw_watcher *watcher, dw_conn_id conn, dw_watch_id watch) noexcept
    int dw_watcher_lost(dw_watcher *watcher, dw_conn_id conn, int reason) noexcept
    int dw_watcher_info(dw_watcher *watcher, dw_conn_id conn, dw_conn_info *out) noexcept
    int dw_watcher_reason(dw_watcher *watcher, dw_conn_id conn) noexcept
    int dw_watcher_set_vanish(
        dw_watcher *watcher, dw_conn_id conn, uint32_t after_ms
    ) noexcept
    int dw_watcher_set_probing(dw_watcher *watcher, dw_conn_id conn, bint is_on) noexcept
    int dw_watcher_unblind(dw_watcher *watcher, dw_conn_id conn, int num_bytes) noexcept
    int dw_watcher_reblind(dw_watcher *watcher, dw_conn_id conn) noexcept
    int dw_watcher_fd(const dw_watcher *watcher) noexcept
    int dw_watcher_poll(dw_watcher *watcher, int timeout_ms) noexcept
    int dw_watcher_read_stats(dw_watcher *watcher, dw_watcher_stats *out) noexcept
    int dw_mailbox_create(dw_watcher *watcher, dw_mailbox **out) noexcept
    int dw_mailbox_fd(const dw_mailbox *mailbox) noexcept
    int dw_mailbox_drain(dw_mailbox *mailbox, dw_event *events, size_t max_events) noexcept
    void dw_mailbox_wake(dw_mailbox *mailbox) noexcept
    void dw_mailbox_shut(dw_mailbox *mailbox) noexcept
    void dw_mailbox_close(dw_mailbox *mailbox) noexcept

cdef extern from "dw_api.h" nogil:
    const dw_api dw_api_core
