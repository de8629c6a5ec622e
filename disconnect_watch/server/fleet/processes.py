"""How a process of a fleet begins: by two sockets, and what comes by the first."""

import os
import pickle
import socket
import sys
from typing import NoReturn

import msgspec

from disconnect_watch.server.fleet.setup import Start
from disconnect_watch.server.logs import configure_logging
from disconnect_watch.token import adopt_flag_table

__all__ = ["begin", "refuse"]


def begin() -> tuple[Start, socket.socket, socket.socket]:
    """Take what the supervisor gives: what to do, its channel, and where links come from.

    The flag table of the supervisor is this process's from now on.
    """
    control, links = (socket.socket(fileno=int(fd)) for fd in sys.argv[1:3])
    size = int.from_bytes(_read(control, 4), "little")
    # From the parent, by a socket that nobody else has.
    start: Start = pickle.loads(_read(control, size))
    adopt_flag_table(start.fds["table"])
    os.close(start.fds["table"])
    configure_logging(start.setup.log_level)
    return start, control, links


def refuse(control: socket.socket, reason: str) -> NoReturn:
    """End before anything was served, and have the supervisor say why."""
    frame = msgspec.msgpack.encode((1, "refused", [reason]))
    control.sendall(len(frame).to_bytes(4, "little") + frame)
    control.recv(1)  # that it was heard
    raise SystemExit(2)


def _read(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = sock.recv(size - len(data))
        if not piece:
            raise SystemExit(1)  # the supervisor is gone
        data += piece
    return data
