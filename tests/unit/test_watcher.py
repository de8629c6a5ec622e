"""Connections and watches: whoever leaves is seen, once, in every way and by every poller."""

import errno
import gc
import os
import select
import socket

import pytest

from disconnect_watch import (
    CancelToken,
    ClosedError,
    Connection,
    ForkedError,
    Reason,
    StaleWatchError,
    UnsupportedSocketError,
    Watcher,
    attach,
    is_gone,
)
from disconnect_watch.watcher import MASK_GONE, default_watcher
from tests.support.net import LEAVES, Pair, connected, wait_until


def test_leave_sets_the_token_with_its_reason(
    watcher: Watcher, poller: str, pair: Pair, leave: str
) -> None:
    how = LEAVES[leave]
    if how.is_before:
        pair.leave(leave)
    token = CancelToken()
    with watcher.attach(pair.server) as conn:
        conn.arm(token)
        if not how.is_before:
            pair.leave(leave)
        if (poller, pair.kind) in how.blind:
            wait_until(lambda: conn.info().is_blind)
            assert not token.cancelled
            assert watcher.stats().num_blind == 1
        else:
            assert token.wait(40)
            assert token.reason is how.reason
            assert conn.reason is how.reason
            assert watcher.stats().num_signals[how.reason] == 1


def test_loop_driver_sees_each_leave_when_polled(pair: Pair, leave: str) -> None:
    how = LEAVES[leave]
    token = CancelToken()
    with Watcher(driver="loop") as watcher:
        if how.is_before:
            pair.leave(leave)
        with watcher.attach(pair.server) as conn:
            conn.arm(token)
            if not how.is_before:
                pair.leave(leave)
            wait_until(lambda: watcher.poll(0.01) or token.cancelled)
            assert token.reason is how.reason


def test_request_bytes_neither_wake_nor_fire(pair: Pair) -> None:
    with Watcher(poller="epoll") as watcher, watcher.attach(pair.server) as conn:
        token = CancelToken()
        conn.arm(token)
        before = watcher.stats().num_wakeups
        for _ in range(50):
            pair.client.sendall(b"x" * 100)
            assert pair.server.recv(100)
        assert watcher.stats().num_wakeups == before
        pair.client.close()
        assert token.wait(40)
        assert token.reason is Reason.FIN


def test_owner_still_gets_bytes_and_end_of_stream(watcher: Watcher, pair: Pair) -> None:
    with watcher.attach(pair.server) as conn:
        conn.arm()
        pair.client.sendall(b"pipelined")
        pair.client.close()
        assert pair.server.recv(100) == b"pipelined"
        assert pair.server.recv(100) == b""
        wait_until(lambda: conn.reason is Reason.FIN)


@pytest.mark.parametrize("kind", ["tcp", "tcp6", "unix"], indirect=True)
def test_owner_still_gets_the_errno_of_a_reset(pair: Pair) -> None:
    token = CancelToken()
    with Watcher(poller="epoll") as watcher, watcher.attach(pair.server) as conn:
        conn.arm(token)
        pair.leave("rst")
        assert token.wait(40)
        with pytest.raises(ConnectionResetError) as caught:
            pair.server.recv(100)
        assert caught.value.errno == errno.ECONNRESET


def test_tokens_armed_together_all_fire_and_disarmed_ones_never(
    watcher: Watcher, pair: Pair
) -> None:
    with watcher.attach(pair.server) as conn:
        tokens = [CancelToken() for _ in range(5)]
        ids = [conn.arm(token) for token in tokens]
        assert 0 not in ids
        assert len(set(ids)) == 5
        assert conn.disarm(ids[0]) is False
        pair.client.close()
        assert all(token.wait(40) for token in tokens[1:])
        assert [conn.disarm(watch_id) for watch_id in ids[1:]] == [True] * 4
        assert not tokens[0].cancelled
        with pytest.raises(StaleWatchError):
            conn.disarm(ids[0])


def test_watch_armed_after_the_leave_fires_inside_arm(watcher: Watcher, pair: Pair) -> None:
    with watcher.attach(pair.server) as conn:
        pair.client.close()
        wait_until(lambda: conn.reason)
        token = CancelToken()
        assert conn.disarm(conn.arm(token)) is True
        assert token.reason is Reason.FIN


def test_half_close_passes_the_gone_mask_and_a_later_reset_fires_it(
    watcher: Watcher, pair: Pair
) -> None:
    token = CancelToken()
    with watcher.attach(pair.server) as conn:
        conn.arm(token, mask=MASK_GONE)
        pair.leave("half_close")
        wait_until(lambda: conn.reason is Reason.FIN)
        assert not token.cancelled
        pair.leave("rst")
        assert token.wait(40)
        assert token.reason is Reason.RESET
        assert conn.info().seen == {Reason.FIN, Reason.RESET}


def test_owners_word_fires_like_the_kernels(watcher: Watcher, pair: Pair) -> None:
    token = CancelToken()
    with watcher.attach(pair.server) as conn:
        conn.arm(token)
        assert conn.lost(Reason.RESET) is True
        assert token.reason is Reason.RESET
        assert conn.lost(Reason.RESET) is False


def test_second_source_of_the_same_end_is_counted_and_changes_nothing(
    watcher: Watcher, pair: Pair
) -> None:
    token = CancelToken()
    with watcher.attach(pair.server) as conn:
        conn.arm(token)
        pair.client.close()
        assert token.wait(40)
        assert conn.lost(Reason.OWNER_CLOSED) is False
        assert token.reason is Reason.FIN
        stats = watcher.stats()
        assert (stats.num_second_sources, stats.num_fired) == (1, 1)


def test_detached_connection_hears_nothing_and_says_so(watcher: Watcher, pair: Pair) -> None:
    token = CancelToken()
    conn = watcher.attach(pair.server)
    conn.arm(token)
    conn.detach()
    conn.detach()
    pair.client.close()
    with watcher.attach(pair.server) as again:
        wait_until(lambda: again.reason)
    assert not token.cancelled
    assert not conn.is_attached
    with pytest.raises(StaleWatchError):
        conn.arm(token)


def test_fd_is_free_for_another_connection_after_detach(watcher: Watcher) -> None:
    # Symptom elsewhere: the registration of a closed socket fires for whoever got its number.
    with connected() as first:
        fd = first.server.fileno()
        token = CancelToken()
        conn = watcher.attach(first.server)
        conn.arm(token)
        conn.detach()
    with connected() as second:
        assert fd in (second.server.fileno(), second.client.fileno())
        with watcher.attach(fd) as conn:
            fresh = CancelToken()
            conn.arm(fresh)
            other = second.client if fd == second.server.fileno() else second.server
            other.close()
            assert fresh.wait(40)
    assert not token.cancelled


def test_fd_closed_without_detach_is_owner_closed_for_the_next_attach(watcher: Watcher) -> None:
    token = CancelToken()
    with connected() as pair:
        fd = pair.server.fileno()
        stale = watcher.attach(pair.server)
        stale.arm(token)
        pair.server.close()  # before the client does
    with connected() as pair:
        conn = watcher.attach(fd)
        assert token.reason is Reason.OWNER_CLOSED
        assert conn.reason is None
        stale.detach()
        fresh = CancelToken()
        conn.arm(fresh)
        pair.client.close()
        pair.server.shutdown(socket.SHUT_RDWR)
        conn.detach()


def test_hot_methods_belong_to_the_public_class_and_are_called_directly() -> None:
    assert [Connection.arm.__objclass__, Connection.disarm.__objclass__] == [Connection] * 2  # type: ignore[attr-defined]


def test_mailbox_delivers_cookie_reason_time_and_watch_id(watcher: Watcher, pair: Pair) -> None:
    mailbox = watcher.mailbox()
    with watcher.attach(pair.server) as conn:
        watch_id = conn.arm(mailbox=mailbox, cookie=2**63 + 7)
        assert mailbox.drain() == []
        pair.client.close()
        assert select.select([mailbox.fileno()], [], [], 10)[0]
        (event,) = mailbox.drain()
        assert event.cookie == 2**63 + 7
        assert event.reason is Reason.FIN
        assert event.watch_id == watch_id
        assert event.at_ns == conn.info().seen_ns
        assert mailbox.drain() == []
    mailbox.close()


def test_mailbox_of_another_watcher_and_a_closed_one_are_refused_by_name(
    watcher: Watcher, pair: Pair
) -> None:
    with Watcher() as other, watcher.attach(pair.server) as conn:
        mailbox, foreign = watcher.mailbox(), other.mailbox()
        with pytest.raises(ValueError, match=r"mailbox is of another watcher"):
            conn.arm(mailbox=foreign)
        mailbox.close()
        mailbox.close()
        with pytest.raises(ClosedError, match=r"mailbox"):
            conn.arm(mailbox=mailbox)
        with pytest.raises(ClosedError, match=r"mailbox"):
            mailbox.fileno()
        assert mailbox.drain() == []
        mailbox.wake()
        foreign.close()


def test_is_gone_looks_once_and_registers_nothing(pair: Pair, leave: str) -> None:
    before = default_watcher().stats().num_connections
    assert is_gone(pair.server) is None
    pair.leave(leave)
    wait_until(lambda: is_gone(pair.server) is LEAVES[leave].reason)
    assert default_watcher().stats().num_connections == before


def test_wrong_things_to_attach_are_named(watcher: Watcher) -> None:
    closed = socket.socket()
    closed.close()
    reader, writer = os.pipe()
    try:
        with pytest.raises(UnsupportedSocketError, match="closed"):
            watcher.attach(closed)
        with pytest.raises(UnsupportedSocketError, match=str(reader)):
            watcher.attach(reader)
        with pytest.raises(TypeError, match="str"):
            watcher.attach("socket")  # type: ignore[arg-type]
    finally:
        os.close(reader)
        os.close(writer)
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagram,
        pytest.raises(UnsupportedSocketError, match=str(datagram.fileno())),
    ):
        watcher.attach(datagram)


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6, socket.AF_UNIX])
def test_a_socket_that_was_never_connected_has_no_peer_to_leave(
    watcher: Watcher, family: socket.AddressFamily
) -> None:
    # Symptom: its peer had left, by FIN.
    with socket.socket(family) as fresh:
        with pytest.raises(UnsupportedSocketError, match=str(fresh.fileno())):
            is_gone(fresh)
        with pytest.raises(UnsupportedSocketError, match=str(fresh.fileno())):
            watcher.attach(fresh)


def test_a_number_that_names_no_file_is_the_systems_error(watcher: Watcher) -> None:
    for look in (is_gone, watcher.attach):
        with pytest.raises(OSError, match="999999") as caught:
            look(999_999)
        assert caught.value.errno == errno.EBADF


def test_one_fd_is_attached_once(watcher: Watcher, pair: Pair) -> None:
    with watcher.attach(pair.server), pytest.raises(FileExistsError):
        watcher.attach(pair.server)


def test_closed_watcher_refuses_and_forgets_unfired(pair: Pair) -> None:
    watcher = Watcher()
    token = CancelToken()
    conn = watcher.attach(pair.server)
    conn.arm(token)
    watcher.close()
    watcher.close()
    assert watcher.is_closed
    with pytest.raises(ClosedError):
        watcher.attach(pair.client)
    pair.client.close()
    assert not token.cancelled
    conn.detach()


def test_unclosed_watcher_warns_with_where_it_was_made() -> None:
    watcher = Watcher()
    with pytest.warns(ResourceWarning, match=r"test_watcher\.py"):
        del watcher


@pytest.mark.parametrize(
    "arguments", [{"poller": "kqueue"}, {"driver": "thread-pool"}], ids=["poller", "driver"]
)
def test_unknown_poller_or_driver_is_refused(arguments: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=next(iter(arguments.values()))):
        Watcher(**arguments)  # type: ignore[arg-type]


def test_a_poll_may_wait_for_ever() -> None:
    # Symptom: OverflowError.
    with Watcher(driver="loop") as watcher, connected("tcp") as pair:
        token = CancelToken()
        with watcher.attach(pair.server) as conn:
            conn.arm(token)
            pair.leave("fin")
            assert watcher.poll(float("inf")) == 1
        assert token.reason is Reason.FIN


def test_what_is_no_reason_is_named(watcher: Watcher, tcp: Pair) -> None:
    with watcher.attach(tcp.server) as conn:
        for wrong in ("fin", 1, None):
            with pytest.raises(TypeError, match=rf"reason {wrong!r}: must be a Reason"):
                conn.lost(wrong)  # type: ignore[arg-type]
        assert conn.reason is None


def test_default_watcher_that_was_closed_is_made_anew(pair: Pair) -> None:
    closed = default_watcher()
    closed.close()
    with attach(pair.server) as conn:
        assert conn.watcher is default_watcher()
        assert conn.watcher is not closed


def test_forked_child_gets_a_fresh_default_watcher_and_the_old_one_says_so(pair: Pair) -> None:
    inherited = default_watcher()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            with pytest.raises(ForkedError):
                inherited.stats()
            try:
                inherited.attach(pair.server)
            except ForkedError:
                token = CancelToken()
                with attach(pair.server) as conn:
                    conn.arm(token)
                    pair.server.send(b"go")
                    status = 0 if token.wait(40) and token.reason is Reason.FIN else 2
        finally:
            os._exit(status)
    assert pair.client.recv(2) == b"go"
    pair.client.shutdown(socket.SHUT_WR)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert default_watcher() is inherited
    assert is_gone(pair.server) is Reason.FIN


def test_watcher_and_connection_in_a_reference_cycle_are_freed_by_the_collector(
    pair: Pair,
) -> None:
    # Symptom: a crash in the collector, which had cleared the watcher before the detach.
    watcher = Watcher()
    conn = watcher.attach(pair.server)
    mailbox = watcher.mailbox()
    conn.cycle = [conn, mailbox]  # type: ignore[attr-defined]
    mailbox.cycle = conn.cycle  # type: ignore[attr-defined]
    assert watcher.stats().num_connections == 1
    del conn, mailbox
    gc.collect()
    assert watcher.stats().num_connections == 0
    watcher.close()
