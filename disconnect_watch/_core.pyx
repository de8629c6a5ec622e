# cython: language_level=3, auto_pickle=False, autotestdict=False
# The binding: one class a C handle, one funnel for errors, no policy.
#
# Flag and Connection are subclassed by token.py and watcher.py, which document
# them; their hot methods are inherited as they stand here, because a Python
# wrapper around each would cost more than the call.
#
# What each class holds is declared in _core.pxd, for aio/_fast.pyx.
#
# Nothing here rests on the GIL. A handle is made with its object and freed with it,
# so that it is there for as long as anybody can call a method; what may change in
# between is an atomic of dw_shared.h, and all else lies in the core under its locks.
# Calls that can block release the GIL, the others are shorter than a release.
#
# no_gc_clear: each __dealloc__ needs the handle its object refers to, which the
# garbage collector would have cleared by then in a cycle (test_token.py).
cimport cython
from cpython.exc cimport PyErr_CheckSignals
from cpython.mem cimport PyMem_Free, PyMem_Realloc
from cpython.pycapsule cimport PyCapsule_New
from cpython.ref cimport Py_INCREF
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t, uintptr_t

from disconnect_watch cimport _dw

from disconnect_watch.errors import (
    ClosedError,
    ForkedError,
    StaleWatchError,
    UnsupportedSocketError,
)

MASK_ANY = _dw.DW_MASK_ANY
MASK_GONE = _dw.DW_MASK_GONE

cdef enum:
    MAX_EVENTS = 64


cdef int _check(int rc, str tried, object value=None) except -1:
    if rc >= 0:
        return rc
    cdef str said = (<bytes>_dw.dw_strerror(rc)).decode()
    cdef str text = f"{tried} {value!r}: {said}" if value is not None else f"{tried}: {said}"
    if rc == _dw.DW_ESTALE:
        raise StaleWatchError(text)
    if rc == _dw.DW_ECLOSED:
        raise ClosedError(text)
    if rc == _dw.DW_EFORKED:
        raise ForkedError(text)
    if rc == _dw.DW_ENOTSOCK:
        raise UnsupportedSocketError(text)
    raise OSError(-rc, text)


def clock_ns():
    return _dw.dw_clock_ns()


def is_gone(int fd):
    return _check(_dw.dw_sock_is_gone(fd), "look at fd", fd)


cdef class Flags:
    def __cinit__(self, int memfd=-1):
        if memfd >= 0:
            _check(_dw.dw_flags_map(memfd, &self._flags), "map flag table of fd", memfd)
        else:
            _check(_dw.dw_flags_create(&self._flags), "create flag table")

    def __dealloc__(self):
        _dw.dw_flags_free(self._flags)

    def fileno(self):
        return _dw.dw_flags_memfd(self._flags)

    def bell(self):
        return _dw.dw_flags_bell(self._flags)

    def ring(self):
        _dw.dw_flags_ring(self._flags)

    def wait_bell(self, uint32_t seen, int64_t timeout_ns):
        cdef int rc
        with nogil:
            rc = _dw.dw_flags_wait_bell(self._flags, seen, timeout_ns)
        if rc == _dw.DW_EINTR:
            PyErr_CheckSignals()
            return True
        if rc == _dw.DW_ETIMEDOUT:
            return False
        _check(rc, "wait for the doorbell")
        return True

    def reclaim(self):
        return _check(_dw.dw_flags_reclaim(self._flags), "reclaim flags")

    @property
    def num_slots(self):
        return _dw.DW_FLAGS_NUM_SLOTS

    @property
    def words_address(self):
        return <uintptr_t>_dw.dw_flag_address(self._flags, 0)

    @property
    def acks_address(self):
        return <uintptr_t>_dw.dw_flag_ack_address(self._flags, 0)

    def latch(
        self,
        size_t num_rows,
        uintptr_t slots,
        uintptr_t generations,
        uintptr_t live,
        uintptr_t seq_lens,
        uintptr_t slot_mapping,
        uintptr_t control,
        size_t flags_per_row,
    ):
        """Run ``dw_latch_many`` over rows at these addresses, which the caller vouches for."""
        cdef _dw.dw_latch_rows rows
        rows.num_rows = num_rows
        rows.slots = <const int32_t *>slots
        rows.generations = <const int32_t *>generations
        rows.live = <int32_t *>live
        rows.seq_lens = <int32_t *>seq_lens
        rows.slot_mapping = <int64_t *>slot_mapping
        rows.control = <uint32_t *>control
        return _dw.dw_latch_many(self._flags, &rows, flags_per_row) == 1

    def stats(self):
        cdef _dw.dw_flags_stats stats
        _dw.dw_flags_read_stats(self._flags, &stats)
        return stats.num_live, stats.num_retired, stats.num_cancels, stats.num_stale


# One a process, made on first use, shared with forked children, and never let go. It
# lives here so that a token is made without a call into Python.
cdef _dw.dw_once _process_table


def flag_table():
    cdef Flags table
    cdef void *first = _dw.dw_once_load(&_process_table)
    if first == NULL:
        table = Flags()
        first = _dw.dw_once_set(&_process_table, <void *>table)
        if first == <void *>table:
            Py_INCREF(table)
    return <Flags>first


def adopt_flag_table(int memfd):
    cdef Flags table = Flags(memfd)
    if _dw.dw_once_set(&_process_table, <void *>table) != <void *>table:
        raise RuntimeError("this process has a flag table, it can take no other")
    Py_INCREF(table)
    return table


@cython.no_gc_clear
cdef class Flag:
    def __cinit__(self):
        cdef void *first = _dw.dw_once_load(&_process_table)
        cdef Flags table = flag_table() if first == NULL else <Flags>first
        cdef int rc = _dw.dw_flag_alloc(table._flags, &self._flag)
        self.table = table
        if rc < 0:
            _check(rc, "allocate a cancel flag")
        self._word = _dw.dw_flag_address(table._flags, self._flag.slot)

    def __init__(self):
        """Refuse arguments, which neither ``__cinit__`` nor ``object`` does here."""

    def __dealloc__(self):
        if self._flag.generation and not self._is_borrowed:
            _dw.dw_flag_release(self.table._flags, self._flag)

    def borrow(self, uint32_t slot, uint32_t generation):
        # Only before anybody else has this object. No reference is taken of the name.
        if slot >= _dw.DW_FLAGS_NUM_SLOTS or not generation:
            _check(_dw.DW_EINVAL, "borrow a flag by its name", (slot, generation))
        _dw.dw_flag_release(self.table._flags, self._flag)
        self._is_borrowed = True
        self._flag.slot = slot
        self._flag.generation = generation
        self._word = _dw.dw_flag_address(self.table._flags, slot)

    @property
    def slot(self):
        return self._flag.slot

    @property
    def generation(self):
        return self._flag.generation

    @property
    def address(self):
        return <uintptr_t>self._word

    @property
    def cancelled(self):
        cdef uint32_t word = _dw.dw_flag_load(self._word)
        # Our reference holds the generation still, but in a forked child it is
        # the parent's reference, and the parent may have let go of the slot.
        if word >> 8 != self._flag.generation:
            _check(_dw.DW_ESTALE, "read flag", self._flag.slot)
        return word & 0xFF != 0

    cdef bint is_set(self) noexcept:
        return _dw.dw_flag_load(self._word) & 0xFF != 0

    @property
    def reason_code(self):
        return _check(
            _dw.dw_flag_reason(self.table._flags, self._flag), "read flag", self._flag.slot
        )

    def cancel_code(self, int reason):
        cdef int rc = _dw.dw_flag_cancel(
            self.table._flags, self._flag, reason, _dw.dw_clock_ns()
        )
        return _check(rc, "cancel flag with reason", reason) == 1

    def times(self):
        cdef uint64_t at_ns = 0
        cdef uint64_t stored_ns = 0
        _check(
            _dw.dw_flag_times(self.table._flags, self._flag, &at_ns, &stored_ns),
            "read flag", self._flag.slot,
        )
        return at_ns, stored_ns

    def ack(self, uint32_t step):
        _check(_dw.dw_flag_ack(self.table._flags, self._flag, step), "acknowledge step", step)

    @property
    def acked(self):
        cdef uint32_t step = 0
        _check(
            _dw.dw_flag_acked(self.table._flags, self._flag, &step), "read flag", self._flag.slot
        )
        return step

    def wait_ns(self, int64_t timeout_ns):
        cdef int rc
        with nogil:
            rc = _dw.dw_flags_wait(self.table._flags, &self._flag, 1, timeout_ns)
        if rc == _dw.DW_EINTR:
            PyErr_CheckSignals()
            return None
        if rc == _dw.DW_ETIMEDOUT:
            return False
        _check(rc, "wait for flag", self._flag.slot)
        return True


cdef class FlagSet:
    def __cinit__(self):
        self._table = flag_table()
        self._held = []
        self._places = {}
        self._counts = {}

    def __dealloc__(self):
        PyMem_Free(self._which)

    @cython.critical_section
    def __len__(self):
        return len(self._held)

    @cython.critical_section
    def add(self, Flag flag not None):
        cdef size_t num = len(self._held)
        cdef size_t room
        cdef void *grown
        if flag in self._counts:
            self._counts[flag] += 1
            return
        if num == self._room:
            room = 2 * num + 16
            grown = PyMem_Realloc(self._which, room * sizeof(_dw.dw_flag))
            if grown == NULL:
                raise MemoryError
            self._which = <_dw.dw_flag *>grown
            self._room = room
        self._which[num] = flag._flag
        self._held.append(flag)
        self._places[flag] = num
        self._counts[flag] = 1

    @cython.critical_section
    def remove(self, Flag flag not None):
        cdef size_t place
        cdef Flag last
        self._counts[flag] -= 1
        if self._counts[flag]:
            return
        del self._counts[flag]
        place = self._places.pop(flag)
        last = self._held.pop()
        if last is not flag:
            self._which[place] = last._flag
            self._held[place] = last
            self._places[last] = place

    @cython.critical_section
    def any_fired(self):
        return _dw.dw_flags_any(self._table._flags, self._which, len(self._held)) == 1


@cython.no_gc_clear
cdef class Watcher:
    def __cinit__(self, Flags flags not None, str poller, bint is_loop_driven):
        cdef bytes name = b"" if poller is None else poller.encode()
        cdef const char *c_name = NULL
        if poller is not None:
            c_name = name
        self.flags = flags
        _check(
            _dw.dw_watcher_create(
                flags._flags,
                c_name,
                _dw.DW_DRIVER_LOOP if is_loop_driven else _dw.DW_DRIVER_THREAD,
                &self._watcher,
            ),
            "create a watcher with poller", poller,
        )

    def __dealloc__(self):
        _dw.dw_watcher_free(self._watcher)

    def close(self):
        with nogil:
            _dw.dw_watcher_close(self._watcher)

    def fileno(self):
        return _check(_dw.dw_watcher_fd(self._watcher), "get the watcher's fd")

    def poll_ms(self, int timeout_ms):
        cdef int rc
        with nogil:
            rc = _dw.dw_watcher_poll(self._watcher, timeout_ms)
        return _check(rc, "poll the watcher")

    def read_stats(self):
        cdef _dw.dw_watcher_stats stats
        cdef int i
        _check(
            _dw.dw_watcher_read_stats(self._watcher, &stats), "read the watcher's counters"
        )
        return (
            (<bytes>stats.poller).decode(),
            stats.driver == _dw.DW_DRIVER_LOOP,
            stats.num_connections,
            stats.num_armed,
            stats.num_blind,
            stats.num_fired,
            stats.num_stale_events,
            stats.num_second_sources,
            stats.num_wakeups,
            tuple([stats.num_signals[i] for i in range(_dw.DW_REASON_MAX + 1)]),
        )


@cython.no_gc_clear
cdef class Mailbox:
    def __cinit__(self, Watcher watcher not None):
        self.watcher = watcher
        _check(_dw.dw_mailbox_create(watcher._watcher, &self._mailbox), "create a mailbox")

    def __dealloc__(self):
        _dw.dw_mailbox_close(self._mailbox)

    def fileno(self):
        return _check(_dw.dw_mailbox_fd(self._mailbox), "get the mailbox's fd")

    def drain_codes(self):
        cdef _dw.dw_event events[MAX_EVENTS]
        cdef int i
        cdef int n = _check(
            _dw.dw_mailbox_drain(self._mailbox, events, MAX_EVENTS), "drain the mailbox"
        )
        return [
            (events[i].cookie, events[i].reason, events[i].at_ns, events[i].watch)
            for i in range(n)
        ]

    def wake(self):
        _dw.dw_mailbox_wake(self._mailbox)

    def close(self):
        _dw.dw_mailbox_shut(self._mailbox)


cdef inline _dw.dw_conn_id id_of(Connection conn) noexcept:
    return _dw.dw_shared_id_load(&conn._conn)


@cython.no_gc_clear
cdef class Connection:
    def __cinit__(self, Watcher watcher not None, int fd):
        self.watcher = watcher
        self.fd = fd
        cdef _dw.dw_conn_id conn = 0
        _check(_dw.dw_watcher_attach(watcher._watcher, fd, &conn), "attach fd", fd)
        _dw.dw_shared_id_store(&self._conn, conn)

    def __dealloc__(self):
        cdef _dw.dw_conn_id conn = id_of(self)
        if conn:
            _dw.dw_watcher_detach(self.watcher._watcher, conn)

    @cython.binding(False)
    def arm(
        self,
        Flag token=None,
        *,
        uint32_t mask=_dw.DW_MASK_ANY,
        Mailbox mailbox=None,
        uint64_t cookie=0,
    ):
        """Fire ``token`` and deliver to ``mailbox`` when the peer leaves in a way ``mask`` names.

        What was seen earlier fires inside this call. Makes no system call.

        Args:
            token: the flag to set; None for a delivery alone.
            mask: ``MASK_ANY``, or ``MASK_GONE`` to let a half-close pass.
            mailbox: where to deliver; None for the flag alone.
            cookie: handed back with the delivery, 64 bits.

        Returns:
            The watch id, for ``disarm``.

        Raises:
            StaleWatchError: the connection was detached.
            ClosedError: the watcher or the mailbox was closed.

        Threads: any.
        """
        cdef uint32_t watch_id = 0
        cdef int rc = self.arm_code(token, mask, mailbox, cookie, &watch_id)
        # Asked here first: the funnel's arguments cost as much as the call itself.
        if rc < 0:
            if rc == _dw.DW_EINVAL:
                if mailbox is not None and mailbox.watcher is not self.watcher:
                    raise ValueError("arm: the mailbox is of another watcher than the connection")
                raise ValueError("arm: the token is of another flag table than the watcher")
            if mailbox is not None and _dw.dw_mailbox_fd(mailbox._mailbox) == _dw.DW_ECLOSED:
                _check(rc, "arm with a mailbox")
            _check(rc, "arm on fd", self.fd)
        return watch_id

    cdef int arm_code(
        self, Flag token, uint32_t mask, Mailbox mailbox, uint64_t cookie, uint32_t *watch_id
    ) noexcept:
        cdef _dw.dw_flag flag
        cdef _dw.dw_mailbox *box = NULL
        flag.slot = 0
        flag.generation = 0
        if token is not None:
            if token.table is not self.watcher.flags:
                return _dw.DW_EINVAL
            flag = token._flag
        if mailbox is not None:
            box = mailbox._mailbox
        return _dw.dw_watcher_arm(
            self.watcher._watcher, id_of(self), flag, mask, box, cookie, watch_id
        )

    @cython.binding(False)
    @cython.always_allow_keywords(False)
    def disarm(self, uint32_t watch_id):
        """End the watch; after it neither flag nor mailbox hears of it.

        Returns:
            Whether it had fired; False means that it never will.

        Raises:
            StaleWatchError: no such watch on this connection any more.

        Threads: any.
        """
        cdef int rc = self.disarm_code(watch_id)
        if rc < 0:
            _check(rc, "disarm watch", watch_id)
        return rc == 1

    cdef int disarm_code(self, uint32_t watch_id) noexcept:
        return _dw.dw_watcher_disarm(self.watcher._watcher, id_of(self), watch_id)

    def lost_code(self, int reason):
        return _check(
            _dw.dw_watcher_lost(self.watcher._watcher, id_of(self), reason),
            "report as lost fd", self.fd,
        ) == 1

    def detach(self):
        """Stop watching; returns when no other thread is inside. The owner may then close the fd.

        Idempotent. Watches still armed are dropped unfired.

        Threads: any.
        """
        cdef _dw.dw_conn_id conn = id_of(self)
        if conn:
            # The core answers a second call with an error. It is forgotten after that, so
            # that who finds no id need not wait: the thread that detached has come back.
            _dw.dw_watcher_detach(self.watcher._watcher, conn)
            _dw.dw_shared_id_store(&self._conn, 0)

    @property
    def is_attached(self):
        return id_of(self) != 0

    def read_info(self):
        cdef _dw.dw_conn_info info
        _check(
            _dw.dw_watcher_info(self.watcher._watcher, id_of(self), &info),
            "read connection of fd", self.fd,
        )
        return (
            info.fd,
            info.seen,
            info.reason,
            info.unread,
            info.seen_ns,
            info.is_blind,
            info.vanish_bound_ms,
        )

    @property
    def reason_code(self):
        return _check(self.reason_now(), "read connection of fd", self.fd)

    cdef int reason_now(self) noexcept:
        return _dw.dw_watcher_reason(self.watcher._watcher, id_of(self))

    def set_vanish_ms(self, uint32_t after_ms):
        _check(
            _dw.dw_watcher_set_vanish(self.watcher._watcher, id_of(self), after_ms),
            "look for silence on fd", self.fd,
        )

    def set_probing(self, bint is_on):
        """After a FIN: find out whether the peer only shut its sending side.

        Asks by TCP keepalive each second, without a byte; a peer that closed is
        RESET once its kernel has forgotten the connection (``tcp_fin_timeout``, a
        minute on Linux). Over AF_UNIX the kernel tells at once.

        Raises:
            StaleWatchError: the connection was detached.
            OSError: EBADF, the owner closed the socket without ``detach``.

        Threads: any.

        Source: ``dw_watch.h``; RFC 9293, 3.8.4.
        """
        _check(
            _dw.dw_watcher_set_probing(self.watcher._watcher, id_of(self), is_on),
            "probe the peer of fd", self.fd,
        )

    def unblind(self, int num_bytes):
        """Make room in the receive buffer for a FIN behind ``num_bytes`` unread bytes.

        For while the owner does not read: until ``reblind``, reading waits for that
        many bytes. Only TCP has a window to open; elsewhere nothing happens.

        Args:
            num_bytes: at least 1; the kernel caps it at half of tcp_rmem's maximum.

        Raises:
            StaleWatchError: the connection was detached.
            OSError: EBADF, the owner closed the socket without ``detach``; EINVAL.

        Threads: any.

        Source: ``SO_RCVLOWAT`` in socket(7).
        """
        _check(
            _dw.dw_watcher_unblind(self.watcher._watcher, id_of(self), num_bytes),
            "unblind fd", self.fd,
        )

    def reblind(self):
        """Let the owner read again as before ``unblind``; the buffer stays as large.

        Raises: as ``unblind``.

        Threads: any.
        """
        _check(
            _dw.dw_watcher_reblind(self.watcher._watcher, id_of(self)), "reblind fd", self.fd
        )


cdef extern from *:
    """
    #ifdef Py_LIMITED_API
    #define method_for(type, method) Py_NewRef(method)
    #else
    #define method_for(type, method) PyDescr_NewMethod( \\
        (PyTypeObject *)(type), ((PyMethodDescrObject *)(method))->d_method)
    #endif
    """
    object method_for(type owner, object method)


def own_methods(type owner, *names):
    # CPython calls a C method directly only on an instance of the very class that the
    # method belongs to; on one of a subclass it goes the general way, for a fifth of
    # what arm and disarm cost together.
    for name in names:
        setattr(owner, name, method_for(owner, getattr(owner, name)))


cdef _dw.dw_watcher *_watcher_of(object watcher, _dw.dw_flags **flags) except NULL:
    cdef Watcher self = watcher
    if self is None:
        raise TypeError("expected a disconnect_watch.Watcher, got None")
    if flags != NULL:
        flags[0] = self.flags._flags
    return self._watcher


cdef int _flag_of(object token, _dw.dw_flags **flags, _dw.dw_flag *out) except -1:
    cdef Flag self = token
    if self is None:
        raise TypeError("expected a disconnect_watch.CancelToken, got None")
    if flags != NULL:
        flags[0] = self.table._flags
    out[0] = self._flag
    return 0


# A C static: it outlives the module object.
cdef _dw.dw_api _api = _dw.dw_api_core
_api.watcher_of = _watcher_of
_api.flag_of = _flag_of
_C_API = PyCapsule_New(&_api, _dw.DW_API_CAPSULE, NULL)
