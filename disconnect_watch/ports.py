"""The ports of a server. Loads nothing else, so that they can be taken before all is loaded."""

import contextlib
import os
import socket
import stat
from collections.abc import Iterator

__all__ = ["bind", "bind_unix", "listen"]


def bind(address: str, port: int) -> socket.socket:
    """Take a TCP port, and listen on it only later: nobody connects before all is ready.

    Args:
        port: 0 takes a free one.

    Raises:
        OSError: says which address, and why not.
    """
    try:
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, name = found[0]
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(name)
        except OSError:
            sock.close()
            raise
    except OSError as error:
        raise _cannot_listen(address, port, error) from error
    return sock


@contextlib.contextmanager
def bind_unix(path: str) -> Iterator[socket.socket]:
    """Take a path for a Unix socket that only this user, and root, can connect to.

    What a server that was killed has left there is taken over. The path goes at the end.

    Raises:
        OSError: says which path, and why not.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        try:
            _remove_dead(path)
            # From the first moment on, which chmod after bind would not be.
            before = os.umask(0o177)
            try:
                sock.bind(path)
            finally:
                os.umask(before)
        except OSError as error:
            reason = error.strerror or str(error)
            raise OSError(error.errno, f"cannot listen on {path}: {reason}") from error
        try:
            yield sock
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


def _remove_dead(path: str) -> None:
    """Remove a socket that nobody listens on any more; leave all else alone."""
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            return
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)


def listen(sock: socket.socket) -> None:
    """Let clients in. Two may have taken the same port; the second is told so here.

    Raises:
        OSError: says which address, and why not.
    """
    try:
        sock.listen()
    except OSError as error:
        address, port = sock.getsockname()[:2]
        raise _cannot_listen(address, port, error) from error


def _cannot_listen(address: str, port: int, error: OSError) -> OSError:
    return OSError(error.errno, f"cannot listen on {address} port {port}: {error.strerror}")
