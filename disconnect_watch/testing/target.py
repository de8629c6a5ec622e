"""Where a server is: given as a URL, an address, a socket, or an object that has one."""

import socket
from asyncio.trsock import TransportSocket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

__all__ = ["HasSockets", "HasUrl", "Server", "Target", "target_of"]


class HasUrl(Protocol):
    """A server that says where it is."""

    @property
    def url(self) -> str: ...


class HasSockets(Protocol):
    """A server that shows its listening sockets, as ``asyncio.Server`` does."""

    @property
    def sockets(self) -> Sequence[socket.socket]: ...


@dataclass(frozen=True, slots=True)
class Target:
    """What a client connects to.

    Attributes:
        text: for messages.
        family: AF_INET, AF_INET6 or AF_UNIX.
        address: of that family.
        host: for TLS; empty for a unix socket.
    """

    text: str
    family: int
    address: str | tuple[object, ...]
    host: str = ""
    is_tls: bool = False


Server = str | tuple[str, int] | socket.socket | TransportSocket | HasUrl | HasSockets | Target


def target_of(server: Server) -> Target:
    """Understand where a server is.

    Args:
        server: ``"http://host:port"``, ``"https://host:port"``, ``"unix:/path"``, a pair of
            host and port, a listening socket, or an object with one of these as its ``url``,
            or with ``sockets``.

    Raises:
        ValueError: a URL of another form.
        TypeError: none of these.
        OSError: there is no such host.
    """
    if isinstance(server, Target):
        return server
    if isinstance(server, str):
        return _of_url(server)
    if isinstance(server, tuple):
        return _of_host(f"{server[0]}:{server[1]}", server[0], server[1])
    if isinstance(server, socket.socket | TransportSocket):  # asyncio.Server shows the latter
        return _of_socket(server)
    if isinstance(url := getattr(server, "url", None), str):
        return _of_url(url)
    if sockets := getattr(server, "sockets", None):
        return _of_socket(sockets[0])
    raise TypeError(
        f"cannot tell where {server!r} serves: give a URL, a pair of host and port, or a "
        "listening socket, or an object with a url or with sockets"
    )


def _of_url(url: str) -> Target:
    if url.startswith("unix:/"):
        return Target(url, socket.AF_UNIX, url.removeprefix("unix:"))
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"cannot go to {url!r}: give http://, https:// or unix:/path")
    if parts.path not in ("", "/") or parts.query:
        raise ValueError(f"cannot go to {url!r}: leave its path out, the request has one")
    is_tls = parts.scheme == "https"
    port = parts.port or (443 if is_tls else 80)
    return _of_host(url.rstrip("/"), parts.hostname, port, is_tls=is_tls)


def _of_host(text: str, host: str, port: int, *, is_tls: bool = False) -> Target:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, _, _, _, address = found[0]
    return Target(text, family, address, host, is_tls)


def _of_socket(sock: socket.socket | TransportSocket) -> Target:
    name = sock.getsockname()
    if sock.family == socket.AF_UNIX:
        return Target(f"unix:{name}", socket.AF_UNIX, name)
    return _of_host(f"{name[0]}:{name[1]}", name[0], name[1])
