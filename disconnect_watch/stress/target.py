"""Where the clients go: ``host:port`` of a raw server, or the URL of an endpoint."""

import asyncio
import socket
from dataclasses import dataclass, replace
from urllib.parse import SplitResult, urlsplit

from disconnect_watch.errors import DisconnectWatchError

__all__ = ["Address", "Target", "TargetError", "parse_target"]


class TargetError(DisconnectWatchError, ValueError):
    """It names no server that this tool can talk to."""


@dataclass(frozen=True, slots=True)
class Target:
    """A server, and for HTTP what to ask of it.

    Attributes:
        path: None for a raw server; with the query, empty where the URL had none.
    """

    host: str
    port: int
    path: str | None = None
    is_tls: bool = False

    @property
    def authority(self) -> str:
        """Host and port as a URL has them."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        if self.path is None:
            return self.authority
        return f"{'https' if self.is_tls else 'http'}://{self.authority}{self.path}"

    def with_path(self, path: str) -> "Target":
        """Another page of the same server."""
        return replace(self, path=path)

    async def resolve(self) -> "Address":
        """Look its name up, once for all clients.

        Raises:
            OSError: there is no such host.
        """
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        family, _, _, _, address = found[0]
        return Address(family, address)


@dataclass(frozen=True, slots=True)
class Address:
    """What a socket connects to."""

    family: int
    sockaddr: tuple[object, ...]


def parse_target(text: str) -> Target:
    """Understand what the user typed.

    Args:
        text: ``host:port``, ``[v6 address]:port``, or ``http[s]://host[:port][/path]``.

    Raises:
        TargetError: neither of them.
    """
    if "://" not in text:
        parts = _split(text, f"//{text}")
        port = _port_of(text, parts)
        if not parts.hostname or port is None or parts.path or parts.query:
            raise TargetError(f"cannot go to {text!r}: give host:port, or an http:// URL")
        return Target(parts.hostname, port)
    parts = _split(text, text)
    if parts.scheme not in ("http", "https"):
        raise TargetError(f"cannot go to {text!r}: the scheme must be http or https")
    if not parts.hostname:
        raise TargetError(f"cannot go to {text!r}: give the whole URL of an endpoint")
    is_tls = parts.scheme == "https"
    query = f"?{parts.query}" if parts.query else ""
    port = _port_of(text, parts) or (443 if is_tls else 80)
    return Target(parts.hostname, port, parts.path + query, is_tls)


def _split(text: str, url: str) -> SplitResult:
    try:
        return urlsplit(url)
    except ValueError as error:
        raise TargetError(f"cannot go to {text!r}: {error}") from error


def _port_of(text: str, parts: SplitResult) -> int | None:
    try:
        return parts.port
    except ValueError as error:
        raise TargetError(f"cannot go to {text!r}: the port must be from 0 to 65535") from error
