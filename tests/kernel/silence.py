"""Peers that are silent: behind a full window, vanished, half-closed, or merely slow."""

import socket
import time

from tests.kernel.fact import Seen, fact
from tests.kernel.look import EventSet, tcp_info, vanish
from tests.support.net import connected, unread_bytes, wait_until

_KEEPALIVE = {
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE): 1,
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE): 1,
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL): 1,
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT): 127,
}
_TCP_RTO_MAX_MS = 44


@fact(
    {
        "the peer closed behind a full window": "silent",
        "the state is": "ESTABLISHED",
        "SO_RCVLOWAT at 1 MiB": "RDHUP",
        "bytes taken": "0",
        "with it set before": "RDHUP",
        "bytes wake": "silent",
    }
)
def a_full_window_hides_the_fin() -> Seen:
    """A FIN behind bytes that the receive window has no room for can't arrive. SO_RCVLOWAT
    grows the buffer, without privilege, and shows it; no byte is consumed."""
    seen = {}
    with connected() as pair, EventSet(pair.server) as events:
        num_sent = _fill(pair.client, pair.server)
        pair.client.close()
        seen["the peer closed behind a full window"] = events.now()
        seen["the state is"] = tcp_info(pair.server).state
        _set_lowat(pair.server)
        seen["SO_RCVLOWAT at 1 MiB"] = events.next()
        seen["bytes taken"] = str(num_sent - unread_bytes(pair.server))
    with connected() as pair, EventSet(pair.server) as events:
        _set_lowat(pair.server)
        pair.client.sendall(bytes(500_000))
        wait_until(lambda: unread_bytes(pair.server) == 500_000)
        seen["bytes wake"] = events.now()
        pair.client.close()
        seen["with it set before"] = events.next()
    return seen


@fact(
    {
        "the first write to a closed peer": "accepted",
        "it is answered by": "RDHUP HUP ERR",
        "a write to a half-closed peer": "accepted",
        "it is answered, once read, by": "silent",
    }
)
def a_write_tells_a_close_from_a_half_close() -> Seen:
    """After a FIN, a closed peer answers a write with a reset; a half-closed one takes it."""
    seen = {}
    with connected() as pair, EventSet(pair.server) as events:
        pair.client.close()
        events.next()
        pair.server.send(b"x")
        seen["the first write to a closed peer"] = "accepted"
        seen["it is answered by"] = events.next()
    with connected() as pair, EventSet(pair.server) as events:
        pair.client.shutdown(socket.SHUT_WR)
        events.next()
        pair.server.send(b"x")
        seen["a write to a half-closed peer"] = "accepted"
        assert pair.client.recv(1) == b"x"
        seen["it is answered, once read, by"] = events.now()
    return seen


@fact(
    {
        "keepalive to a closed peer": "RDHUP HUP ERR",
        "keepalive to a half-closed peer": "silent",
        "which is": "CLOSE_WAIT, acknowledging",
    }
)
def a_closed_peer_stops_answering_once_its_timer_ends() -> Seen:
    """Without a byte: a closed peer acknowledges keepalive until its FIN_WAIT2 timer ends
    (tcp_fin_timeout, 60 s unless it asks for less, as here) and then resets; a half-closed
    one goes on acknowledging."""
    with (
        connected() as closed,
        connected() as half,
        EventSet(closed.server) as of_closed,
        EventSet(half.server) as of_half,
    ):
        closed.client.setsockopt(socket.IPPROTO_TCP, socket.TCP_LINGER2, 1)
        closed.client.close()
        half.client.shutdown(socket.SHUT_WR)
        of_closed.next()
        of_half.next()
        asked = time.monotonic()
        for pair in (half, closed):
            _keep_alive(pair.server)
        seen = {"keepalive to a closed peer": of_closed.next()}
        seen["keepalive to a half-closed peer"] = of_half.now()
        wait_until(lambda: _has_answered_since(half.server, asked))
        seen["which is"] = f"{tcp_info(half.server).state}, acknowledging"
        return seen


@fact(
    {
        "events": "silent",
        "keepalive probes unanswered": "counted",
        "retransmissions": "0",
        "acknowledgements": "none",
        "a live idle peer": "acknowledges",
    }
)
def a_vanished_peer_leaves_keepalive_unanswered() -> Seen:
    """An idle peer that vanished shows in nothing but TCP_INFO, and only with keepalive:
    probes count up and the last acknowledgement ages. A live one resets both."""
    with connected() as gone, connected() as alive, EventSet(gone.server) as events:
        for pair in (alive, gone):
            _keep_alive(pair.server)
        vanish(gone.client)
        asked = time.monotonic()
        wait_until(lambda: tcp_info(gone.server).num_probes >= 2)
        is_silent = not _has_answered_since(gone.server, asked)
        wait_until(lambda: _has_answered_since(alive.server, asked))
        return {
            "events": events.now(),
            "keepalive probes unanswered": "counted",
            "retransmissions": str(tcp_info(gone.server).num_retransmits),
            "acknowledgements": "none" if is_silent else "some",
            "a live idle peer": "acknowledges",
        }


@fact({"events": "silent", "keepalive probes": "0", "retransmissions": "counted"})
def a_vanished_peer_leaves_bytes_unacknowledged() -> Seen:
    """With a byte in flight keepalive is mute, and retransmissions count up instead."""
    with connected() as pair, EventSet(pair.server) as events:
        _keep_alive(pair.server)
        vanish(pair.client)
        pair.server.send(b"x")
        # The third comes after the second at which an idle connection has its first probe.
        wait_until(lambda: tcp_info(pair.server).num_retransmits >= 3)
        return {
            "events": events.now(),
            "keepalive probes": str(tcp_info(pair.server).num_probes),
            "retransmissions": "counted",
        }


@fact({"after four retransmissions it waits for": "1.0 s"}, since=(6, 15))
def back_off_can_be_capped() -> Seen:
    """Retransmissions and window probes wait twice as long each time, up to two minutes;
    TCP_RTO_MAX_MS sets another limit, here of a second."""
    with connected() as pair:
        pair.server.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, 1000)
        vanish(pair.client)
        pair.server.send(b"x")
        wait_until(lambda: tcp_info(pair.server).num_retransmits >= 4)
        waits = tcp_info(pair.server).rto_us / 1e6
        return {"after four retransmissions it waits for": f"{waits:.1f} s"}


@fact(
    {
        "a live peer that does not read, with TCP_USER_TIMEOUT": "RDHUP HUP ERR",
        "without: events": "silent",
        "without: it acknowledges window probes": "yes",
    }
)
def a_user_timeout_takes_a_slow_reader_for_gone() -> Seen:
    """TCP_USER_TIMEOUT ends a connection whose live peer merely does not read. Without it
    the peer's acknowledgements of window probes keep it alive, and show in TCP_INFO."""
    with connected() as ended, connected() as kept:
        timeout = (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 500)
        ended.server.setsockopt(*timeout)
        with EventSet(ended.server) as of_ended, EventSet(kept.server) as of_kept:
            for pair in (kept, ended):
                _fill(pair.server, pair.client)
            seen = {"a live peer that does not read, with TCP_USER_TIMEOUT": of_ended.next()}
            seen["without: events"] = of_kept.now()
            asked = time.monotonic()
            wait_until(lambda: _has_answered_since(kept.server, asked))
            seen["without: it acknowledges window probes"] = "yes"
            return seen


def _fill(sender: socket.socket, receiver: socket.socket) -> int:
    """Send until the receiver's window is closed over what waits; returns how many bytes."""
    # Less than SO_RCVLOWAT makes room for, so that all of it can arrive in the end.
    sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 17)
    sender.setblocking(False)
    num_sent = 0

    def is_full() -> bool:
        nonlocal num_sent
        try:
            num_sent += sender.send(bytes(1 << 16))
        except BlockingIOError:
            # What was sent is acknowledged, and still something waits.
            return not tcp_info(sender).num_unacked and unread_bytes(receiver) < num_sent
        return False

    wait_until(is_full)
    return num_sent


def _has_answered_since(sock: socket.socket, asked: float) -> bool:
    # An acknowledgement from before could pass for a later one within the clocks' grain.
    grain_ms = 50
    return tcp_info(sock).last_ack_recv_ms + grain_ms < (time.monotonic() - asked) * 1000


def _keep_alive(sock: socket.socket) -> None:
    for (level, name), value in _KEEPALIVE.items():
        sock.setsockopt(level, name, value)


def _set_lowat(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1 << 20)
