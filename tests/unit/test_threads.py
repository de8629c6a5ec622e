"""Many threads on the same objects, with the GIL changing hands between any two steps.

What each of them locks is in ``docs/architecture.md``; races of the core that need no
luck are in ``tests/c``.
"""

import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest

from disconnect_watch import (
    CancelToken,
    ClosedError,
    Connection,
    Reason,
    StaleWatchError,
    Watcher,
)
from disconnect_watch.watcher import default_watcher
from tests.support.net import Pair, connected, wait_until

NUM_THREADS = 4
NUM_ROUNDS = 100


@pytest.fixture(autouse=True)
def hurried_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


T = TypeVar("T")


def together(work: Callable[[int], T]) -> list[T]:
    """What ``work(index)`` returned on threads of its own, all begun at once.

    Raises:
        ExceptionGroup: what was raised there.
    """
    results: dict[int, T] = {}
    errors: list[Exception] = []
    start = threading.Barrier(NUM_THREADS)

    def run(index: int) -> None:
        start.wait()
        try:
            results[index] = work(index)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise ExceptionGroup("on other threads", errors)
    return [results[index] for index in range(NUM_THREADS)]


def test_each_watch_of_a_shared_connection_is_settled_by_its_disarm(
    watcher: Watcher, pair: Pair
) -> None:
    halfway = threading.Barrier(NUM_THREADS, action=pair.client.close, timeout=40)

    def work(index: int) -> list[tuple[bool, CancelToken]]:
        settled = []
        for turn in range(NUM_ROUNDS):
            token = CancelToken()
            watch_id = conn.arm(token)
            if turn == NUM_ROUNDS // 2:
                halfway.wait()
            settled.append((conn.disarm(watch_id), token))
        return settled

    with watcher.attach(pair.server) as conn:
        wait = CancelToken()
        conn.arm(wait)
        told = [told for settled in together(work) for told in settled]
        assert wait.wait(40)
    # Whoever was disarmed before hears nothing of the client, who has left since.
    assert [has_fired for has_fired, _ in told] == [token.cancelled for _, token in told]
    assert not told[0][0]
    assert {token.reason for _, token in told} <= {None, Reason.FIN}
    stats = watcher.stats()
    assert stats.num_fired == 1 + sum(has_fired for has_fired, _ in told)
    assert (stats.num_armed, stats.num_connections) == (0, 0)


def test_each_fired_watch_is_delivered_once_or_disarmed(watcher: Watcher, pair: Pair) -> None:
    mailbox = watcher.mailbox()
    delivered: list[int] = []
    is_over = threading.Event()

    def drain() -> None:
        while not is_over.is_set():
            delivered.extend(event.watch_id for event in mailbox.drain())

    def work(index: int) -> list[int]:
        # Half of them disarm, in the midst of the delivery.
        armed = [conn.arm(mailbox=mailbox) for _ in range(NUM_ROUNDS)]
        if index == 0:
            conn.lost(Reason.RESET)
        if index % 2:
            for watch_id in armed:
                conn.disarm(watch_id)
            return []
        return armed

    with watcher.attach(pair.server) as conn:
        drainer = threading.Thread(target=drain)
        drainer.start()
        kept = [watch_id for armed in together(work) for watch_id in armed]
        try:
            wait_until(lambda: set(kept) <= set(delivered))
        finally:
            is_over.set()
            drainer.join()
        assert len(delivered) == len(set(delivered))
    mailbox.close()


def test_connections_come_and_go_on_every_thread(watcher: Watcher) -> None:
    def work(index: int) -> int:
        num_told = 0
        for _ in range(NUM_ROUNDS // 5):
            with connected("unix") as pair, watcher.attach(pair.server) as conn:
                token = CancelToken()
                conn.arm(token)
                pair.client.close()
                num_told += token.wait(40)
        return num_told

    assert together(work) == [NUM_ROUNDS // 5] * NUM_THREADS
    stats = watcher.stats()
    assert (stats.num_armed, stats.num_connections) == (0, 0)
    assert stats.num_signals[Reason.FIN] == NUM_THREADS * NUM_ROUNDS // 5


def test_everything_may_be_closed_by_many_at_once(watcher: Watcher, pair: Pair) -> None:
    mailbox = watcher.mailbox()
    conn: Connection = watcher.attach(pair.server)
    ends = (conn.detach, mailbox.close, mailbox.wake, mailbox.drain, watcher.close)

    def work(index: int) -> set[type[Exception]]:
        refusals: set[type[Exception]] = set()
        for turn in range(NUM_ROUNDS + len(ends) + 1):
            try:
                if turn >= NUM_ROUNDS:
                    ends[(turn + index) % len(ends)]()
                conn.disarm(conn.arm(mailbox=mailbox))
            except (ClosedError, StaleWatchError) as refusal:
                refusals.add(type(refusal))
        return refusals

    assert all(together(work))
    with pytest.raises(ClosedError):
        watcher.attach(pair.server)


def test_mailbox_is_closed_amid_its_use(watcher: Watcher, pair: Pair) -> None:
    def work(index: int) -> int:
        num_refused = 0
        for mailbox in mailboxes:
            if index == 0:
                mailbox.close()
            for _ in range(3):
                try:
                    watch_id = conn.arm(mailbox=mailbox)
                    mailbox.wake()
                    mailbox.fileno()
                    assert mailbox.drain() == []
                    conn.disarm(watch_id)
                except ClosedError:
                    num_refused += 1
        return num_refused

    mailboxes = [watcher.mailbox() for _ in range(NUM_ROUNDS)]
    with watcher.attach(pair.server) as conn:
        assert together(work)[0] == 3 * NUM_ROUNDS


def test_connection_is_gone_for_who_comes_back_from_its_detach(watcher: Watcher) -> None:
    def work(index: int) -> None:
        for conn in conns:
            with contextlib.suppress(StaleWatchError):  # another was faster
                conn.arm()
            conn.detach()
            assert not conn.is_attached
            with pytest.raises(StaleWatchError):
                conn.arm()

    with contextlib.ExitStack() as stack:
        pairs = [stack.enter_context(connected("unix")) for _ in range(NUM_ROUNDS // 2)]
        conns = [watcher.attach(pair.server) for pair in pairs]
        together(work)
        assert watcher.stats().num_connections == 0


def test_loop_driven_watcher_is_polled_by_many_and_closed(pair: Pair) -> None:
    watcher = Watcher(driver="loop")

    def work(index: int) -> bool:
        if index == 0:
            is_told = token.wait(10)
            watcher.close()
            return is_told
        while True:
            try:
                watcher.poll(-1)
            except ClosedError:
                return True

    with watcher:
        conn = watcher.attach(pair.server)
        token = CancelToken()
        conn.arm(token)
        pair.client.close()
        assert all(together(work))


#: In a process that has made no token yet.
FIRST_TOKENS = """
import sys, threading
from disconnect_watch import CancelToken
sys.setswitchinterval(1e-6)
start = threading.Barrier(8)
tokens = []
def make():
    start.wait()
    tokens.append(CancelToken())
threads = [threading.Thread(target=make) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert len({id(token.table) for token in tokens}) == 1
assert len({(token.slot, token.generation) for token in tokens}) == 8
"""


def test_many_first_tokens_share_one_table() -> None:
    subprocess.run([sys.executable, "-c", FIRST_TOKENS], check=True, timeout=30)


def test_first_of_many_cancels_decides() -> None:
    for _ in range(NUM_ROUNDS):
        token = CancelToken()
        reasons = (Reason.ABORTED, Reason.DEADLINE, Reason.SHUTDOWN, Reason.RESET)
        won = together(lambda index: token.cancel(reasons[index]))  # noqa: B023
        assert won.count(True) == 1
        assert token.reason is reasons[won.index(True)]


def test_callback_is_called_once_or_removed() -> None:
    for _ in range(NUM_ROUNDS // 5):
        token = CancelToken()
        calls: list[int] = []

        def work(index: int) -> int:
            def callback(_: CancelToken) -> None:
                calls.append(index)  # noqa: B023

            token.add_callback(callback)  # noqa: B023
            if index == 0:
                token.cancel()  # noqa: B023
            return token.remove_callback(callback)  # noqa: B023

        removed = together(work)
        wait_until(lambda: len(calls) + sum(removed) == NUM_THREADS)  # noqa: B023
        assert sorted([*calls, *(i for i, was in enumerate(removed) if was)]) == [0, 1, 2, 3]


def test_many_first_users_get_the_same_default_watcher() -> None:
    for _ in range(NUM_ROUNDS // 5):
        default_watcher().close()
        assert len(set(map(id, together(lambda _: default_watcher())))) == 1
