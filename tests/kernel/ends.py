"""How the end of a stream shows in an epoll set that asks for RDHUP alone."""

import os
import select
import socket

from tests.kernel.fact import Seen, fact
from tests.kernel.look import INTEREST, EventSet, error_name, peek, tcp_info
from tests.support.net import connected, reset, unread_bytes, wait_until


@fact(
    {
        "20 segments arrive": "silent",
        "the peer closes behind them": "RDHUP",
        "a peek then sees": "data",
        "the state is": "CLOSE_WAIT",
    }
)
def unread_bytes_hide_no_fin() -> Seen:
    """Without EPOLLIN, request bytes wake nobody, and a FIN behind unread bytes is
    reported at once; a peek goes on seeing the bytes before it."""
    with connected() as pair, EventSet(pair.server) as events:
        seen = {}
        pair.client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(20):
            pair.client.send(b"x")
        wait_until(lambda: unread_bytes(pair.server) == 20)
        seen["20 segments arrive"] = events.now()
        pair.client.close()
        seen["the peer closes behind them"] = events.next()
        seen["a peek then sees"] = peek(pair.server)
        seen["the state is"] = tcp_info(pair.server).state
        return seen


@fact(
    {
        "the peer resets behind an unread byte": "RDHUP HUP ERR",
        "a peek then sees": "data",
        "the state is": "CLOSE",
    }
)
def unread_bytes_hide_no_reset() -> Seen:
    """A reset behind unread bytes is RDHUP, HUP and ERR; a peek goes on seeing the bytes."""
    with connected() as pair, EventSet(pair.server) as events:
        pair.client.send(b"x")
        wait_until(lambda: unread_bytes(pair.server) == 1)
        reset(pair.client)
        return {
            "the peer resets behind an unread byte": events.next(),
            "a peek then sees": peek(pair.server),
            "the state is": tcp_info(pair.server).state,
        }


@fact(
    {
        "the peer half-closes": "RDHUP",
        "a second look": "silent",
        "the peer resets": "RDHUP HUP ERR",
        "a third look": "silent",
    }
)
def edges_tell_a_half_close_from_what_follows() -> Seen:
    """Edge-triggered, a FIN is one event and a reset after it another."""
    with connected() as pair, EventSet(pair.server) as events:
        seen = {}
        pair.client.shutdown(socket.SHUT_WR)
        seen["the peer half-closes"] = events.next()
        seen["a second look"] = events.now()
        reset(pair.client)
        seen["the peer resets"] = events.next()
        seen["a third look"] = events.now()
        return seen


@fact({"looks at one half-close that saw it": "100 of 100"})
def levels_spin_on_a_half_close() -> Seen:
    """Level-triggered, a half-close that is tolerated makes every wait return at once."""
    with connected() as pair, EventSet(pair.server, select.EPOLLRDHUP) as events:
        pair.client.shutdown(socket.SHUT_WR)
        events.next()
        num_seen = sum(events.now() == "RDHUP" for _ in range(100))
        return {"looks at one half-close that saw it": f"{num_seen} of 100"}


@fact({"added after the FIN": "RDHUP", "added after a reset": "RDHUP HUP ERR"})
def adding_after_the_end_fires() -> Seen:
    """An fd whose peer has left before is reported as soon as it is added."""
    with connected() as closed, connected() as broken:
        closed.client.close()
        wait_until(lambda: tcp_info(closed.server).state == "CLOSE_WAIT")
        reset(broken.client)
        wait_until(lambda: tcp_info(broken.server).state == "CLOSE")
        with EventSet(closed.server) as of_closed, EventSet(broken.server) as of_broken:
            return {
                "added after the FIN": of_closed.now(),
                "added after a reset": of_broken.now(),
            }


@fact({"EPOLLEXCLUSIVE with EPOLLRDHUP": "EINVAL"})
def no_exclusive_rdhup() -> Seen:
    """EPOLLEXCLUSIVE does not go with EPOLLRDHUP: two sets that watch one fd both wake."""
    with connected() as pair, select.epoll() as epoll:
        try:
            epoll.register(pair.server, INTEREST | select.EPOLLEXCLUSIVE)
        except OSError as error:
            return {"EPOLLEXCLUSIVE with EPOLLRDHUP": error_name(error)}
        return {"EPOLLEXCLUSIVE with EPOLLRDHUP": "accepted"}


@fact(
    {
        "our SHUT_WR": "silent",
        "then the peer's FIN": "RDHUP HUP",
        "our SHUT_RD": "RDHUP",
        "the state is": "ESTABLISHED",
        "then the peer's FIN again": "RDHUP",
        "and the state is": "CLOSE_WAIT",
    }
)
def our_own_shutdown_looks_like_the_peers() -> Seen:
    """HUP means that both directions ended, not an error; our own SHUT_RD raises RDHUP
    though nobody left, and only the state in TCP_INFO tells. A FIN after it is a new edge."""
    seen = {}
    with connected() as pair, EventSet(pair.server) as events:
        pair.server.shutdown(socket.SHUT_WR)
        seen["our SHUT_WR"] = events.now()
        pair.client.close()
        seen["then the peer's FIN"] = events.until("HUP")
    with connected() as pair, EventSet(pair.server) as events:
        pair.server.shutdown(socket.SHUT_RD)
        seen["our SHUT_RD"] = events.next()
        seen["the state is"] = tcp_info(pair.server).state
        pair.client.close()
        seen["then the peer's FIN again"] = events.next()
        seen["and the state is"] = tcp_info(pair.server).state
    return seen


@fact({"an urgent byte": "silent", "it waits as": "URG"})
def urgent_bytes_do_not_wake() -> Seen:
    """Out-of-band data raises PRI, which is not asked for."""
    with connected() as pair, EventSet(pair.server) as events:
        urgent = select.poll()
        urgent.register(pair.server, select.POLLPRI)
        pair.client.send(b"!", socket.MSG_OOB)
        is_urgent = urgent.poll(10_000)
        return {"an urgent byte": events.now(), "it waits as": "URG" if is_urgent else "nothing"}


@fact({"a timestamp waits in the error queue": "ERR", "the state is": "ESTABLISHED"})
def the_error_queue_looks_like_an_error() -> Seen:
    """What the owner asked the kernel to report (send timestamps, zero-copy completions)
    raises ERR on a healthy connection; a reset has state CLOSE as well."""
    timestamping, software = 37, 1 << 1 | 1 << 4  # SO_TIMESTAMPING, TX_SOFTWARE | SOFTWARE
    with connected() as pair, EventSet(pair.server) as events:
        pair.server.setsockopt(socket.SOL_SOCKET, timestamping, software)
        pair.server.send(b"x")
        return {
            "a timestamp waits in the error queue": events.next(),
            "the state is": tcp_info(pair.server).state,
        }


@fact(
    {
        "the peer half-closes": "RDHUP",
        "the peer closes": "RDHUP HUP",
        "the peer closes with our byte unread": "RDHUP HUP ERR",
        "our own SHUT_RD": "RDHUP",
    }
)
def unix_sockets_have_no_state_to_ask() -> Seen:
    """On AF_UNIX a close is HUP too, a close with unread bytes a reset, and our own
    SHUT_RD can't be told from the peer's SHUT_WR: there is no TCP_INFO."""
    seen = {}
    with connected("unix") as pair, EventSet(pair.server) as events:
        pair.client.shutdown(socket.SHUT_WR)
        seen["the peer half-closes"] = events.next()
    with connected("unix") as pair, EventSet(pair.server) as events:
        pair.client.close()
        seen["the peer closes"] = events.next()
    with connected("unix") as pair, EventSet(pair.server) as events:
        reset(pair.client, pair.server)
        seen["the peer closes with our byte unread"] = events.next()
    with connected("unix") as pair, EventSet(pair.server) as events:
        pair.server.shutdown(socket.SHUT_RD)
        seen["our own SHUT_RD"] = events.next()
    return seen


@fact({"bytes wait in it": "silent", "the reader closes": "ERR"})
def a_pipe_tells_its_writer() -> Seen:
    """The write end of a pipe gets ERR, and nothing else, when its last reader closes."""
    reader, writer = os.pipe()
    try:
        with EventSet(writer) as events:
            os.write(writer, b"x")
            seen = {"bytes wait in it": events.now()}
            os.close(reader)
            reader = -1
            seen["the reader closes"] = events.next()
            return seen
    finally:
        os.close(writer)
        if reader >= 0:
            os.close(reader)
