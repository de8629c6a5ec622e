"""What a look takes from the socket's owner, and whose fd it is afterwards."""

import os
import socket
import subprocess
import sys

from tests.kernel.fact import Seen, fact
from tests.kernel.look import EventSet, error_of_recv, peek, take_error, tcp_info
from tests.support.net import connected, reset, unread_bytes, wait_until

_UNREGISTER = "import select, sys; select.epoll.fromfd({}).unregister({})"


@fact(
    {
        "a peek after a reset": "ECONNRESET",
        "the owner's recv then": "end of stream",
        "SO_ERROR after a reset": "ECONNRESET",
        "the owner's recv then, again": "end of stream",
    }
)
def a_peek_and_so_error_take_the_error() -> Seen:
    """A peek and SO_ERROR take a pending error: the owner, who would have got ECONNRESET,
    reads an orderly end."""
    seen = {}
    with connected() as pair:
        reset(pair.client)
        wait_until(lambda: tcp_info(pair.server).state == "CLOSE")
        seen["a peek after a reset"] = peek(pair.server)
        seen["the owner's recv then"] = error_of_recv(pair.server)
    with connected() as pair:
        reset(pair.client)
        wait_until(lambda: tcp_info(pair.server).state == "CLOSE")
        seen["SO_ERROR after a reset"] = take_error(pair.server)
        seen["the owner's recv then, again"] = error_of_recv(pair.server)
    return seen


@fact(
    {
        "state after a FIN": "CLOSE_WAIT",
        "SIOCINQ then": "3 bytes unread",
        "the owner reads": "data",
        "state after a reset": "CLOSE",
        "SIOCINQ and poll then": "0 bytes unread, RDHUP HUP ERR",
        "the owner's recv then": "ECONNRESET",
    }
)
def tcp_info_and_siocinq_take_nothing() -> Seen:
    """TCP_INFO (8 CLOSE_WAIT: a FIN came; 7 CLOSE: it is over), SIOCINQ and a poll leave
    the owner its bytes and its error."""
    seen = {}
    with connected() as pair:
        pair.client.send(b"abc")
        pair.client.close()
        wait_until(lambda: tcp_info(pair.server).state != "ESTABLISHED")
        seen["state after a FIN"] = tcp_info(pair.server).state
        seen["SIOCINQ then"] = f"{unread_bytes(pair.server)} bytes unread"
        seen["the owner reads"] = error_of_recv(pair.server)
    with connected() as pair, EventSet(pair.server) as events:
        reset(pair.client)
        polled = events.next()
        seen["state after a reset"] = tcp_info(pair.server).state
        seen["SIOCINQ and poll then"] = f"{unread_bytes(pair.server)} bytes unread, {polled}"
        seen["the owner's recv then"] = error_of_recv(pair.server)
    return seen


@fact({"the peer left and the owner closed": "silent"})
def the_owners_close_takes_the_event_along() -> Seen:
    """When the owner closes the fd, the registration goes, and with it an event that
    nobody has fetched yet: an owner that reads can be faster than any watcher."""
    with connected() as pair, EventSet(pair.server) as events:
        pair.client.close()
        wait_until(lambda: tcp_info(pair.server).state == "CLOSE_WAIT")
        pair.server.close()
        return {"the peer left and the owner closed": events.now()}


@fact(
    {
        "the owner closed, a dup is open: our peer sees": "EAGAIN",
        "the peer leaves": "RDHUP",
        "removing by the old number": "EBADF",
        "the dup is closed: our peer sees": "end of stream",
    }
)
def a_dup_outlives_the_owners_close() -> Seen:
    """While a dup is open the owner's close sends no FIN, and the registration made by the
    first number goes on firing and can't be removed by it."""
    with connected() as pair, EventSet(pair.server) as events:
        seen = {}
        number = pair.server.fileno()
        duplicate = pair.server.dup()
        with duplicate:
            pair.server.close()
            seen["the owner closed, a dup is open: our peer sees"] = peek(pair.client)
            pair.client.shutdown(socket.SHUT_WR)
            seen["the peer leaves"] = events.next()
            seen["removing by the old number"] = events.remove(number)
        wait_until(lambda: peek(pair.client) != "EAGAIN")
        seen["the dup is closed: our peer sees"] = peek(pair.client)
        return seen


@fact(
    {
        "the number of the closed fd": "is the next one's",
        "SO_COOKIE": "differs",
        "adding it while a dup holds the old one": "accepted",
        "the old peer leaves": "RDHUP",
        "removing the new one": "removed",
        "the old peer resets": "RDHUP HUP ERR",
    }
)
def numbers_are_reused() -> Seen:
    """The next socket gets the closed one's number. An old registration that a dup keeps
    alive lies beside the new one under the same number: only the key in the event and
    SO_COOKIE, a socket's own 64-bit number, tell them apart."""
    with connected() as old, connected() as new, EventSet(old.server) as events:
        seen = {}
        number, old_cookie = old.server.fileno(), _cookie(old.server)
        with old.server.dup():
            old.server.close()
            reused = os.dup2(new.server.fileno(), number)
            try:
                seen["the number of the closed fd"] = (
                    "is the next one's" if reused == number else "is new"
                )
                seen["SO_COOKIE"] = (
                    "differs" if _cookie(new.server) != old_cookie else "is the same"
                )
                events.add(number)
                seen["adding it while a dup holds the old one"] = "accepted"
                old.client.shutdown(socket.SHUT_WR)
                seen["the old peer leaves"] = events.next()
                seen["removing the new one"] = events.remove(number)
                reset(old.client)
                seen["the old peer resets"] = events.next()
            finally:
                os.close(number)
        return seen


@fact({"a child removes it from the set: the peer leaves": "silent"})
def a_child_shares_the_set() -> Seen:
    """An epoll set that a child inherited is the parent's set: what the child removes is
    gone for both."""
    with connected() as pair, EventSet(pair.server) as events:
        fds = (events.fileno(), pair.server.fileno())
        subprocess.run(
            [sys.executable, "-S", "-c", _UNREGISTER.format(*fds)],
            pass_fds=fds,
            check=True,
            timeout=40,
        )
        pair.client.close()
        wait_until(lambda: tcp_info(pair.server).state == "CLOSE_WAIT")
        return {"a child removes it from the set: the peer leaves": events.now()}


@fact({"the parent closed its end": "silent", "the child ended": "RDHUP"})
def a_child_keeps_the_connection_open() -> Seen:
    """A client that forked has left only when the last process with its socket has: the
    FIN is sent at the last close."""
    with connected() as pair, EventSet(pair.server) as events:
        child = pair.hold_in_child()
        seen = {"the parent closed its end": events.now()}
        child.kill()
        seen["the child ended"] = events.next()
        return seen


def _cookie(sock: socket.socket) -> bytes:
    so_cookie = 57
    return sock.getsockopt(socket.SOL_SOCKET, so_cookie, 8)
