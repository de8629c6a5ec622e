# The short way through a watch, for adapters/_fast.pyx to go on from.
cimport cython
from libc.stdint cimport uint32_t, uint64_t

from disconnect_watch._core cimport Connection, Flag, Mailbox


@cython.final
cdef class Ready:
    # A coroutine that is over: awaiting it suspends nobody.
    cdef object _value

cdef class Block:
    cdef public object task
    cdef public bint was_cancelled
    cdef readonly object _target
    cdef readonly object _policy
    cdef readonly bint _pause_reading
    cdef readonly object _watcher
    cdef readonly Flag _token
    cdef public Attached _connection
    cdef public bint _is_pausing
    cdef readonly int _cancels_before
    # The cancel that is due: at the loop's next turn, or at the end of the grace.
    cdef public object _soon
    cdef public object _left
    cdef readonly uint32_t watch_id
    cdef Block _older
    cdef _take_task(self)
    cdef bint _enter_shortly(self) except -1
    # For adapters, whose protocol is followed and reads on. False, and nothing done,
    # where the long way must be gone.
    cdef bint _arm_shortly(self, transport, Flag token) except -1
    cdef _let_go(self)

cdef class Attached:
    cdef public object mailbox
    cdef public Connection conn
    cdef public object transport
    cdef public object protocol
    cdef public bint is_followed
    cdef public bint is_served
    cdef public bint has_peer_left
    cdef public object handler
    # Of the blocks that watch it the newest, which leads to the others.
    cdef Block _newest
    cdef public object _optins
    cdef public bint _is_tls
    cdef public bint _is_pipe
    cdef Mailbox _box
    cdef uint64_t _cookie
    cdef bint _is_default
    cdef int _num_pauses
    cdef bint _holds_pause
    cdef object _paused_reader
    cdef Hold _hold
    cdef bint _is_shortcut(self, transport, protocol, watcher)
    cdef int _enter(self, Block block) except -1
    cdef _leave(self, Block block)
    cdef _pause(self, transport)
    cdef _pause_transport(self, transport)
    cdef _resume(self)
    cdef _flow_reader(self)

cdef class Hold:
    cdef object _transport
    cdef object _handle
    cdef object _read
    cdef object _tell
    cdef bint begin(self, transport) except -1
    cdef bint is_on(self) except? True
    cdef bint end(self) except -1
    cdef forget(self)
