"""What the running kernel does, tried on connections of our own."""

import contextlib
import platform
import resource
import select
import socket
import sys
import time
from collections.abc import Callable, Iterator
from statistics import median

from disconnect_watch.doctor.finding import Finding, Status
from disconnect_watch.errors import DisconnectWatchError
from disconnect_watch.token import CancelToken
from disconnect_watch.watcher import Watcher

__all__ = ["kernel_findings"]

_AREA = "kernel"
_PATIENCE = 2.0
_NUM_LEAVES = 5
#: Of Linux's struct tcp_info: a peer that closed.
_CLOSE_WAIT = 8
_UNBLIND_BYTES = 1 << 20
#: Seconds; the shortest silence that can be asked for, and the bound that is kept where the
#: kernel's questions need not back off.
_VANISH_AFTER = 2
_VANISH_BOUND = 10


def kernel_findings() -> list[Finding]:
    """Try each thing that a watch leans on, or that an opt-in needs."""
    found = [Finding(_AREA, "system", Status.OK, f"{platform.system()} {platform.release()}")]
    for name, look in _LOOKS.items():
        try:
            found.append(look(name))
        except (OSError, AttributeError, DisconnectWatchError) as error:
            found.append(
                Finding(_AREA, name, Status.PROBLEM, f"failed: {error!r}", _ADVICE.get(name, ""))
            )
    return found


@contextlib.contextmanager
def _connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A client's and a server's end over loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(_PATIENCE)
        with socket.create_connection(listening.getsockname()[:2], _PATIENCE) as client:
            server, _ = listening.accept()
            with server:
                yield client, server


def _watcher(name: str) -> Finding:
    with Watcher() as watcher:
        stats = watcher.stats()
    value = f"{stats.poller}, by a {stats.driver}"
    if stats.poller == "epoll":
        return Finding(_AREA, name, Status.OK, value)
    advice = "a leave behind unread bytes is not seen; Linux's epoll sees it"
    return Finding(_AREA, name, Status.NOTE, value, advice)


def _rdhup(name: str) -> Finding:
    with _connected() as (client, server), select.epoll() as epoll:
        epoll.register(server, select.EPOLLRDHUP | select.EPOLLET)
        client.sendall(b"unread")
        client.close()
        is_seen = bool(epoll.poll(_PATIENCE))
    return _as_hoped(name, is_seen, "tells of a FIN behind unread bytes")


def _leave(name: str) -> Finding:
    times = []
    with Watcher() as watcher:
        for _ in range(_NUM_LEAVES):
            with _connected() as (client, server), watcher.attach(server) as conn:
                token = CancelToken()
                conn.arm(token)
                began = time.perf_counter()
                client.close()
                if not token.wait(_PATIENCE):
                    return Finding(_AREA, name, Status.PROBLEM, "not seen")
                times.append(time.perf_counter() - began)
    value = f"{1e6 * median(times):.0f} µs from close() to the token"
    return Finding(_AREA, name, Status.OK, value)


def _tcp_info(name: str) -> Finding:
    with _connected() as (client, server):
        client.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + _PATIENCE
        while True:
            info = server.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 512)
            if info[0] == _CLOSE_WAIT or time.monotonic() > deadline:
                break
            time.sleep(0.001)
    return _as_hoped(name, info[0] == _CLOSE_WAIT, f"tells of a FIN, {len(info)} bytes")


def _unblind(name: str) -> Finding:
    with _connected() as (_, server):
        before = server.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, _UNBLIND_BYTES)
        after = server.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
    if after >= _UNBLIND_BYTES:
        return Finding(_AREA, name, Status.OK, f"grows the receive buffer: {before} to {after}")
    advice = "unblind reaches no further than the receive buffer; raise net.ipv4.tcp_rmem"
    return Finding(_AREA, name, Status.NOTE, f"receive buffer stays at {after} bytes", advice)


def _vanish(name: str) -> Finding:
    with (
        Watcher() as watcher,
        _connected() as (_, server),
        watcher.attach(server, vanish_after=_VANISH_AFTER) as conn,
    ):
        bound = conn.info().vanish_bound
    value = f"vanish_after={_VANISH_AFTER} is kept within {bound:g} s"
    if bound is not None and bound < _VANISH_BOUND:
        return Finding(_AREA, name, Status.OK, value)
    advice = "Linux 6.15 keeps it within an eighth more; before, its questions back off"
    return Finding(_AREA, name, Status.NOTE, value, advice)


def _files(name: str) -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    value = f"{soft} of at most {hard}"
    if soft >= min(hard, _MANY_FILES):
        return Finding(_AREA, name, Status.OK, value)
    advice = f"each connection needs one: ulimit -n {min(hard, _MANY_FILES)}"
    return Finding(_AREA, name, Status.NOTE, value, advice)


def _as_hoped(name: str, is_so: bool, value: str) -> Finding:
    if is_so:
        return Finding(_AREA, name, Status.OK, value)
    return Finding(_AREA, name, Status.PROBLEM, f"no longer {value}", _ADVICE.get(name, ""))


_MANY_FILES = 4096

_LOOKS: dict[str, Callable[[str], Finding]] = {
    "watcher": _watcher,
    "a client's leave": _leave,
    "TCP_INFO": _tcp_info,
    "SO_RCVLOWAT": _unblind,
    "keepalive": _vanish,
    "open files": _files,
}
if sys.platform == "linux":
    _LOOKS = {"EPOLLRDHUP": _rdhup, **_LOOKS}

_ADVICE = {
    "EPOLLRDHUP": "Linux 2.6.17 and newer have it; sandboxes such as gVisor may not",
    "TCP_INFO": "a seccomp filter or a sandbox may refuse it; run outside of it",
    "SO_RCVLOWAT": "do without unblind",
    "keepalive": "do without vanish_after",
}
