"""Many clients in a process of their own: they connect, send when told to, and one leaves."""

import contextlib
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator

__all__ = ["LEAVE", "SEND", "crowd", "raise_fd_limit"]

SEND = b"s"
LEAVE = b"l"
_DONE = b"."
_REQUEST = bytes(100)
_PATIENCE = 50.0  # seconds
_SPARE_FDS = 500


@contextlib.contextmanager
def raise_fd_limit(num_fds: int) -> Iterator[bool]:
    """Allow so many sockets more; whether that is possible."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = num_fds + _SPARE_FDS
    if hard != resource.RLIM_INFINITY and hard < wanted:
        yield False
        return
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    try:
        yield True
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Crowd:
    """The handle on the process."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control

    def order(self, act: bytes) -> None:
        """Let all ``SEND``, or the last ``LEAVE``; returns when that is done."""
        self._control.sendall(act)
        self.answer()

    def answer(self) -> None:
        """Wait until all are connected, or have done what was ordered."""
        assert self._control.recv(1) == _DONE


@contextlib.contextmanager
def crowd(listening: socket.socket, num_clients: int) -> Iterator[Crowd]:
    """Start the process; it connects at once."""
    ours, theirs = socket.socketpair()
    ours.settimeout(_PATIENCE)
    port = listening.getsockname()[1]
    command = [sys.executable, "-m", __spec__.name, str(theirs.fileno()), str(port)]
    with theirs:
        process = subprocess.Popen([*command, str(num_clients)], pass_fds=[theirs.fileno()])
    try:
        with ours:
            yield Crowd(ours)
    finally:
        process.wait(_PATIENCE)


def main(control: socket.socket, port: int, num_clients: int) -> None:
    """Be the crowd until the other end closes."""
    with raise_fd_limit(num_clients), contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), _PATIENCE))
            for _ in range(num_clients)
        ]
        control.sendall(_DONE)
        while act := control.recv(1):
            if act == LEAVE:
                clients.pop().close()
            else:
                for client in clients:
                    client.sendall(_REQUEST)
            control.sendall(_DONE)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as control:
        main(control, int(sys.argv[2]), int(sys.argv[3]))
