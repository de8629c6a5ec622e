# cython: language_level=3, auto_pickle=False, autotestdict=False
# The short way through a request: what it costs where no client leaves.
#
# Call is the base of WatchedCall (adapters/_asgi_call.py), which documents it and holds
# whatever lies off that way: other servers than uvicorn, opt-ins, and all that happens
# once a client leaves.
#
# Threads: the loop's own only.
cimport cython
from libc.stdint cimport uint32_t, uint64_t
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec

from disconnect_watch._core cimport Connection, Flag, Mailbox
from disconnect_watch.aio._fast cimport Block, Ready

from disconnect_watch import adapters, token as tokens
from disconnect_watch.adapters import _content_length

# In ``scope["state"]`` where the token is an ASGI call's own: True while one runs.
CALL_KEY = "disconnect_watch.call"

# As C variables they are found without a look into the module.
cdef str CALL_KEY_IN_C = CALL_KEY
cdef str TOKEN_KEY = adapters.TOKEN_KEY
cdef str WHOLE_KEY = adapters.WHOLE_KEY
cdef Ready DONE = Ready.__new__(Ready)
cdef type CancelToken = tokens.CancelToken
cdef object content_length = _content_length.content_length

cdef enum:
    HAS_FIRED = 1

cdef struct Pieces:
    # A body in pieces: whether there was one yet, and what is to come after it.
    bint is_begun
    double num_bytes_left


cdef class Counts:
    # Requests by how their connection was found, and by what became of them.
    cdef public long protocol
    cdef public long transport
    cdef public long addresses
    cdef public long none
    cdef public long left
    cdef public long not_started

    def found(self, str how):
        setattr(self, how, getattr(self, how) + 1)


# Of this process.
counts = Counts()
cdef Counts counts_in_c = counts


cdef class Calls:
    # Makes the calls of one middleware, or of one route.
    cdef tuple _arguments
    cdef bint _is_plain
    cdef object _of_any_server
    cdef object _of_uvicorn
    cdef object _of_ours
    # Of uvicorn's cycles, as seen last.
    cdef type _cycle_type

    def __cinit__(self, policy, watcher, of_any_server, of_uvicorn, of_ours):
        self._arguments = (None, policy, False, watcher)
        self._is_plain = policy.is_plain and not policy.grace
        self._of_any_server = of_any_server
        self._of_uvicorn = of_uvicorn
        self._of_ours = of_ours

    @cython.binding(False)
    def outermost(self, scope, receive, send):
        """As ``make``; None where there is no request, or a call of it already."""
        if item(scope, "type") != "http":
            return None
        cdef object state = item(scope, "state")
        cdef Flag token = None if state is None else item(state, TOKEN_KEY)
        if token is not None and CALL_KEY_IN_C in state:
            return None
        return self._make(scope, receive, send, state, token)

    @cython.binding(False)
    def make(self, scope, receive, send):
        """The call of a request, by the current task."""
        cdef object state = item(scope, "state")
        cdef Flag token = None if state is None else item(state, TOKEN_KEY)
        return self._make(scope, receive, send, state, token)

    cdef Call _make(self, scope, receive, send, state, Flag token):
        cdef object cycle = getattr(receive, "__self__", None)
        cdef object kind
        if not self._is_cycle(cycle):
            kind, cycle = self._of_any_server, None
            if state is not None and is_shared_namespace(send):
                state = scope["state"] = state.copy()
        elif isinstance(getattr(send, "__self__", None), Exchange):
            kind = self._of_ours
        else:
            kind = self._of_uvicorn
        cdef Call call = kind(*self._arguments)
        call._is_plain = self._is_plain
        call._cycle = cycle
        if state is None:
            state = scope["state"] = {}
        call._take(scope, receive, send, state, token)
        return call

    cdef bint _is_cycle(self, receiver) except -1:
        if type(receiver) is self._cycle_type:
            return True
        # One of HTTP/2 has a stream, which may end alone: only its receive() tells of that.
        if getattr(receiver, "message_event", None) is None or hasattr(receiver, "stream"):
            return False
        self._cycle_type = type(receiver)
        return True


cdef class Call(Block):
    cdef bint _is_plain
    cdef readonly Flag token
    # Of uvicorn, its own record of the request; None under other servers.
    cdef public object _cycle
    cdef readonly object _scope
    cdef readonly object _receive
    cdef readonly object _send
    cdef public object _transport
    cdef public object inbox
    cdef readonly object _head
    cdef Pieces _pieces
    cdef public int _num_receiving
    cdef int _num_late
    cdef readonly bint is_borrowed
    cdef public bint _has_heard
    cdef public bint _is_cut
    cdef readonly bint _is_over
    cdef readonly uint64_t _began_ns

    cdef int _take(self, scope, receive, send, state, Flag token) except -1:
        self._take_task()
        self._scope = scope
        self._receive = receive
        self._send = send
        self._began_ns = monotonic_ns()
        if token is None:
            token = state[TOKEN_KEY] = self._token
        elif CALL_KEY_IN_C not in state:
            self.is_borrowed = True
        self.token = token
        state[CALL_KEY_IN_C] = True
        return 0

    @cython.binding(False)
    def begin(self):
        try:
            if not self._begin_shortly():
                self._begin()
        except BaseException:
            self._close()
            raise
        return self._left is None

    cdef bint _begin_shortly(self) except -1:
        # False, and nothing done, where the long way must be gone.
        if self._cycle is None or self.is_borrowed or not self._is_plain:
            return False
        if not self._arm_shortly(self._cycle.transport, self.token):
            return False
        counts_in_c.transport += 1
        if self.token.is_set():
            self._has_left_before(self.token.reason)
        return True

    @cython.binding(False)
    def send(self, message):
        """The ``send()`` of the application: the server's, whose awaitable it returns."""
        cdef str kind = item(message, "type")
        if equal(kind, "http.response.start"):
            self._head = message
        elif not self._is_over and self._is_last(kind, message):
            self._disarm()
        if self.token.is_set():
            # A stream is best cancelled inside its generator, whose blocks then end at once:
            # so the head and a chunk take it there without a wait.
            self._num_late += 1
            if self._num_late > 2:
                return self._send_late(message)
        return DONE if self._is_cut else self._send(message)

    cdef bint _is_last(self, str kind, message) except -1:
        # Whether the client has its whole answer with this message.
        if equal(kind, "http.response.body"):
            # uvicorn knows no trailers.
            if self._cycle is None and self._head is not None and item(self._head, "trailers"):
                return False
            return is_last_of_body(message, self._head, &self._pieces)
        if equal(kind, "http.response.trailers"):
            return not item(message, "more_trailers")
        return equal(kind, "http.response.pathsend")

    cdef int _disarm(self) except -1:
        # The response is complete, or the application ended: what comes now is no leave.
        self._is_over = True
        self._let_go()
        if self.is_borrowed:
            self._unfollow()
        return 0

    cdef int _close(self) except -1:
        if not self._is_over:
            self._disarm()
        if self.inbox is not None:
            self.inbox.close()
        return 0

    @cython.binding(False)
    def end(self, error=None):
        self._close()
        if error is None and not self.was_cancelled:
            return False
        return self._is_ended_by_us(error)

    @property
    def has_left(self):
        """Whether the client left; at the start: before it."""
        return self._left is not None


cdef class Exchange:
    """One request under our uvicorn protocol, its token and the watch that sets it.

    Attributes:
        token: the request's.
        armed: what the watch sets: the token, or with a grace what begins that.
        grace: None where the token is set at once.
        head: the first message of the response, once it was sent.
        is_over: whether the watch has ended.
        on_cancel: called with the reason when it is cancelled; for ``CancelOnDisconnect``.
    """
    cdef readonly object protocol
    cdef readonly object cycle
    cdef readonly Flag token
    cdef public Flag armed
    cdef public object grace
    cdef readonly object head
    cdef readonly bint is_over
    cdef public object on_cancel
    cdef readonly uint32_t watch_id
    cdef public uint32_t fin_watch_id
    cdef Connection _connection
    cdef bint _has_fired
    cdef Pieces _pieces

    def __cinit__(self, protocol, cycle):
        self.protocol = protocol
        self.cycle = cycle
        self.token = self.armed = CancelToken.__new__(CancelToken)

    @cython.binding(False)
    def arm(self, Connection connection, uint32_t mask, Mailbox mailbox, uint64_t cookie):
        """Begin the watch; its partner is ``disarm``.

        Raises:
            DisconnectWatchError: the connection was detached, or its watcher closed.
        """
        cdef int rc = connection.arm_code(self.armed, mask, mailbox, cookie, &self.watch_id)
        if rc < 0:
            connection.arm(self.armed, mask=mask, mailbox=mailbox, cookie=cookie)  # raises
        self._connection = connection

    cpdef bint disarm(self) except -1:
        """End the watch; returns whether it had fired. Idempotent."""
        cdef Connection connection = self._connection
        if connection is not None:
            self._connection = None
            if self.fin_watch_id:
                connection.disarm_code(self.fin_watch_id)
            # An error means that the watcher was closed, and fires nothing any more.
            self._has_fired = connection.disarm_code(self.watch_id) == HAS_FIRED
        return self._has_fired

    @cython.binding(False)
    def send(self, message):
        """The ``send`` of the application: uvicorn's, whose coroutine it returns."""
        cdef str kind = item(message, "type")
        if equal(kind, "http.response.start"):
            self.head = message
            if item(message, WHOLE_KEY) is not None:
                return self._send_whole(message)
        elif not self.is_over and is_last_of_body(message, self.head, &self._pieces):
            # A client may leave as soon as it has the last byte, and that is no disconnect.
            # A write that has to wait for the client still needs its watch.
            if self.cycle.flow.write_paused:
                return self.protocol.send_last(self, message)
            if self.grace is not None or self.disarm():
                self.protocol.end(self, is_answered=True)
            else:
                self.finish()
        return self.cycle.send(message)

    cdef object _send_whole(self, message):
        # Head and body in one write: two would be two system calls, and two wake-ups of
        # the client.
        cdef object cycle = self.cycle
        if self.is_over or cycle.flow.write_paused or cycle.access_log:
            return in_parts(self, message)
        if self.grace is not None or self.disarm():
            self.protocol.end(self, is_answered=True)
        else:
            self.finish()
        if not cycle.disconnected:
            write_whole(cycle, message)
        return DONE

    cpdef finish(self):
        """Be over, and hold the protocol no longer: it holds its newest exchange."""
        self.is_over = True
        self.protocol = None

    def cancel(self, reason):
        """Set the token, and have ``receive()`` tell of it."""
        self.token.cancel(reason)
        self.disconnect()
        if self.on_cancel is not None:
            self.on_cancel(reason)

    def disconnect(self):
        """Have uvicorn's ``receive`` tell of it, and drop what is sent from now on."""
        self.cycle.disconnected = True
        self.cycle.message_event.set()

    def question(self):
        """What may be written now to find out whether a half-closed client reads."""
        return b""


async def in_parts(exchange, message):
    """A whole response in two messages, as uvicorn knows it."""
    cdef object body = message.pop(WHOLE_KEY)
    await exchange.send(message)
    await exchange.send({"type": "http.response.body", "body": body})


cdef object write_whole(cycle, message):
    # What the cycle's own ``send`` does with the two messages (uvicorn 0.54).
    cdef object body = b"" if cycle.scope["method"] == "HEAD" else message[WHOLE_KEY]
    cdef bint keeps_alive = cycle.keep_alive
    cdef list pieces = [status_line(message["status"])]
    cdef bytes name, value
    for name, value in [*cycle.default_headers, *message["headers"]]:
        if b"\r" in value or b"\n" in value:
            raise RuntimeError("Invalid HTTP header value.")
        if name == b"connection" and value == b"close":
            cycle.keep_alive = keeps_alive = False
            continue
        pieces += (name, b": ", value, b"\r\n")
    if not keeps_alive:
        pieces.append(b"connection: close\r\n")
    pieces += (b"\r\n", body)
    cycle.response_started = True
    cycle.waiting_for_100_continue = False
    cycle.transport.write(b"".join(pieces))
    cycle.response_complete = True
    cycle.message_event.set()
    if not keeps_alive:
        cycle.transport.close()
    cycle.on_response()


cdef dict status_lines = {}


cdef bytes status_line(status):
    cdef object line = status_lines.get(status)
    if line is None:
        # Here, since this module is for other servers too.
        from uvicorn.protocols.http.httptools_impl import STATUS_LINE
        line = status_lines[status] = STATUS_LINE[status]
    return line


cdef bint is_last_of_body(message, head, Pieces *pieces) except -1:
    # Whether the client has its whole body with this message. Middleware sends a last one
    # that is empty, and so do streams of a known length, when the client may be gone.
    if not item(message, "more_body"):
        return True
    if not pieces.is_begun:
        pieces.is_begun = True
        pieces.num_bytes_left = content_length(head)
    cdef object body = item(message, "body")
    if body is not None:
        pieces.num_bytes_left -= len(body)
    return pieces.num_bytes_left <= 0


cdef bint is_shared_namespace(send) except -1:
    # Whether ``scope["state"]`` may be that of other requests, too: hypercorn before 0.18 has
    # one for all of a connection. Only where nobody is between the server and us, who may
    # hold it as well.
    cdef object sender = getattr(send, "__self__", None)
    return type(sender).__module__ == "hypercorn.protocol.http_stream"


cdef bint equal(str one, str other) noexcept:
    # Most differ in their length, which is cheaper to compare than by `==`.
    return one is other or len(one) == len(other) and one == other


cdef object item(mapping, str key):
    if type(mapping) is dict:
        return (<dict>mapping).get(key)
    return mapping.get(key)


cdef uint64_t monotonic_ns() noexcept:
    cdef timespec now
    clock_gettime(CLOCK_MONOTONIC, &now)
    return <uint64_t>now.tv_sec * 1000000000 + now.tv_nsec
