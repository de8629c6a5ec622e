"""Two network namespaces with a cable between them that can be cut. Needs root and ``ip``."""

import contextlib
import ctypes
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import pytest

from tests.support.net import Pair

T = TypeVar("T")

_ADDRESS = {"server": "10.77.0.1", "client": "10.77.0.2"}


@dataclass(frozen=True, slots=True)
class Cable:
    """A link between two hosts that are namespaces of this machine.

    Attributes:
        names: of the namespaces, by "server" and "client".
    """

    names: dict[str, str]

    def listener(self) -> socket.socket:
        """A listening socket of the server's host."""
        listening = _inside(self.names["server"], _new_socket)
        listening.bind((_ADDRESS["server"], 0))
        listening.listen(1)
        return listening

    def dial(self, listening: socket.socket) -> socket.socket:
        """A blocking client on the client's host."""
        client = _inside(self.names["client"], _new_socket)
        client.settimeout(40)
        client.connect(listening.getsockname())
        return client

    @contextlib.contextmanager
    def connected(self) -> Iterator[Pair]:
        """A TCP connection over the cable, of blocking sockets."""
        with self.listener() as listening:
            client = self.dial(listening)
            server, _ = listening.accept()
        pair = Pair("tcp", server, client)
        try:
            yield pair
        finally:
            pair.close()

    def cut(self) -> None:
        """Nothing passes any more, in either direction; neither host is told by the other."""
        _ip("-n", self.names["client"], "link", "set", "cable", "down")


@contextlib.contextmanager
def cable() -> Iterator[Cable]:
    """Two hosts and their cable; skips the test where this user may not make them."""
    if shutil.which("ip") is None:
        pytest.skip("two network namespaces: no ip command")
    names = {side: f"dw-{os.getpid()}-{side}" for side in _ADDRESS}
    with contextlib.ExitStack() as stack:
        try:
            for name in names.values():
                _ip("netns", "add", name)
                stack.callback(_ip, "netns", "del", name)
            # The queue of a cable's own end holds what the other end does not take.
            _ip(
                *("-n", names["server"], "link", "add", "cable", "type", "veth"),
                *("peer", "name", "cable", "netns", names["client"]),
            )
            for side, name in names.items():
                _ip("-n", name, "address", "add", f"{_ADDRESS[side]}/24", "dev", "cable")
                _ip("-n", name, "link", "set", "cable", "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"two network namespaces: {error.stderr.strip()}")
        yield Cable(names)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def _new_socket() -> socket.socket:
    return socket.socket(socket.AF_INET)


def _inside(name: str, make: Callable[[], T]) -> T:
    """Call ``make`` on a thread that is in the namespace; what it opens stays there."""
    made: list[T] = []

    def run() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/run/netns/{name}", "rb") as namespace:
            if libc.setns(namespace.fileno(), 0):
                return
        made.append(make())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert made, f"cannot enter namespace {name}"
    return made[0]
