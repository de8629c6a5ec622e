"""Opt-ins of a connection: what they find out, and that the owner's options come back."""

import contextlib
import gc
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import disconnect_watch.watcher
from disconnect_watch import CancelToken, Connection, Reason, Watcher, attach, is_gone
from disconnect_watch.watcher import MASK_GONE
from tests.support.net import Pair, connected, fill, options_of, reset, vanish, wait_until


def opt_in(conn: Connection) -> None:
    conn.set_vanish_after(30)
    conn.set_probing(True)
    conn.unblind(1 << 20)


def _opt_out(watcher: Watcher, conn: Connection) -> None:
    conn.reblind()
    conn.set_vanish_after(None)
    conn.set_probing(False)


def _lose(watcher: Watcher, conn: Connection) -> None:
    conn.lost()
    conn.detach()


ENDS: dict[str, Callable[[Watcher, Connection], None]] = {
    "opt_out": _opt_out,
    "detach": lambda watcher, conn: conn.detach(),
    "close": lambda watcher, conn: watcher.close(),
    "lost": _lose,
}


@pytest.mark.parametrize("end", ENDS)
def test_options_come_back_byte_for_byte(watcher: Watcher, tcp: Pair, end: str) -> None:
    tcp.server.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 9)
    before = options_of(tcp.server)
    conn = watcher.attach(tcp.server)
    opt_in(conn)
    during = options_of(tcp.server)
    assert {name for name in before if before[name] != during[name]} == before.keys() - {
        "TCP_USER_TIMEOUT"
    }
    ENDS[end](watcher, conn)
    assert options_of(tcp.server) == before
    conn.detach()


def test_a_forgotten_connection_gives_the_options_back(watcher: Watcher, tcp: Pair) -> None:
    before = options_of(tcp.server)
    opt_in(watcher.attach(tcp.server))
    gc.collect()
    assert options_of(tcp.server) == before


@pytest.mark.slow
def test_a_peer_that_vanished_has_timed_out_and_one_that_does_not_read_has_not(
    watcher: Watcher,
) -> None:
    with connected() as idle, connected() as blocked, connected() as live:
        pairs = [idle, blocked, live]
        tokens = [CancelToken() for _ in pairs]
        with contextlib.ExitStack() as stack:
            for pair, token in zip(pairs, tokens, strict=True):
                stack.enter_context(watcher.attach(pair.server, vanish_after=2)).arm(token)
            fill(blocked.server)
            fill(live.server)
            vanish(idle.client)
            vanish(blocked.client)
            assert tokens[0].wait(40)
            assert tokens[1].wait(40)
            assert [token.reason for token in tokens] == [
                Reason.TIMED_OUT,
                Reason.TIMED_OUT,
                None,
            ]
            # The verdict is ours: the socket goes on as it was.
            assert idle.server.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
            assert watcher.stats().num_signals[Reason.TIMED_OUT] == 2


def test_the_bound_is_the_connections_or_else_the_watchers(tcp: Pair) -> None:
    with Watcher(vanish_after=8) as watcher:
        with watcher.attach(tcp.server) as conn:
            assert conn.info().vanish_bound in (9.0, 138.0)  # the latter before Linux 6.15
        with watcher.attach(tcp.server, vanish_after=80) as conn:
            assert conn.info().vanish_bound in (85.0, 160.0)
            conn.set_vanish_after(None)
            assert conn.info().vanish_bound is None
    with Watcher() as watcher, watcher.attach(tcp.server) as conn:
        assert conn.info().vanish_bound is None


def test_the_process_wide_watcher_takes_a_bound_too(
    watcher: Watcher, tcp: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The real one would keep a timer's fd from here on.
    monkeypatch.setattr(disconnect_watch.watcher, "default_watcher", lambda: watcher)
    with attach(tcp.server, vanish_after=8) as conn:
        assert conn.info().vanish_bound is not None


@pytest.mark.parametrize("bound", [0, 1.99, 86_401, float("nan"), -5])
def test_a_bound_that_cannot_be_kept_is_refused(watcher: Watcher, tcp: Pair, bound: float) -> None:
    with pytest.raises(ValueError, match="vanish_after"):
        Watcher(vanish_after=bound)
    with pytest.raises(ValueError, match="vanish_after"):
        watcher.attach(tcp.server, vanish_after=bound)
    with watcher.attach(tcp.server) as conn, pytest.raises(ValueError, match="vanish_after"):
        conn.set_vanish_after(bound)


def test_over_unix_there_is_nothing_to_set(watcher: Watcher) -> None:
    with connected("unix") as pair, watcher.attach(pair.server, vanish_after=2) as conn:
        assert conn.info().vanish_bound is None
        conn.unblind(1 << 20)
        conn.reblind()


def test_over_unix_a_probed_peer_that_closed_is_reset_at_once(watcher: Watcher) -> None:
    with connected("unix") as pair, watcher.attach(pair.server) as conn:
        token = CancelToken()
        conn.arm(token, mask=MASK_GONE)
        pair.leave("half_close")
        wait_until(lambda: conn.reason is Reason.FIN)
        conn.set_probing(True)
        assert not token.cancelled
        pair.client.close()
        assert token.wait(40)
        assert token.reason is Reason.RESET


def test_unblind_shows_a_fin_behind_a_full_window(tcp: Pair) -> None:
    tcp.client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
    token = CancelToken()
    with Watcher(poller="epoll") as watcher, watcher.attach(tcp.server) as conn:
        conn.arm(token)
        num_bytes = fill(tcp.client)
        tcp.leave("half_close")
        wait_until(lambda: conn.info().is_blind)
        assert watcher.stats().num_blind == 1
        assert not token.cancelled
        conn.unblind(1 << 20)
        assert token.wait(40)
        assert token.reason is Reason.FIN
        assert watcher.stats().num_blind == 0
        conn.reblind()
        assert conn.info().unread_bytes == num_bytes
        received = 0
        while part := tcp.server.recv(1 << 16):
            received += len(part)
        assert received == num_bytes


def test_the_write_end_of_a_pipe_is_watched(watcher: Watcher) -> None:
    reader, writer = os.pipe()
    token = CancelToken()
    with watcher.attach(writer) as conn:
        conn.arm(token, mask=MASK_GONE)
        os.write(writer, b"token")
        assert os.read(reader, 5) == b"token"
        assert conn.reason is None
        assert is_gone(writer) is None
        os.close(reader)
        assert token.wait(40)
        assert token.reason is Reason.RESET
        assert is_gone(writer) is Reason.RESET
        with pytest.raises(BrokenPipeError):
            os.write(writer, b"x")
    os.close(writer)


def test_a_process_that_read_a_fifo_is_gone_when_it_is_killed(
    watcher: Watcher, tmp_path: Path
) -> None:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    read_for_ever = f"open({str(path)!r}, 'rb').read()"
    child = subprocess.Popen([sys.executable, "-c", read_for_ever])
    with path.open("wb", buffering=0) as fifo, watcher.attach(fifo) as conn:
        token = CancelToken()
        conn.arm(token)
        fifo.write(b"x")
        assert not token.cancelled
        child.kill()
        child.wait()
        assert token.wait(40)
        assert token.reason is Reason.RESET


def test_a_reset_is_no_silence(watcher: Watcher, tcp: Pair) -> None:
    token = CancelToken()
    with watcher.attach(tcp.server, vanish_after=2) as conn:
        conn.arm(token)
        reset(tcp.client)
        assert token.wait(40)
        assert token.reason is Reason.RESET
