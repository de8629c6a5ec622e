"""Loop mailboxes: opened by the first user, shared, closed with the last, nothing lost."""

import asyncio
import contextlib
import gc
import os
import threading
import time
from collections.abc import Callable

import pytest

from disconnect_watch import CancelToken, ClosedError, Reason, StaleWatchError, Watcher, attach
from disconnect_watch.aio import LoopMailbox, loop_mailbox
from disconnect_watch.watcher import MASK_GONE, Connection, default_watcher
from tests.support.loops import LoopRunner
from tests.support.net import LEAVES, Pair, connected, open_fds, until, wait_until


def test_leave_is_delivered_on_the_loop_with_reason_and_time(
    run: LoopRunner, pair: Pair, leave: str, driver: str
) -> None:
    how = LEAVES[leave]

    async def main() -> None:
        with Watcher(driver="loop" if driver == "loop" else "thread") as watcher:
            mailbox = loop_mailbox(watcher)
            heard: list[tuple[Reason, int, int]] = []

            def on_leave(reason: Reason, at_ns: int) -> None:
                heard.append((reason, at_ns, threading.get_ident()))

            if how.is_before:
                pair.leave(leave)
            before = time.monotonic_ns()
            with watcher.attach(pair.server) as conn:
                token = CancelToken()
                watch_id = mailbox.arm(conn, token, on_leave)
                if not how.is_before:
                    pair.leave(leave)
                await until(lambda: heard)
                ((reason, at_ns, thread_id),) = heard
                assert reason is token.reason is how.reason
                assert before <= at_ns <= time.monotonic_ns()
                assert thread_id == threading.get_ident()
                assert mailbox.disarm(conn, watch_id) is True

    run(main)


def test_mailbox_is_shared_and_closes_with_its_last_holder(run: LoopRunner) -> None:
    async def main() -> None:
        before = len(open_fds())
        mailbox = loop_mailbox()
        assert loop_mailbox() is mailbox
        assert len(open_fds()) == before + 1
        del mailbox
        assert len(open_fds()) == before
        mailbox = loop_mailbox()
        mailbox.close()
        mailbox.close()
        assert len(open_fds()) == before

    run(main)


def test_mailbox_dropped_in_another_thread_is_closed_by_its_loop(run: LoopRunner) -> None:
    async def main() -> None:
        before = len(open_fds())
        holder = [loop_mailbox()]
        thread = threading.Thread(target=holder.clear)
        thread.start()
        thread.join()
        # The loop may be polling the fd, so it is the loop that takes it out.
        assert len(open_fds()) == before + 1
        await until(lambda: len(open_fds()) == before)

    run(main)


def test_disarmed_function_is_not_called_although_its_watch_fired(
    run: LoopRunner, tcp: Pair
) -> None:
    async def main() -> None:
        mailbox = loop_mailbox()
        with attach(tcp.server) as conn:
            token = CancelToken()
            watch_id = mailbox.arm(conn, token, lambda *_: pytest.fail("it was disarmed"))
            tcp.client.close()
            assert token.wait(40)
            assert mailbox.disarm(conn, watch_id) is True
            with pytest.raises(StaleWatchError):
                mailbox.disarm(conn, watch_id)
            await asyncio.sleep(0)
            mailbox.deliver()

    run(main)


def test_function_that_disarms_another_of_the_same_batch_is_obeyed(
    run: LoopRunner, tcp: Pair
) -> None:
    async def main() -> None:
        mailbox = loop_mailbox()
        with attach(tcp.server) as conn:
            called: list[str] = []
            ids: dict[str, int] = {}

            def only(name: str, other: str) -> None:
                called.append(name)
                mailbox.disarm(conn, ids[other])

            ids["a"] = mailbox.arm(conn, None, lambda *_: only("a", "b"))
            ids["b"] = mailbox.arm(conn, None, lambda *_: only("b", "a"))
            tcp.client.close()
            await until(lambda: called)
            await asyncio.sleep(0)
            assert len(called) == 1
            mailbox.disarm(conn, ids[called[0]])

    run(main)


@pytest.mark.parametrize("is_listened", [False, True])
def test_event_of_a_batch_does_not_reach_a_connection_attached_meanwhile(
    run: LoopRunner, is_listened: bool
) -> None:
    # A new connection could get the id() of a freed one whose event is still in the batch,
    # and its first watch has the same number. (Looked up one by one, some of these do.)
    async def main() -> None:
        mailbox = loop_mailbox()
        with contextlib.ExitStack() as stack:
            pairs = [stack.enter_context(connected()) for _ in range(10)]
            spare = [stack.enter_context(connected()) for _ in range(100)]
            ids: dict[Connection, int] = {}
            reused: list[Connection] = []

            def arm(conn: Connection, function: Callable[..., object]) -> None:
                if is_listened:
                    cookie = mailbox.listen(conn, function)
                    ids[conn] = conn.arm(mailbox=mailbox.core, cookie=cookie)
                else:
                    ids[conn] = mailbox.arm(conn, None, function)

            def end(conn: Connection, watch_id: int) -> None:
                if is_listened:
                    mailbox.forget(conn)
                    conn.disarm(watch_id)
                else:
                    mailbox.disarm(conn, watch_id)
                conn.detach()

            def replace(*_: object) -> None:
                if reused:
                    return
                for conn, watch_id in ids.items():
                    end(conn, watch_id)
                del conn
                ids.clear()
                for other in spare:
                    conn = attach(other.server)
                    reused.append(conn)
                    arm(conn, lambda *_: pytest.fail("its peer is there"))

            for pair in pairs:
                conn = attach(pair.server)
                arm(conn, replace)
            del conn
            for pair in pairs:
                pair.client.close()
            wait_until(lambda: default_watcher().stats().num_armed == 0)
            await until(lambda: len(reused) == len(spare))
            for conn, watch_id in ids.items():
                end(conn, watch_id)

    run(main)


def test_listener_hears_of_each_watch_that_it_armed_until_it_is_forgotten(
    run: LoopRunner, tcp: Pair
) -> None:
    async def main() -> None:
        mailbox = loop_mailbox()
        with attach(tcp.server) as conn:
            heard: dict[int, tuple[Reason, int]] = {}

            def on_fired(reason: Reason, at_ns: int, watch_id: int) -> None:
                heard[watch_id] = reason, at_ns

            cookie = mailbox.listen(conn, on_fired)
            before = time.monotonic_ns()
            tokens = [CancelToken() for _ in range(3)]
            ids = [conn.arm(token, mailbox=mailbox.core, cookie=cookie) for token in tokens]
            assert conn.disarm(ids.pop()) is False
            tcp.client.close()
            await until(lambda: len(heard) == 2)
            assert set(heard) == set(ids)
            for reason, at_ns in heard.values():
                assert reason is Reason.FIN
                assert before <= at_ns <= time.monotonic_ns()
            assert [token.cancelled for token in tokens] == [True, True, False]
            mailbox.forget(conn)
            mailbox.forget(conn)
            conn.arm(mailbox=mailbox.core, cookie=cookie)
            mailbox.deliver()
            assert len(heard) == 2

    run(main)


def test_listener_that_is_forgotten_amid_a_batch_is_not_called(run: LoopRunner) -> None:
    async def main() -> None:
        mailbox = loop_mailbox()
        with contextlib.ExitStack() as stack:
            pairs = [stack.enter_context(connected()) for _ in range(2)]
            conns = [stack.enter_context(attach(pair.server)) for pair in pairs]
            called: list[int] = []

            def only(number: int) -> None:
                called.append(number)
                mailbox.forget(conns[1 - number])

            for number, conn in enumerate(conns):
                cookie = mailbox.listen(conn, lambda *_, number=number: only(number))
                conn.arm(mailbox=mailbox.core, cookie=cookie)
            for pair in pairs:
                pair.client.close()
            wait_until(lambda: default_watcher().stats().num_armed == 0)
            mailbox.deliver()
            assert len(called) == 1

    run(main)


def test_failing_function_is_reported_and_loses_no_other(run: LoopRunner, tcp: Pair) -> None:
    async def main() -> None:
        mailbox = loop_mailbox()
        with attach(tcp.server) as conn:
            heard: list[str] = []

            def fail(*_: object) -> None:
                heard.append("failing")
                raise KeyError("of the function")

            def note(*_: object) -> None:
                heard.append("other")

            # Whatever the order of delivery, one comes behind the one that fails.
            ids = [mailbox.arm(conn, None, function) for function in (note, fail, note)]
            tcp.client.close()
            await until(lambda: len(heard) == 3)
            for watch_id in ids:
                mailbox.disarm(conn, watch_id)

    run(main, reports=1)
    (report,) = run.reports
    assert isinstance(report["exception"], KeyError)


def test_hundreds_of_watches_that_fire_together_are_all_delivered(
    run: LoopRunner, tcp: Pair
) -> None:
    async def main() -> None:
        mailbox = loop_mailbox()
        with attach(tcp.server) as conn:
            heard: set[int] = set()
            ids = [
                mailbox.arm(conn, None, lambda *_, number=number: heard.add(number))
                for number in range(300)
            ]
            tcp.client.close()
            await until(lambda: len(heard) == 300)
            assert all([mailbox.disarm(conn, watch_id) for watch_id in ids])

    run(main)


def test_owners_word_is_delivered_before_the_detach_that_follows(
    run: LoopRunner, tcp: Pair
) -> None:
    async def main() -> None:
        mailbox = loop_mailbox()
        conn = attach(tcp.server)
        heard: list[Reason] = []
        token = CancelToken()
        watch_id = mailbox.arm(conn, token, lambda reason, _: heard.append(reason))
        assert mailbox.lost(conn, Reason.RESET) is True
        conn.detach()
        assert heard == [Reason.RESET]
        assert mailbox.disarm(conn, watch_id) is True

    run(main)


def test_owners_word_on_hundreds_of_watches_is_delivered_whole(run: LoopRunner, tcp: Pair) -> None:
    async def main() -> None:
        mailbox = loop_mailbox()
        conn = attach(tcp.server)
        heard: list[Reason] = []
        ids = [mailbox.arm(conn, None, lambda reason, _: heard.append(reason)) for _ in range(300)]
        mailbox.lost(conn, Reason.RESET)
        conn.detach()
        assert heard == [Reason.RESET] * 300
        for watch_id in ids:
            mailbox.disarm(conn, watch_id)

    run(main)


def test_watch_of_a_detached_connection_has_not_fired(run: LoopRunner, tcp: Pair) -> None:
    async def main() -> None:
        mailbox = loop_mailbox()
        conn = attach(tcp.server)
        watch_id = mailbox.arm(conn, None, lambda *_: None)
        conn.detach()
        assert mailbox.disarm(conn, watch_id) is False

    run(main)


def test_half_close_passes_a_gone_mask(run: LoopRunner, tcp: Pair) -> None:
    async def main() -> None:
        mailbox = loop_mailbox()
        with attach(tcp.server) as conn:
            heard: list[Reason] = []
            ids = [
                mailbox.arm(conn, None, lambda reason, _: heard.append(reason), mask=MASK_GONE),
                mailbox.arm(conn, None, lambda reason, _: heard.append(reason)),
            ]
            tcp.leave("half_close")
            await until(lambda: heard)
            assert heard == [Reason.FIN]
            tcp.leave("rst")
            await until(lambda: len(heard) == 2)
            assert heard == [Reason.FIN, Reason.RESET]
            for watch_id in ids:
                mailbox.disarm(conn, watch_id)

    run(main)


def test_loop_driven_watcher_belongs_to_one_loop(run: LoopRunner) -> None:
    async def main() -> None:
        async def elsewhere() -> LoopMailbox:
            return loop_mailbox(watcher)

        mailbox = loop_mailbox(watcher)
        assert mailbox.is_loop_driven
        with pytest.raises(RuntimeError, match="another loop"):
            await asyncio.to_thread(asyncio.run, elsewhere())
        del mailbox
        other = await asyncio.to_thread(asyncio.run, elsewhere())
        assert other.is_loop_driven

    with Watcher(driver="loop") as watcher:
        run(main)
        gc.collect()


def test_closed_watcher_takes_its_mailbox_out_of_the_loop(run: LoopRunner, tcp: Pair) -> None:
    async def main() -> None:
        watcher = Watcher()
        conn = watcher.attach(tcp.server)
        before = set(open_fds())
        mailbox = loop_mailbox(watcher)
        (notify_fd,) = set(open_fds()) - before
        watch_id = mailbox.arm(conn, None, lambda *_: pytest.fail("nobody left"))
        watcher.close()
        await until(lambda: notify_fd not in open_fds())
        assert mailbox.disarm(conn, watch_id) is False
        conn.detach()
        del mailbox
        with pytest.raises(ClosedError):
            loop_mailbox(watcher)

    run(main)


def test_no_running_loop_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="no running event loop"):
        loop_mailbox()


def in_child(function: Callable[[], None]) -> None:
    """Run ``function`` in a forked child and wait for its end."""
    pid = os.fork()
    if pid == 0:
        try:
            function()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_fork_that_drops_a_mailbox_leaves_its_parents_loop_alone(
    run: LoopRunner, tcp: Pair
) -> None:
    # The child shares the epoll set of the loop: a remove_reader there would deafen us.
    async def main() -> None:
        mailbox = loop_mailbox()
        in_child(mailbox.close)
        with attach(tcp.server) as conn:
            heard: list[Reason] = []
            watch_id = mailbox.arm(conn, None, lambda reason, _: heard.append(reason))
            tcp.client.close()
            await until(lambda: heard)
            mailbox.disarm(conn, watch_id)

    run(main)
