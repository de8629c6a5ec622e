"""The ways in which a client leaves, and the last thing that it does in each of them.

``part`` never waits for the server, so that it serves blocking sockets and loops alike. What
a client sends before it parts, ``parting_bytes`` says, and the caller sends in its own manner.
"""

import contextlib
import select
import socket
import ssl
import struct
from enum import StrEnum

from disconnect_watch.testing.child import hand_to_child
from disconnect_watch.testing.vanish import vanish

__all__ = ["Way", "default_ways", "notify", "part", "parting_bytes", "why_not"]

_PATIENCE = 10.0

_NUM_BODY_BYTES = 100_000
_BODY = (
    b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % _NUM_BODY_BYTES
) + bytes(_NUM_BODY_BYTES)


class Way(StrEnum):
    """How a client leaves. In this order they are tried."""

    #: ``close()``; over TLS without a close_notify, as by a client that crashed.
    FIN = "fin"
    #: Closed so that a reset goes out (``SO_LINGER`` 0).
    RST = "rst"
    #: ``shutdown(SHUT_WR)``, and the client goes on reading.
    HALF_CLOSE = "half_close"
    #: ``shutdown(SHUT_WR)``, then ``close()``.
    HALF_CLOSE_FIN = "half_close_fin"
    #: Its process is killed.
    KILLED = "killed"
    #: The TLS alert, then ``close()``, as curl does.
    CLOSE_NOTIFY = "close_notify"
    #: Neither hears nor answers any more: its host lost the network.
    VANISH = "vanish"
    #: ``close()`` behind a second request whose body nobody reads.
    BEHIND_BODY = "behind_body"
    #: ``close()`` behind its request, sent once more. The last: a server that starts the
    #: second one, and cancels it, would be credited with it for the way that comes next.
    BEHIND_REQUEST = "behind_request"

    @property
    def in_words(self) -> str:
        """For messages."""
        return _IN_WORDS[self]


_IN_WORDS = {
    Way.FIN: "close, a FIN",
    Way.RST: "reset",
    Way.HALF_CLOSE: "half-close, reading on",
    Way.HALF_CLOSE_FIN: "half-close, then close",
    Way.KILLED: "client's process killed",
    Way.CLOSE_NOTIFY: "TLS close_notify, then FIN",
    Way.VANISH: "vanished without a word",
    Way.BEHIND_BODY: "FIN behind a second request's unread body",
    Way.BEHIND_REQUEST: "FIN behind a pipelined request",
}


def why_not(way: Way, *, family: int, is_tls: bool) -> str | None:
    """Why a client over such a connection cannot leave so; None where it can."""
    if way is Way.CLOSE_NOTIFY and not is_tls:
        return "only a TLS client sends a close_notify"
    if way is Way.VANISH and family == socket.AF_UNIX:
        return "the peer on a unix socket cannot vanish"
    return None


def default_ways(*, family: int, is_tls: bool) -> tuple[Way, ...]:
    """All ways that every server can be asked to notice, in the order of ``Way``.

    Not VANISH, which needs ``vanish_after`` and its seconds; nor a reset on a unix socket, for
    which the client needs an answer that it has not read.
    """
    return tuple(
        way
        for way in Way
        if why_not(way, family=family, is_tls=is_tls) is None
        and way is not Way.VANISH
        and not (way is Way.RST and family == socket.AF_UNIX)
    )


def parting_bytes(way: Way, request: bytes) -> bytes:
    """What the client sends before it parts, given its request."""
    if way is Way.BEHIND_REQUEST:
        return request
    return _BODY if way is Way.BEHIND_BODY else b""


def part(sock: socket.socket, way: Way) -> None:
    """Do the last thing that the client does; its parting bytes are sent.

    The socket is closed afterwards, except by HALF_CLOSE and VANISH, which need it open.
    A close with bytes unread is a reset whatever the way.

    Raises:
        ValueError: it cannot leave so, see ``why_not``; nothing was done.
        AssertionError: RST on a unix socket where nothing is unread.
    """
    problem = why_not(way, family=sock.family, is_tls=isinstance(sock, ssl.SSLSocket))
    if problem is not None:
        raise ValueError(f"cannot leave by {way}: {problem}")
    match way:
        case Way.RST:
            _reset(sock)
        case Way.HALF_CLOSE:
            _shut_down(sock)
        case Way.HALF_CLOSE_FIN:
            _shut_down(sock)
            sock.close()
        case Way.KILLED:
            child = hand_to_child(sock)
            child.kill()
            child.wait()
        case Way.CLOSE_NOTIFY:
            if hasattr(socket, "TCP_CORK") and sock.family != socket.AF_UNIX:
                # In one segment with the FIN, or the server's answer to the alert could meet
                # an open socket.
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 1)
            notify(sock)
            sock.close()
        case Way.VANISH:
            vanish(sock)
        case _:
            sock.close()


def _reset(sock: socket.socket) -> None:
    if sock.family == socket.AF_UNIX:
        # There it takes a byte that the client has not read.
        is_unread = select.select([sock], [], [], _PATIENCE)[0]
        assert is_unread, "nothing unread, which a reset on a unix socket needs"
    else:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def _shut_down(sock: socket.socket) -> None:
    # The TCP connection's own: that of an SSLSocket would end TLS for reading too.
    socket.socket.shutdown(sock, socket.SHUT_WR)


def notify(sock: socket.socket) -> None:
    """Send the TLS alert alone, and leave the socket non-blocking: the other's is not awaited."""
    assert isinstance(sock, ssl.SSLSocket)
    sock.setblocking(False)
    with contextlib.suppress(ssl.SSLWantReadError):
        sock.unwrap()
