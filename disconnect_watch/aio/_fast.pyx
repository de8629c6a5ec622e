# cython: language_level=3, auto_pickle=False, autotestdict=False
# The short way through a watch: what a block costs that no leaving client disturbs.
#
# Block and Attached are the bases of Watch (_watch.py) and LoopConnection
# (_connection.py), which document them and hold whatever lies off that way: a
# connection's first watch, opt-ins, grace, and all that happens once a client leaves.
#
# Threads: the loop's own only.
cimport cython
from cpython.object cimport PyObject
from libc.stdint cimport uint32_t, uintptr_t

from disconnect_watch._core cimport Connection, Flag

import asyncio
import sys
from asyncio.selector_events import _SelectorSocketTransport

from disconnect_watch import token as tokens
from disconnect_watch.aio import _optins, _policy

cdef extern from *:
    """
    #ifdef Py_LIMITED_API
    #define set_next(type, next) ((void)(next))
    #else
    #define set_next(type, next) (((PyTypeObject *)(type))->tp_iternext = (next))
    #endif
    """
    void set_next(object type, PyObject *(*next)(PyObject *) noexcept)
    void PyErr_SetObject(PyObject *type, PyObject *value) noexcept
    PyObject *PyExc_StopIteration

cdef extern from "<sys/ioctl.h>" nogil:
    unsigned long FIONREAD
    int ioctl(int fd, unsigned long request, ...)

# Under this attribute a protocol holds the connection that hears from it.
KNOWN = "_disconnect_watch_connection"

# As C variables they are found without a look into the module.
cdef str KNOWN_IN_C = KNOWN
cdef type CancelToken = tokens.CancelToken
cdef object FlowTransport = _optins.FlowTransport
cdef object PLAIN = _policy.PLAIN
cdef uint32_t PLAIN_MASK = PLAIN.mask
cdef int FIN = tokens.Reason.FIN.code
cdef type StreamWriter = asyncio.StreamWriter
cdef type SelectorSocketTransport = _SelectorSocketTransport
cdef object PAUSE_READING = _SelectorSocketTransport.pause_reading
cdef object get_running_loop = asyncio.get_running_loop
cdef object current_task = asyncio.current_task
# Before 3.12 current_task is written in Python, and takes a tenth of a whole watch.
cdef dict tasks_by_loop = None
if sys.version_info < (3, 12):
    tasks_by_loop = asyncio.tasks._current_tasks


@cython.final
@cython.freelist(8)
@cython.no_gc
cdef class Ready:
    def __await__(self):
        return self

    def __next__(self):
        raise StopIteration(self._value)

    def send(self, value):
        raise StopIteration(self._value)

    def throw(self, error):
        raise error

    def close(self):
        pass


cdef PyObject *next_of_ready(PyObject *self) noexcept:
    # As __next__, without the traceback that costs ten times as much. With no error
    # set, iterating ends with None.
    cdef object value = (<Ready>self)._value
    if value is not None:
        PyErr_SetObject(PyExc_StopIteration, <PyObject *>value)
    return NULL


set_next(Ready, next_of_ready)

cdef Ready DONE = Ready.__new__(Ready)


cdef class Block:
    def __cinit__(self, target, policy, bint pause_reading, watcher):
        self._target = target
        self._policy = policy
        self._pause_reading = pause_reading
        self._watcher = watcher
        self._token = CancelToken.__new__(CancelToken)

    def __aenter__(self):
        if self.task is not None:
            raise RuntimeError("a watch was entered twice: make one for each block")
        self._take_task()
        try:
            if not self._enter_shortly():
                self._enter()
        except BaseException:
            self._let_go()
            raise
        cdef Ready entered = Ready.__new__(Ready)
        entered._value = self
        return entered

    cdef _take_task(self):
        cdef object task
        if tasks_by_loop is None:
            task = current_task()
        else:
            task = tasks_by_loop.get(get_running_loop())
        if task is None:
            raise RuntimeError("watch must be entered inside a task")
        self.task = task
        self._cancels_before = task.cancelling()

    cdef bint _enter_shortly(self) except -1:
        # False, and nothing done, where the long way must be gone.
        cdef object policy = self._policy
        cdef object target = self._target
        cdef uint32_t mask = PLAIN_MASK
        if policy is not PLAIN:
            if not policy.is_plain or policy.grace:
                return False
            mask = policy.mask
        cdef bint is_stream = type(target) is StreamWriter
        cdef object transport = target._transport if is_stream else target
        cdef object protocol
        try:
            protocol = protocol_of(transport)
        except AttributeError:  # no transport
            return False
        cdef Attached connection = getattr(protocol, KNOWN_IN_C, None)
        if connection is None:
            return False
        if not connection._is_shortcut(transport, protocol, self._watcher):
            return False
        if is_stream and connection._is_tls or is_closing(transport):
            return False
        cdef int rc = connection.conn.arm_code(
            self._token, mask, connection._box, connection._cookie, &self.watch_id
        )
        if rc < 0:
            return False
        connection._enter(self)
        self._connection = connection
        if self._token.is_set():
            self._left_before(self._token.reason)
        elif self._pause_reading:
            self._is_pausing = True
            connection._pause(transport)
        return True

    cdef bint _arm_shortly(self, transport, Flag token) except -1:
        cdef object protocol = protocol_of(transport)
        cdef Attached connection = getattr(protocol, KNOWN_IN_C, None)
        if connection is None or is_closing(transport):
            return False
        if not connection._is_shortcut(transport, protocol, self._watcher):
            return False
        cdef int rc = connection.conn.arm_code(
            token, PLAIN_MASK, connection._box, connection._cookie, &self.watch_id
        )
        if rc < 0:
            return False
        connection._enter(self)
        self._connection = connection
        return True

    def _exit(self):
        self._let_go()

    cdef _let_go(self):
        cdef Attached connection = self._connection
        self._connection = None
        if connection is not None:
            if self._is_pausing:
                connection._resume()
            connection._leave(self)
        if self._soon is not None:
            self._soon.cancel()

    def __aexit__(self, exc_type, exc, traceback):
        self._let_go()
        return self._end(exc) if self.was_cancelled else DONE


cdef class Attached:
    def __cinit__(self, *args):
        self._hold = Hold()

    def _join(self, mailbox, Connection conn, bint is_default):
        self.mailbox = mailbox
        self.conn = conn
        self._box = mailbox.core
        # As the mailbox finds it again, when a block is to hear that its client left.
        self._cookie = <uintptr_t><PyObject *>self
        mailbox.attached[self._cookie] = self
        self._is_default = is_default

    cdef bint _is_shortcut(self, transport, protocol, watcher):
        # A protocol may have another transport by now, or more than one.
        if self.transport is not transport or self.protocol is not protocol:
            return False
        if watcher is None:
            return self.is_served or self._is_default
        return self.conn.watcher is watcher

    def arm(self, Block block, token, mask):
        block.watch_id = self.conn.arm(
            token, mask=mask, mailbox=self._box, cookie=self._cookie
        )
        self._enter(block)

    def armed(self, uint32_t watch_id):
        cdef Block block = self._newest
        while block is not None and block.watch_id != watch_id:
            block = block._older
        return block

    @property
    def blocks(self):
        """Those that watch it, the oldest first."""
        cdef list blocks = []
        cdef Block block = self._newest
        while block is not None:
            blocks.append(block)
            block = block._older
        blocks.reverse()
        return tuple(blocks)

    cdef int _enter(self, Block block) except -1:
        # Linked through the blocks: to append to a list and remove from it would cost as
        # much as the watch.
        block._older = self._newest
        self._newest = block
        return 0

    cdef _leave(self, Block block):
        cdef Block newer = self._newest
        if newer is block:
            self._newest = block._older
        else:
            while newer is not None and newer._older is not block:
                newer = newer._older
            if newer is not None:
                newer._older = block._older
        block._older = None
        if self._optins is not None:
            self._optins.remove(block)
        # An error here means that it was detached, or its watcher closed or forked away.
        self.conn.disarm_code(block.watch_id)
        if self.handler is not None:
            self.handler.block_ended(block)
        if self._newest is None and not self.is_followed:
            self.detach()

    def forget_transport(self):
        self._hold.forget()
        self.transport = self.protocol = None

    def pause(self):
        """Leave what the peer sends in the kernel; its partner is ``resume``."""
        cdef object transport = self.transport
        self._pause(None if transport is None or is_closing(transport) else transport)

    cdef _pause(self, transport):
        # transport: to be paused, which is not closing; None for none.
        self._num_pauses += 1
        if self._is_pipe:
            return  # it only writes
        if transport is not None:
            self._pause_transport(transport)
        if self._optins is not None:
            if self.transport is None or not is_reading(self.transport):
                self._optins.unblind()

    cdef _pause_transport(self, transport):
        if not is_reading(transport):
            return
        if self.conn.reason_now() == FIN and not has_unread(self.conn.fd):
            # Nothing comes any more, and asyncio, which goes on saying is_reading, would
            # on resuming report the same end of stream to its protocol again.
            return
        cdef object reader = self._flow_reader()
        if reader is None and self._is_tls and own_reader(self.protocol) is not None:
            # TLS was started on the stream, and its reader goes on controlling the
            # transport below: to be read inside the block it would resume that one, and
            # wait for ever. What it does not read it keeps, up to its limit.
            return
        if not self._hold.begin(transport):
            transport.pause_reading()
        self._holds_pause = True
        self._paused_reader = reader
        if reader is not None:
            # The reader's own flow control must know, or a body that reads more of
            # its request would wait for bytes that nobody lets in.
            reader._paused = True

    cdef _resume(self):
        self._num_pauses -= 1
        if self._num_pauses or not self._holds_pause:
            return
        self._holds_pause = False
        cdef object reader = self._paused_reader
        self._paused_reader = None
        cdef object transport = self.transport
        if transport is None or is_closing(transport):
            return
        if reader is None or reader._transport is not transport:
            # Another may control the flow by now, or the same through its FlowTransport.
            reader = self._flow_reader()
            if reader is not None:
                reader._maybe_resume_transport()
            elif not self._hold.end() and not is_reading(transport):
                transport.resume_reading()
        elif reader._paused and len(reader._buffer) <= reader._limit:
            # As _maybe_resume_transport does it, but for the hold.
            reader._paused = False
            if not self._hold.end():
                transport.resume_reading()
        else:
            self._hold.tell_kernel()

    def stream_reader(self):
        """The StreamReader that controls the flow of the transport, if one does."""
        return self._flow_reader()

    cdef _flow_reader(self):
        # After start_tls it goes on controlling the transport below. The names are
        # private to asyncio and the same in 3.11 to 3.14; test_watch.py fails where
        # they change.
        cdef object reader = own_reader(self.protocol)
        if reader is None:
            return None
        cdef object controlled = getattr(reader, "_transport", None)
        if controlled is not self.transport and isinstance(controlled, FlowTransport):
            controlled = controlled.transport
        if controlled is None or controlled is not self.transport:
            return None
        return reader if hasattr(reader, "_paused") else None


cdef class Hold:
    # A pause of asyncio's that the kernel hears of only when there is something to read.
    #
    # asyncio takes a paused transport's fd out of its selector and puts it back, for two
    # system calls and 6 µs. Most blocks end before their client sends anything, so we
    # leave the fd where it is, and put a callback of ours in the place of the one that
    # reads: the first byte makes it a pause like any other, and is not read. Whoever
    # else resumes the transport, closes it or gives it another reader cancels the handle,
    # and with it our callback. uvloop does the same by itself.

    cdef bint begin(self, transport) except -1:
        if type(transport) is not SelectorSocketTransport:
            return False
        cdef object handle = self._handle
        if self._transport is not transport or handle._callback is not self._read:
            handle = reading_handle(transport)
            if handle is None:
                return False
            self._transport = transport
            self._handle = handle
            self._read = handle._callback
        self._tell = self.tell_kernel
        handle._callback = self._tell
        transport._paused = True
        return True

    cdef bint is_on(self) except? True:
        return self._tell is not None and self._handle._callback is self._tell

    cdef bint end(self) except -1:
        # False where it is over already.
        if not self.is_on():
            return False
        self._handle._callback = self._read
        self._tell = None
        self._transport._paused = False
        return True

    def tell_kernel(self):
        if self.is_on():
            self._transport._loop._remove_reader(self._transport._sock_fd)
        self._tell = None

    cdef forget(self):
        self.tell_kernel()
        self._transport = self._handle = self._read = None


cdef object reading_handle(transport):
    # None where the transport does not read now, asyncio is not as we know it, or somebody
    # shadows the method that we would not call.
    if getattr(transport.pause_reading, "__func__", None) is not PAUSE_READING:
        return None
    try:
        key = transport._loop._selector.get_key(transport._sock_fd)
        handle = key.data[0]
        is_known = not transport._paused and handle._callback == transport._read_ready
    except (AttributeError, LookupError, TypeError):
        return None
    return handle if is_known else None


cdef object own_reader(protocol):
    # The StreamReader that the protocol feeds, if it feeds one.
    cdef object reader = getattr(protocol, "_stream_reader_wr", None)
    return None if reader is None else reader()


cdef bint has_unread(int fd) noexcept:
    cdef int num_bytes = 0
    return ioctl(fd, FIONREAD, &num_bytes) == 0 and num_bytes > 0


# A question to asyncio's transport is a call or two into Python, for five times what a
# look at the attribute behind it costs. The names are the same in 3.11 to 3.14, and
# test_watch.py fails where they change.


cdef object protocol_of(transport):
    if type(transport) is SelectorSocketTransport:
        return transport._protocol
    return transport.get_protocol()


cdef bint is_closing(transport) except -1:
    if type(transport) is SelectorSocketTransport:
        return transport._closing
    return transport.is_closing()


cdef bint is_reading(transport) except -1:
    if type(transport) is SelectorSocketTransport:
        return not transport._paused and not transport._closing
    try:
        return transport.is_reading()
    except NotImplementedError:
        return False
