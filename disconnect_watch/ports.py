"""The TCP ports of a server. Loads nothing else, so that they can be taken before all is loaded."""

import socket

__all__ = ["bind", "listen"]


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
