# What aio/_fast.pyx shares with the binding: its classes and their handles, and calls
# that cost no more than the C function's. A result below 0 is an error code of C's; the
# method of the same name without `_code` raises it.
from libc.stdint cimport uint32_t, uint64_t

from disconnect_watch cimport _dw

cdef class Flags:
    cdef _dw.dw_flags *_flags

cdef class Flag:
    cdef readonly Flags table
    cdef _dw.dw_flag _flag
    cdef const uint32_t *_word
    cdef bint _is_borrowed
    cdef bint is_set(self) noexcept

cdef class FlagSet:
    cdef _dw.dw_flag *_which
    cdef size_t _room
    cdef Flags _table
    cdef list _held
    cdef dict _places
    cdef dict _counts

cdef class Watcher:
    cdef _dw.dw_watcher *_watcher
    cdef readonly Flags flags

cdef class Mailbox:
    cdef _dw.dw_mailbox *_mailbox
    cdef readonly Watcher watcher

cdef class Connection:
    cdef readonly Watcher watcher
    cdef _dw.dw_shared_id _conn
    cdef readonly int fd
    cdef int arm_code(
        self, Flag token, uint32_t mask, Mailbox mailbox, uint64_t cookie, uint32_t *watch_id
    ) noexcept
    cdef int disarm_code(self, uint32_t watch_id) noexcept
    cdef int reason_now(self) noexcept
