"""The worker's way to its server: the socket, the arena, and the flags."""

import ctypes
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from disconnect_watch import _core
from disconnect_watch.backends.python_model.arena import Arena
from disconnect_watch.backends.python_model.messages import (
    MAX_PACKET_BYTES,
    Kind,
    decode,
    encode,
)
from disconnect_watch.backends.python_model.worker.calls import Caller

__all__ = ["Link"]


class Link:
    """What a worker says to its server, and what it reads of it.

    Args:
        sock: SEQPACKET, to the server.
        flags: the server's flag table, mapped here.

    Attributes:
        is_server_gone: makes every request count as cancelled.

    Threads: ``receive`` on one, all else on any.
    """

    def __init__(
        self, sock: socket.socket, arena: Arena, flags: _core.Flags, caller: Caller
    ) -> None:
        self.arena = arena
        self.caller = caller
        self.is_server_gone = threading.Event()
        self._sock = sock
        self._flags = flags  # keeps the mapping
        words = ctypes.c_uint32 * flags.num_slots
        self._words = memoryview(words.from_address(flags.words_address)).cast("B").cast("I")
        self._buffer = bytearray(2 * MAX_PACKET_BYTES)

    def receive(self) -> list[Any] | None:
        """The next message; None when the server is gone."""
        try:
            size = self._sock.recv_into(self._buffer)
        except ConnectionResetError:
            return None
        if not size:
            return None
        return decode(self.arena, memoryview(self._buffer)[:size])

    def flag_reader(self, slot: int, generation: int) -> Callable[[], bool]:
        """A function that says whether the request with that flag was cancelled.

        One load: a word that is not the generation with reason 0 is a flag that was set,
        or one whose request has ended.
        """
        words, live, is_gone = self._words, generation << 8, self.is_server_gone.is_set

        def is_set() -> bool:
            return words[slot] != live or is_gone()

        return is_set

    def send(self, kind: Kind, *body: Any) -> None:
        """Send a message, and wait where the server does not read; to nobody if it is gone."""
        packet = encode(self.arena, kind, *body)
        with suppress(BrokenPipeError, ConnectionResetError):
            self._sock.sendall(packet)

    def send_done(self, started_ns: int, ended_ns: int, answers: list[Any]) -> None:
        """Tell that ``execute`` has returned."""
        self.send(Kind.DONE, started_ns, ended_ns, answers)

    def send_response(self, number: int, answer: Any, is_final: bool) -> None:
        """Send what a sender was given."""
        self.send(Kind.RESPONSE, number, answer, is_final)
