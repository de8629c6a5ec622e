"""The client that leaves on command, in a process of its own (c/leaver.c)."""

import select
import socket
import struct

from bench._build import build_program
from bench._child import Child

__all__ = ["Leaver"]

GIVE_UP = 10.0

_ORDER = struct.Struct("=IIII")
_ANSWER = struct.Struct("=Q")


class Leaver(Child):
    """Connects, sends requests and closes on command; its connections are a stack.

    Its timestamps are of CLOCK_MONOTONIC, which all processes of a machine share.
    """

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(GIVE_UP)
        super().__init__([str(build_program("leaver"))], bufsize=0)

    def connect(self) -> socket.socket:
        """Our end of a new connection."""
        self._order("c", number=self._listener.getsockname()[1])
        accepted, _ = self._listener.accept()
        self.closed_ns()
        return accepted

    def connect_to(self, port: int) -> None:
        """Connect to somebody else's listener."""
        self._order("c", number=port)
        self.closed_ns()

    def request(self, num_connections: int = 1) -> None:
        """Send a request, which has no body, on each of the newest connections."""
        self.order_request(num_connections)
        self.closed_ns()

    def order_request(self, num_connections: int) -> None:
        """``request``, whose end is an answer."""
        self._order("r", number=num_connections)

    def order_close(self, *, delay: float, settle: float) -> None:
        """Have it close the newest in `delay` seconds, and answer `settle` seconds after that."""
        self._order("x", delay_us=round(delay * 1e6), settle_us=round(settle * 1e6))

    def fileno(self) -> int:
        """Readable when an answer waits."""
        return self.answers.fileno()

    def closed_ns(self) -> int:
        """Wait for the answer: the time right before the close, 0 after any other order."""
        # uvloop has made the pipe non-blocking if it ever watched it.
        select.select([self.fileno()], [], [], GIVE_UP)
        answer = self.answers.read(_ANSWER.size)
        if answer is None:
            raise TimeoutError(f"the leaving client did not answer for {GIVE_UP} seconds")
        if len(answer) != _ANSWER.size:
            raise RuntimeError(f"the leaving client ended with status {self.process.wait()}")
        closed_ns: int = _ANSWER.unpack(answer)[0]
        return closed_ns

    def _order(self, kind: str, *, number: int = 0, delay_us: int = 0, settle_us: int = 0) -> None:
        self.orders.write(_ORDER.pack(ord(kind), number, delay_us, settle_us))

    def close(self) -> None:
        self._listener.close()
        super().close()
