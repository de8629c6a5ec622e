# cython: language_level=3
# A Cython module: sleeps without the GIL until the client leaves or a token of
# Python's is cancelled, whichever comes first.
from libc.stdint cimport int64_t

from disconnect_watch.native cimport (
    DW_EINTR,
    DW_ETIMEDOUT,
    DW_MASK_ANY,
    dw_api,
    dw_conn_id,
    dw_flag,
    dw_flags,
    dw_import,
    dw_watch_id,
    dw_watcher,
)

cdef const dw_api *dw = dw_import()


cdef int _wait(
    dw_watcher *watcher, dw_flags *flags, int fd, dw_flag other, int64_t timeout_ns,
    int *reason,
) noexcept nogil:
    """Returns 0 for the client, 1 for the other flag, or a negative code."""
    cdef dw_flag[2] which
    cdef dw_conn_id conn
    cdef dw_watch_id watch
    cdef int rc = dw.flag_alloc(flags, &which[0])
    if rc < 0:
        return rc
    which[1] = other
    rc = dw.watcher_attach(watcher, fd, &conn)
    if rc >= 0:
        rc = dw.watcher_arm(watcher, conn, which[0], DW_MASK_ANY, NULL, 0, &watch)
        if rc >= 0:
            rc = dw.flags_wait(flags, which, 2, timeout_ns)
        if rc >= 0:
            reason[0] = dw.flag_reason(flags, which[rc])
        dw.watcher_detach(watcher, conn)
    dw.flag_release(flags, which[0])
    return rc


def wait_for_either(watcher, int fd, token, double timeout):
    """Return ``("client" | "token", reason code)``; TimeoutError after ``timeout`` seconds."""
    cdef dw_flags *flags
    cdef dw_flag other
    cdef int reason = 0
    cdef int rc
    cdef dw_watcher *handle = dw.watcher_of(watcher, &flags)
    dw.flag_of(token, NULL, &other)
    with nogil:
        rc = _wait(handle, flags, fd, other, <int64_t>(timeout * 1e9), &reason)
    if rc == DW_ETIMEDOUT or rc == DW_EINTR:
        raise TimeoutError((<bytes>dw.strerror(rc)).decode())
    if rc < 0:
        raise OSError(-rc, (<bytes>dw.strerror(rc)).decode())
    return ("client", "token")[rc], reason
