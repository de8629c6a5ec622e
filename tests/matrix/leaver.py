"""The clients of the matrix, in a process of their own, and the handle on it.

They need one: a client must be able to leave while the server's interpreter stands
still, and to be killed. The control connection carries one JSON order a message,
the first with the client's end of a connection; each order is answered.
"""

import json
import os
import select
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from disconnect_watch.testing.ways import Way, notify, part
from tests.support.net import reset
from tests.support.tls import client_context, server_context

__all__ = ["GET", "LARGE_BODY", "NUM_SEGMENTS", "SEGMENT", "Leaver", "TlsEnd"]

GET = b"GET /next HTTP/1.1\r\nHost: localhost\r\n\r\n"
LARGE_BODY = bytes(300_000)
NUM_SEGMENTS = 20
SEGMENT = bytes(100)

_ORDER_BYTES = 256
_PATIENCE = 20.0  # seconds; only a hanging test needs them
_SEGMENTS_IN = slice(140, 144)  # tcpi_segs_in


class Leaver:
    """The server's handle on the process: orders that its one client leave in some way.

    Threads: one.
    """

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __spec__.name, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
            )
        self._control.settimeout(_PATIENCE)
        self._num_orders = 0

    def take(self, client: socket.socket | int, tls: "TlsEnd | None" = None) -> None:
        """Order: this is the client's end now. It is closed here."""
        fd = client if isinstance(client, int) else client.detach()
        order = self._order("take", is_pipe=isinstance(client, int), tls=tls)
        socket.send_fds(self._control, [order], [fd])
        os.close(fd)

    def order(self, act: str) -> None:
        """Let the client do one of the ``ACTS``, and do not wait for it."""
        self._control.sendall(self._order(act))

    def _order(self, act: str, **details: Any) -> bytes:
        self._num_orders += 1
        return json.dumps({"number": self._num_orders, "do": act, **details}).encode()

    def has_answered(self) -> bool:
        """Whether the answer to the last order is there."""
        return bool(select.select([self._control], [], [], 0)[0])

    def answer(self) -> None:
        """Wait for the end of the last order.

        Answers to earlier ones, which a test that failed did not wait for, are forgotten.
        """
        number = 0
        while number != self._num_orders:
            number, error = json.loads(self._control.recv(_ORDER_BYTES))
        assert error is None, f"the client failed: {error}"

    def do(self, act: str) -> None:
        """Order, and wait for the end of it."""
        self.order(act)
        self.answer()

    def fileno(self) -> int:
        """Readable when the answer is there."""
        return self._control.fileno()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._control.close()
        self._process.wait(_PATIENCE)


#: Which end of TLS the client is, and the version: {"is_server": bool, "version": "tls13"}.
TlsEnd = dict[str, Any]


class Client:
    """The client's end of one connection, in the leaver's process."""

    def __init__(self, fd: int, *, is_pipe: bool, tls: TlsEnd | None) -> None:
        self.pipe = fd if is_pipe else None
        self.sock = socket.socket() if is_pipe else socket.socket(fileno=fd)
        self.children: list[int] = []
        if tls is not None:
            self.sock = _wrapped(self.sock, tls)
        self.sock.settimeout(_PATIENCE)

    def close(self) -> None:
        if self.pipe is not None:
            os.close(self.pipe)
            self.pipe = None
        self.sock.close()

    def reset(self) -> None:
        reset(self.sock)

    def await_bytes(self) -> None:
        fd = self.sock.fileno() if self.pipe is None else self.pipe
        assert select.select([fd], [], [], _PATIENCE)[0], "the server sent nothing"

    def fill_window(self) -> None:
        """Send until nothing goes any more, or so much that somebody must be reading."""
        self.sock.setblocking(False)
        left = 1 << 23
        while left > 0:
            try:
                left -= self.sock.send(bytes(1 << 16))
            except (BlockingIOError, ssl.SSLWantWriteError):
                if not select.select([], [self.sock], [], 0.1)[1]:
                    return

    def share_with_child(self) -> int:
        """Fork a process that holds the connection open; returns its id."""
        child = os.fork()
        if child == 0:
            signal.pause()
            os._exit(0)
        self.children.append(child)
        return child

    def end_children(self) -> None:
        for child in self.children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        self.children.clear()


def _wrapped(sock: socket.socket, tls: TlsEnd) -> ssl.SSLSocket:
    version = tls["version"]
    if tls["is_server"]:
        return server_context(version).wrap_socket(sock, server_side=True)
    client = client_context(version).wrap_socket(sock, server_hostname="localhost")
    # The session tickets come before it; left unread they would make a reset of a close.
    assert client.recv(1) == b"."
    return client


def _send_then(data: bytes, leave: Callable[[Client], None]) -> Callable[[Client], None]:
    def act(client: Client) -> None:
        client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * len(data))
        client.sock.sendall(data)
        leave(client)

    return act


def _half_close_then(leave: Callable[[Client], None]) -> Callable[[Client], None]:
    def act(client: Client) -> None:
        socket.socket.shutdown(client.sock, socket.SHUT_WR)
        leave(client)

    return act


def _fill_then(leave: Callable[[Client], None]) -> Callable[[Client], None]:
    def act(client: Client) -> None:
        client.fill_window()
        leave(client)

    return act


def _await_bytes_then(leave: Callable[[Client], None]) -> Callable[[Client], None]:
    def act(client: Client) -> None:
        client.await_bytes()
        leave(client)

    return act


def _notify(client: Client) -> None:
    notify(client.sock)


def _notify_and_close(client: Client) -> None:
    part(client.sock, Way.CLOSE_NOTIFY)


def _die(client: Client) -> None:
    client.share_with_child()
    client.close()
    client.end_children()


def _leave_it_to_child(client: Client) -> None:
    client.share_with_child()
    client.close()


def _send_urgent(client: Client) -> None:
    socket.socket.send(client.sock, b"!", socket.MSG_OOB)


def _send_segments(client: Client) -> None:
    if client.sock.family != socket.AF_UNIX:
        client.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for _ in range(NUM_SEGMENTS):
        client.sock.sendall(SEGMENT)


def _answer_probe(client: Client) -> None:
    """Wait for a keep-alive probe, which the kernel answers."""
    before = _num_segments_in(client.sock)
    for _ in range(round(_PATIENCE / 0.01)):
        if _num_segments_in(client.sock) > before:
            return
        select.select([], [], [], 0.01)
    raise AssertionError("no probe came")


def _num_segments_in(sock: socket.socket) -> int:
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SEGMENTS_IN.stop)
    return int.from_bytes(info[_SEGMENTS_IN], sys.byteorder)


def _stay(client: Client) -> None:
    """Do nothing."""


#: What a client can be ordered to do.
ACTS: dict[str, Callable[[Client], None]] = {
    "fin": Client.close,
    "rst": Client.reset,
    "fin_1": _send_then(b"x", Client.close),
    "fin_get": _send_then(GET, Client.close),
    "rst_get": _send_then(GET, Client.reset),
    "fin_40": _send_then(40 * GET, Client.close),
    "rst_40": _send_then(40 * GET, Client.reset),
    "fin_300k": _send_then(LARGE_BODY, Client.close),
    "rst_300k": _send_then(LARGE_BODY, Client.reset),
    "fin_window": _fill_then(Client.close),
    "rst_window": _fill_then(Client.reset),
    "half_close": _half_close_then(_stay),
    "half_close_fin": _half_close_then(Client.close),
    "half_close_rst": _half_close_then(Client.reset),
    "close_notify": _notify,
    "close_notify_fin": _notify_and_close,
    "fin_unread": _await_bytes_then(Client.close),
    "killed": _die,
    "leave_it_to_child": _leave_it_to_child,
    "end_child": Client.end_children,
    "urgent": _send_urgent,
    "segments": _send_segments,
    "answer_probe": _answer_probe,
    "stay": _stay,
}


def main(control: socket.socket) -> None:
    """Obey until the other end closes."""
    client: Client | None = None
    while True:
        try:
            data, fds, _, _ = socket.recv_fds(control, _ORDER_BYTES, 1)
        except ConnectionResetError:  # it closed with answers unread
            break
        if not data:
            break
        order = json.loads(data)
        try:
            if order["do"] == "take":
                client = Client(fds[0], is_pipe=order["is_pipe"], tls=order["tls"])
            elif order["do"] == "drop":
                _drop(client)
                client = None
            else:
                assert client is not None, "no connection was taken"
                ACTS[order["do"]](client)
            error = None
        except Exception as caught:
            error = repr(caught)[:100]
        control.sendall(json.dumps([order["number"], error]).encode())
    _drop(client)


def _drop(client: Client | None) -> None:
    if client is not None:
        client.end_children()
        client.close()


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as control:
        main(control)
