"""What ``test_watch.py`` asks of a connection's first watch, of every later one.

They go the short way (``aio/_fast.pyx``), which is another.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from disconnect_watch import Reason, grace, watch
from disconnect_watch.aio import Watch, loop_mailbox
from tests.support.loops import LoopRunner
from tests.support.net import LEAVES, Pair, streams, transport_of, until
from tests.unit import test_watch
from tests.unit.test_watch import (
    test_block_is_cancelled_in_the_task_that_entered_it,
    test_block_may_read_its_stream_although_reading_is_paused,
    test_block_without_a_leave_is_left_alone,
    test_bytes_end_of_stream_and_errno_of_a_gone_client_reach_the_owner,
    test_cancel_from_outside_at_the_time_of_the_leave_wins,
    test_cancel_from_outside_is_neither_swallowed_nor_disguised,
    test_client_that_answers_our_close_with_his_own_cancels_nobody,
    test_close_of_ones_own_fires_the_token_and_cancels_nobody,
    test_disarmed_block_runs_on_when_its_client_leaves,
    test_exception_raised_meanwhile_propagates,
    test_exception_without_a_leave_propagates,
    test_full_stream_reader_is_not_resumed,
    test_half_close_is_served_when_it_is_ignored_and_a_reset_is_not,
    test_leave_fires_the_token_and_ends_the_block,
    test_leave_is_seen_while_the_transport_reads_or_pauses,
    test_nested_blocks_pause_once_and_the_last_resumes,
    test_no_cancel_escapes_a_block_that_has_no_await_left,
    test_outermost_of_nested_blocks_converts_the_cancel,
    test_owner_that_reads_the_end_first_is_the_second_source,
    test_pause_of_the_owner_is_not_resumed,
    test_pause_reading_off_lets_the_transport_read,
    test_pipelined_bytes_stay_in_the_kernel_and_reach_the_owner_afterwards,
    test_transport_that_is_closed_has_no_client,
    test_transport_that_took_over_a_watched_protocol_is_followed,
    test_two_sources_fire_once_and_cancel_once,
    test_watch_is_for_one_block_and_inside_a_task,
)

__all__ = [
    "test_block_is_cancelled_in_the_task_that_entered_it",
    "test_block_may_read_its_stream_although_reading_is_paused",
    "test_block_without_a_leave_is_left_alone",
    "test_bytes_end_of_stream_and_errno_of_a_gone_client_reach_the_owner",
    "test_cancel_from_outside_at_the_time_of_the_leave_wins",
    "test_cancel_from_outside_is_neither_swallowed_nor_disguised",
    "test_client_that_answers_our_close_with_his_own_cancels_nobody",
    "test_close_of_ones_own_fires_the_token_and_cancels_nobody",
    "test_disarmed_block_runs_on_when_its_client_leaves",
    "test_exception_raised_meanwhile_propagates",
    "test_exception_without_a_leave_propagates",
    "test_full_stream_reader_is_not_resumed",
    "test_half_close_is_served_when_it_is_ignored_and_a_reset_is_not",
    "test_leave_fires_the_token_and_ends_the_block",
    "test_leave_is_seen_while_the_transport_reads_or_pauses",
    "test_nested_blocks_pause_once_and_the_last_resumes",
    "test_no_cancel_escapes_a_block_that_has_no_await_left",
    "test_outermost_of_nested_blocks_converts_the_cancel",
    "test_owner_that_reads_the_end_first_is_the_second_source",
    "test_pause_of_the_owner_is_not_resumed",
    "test_pause_reading_off_lets_the_transport_read",
    "test_pipelined_bytes_stay_in_the_kernel_and_reach_the_owner_afterwards",
    "test_transport_that_is_closed_has_no_client",
    "test_transport_that_took_over_a_watched_protocol_is_followed",
    "test_two_sources_fire_once_and_cancel_once",
    "test_watch_is_for_one_block_and_inside_a_task",
]


# That a client left before the watch is known at once only where the watch attaches.
@pytest.fixture(params=[name for name, how in LEAVES.items() if not how.is_before])
def leave(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@contextlib.asynccontextmanager
async def watched(pair: Pair) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """The same streams, watched once before."""
    async with streams(pair) as (reader, writer):
        async with watch(writer):
            pass
        yield reader, writer


@pytest.fixture(autouse=True)
def watched_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_watch, "streams", watched)


def test_later_watch_goes_the_short_way_alone(
    run: LoopRunner, tcp: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def long_way(_: object) -> None:
        raise AssertionError("went the long way")

    async def main() -> None:
        async with watched(tcp) as (_, writer):
            monkeypatch.setattr(Watch, "_enter", long_way)
            for target in (writer, writer.transport):
                async with watch(target) as w:
                    assert not w.token.cancelled
                    assert not transport_of(writer).is_reading()
                async with watch(target, half_close="ignore", pause_reading=False):
                    assert transport_of(writer).is_reading()

    run(main)


def test_grace_of_a_later_watch_fires_no_token_before_it_is_over(
    run: LoopRunner, tcp: Pair
) -> None:
    async def main() -> None:
        async with watched(tcp) as (_, writer):
            conn = loop_mailbox().connections[tcp.server.fileno()].conn
            async with watch(writer, on_disconnect=grace(60)) as w:
                tcp.leave("fin")
                await until(lambda: w.reason is Reason.FIN)
                assert conn.reason is Reason.FIN
                assert not w.token.cancelled

    run(main)


def test_what_enters_and_leaves_is_a_coroutine_that_is_over(run: LoopRunner, tcp: Pair) -> None:
    async def main() -> None:
        async with watched(tcp) as (_, writer):
            block = watch(writer)
            async with contextlib.AsyncExitStack() as stack:
                assert await stack.enter_async_context(block) is block
                assert not transport_of(writer).is_reading()
            assert transport_of(writer).is_reading()
            entering = watch(writer)
            coroutine = entering.__aenter__()
            assert asyncio.iscoroutine(coroutine)
            with pytest.raises(StopIteration) as ended:
                coroutine.send(None)
            assert ended.value.value is entering
            with pytest.raises(StopIteration) as ended:
                next(coroutine.__await__())
            assert ended.value.value is entering
            with pytest.raises(ZeroDivisionError):
                coroutine.throw(ZeroDivisionError())
            coroutine.close()
            await entering.__aexit__(None, None, None)

    run(main)
