# cython: language_level=3
# A Cython module: sleeps without the GIL until the client leaves or a token of
# Python's is cancelled, whichever comes first. Asked to, it serves a client that only
# half-closed on.
from libc.stdint cimport UINT32_MAX, int32_t, int64_t, uint32_t

from disconnect_watch.native cimport (
    DW_CONTROL_STEP,
    DW_CONTROL_STEPS_LEFT,
    DW_CONTROL_WORDS,
    DW_EINTR,
    DW_ETIMEDOUT,
    DW_MASK_ANY,
    DW_MASK_FIN,
    DW_MASK_GONE,
    dw_api,
    dw_conn_id,
    dw_flag,
    dw_flags,
    dw_import,
    dw_latch_rows,
    dw_reason_mask,
    dw_watch_id,
    dw_watcher,
)

cdef const dw_api *dw = dw_import()


cdef int _probe(
    dw_watcher *watcher, dw_flags *flags, dw_conn_id conn, int64_t timeout_ns
) noexcept nogil:
    """Waits for a FIN, and has the client asked then whether it only half-closed."""
    cdef dw_flag fin
    cdef dw_watch_id watch
    cdef int rc = dw.flag_alloc(flags, &fin)
    if rc < 0:
        return rc
    rc = dw.watcher_arm(watcher, conn, fin, DW_MASK_FIN, NULL, 0, &watch)
    if rc >= 0:
        rc = dw.flags_wait(flags, &fin, 1, timeout_ns)
    if rc >= 0:
        rc = dw.watcher_set_probing(watcher, conn, True)
    dw.flag_release(flags, fin)
    return rc


cdef int _wait(
    dw_watcher *watcher, dw_flags *flags, int fd, dw_flag other, bint is_probing,
    int64_t timeout_ns, int *reason,
) noexcept nogil:
    """Returns 0 for the client, 1 for the other flag, or a negative code."""
    cdef dw_flag[2] which
    cdef dw_conn_id conn
    cdef dw_watch_id watch
    cdef dw_reason_mask mask = DW_MASK_GONE if is_probing else DW_MASK_ANY
    cdef int rc = dw.flag_alloc(flags, &which[0])
    if rc < 0:
        return rc
    which[1] = other
    rc = dw.watcher_attach(watcher, fd, &conn)
    if rc >= 0:
        rc = dw.watcher_arm(watcher, conn, which[0], mask, NULL, 0, &watch)
        if rc >= 0 and is_probing:
            rc = _probe(watcher, flags, conn, timeout_ns)
        if rc >= 0:
            rc = dw.flags_wait(flags, which, 2, timeout_ns)
        if rc >= 0:
            reason[0] = dw.flag_reason(flags, which[rc])
        dw.watcher_detach(watcher, conn)
    dw.flag_release(flags, which[0])
    return rc


def wait_for_either(watcher, int fd, token, double timeout, *, half_close="disconnect"):
    """Return ``("client" | "token", reason code)``; TimeoutError after ``timeout`` seconds.

    With ``half_close="probe"`` the first FIN is waited for alone, and is no leave by
    itself.
    """
    cdef dw_flags *flags
    cdef dw_flag other
    cdef int reason = 0
    cdef int rc
    cdef bint is_probing = half_close == "probe"
    cdef dw_watcher *handle = dw.watcher_of(watcher, &flags)
    dw.flag_of(token, NULL, &other)
    with nogil:
        rc = _wait(handle, flags, fd, other, is_probing, <int64_t>(timeout * 1e9), &reason)
    if rc == DW_ETIMEDOUT or rc == DW_EINTR:
        raise TimeoutError((<bytes>dw.strerror(rc)).decode())
    if rc < 0:
        raise OSError(-rc, (<bytes>dw.strerror(rc)).decode())
    return ("client", "token")[rc], reason


def run_batch(list tokens):
    """An engine's loop without the GIL, of two rows, until the clients of both have left.

    Returns the number of latches.
    """
    cdef int32_t[2] slots, generations, live, seq_lens
    cdef int64_t[2] slot_mapping
    cdef uint32_t[DW_CONTROL_WORDS] control
    cdef dw_latch_rows rows
    cdef dw_flags *flags = NULL
    cdef dw_flag flag
    cdef int row
    for row in range(2):
        dw.flag_of(tokens[row], &flags, &flag)
        slots[row] = flag.slot
        generations[row] = flag.generation
        live[row] = 1
        seq_lens[row] = 10
        slot_mapping[row] = row
    control[<int>DW_CONTROL_STEP] = 0
    control[<int>DW_CONTROL_STEPS_LEFT] = UINT32_MAX
    rows.num_rows = 2
    rows.slots = slots
    rows.generations = generations
    rows.live = live
    rows.seq_lens = seq_lens
    rows.slot_mapping = slot_mapping
    rows.control = control
    with nogil:
        while dw.latch(flags, &rows):
            pass  # a step
    if dw.flag_ack(flags, flag, 0) >= 0:
        raise AssertionError("an ack of no step was taken")
    return control[<int>DW_CONTROL_STEP]
