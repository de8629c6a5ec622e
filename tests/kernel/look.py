"""The looks that the experiments take at a socket; each says in words what it saw."""

import ctypes
import errno
import select
import socket
import struct
from dataclasses import dataclass
from types import TracebackType
from typing import Self

__all__ = [
    "INTEREST",
    "EventSet",
    "TcpInfo",
    "error_name",
    "error_of_recv",
    "peek",
    "take_error",
    "tcp_info",
    "vanish",
]

#: What the watcher's epoll set asks for.
INTEREST = select.EPOLLRDHUP | select.EPOLLET

#: Milliseconds; only a kernel that behaves otherwise is waited for that long.
GIVE_UP_MS = 10_000

_SO_ATTACH_FILTER = 26
_BPF_RETURN = 0x06
_TCP_INFO = struct.Struct("=8B24I")
_STATES = {1: "ESTABLISHED", 5: "FIN_WAIT2", 7: "CLOSE", 8: "CLOSE_WAIT", 9: "LAST_ACK"}
_EVENTS = ("IN", "RDHUP", "HUP", "ERR")


class EventSet:
    """An epoll set of its own around one fd."""

    def __init__(self, sock: socket.socket | int, interest: int = INTEREST) -> None:
        self._epoll = select.epoll()
        self.add(sock, interest)

    def add(self, sock: socket.socket | int, interest: int = INTEREST) -> None:
        self._epoll.register(sock, interest)

    def remove(self, fd: int) -> str:
        """Remove by number; returns "removed" or the errno's name."""
        try:
            self._epoll.unregister(fd)
        except OSError as error:
            return error_name(error)
        return "removed"

    def fileno(self) -> int:
        return self._epoll.fileno()

    def now(self) -> str:
        """The events that wait, as "RDHUP HUP"; "silent" when none does."""
        return self._poll(0)

    def next(self) -> str:
        """The next events, waited for."""
        return self._poll(GIVE_UP_MS)

    def until(self, *names: str) -> str:
        """Wait for all these events, in however many returns; what was seen by then."""
        seen: set[str] = set()
        while not seen >= set(names):
            events = self.next()
            if events == "silent":
                break
            seen |= set(events.split())
        return " ".join(name for name in _EVENTS if name in seen) or "silent"

    def _poll(self, timeout_ms: int) -> str:
        seen = 0
        for _, events in self._epoll.poll(timeout_ms / 1000):
            seen |= events
        names = [name for name in _EVENTS if seen & getattr(select, f"EPOLL{name}")]
        return " ".join(names) or "silent"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._epoll.close()


@dataclass(frozen=True, slots=True)
class TcpInfo:
    """The fields of ``struct tcp_info`` that tell something of a peer."""

    state: str
    num_retransmits: int
    num_probes: int
    rto_us: int
    num_unacked: int
    last_ack_recv_ms: int


def tcp_info(sock: socket.socket) -> TcpInfo:
    """``TCP_INFO`` of a socket."""
    fields = _TCP_INFO.unpack(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size))
    state = _STATES.get(fields[0], f"state {fields[0]}")
    # Eight bytes come first; then words: tcpi_rto, as the fifth tcpi_unacked, as the
    # thirteenth tcpi_last_ack_recv.
    return TcpInfo(state, fields[2], fields[3], fields[8], fields[8 + 4], fields[8 + 12])


def error_name(error: OSError) -> str:
    """Such as "ECONNRESET"."""
    assert error.errno is not None
    return errno.errorcode[error.errno]


def peek(sock: socket.socket) -> str:
    """What ``recv(MSG_PEEK)`` says of a socket, without waiting."""
    return _receive(sock, socket.MSG_PEEK)


def error_of_recv(sock: socket.socket) -> str:
    """What the owner's own ``recv`` says, without waiting."""
    return _receive(sock, 0)


def _receive(sock: socket.socket, flags: int) -> str:
    timeout = sock.gettimeout()
    sock.setblocking(False)
    try:
        received = sock.recv(1, flags)
    except OSError as error:
        return error_name(error)
    finally:
        sock.settimeout(timeout)
    return "data" if received else "end of stream"


def take_error(sock: socket.socket) -> str:
    """``SO_ERROR``, which takes what it tells."""
    code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    return errno.errorcode[code] if code else "no error"


def vanish(client: socket.socket) -> None:
    """Have ``client`` answer nothing any more, as if its cable were cut.

    A socket filter that keeps no byte drops every segment before TCP sees it; needs no
    privilege.
    """
    code = ctypes.create_string_buffer(struct.pack("=HBBI", _BPF_RETURN, 0, 0, 0))
    program = struct.pack("@HP", 1, ctypes.addressof(code))
    client.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
