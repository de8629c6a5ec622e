"""Cancel tokens: the first reason stays, every waiter hears of it, nothing leaks."""

import asyncio
import ctypes
import gc
import itertools
import math
import os
import threading
import time

import pytest

from disconnect_watch import CancelToken, ClientDisconnected, Reason
from disconnect_watch.token import FlagSet, flag_table
from tests.support.loops import LoopRunner
from tests.support.net import wait_until


def test_live_token_has_no_reason_and_no_time() -> None:
    token = CancelToken()
    assert not token.cancelled
    assert token.reason is None
    assert token.cancelled_at is None
    assert token.cancelled_at_ns == 0
    token.raise_if_cancelled()


@pytest.mark.parametrize("reason", Reason)
def test_first_cancel_decides_the_reason(reason: Reason) -> None:
    token = CancelToken()
    before = time.monotonic()
    assert token.cancel(reason) is True
    assert token.cancel(Reason.ABORTED) is False
    assert token.cancelled
    assert token.reason is reason
    assert token.cancelled_at is not None
    assert before <= token.cancelled_at <= time.monotonic()


def test_raise_if_cancelled_carries_reason_and_time() -> None:
    token = CancelToken()
    token.cancel(Reason.DEADLINE)
    with pytest.raises(ClientDisconnected, match="deadline") as caught:
        token.raise_if_cancelled()
    assert caught.value.reason is Reason.DEADLINE
    assert caught.value.detected_at == token.cancelled_at


def test_address_is_the_word_that_native_code_reads() -> None:
    token = CancelToken()
    word = ctypes.c_uint32.from_address(token.address)
    assert word.value == token.generation << 8
    token.cancel(Reason.RESET)
    assert word.value == token.generation << 8 | Reason.RESET.code


def test_wait_returns_when_another_thread_cancels() -> None:
    token = CancelToken()
    started = threading.Event()

    def cancel() -> None:
        started.set()
        token.cancel()

    thread = threading.Thread(target=cancel)
    thread.start()
    assert token.wait(40)
    thread.join()
    assert started.is_set()


def test_wait_says_false_when_its_time_is_over() -> None:
    assert CancelToken().wait(0) is False
    assert CancelToken().wait(0.001) is False


@pytest.mark.parametrize("timeout", [math.inf, 1e10])
def test_wait_takes_a_timeout_beyond_64_bits_of_nanoseconds(timeout: float) -> None:
    token = CancelToken()
    thread = threading.Thread(target=token.cancel)
    thread.start()
    assert token.wait(timeout)
    thread.join()


def test_callback_runs_once_off_the_caller_thread() -> None:
    token = CancelToken()
    calls: list[tuple[CancelToken, int]] = []
    token.add_callback(lambda token: calls.append((token, threading.get_ident())))
    token.cancel()
    wait_until(lambda: calls)
    token.cancel(Reason.FIN)
    ((called, thread_id),) = calls
    assert called is token
    assert thread_id != threading.get_ident()


def test_callback_added_after_the_cancel_runs_too() -> None:
    token = CancelToken()
    token.cancel()
    calls: list[CancelToken] = []
    token.add_callback(calls.append)
    wait_until(lambda: calls == [token])


def is_asleep(thread: threading.Thread) -> bool:
    with open(f"/proc/self/task/{thread.native_id}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] == "S"


def test_callback_added_after_the_cancel_wakes_the_thread_that_serves_others() -> None:
    token = CancelToken()
    token.cancel()
    waiting = CancelToken()
    waiting.add_callback(lambda _: None)
    (thread,) = (t for t in threading.enumerate() if t.name == "disconnect-watch-callbacks")
    looks = itertools.count()  # more than one: it sleeps for moments on its way, too
    wait_until(lambda: is_asleep(thread) and next(looks) == 5)
    calls: list[CancelToken] = []
    token.add_callback(calls.append)
    wait_until(lambda: calls == [token])


def test_removed_callback_never_runs() -> None:
    token = CancelToken()
    calls: list[str] = []

    def unwanted(_: CancelToken) -> None:
        calls.append("unwanted")

    token.add_callback(unwanted)
    assert token.remove_callback(unwanted) == 1
    assert token.remove_callback(unwanted) == 0
    token.add_callback(lambda _: calls.append("wanted"))
    token.cancel()
    wait_until(lambda: calls)
    assert calls == ["wanted"]


def test_callback_with_a_loop_runs_on_that_loop(run: LoopRunner) -> None:
    async def main() -> None:
        token = CancelToken()
        heard = asyncio.get_running_loop().create_future()

        def on_cancel(_: CancelToken) -> None:
            heard.set_result(threading.get_ident())

        token.add_callback(on_cancel, loop=asyncio.get_running_loop())
        token.cancel()
        assert await heard == threading.get_ident()

    run(main)


def test_failing_callback_is_reported_and_stops_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reported: list[str] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: reported.append(str(args.exc_value)))
    token = CancelToken()
    calls: list[CancelToken] = []

    def fail(_: CancelToken) -> None:
        raise RuntimeError("of the callback")

    token.add_callback(fail)
    token.add_callback(calls.append)
    token.cancel()
    wait_until(lambda: calls)
    assert reported == ["of the callback"]


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_callback_that_ends_its_thread_ends_no_other_callback(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    reported: list[type[BaseException]] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: reported.append(args.exc_type))

    def fail(_: CancelToken) -> None:
        raise error

    calls: list[CancelToken] = []
    first, later = CancelToken(), CancelToken()
    first.add_callback(fail)
    first.add_callback(calls.append)
    first.cancel()
    wait_until(lambda: calls == [first])
    later.add_callback(calls.append)
    later.cancel()
    wait_until(lambda: calls == [first, later])
    assert reported == [error]


class CyclicToken(CancelToken):
    itself: CancelToken


def test_token_in_a_reference_cycle_is_freed_by_the_collector() -> None:
    # Symptom: a crash in the collector, which had cleared the table before the release.
    gc.collect()
    before = flag_table().stats()[0]
    for _ in range(100):
        token = CyclicToken()
        token.itself = token
    del token
    assert flag_table().stats()[0] > before
    gc.collect()
    assert flag_table().stats()[0] == before


def test_forked_child_cancels_its_parents_token() -> None:
    token = CancelToken()
    pid = os.fork()
    if pid == 0:
        os._exit(0 if token.cancel(Reason.SHUTDOWN) else 1)
    assert token.wait(40)
    assert token.reason is Reason.SHUTDOWN
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_token_takes_no_arguments_but_a_class_of_ones_own_may() -> None:
    class Named(CancelToken):
        def __init__(self, name: str) -> None:
            self.name = name

    with pytest.raises(TypeError, match="argument"):
        CancelToken(1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="argument"):
        CancelToken(reason=Reason.FIN)  # type: ignore[call-arg]
    assert Named("a").name == "a"


@pytest.mark.parametrize("wrong", ["fin", "bogus", 1, None])
def test_what_is_no_reason_is_named_and_cancels_nothing(wrong: object) -> None:
    token = CancelToken()
    with pytest.raises(TypeError, match=rf"reason {wrong!r}: must be a Reason"):
        token.cancel(wrong)  # type: ignore[arg-type]
    assert not token.cancelled


def test_a_callback_that_cannot_be_called_is_refused_at_once() -> None:
    # Symptom: an exception on the callback thread, long after the mistake.
    token = CancelToken()
    with pytest.raises(TypeError, match="callback 'print': must be callable"):
        token.add_callback("print")  # type: ignore[arg-type]
    assert token.remove_callback(print) == 0


def test_a_set_of_tokens_has_fired_when_any_of_them_has() -> None:
    flags = FlagSet()
    assert not flags.any_fired()
    tokens = [CancelToken() for _ in range(100)]
    for token in tokens:
        flags.add(token)
    assert len(flags) == 100
    assert not flags.any_fired()
    tokens[63].cancel()
    assert flags.any_fired()
    flags.remove(tokens[63])
    assert not flags.any_fired()


def test_those_that_stay_in_a_set_are_looked_at_whoever_goes() -> None:
    for gone, fires in itertools.permutations(range(3), 2):
        flags, tokens = FlagSet(), [CancelToken() for _ in range(3)]
        for token in tokens:
            flags.add(token)
        flags.remove(tokens[gone])
        assert not flags.any_fired()
        tokens[gone].cancel()
        assert not flags.any_fired()
        tokens[fires].cancel()
        assert flags.any_fired()


def test_a_shared_token_stays_in_a_set_until_it_was_removed_as_often_as_added() -> None:
    flags, token = FlagSet(), CancelToken()
    flags.add(token)
    flags.add(token)
    assert len(flags) == 1
    flags.remove(token)
    token.cancel()
    assert flags.any_fired()
    flags.remove(token)
    assert not flags.any_fired()
    with pytest.raises(KeyError):
        flags.remove(token)


def test_a_set_holds_its_tokens_so_that_no_slot_changes_hands() -> None:
    flags = FlagSet()
    flags.add(CancelToken())
    before = flag_table().stats()[0]
    gc.collect()
    assert flag_table().stats()[0] == before
    del flags
    assert flag_table().stats()[0] == before - 1
