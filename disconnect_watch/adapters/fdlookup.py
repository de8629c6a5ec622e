"""The fd of a connection that is known by its addresses alone.

For servers whose sockets belong to native code: an application is told both addresses of
its connection and no more, and the fd with these ends is somewhere in this process.

The number is worth nothing by itself. Its owner closes it when he likes, and the next
connection gets it. What names a socket for good is its inode, so a number is handed out
together with it, and whoever registered the number looks once more: if it still leads to
that inode, then it is the right socket that is registered, whatever comes later.

Nothing is opened, duplicated or set: a duplicate would keep the connection open behind
its owner's back, and Python's own ``socket(fileno=...)`` may make an fd non-blocking.

Source: getpeername(2); proc(5), "/proc/pid/fd".
"""

import ctypes
import ipaddress
import os
import socket
import stat
import struct
import sys
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["Address", "FdLookup", "SocketFd", "address"]

_SIZE_OF_SOCKADDR = 128  # of sockaddr_storage
_MAX_LOST = 4096
_libc = ctypes.CDLL(None, use_errno=True)


class Address(NamedTuple):
    """One end of a TCP connection."""

    host: str
    port: int


class SocketFd(NamedTuple):
    """A number, and the socket that it led to when it was found."""

    fd: int
    inode: int

    def is_current(self) -> bool:
        """Whether the number leads to that socket still. One system call."""
        try:
            return os.fstat(self.fd).st_ino == self.inode
        except OSError:
            return False


def address(end: object) -> Address | None:
    """An end of a connection as ASGI's scope gives it: host and port.

    Granian's ports are strings; a listener for IPv6 that takes IPv4 too shows its peers'
    addresses mapped. None where it is none: a Unix socket, or what a proxy's header said,
    which names no port.
    """
    if not isinstance(end, tuple | list) or len(end) < 2:
        return None
    try:
        ip = ipaddress.ip_address(end[0])
        port = int(end[1])
    except (TypeError, ValueError):
        return None
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return Address(str(mapped or ip), port) if port else None


class FdLookup:
    """The TCP connections of this process, by their two ends.

    Looks through all fds where it does not know the connection yet, which takes about
    2 us for each; a connection that it knows costs one ``fstat``. Finds nothing on
    systems other than Linux.

    Threads: any.
    """

    def __init__(self) -> None:
        #: As of the last look, so it holds no more entries than there are sockets.
        self._found: dict[tuple[Address, Address], SocketFd] = {}
        #: Those that an earlier look found and the last one did not, the newest last.
        self._lost: dict[tuple[Address, Address], None] = {}

    def find(self, local: Address, peer: Address) -> SocketFd | None:
        """The fd of the connection between these ends, if it is this process's."""
        known = self._found.get((local, peer))
        if known is None or not known.is_current():
            self._look()
            known = self._found.get((local, peer))
        return known

    def has_lost(self, local: Address, peer: Address) -> bool:
        """Whether ``find`` had seen that connection before it was closed."""
        return (local, peer) in self._lost

    def _look(self) -> None:
        known, found = self._found, dict(_connections())
        # Replaced, not changed: other threads may be reading it.
        lost = [end for end in (*self._lost, *known) if end not in found]
        self._lost = dict.fromkeys(lost[-_MAX_LOST:])
        self._found = found


def _connections() -> Iterator[tuple[tuple[Address, Address], SocketFd]]:
    if sys.platform != "linux":
        return
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        try:
            status = os.fstat(fd)
        except OSError:
            continue  # closed since, as the listing's own is
        if stat.S_ISSOCK(status.st_mode):
            peer = _end(_libc.getpeername, fd)
            local = peer and _end(_libc.getsockname, fd)
            if peer and local:
                yield (local, peer), SocketFd(fd, status.st_ino)


def _end(name_of: "ctypes._NamedFuncPointer", fd: int) -> Address | None:
    """What getsockname or getpeername says of a TCP socket; None for any other."""
    buffer = ctypes.create_string_buffer(_SIZE_OF_SOCKADDR)
    size = ctypes.c_uint32(_SIZE_OF_SOCKADDR)
    if name_of(fd, buffer, ctypes.byref(size)) != 0:
        return None
    (family,) = struct.unpack_from("=H", buffer)
    (port,) = struct.unpack_from("!H", buffer, 2)
    if family == socket.AF_INET:
        return address((socket.inet_ntop(family, buffer.raw[4:8]), port))
    if family == socket.AF_INET6:
        return address((socket.inet_ntop(family, buffer.raw[8:24]), port))
    return None
