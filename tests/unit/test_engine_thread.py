"""The engine on its thread: streams on loops, leaving in every way, shutting down.

Where the order of events matters, the engine's thread is held inside a step by its layer hook.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from disconnect_watch.engine import (
    AbortResult,
    Engine,
    EngineThread,
    Outcome,
    RequestOutput,
    SamplingParams,
)
from disconnect_watch.engine.errors import (
    DuplicateRequestError,
    EngineClosedError,
    PromptTooLongError,
    QueueFullError,
)
from disconnect_watch.engine.thread import _call_all
from disconnect_watch.token import CancelToken, Reason
from tests.support.engine import dense_greedy, make_engine, tiny_model, tokens_of
from tests.support.loops import LoopRunner
from tests.support.net import until, wait_until

PROMPT = [5, 6, 7]


def params(num_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, ignore_eos=True)


class Told:
    """What ``on_outcome`` heard, in order."""

    def __init__(self) -> None:
        self.outcomes: list[tuple[str, Outcome]] = []

    def __call__(self, request_id: str, outcome: Outcome) -> None:
        self.outcomes.append((request_id, outcome))

    def of(self, request_id: str) -> Outcome:
        [outcome] = [outcome for name, outcome in self.outcomes if name == request_id]
        return outcome


class Gate:
    """Holds the engine's thread inside the forward of a step, until it is opened."""

    def __init__(self, engine: Engine) -> None:
        self.is_held = threading.Event()
        self._open = threading.Event()
        self._is_armed = False
        engine.layer_hook = self._hook

    def arm(self) -> None:
        """Hold the next forward."""
        self._is_armed = True

    def open(self) -> None:
        self._open.set()

    def _hook(self, _: int, layer: int) -> None:
        if self._is_armed and layer == 1:
            self._is_armed = False
            self.is_held.set()
            assert self._open.wait(40)


@contextmanager
def serving(**config: Any) -> Iterator[tuple[EngineThread, Told]]:
    told = Told()
    engine = make_engine(**config)
    with EngineThread(engine, on_outcome=told) as thread:
        yield thread, told
    engine.check_integrity()
    assert engine.stats().num_blocks_available == engine.stats().num_blocks


async def collect(stream: Any) -> list[RequestOutput]:
    return [output async for output in stream]


def test_a_stream_ends_with_its_outcome(run: LoopRunner) -> None:
    async def main() -> None:
        with serving() as (thread, told):
            outputs = await collect(thread.generate("a", PROMPT, params(10)))
            assert tokens_of(outputs) == dense_greedy(tiny_model(), PROMPT, 10)
            assert [output.outcome for output in outputs[:-1]] == [None] * 9
            assert outputs[-1].outcome == told.of("a")
            assert thread.stats().outcomes == {("finished", None): 1}

    run(main)


def test_many_streams_on_two_loops_get_their_own_tokens() -> None:
    prompts = {f"r{i}": [(i * 19 + j) % 256 for j in range(1 + 3 * i)] for i in range(8)}

    async def consume(thread: EngineThread, names: list[str]) -> dict[str, list[RequestOutput]]:
        streams = [collect(thread.generate(name, prompts[name], params(12))) for name in names]
        return dict(zip(names, await asyncio.gather(*streams), strict=True))

    results: dict[str, list[RequestOutput]] = {}

    def on_loop_of_its_own(thread: EngineThread, names: list[str]) -> None:
        results.update(asyncio.run(consume(thread, names)))

    with serving() as (thread, _):
        names = list(prompts)
        loops = [
            threading.Thread(target=on_loop_of_its_own, args=(thread, part))
            for part in (names[::2], names[1::2])
        ]
        for loop in loops:
            loop.start()
        for loop in loops:
            loop.join()
    for name, prompt in prompts.items():
        assert tokens_of(results[name]) == dense_greedy(tiny_model(), prompt, 12)


def test_one_step_crosses_to_a_loop_in_one_call(run: LoopRunner) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        call_soon_threadsafe = loop.call_soon_threadsafe
        wakes: list[int] = []

        def count(callback: Any, *args: Any, **kwargs: Any) -> asyncio.Handle:
            if callback is _call_all:
                wakes.append(len(args[0]))
            return call_soon_threadsafe(callback, *args, **kwargs)

        with serving() as (thread, _), pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop, "call_soon_threadsafe", count)
            gate = Gate(thread.engine)
            gate.arm()
            tasks = [asyncio.create_task(collect(thread.generate("0", PROMPT, params(20))))]
            await until(gate.is_held.is_set)
            tasks += [
                asyncio.create_task(collect(thread.generate(str(index), PROMPT, params(20))))
                for index in range(1, 6)
            ]
            await until(lambda: len(thread._commands) == 5)
            gate.open()
            outputs = await asyncio.gather(*tasks)
        assert [len(tokens_of(output)) for output in outputs] == [20] * 6
        # One for the first admission, one for the five others, and one a step.
        assert len(wakes) == 2 + len(thread.engine.step_log)
        assert sum(wakes) == 6 + 6 * 20

    run(main)


def test_priority_and_time_reach_the_engine(run: LoopRunner) -> None:
    async def main() -> None:
        with serving() as (thread, told):
            late = await collect(
                thread.generate("late", PROMPT, params(9), priority=2, time_limit=0)
            )
            assert late[-1].outcome == told.of("late")
            assert told.of("late").reason is Reason.DEADLINE
            stream = await thread.submit("b", PROMPT, params(2), priority=2, time_limit=60)
            assert (stream.request.priority, stream.request.deadline_ns is None) == (2, False)
            assert (await collect(stream))[-1].outcome == told.of("b")

    run(main)


def test_several_answers_come_in_one_stream_and_leave_with_it(run: LoopRunner) -> None:
    async def main() -> None:
        with serving() as (thread, told):
            several = SamplingParams(max_tokens=6, ignore_eos=True, n=3)
            outputs = await collect(thread.generate("a", PROMPT, several))
            for index in range(3):
                answer = [output for output in outputs if output.index == index]
                assert tokens_of(answer) == dense_greedy(tiny_model(), PROMPT, 6)
            generator = thread.generate("b", PROMPT, several)
            async for output in generator:
                if output.index == 0 and output.finish_reason is not None:
                    break
            await generator.aclose()
            await until(lambda: len(told.outcomes) == 2)
            assert (await thread.abort("b")).outcome in ("already_cancelled", "already_finished")

    run(main)


def test_closing_a_stream_aborts_its_request(run: LoopRunner) -> None:
    async def main() -> None:
        with serving() as (thread, told):
            generator = thread.generate("a", PROMPT, params(120))
            async for _ in generator:
                break
            await generator.aclose()
            await until(lambda: told.outcomes)
            assert (told.of("a").kind, told.of("a").reason) == ("cancelled", Reason.ABORTED)
            assert (await thread.abort("a")).outcome == "already_cancelled"

    run(main)


def test_cancelling_the_task_aborts_the_request_and_is_not_swallowed(run: LoopRunner) -> None:
    async def main() -> None:
        with serving() as (thread, told):
            task = asyncio.create_task(collect(thread.generate("a", PROMPT, params(120))))
            await until(lambda: thread.stats().num_generated_tokens)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await until(lambda: told.outcomes)
            assert told.of("a").reason is Reason.ABORTED

    run(main)


def test_a_task_cancelled_before_admission_leaves_nothing_behind(run: LoopRunner) -> None:
    async def main() -> None:
        with serving() as (thread, told):
            gate = Gate(thread.engine)
            gate.arm()
            first = await thread.submit("first", PROMPT, params(2))
            await until(gate.is_held.is_set)
            task = asyncio.create_task(collect(thread.generate("a", PROMPT, params(9))))
            await until(lambda: thread._commands)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            gate.open()
            assert (await collect(first))[-1].outcome == told.of("first")
            await until(lambda: len(told.outcomes) == 2)
            assert (told.of("a").kind, told.of("a").phase) == ("cancelled", "waiting")
            assert told.of("a").num_generated_tokens == 0

    run(main)


def test_a_token_ends_the_stream_with_its_reason_and_no_error(run: LoopRunner) -> None:
    async def main() -> None:
        with serving() as (thread, told):
            token = CancelToken()
            outputs = []
            async for output in thread.generate("a", PROMPT, params(120), cancel=token):
                outputs.append(output)
                token.cancel(Reason.FIN)
            outcome = outputs[-1].outcome
            assert outcome is not None
            assert outcome == told.of("a")
            assert (outcome.reason, outcome.kind) == (Reason.FIN, "cancelled")
            assert outputs[-1].token_ids == ()

    run(main)


def test_a_blocked_loop_does_not_delay_a_cancel() -> None:
    async def main() -> None:
        with serving() as (thread, told):
            token = CancelToken()
            stream = await thread.submit("a", PROMPT, params(120), cancel=token)
            token.cancel(Reason.FIN)
            # No await: the loop is blocked, and the engine acts all the same.
            wait_until(lambda: told.outcomes)
            assert told.of("a").reason is Reason.FIN
            assert thread.stats().num_blocks_used == 0
            stream.close()

    asyncio.run(main())


def test_abort_by_id_is_answered_after_its_effect(run: LoopRunner) -> None:
    async def main() -> None:
        with serving() as (thread, told):
            stream = await thread.submit("a", PROMPT, params(120))
            await anext(aiter(stream))
            results = await asyncio.gather(*(thread.abort("a") for _ in range(3)))
            assert thread.stats().num_blocks_used == 0
            [first, *others] = results
            assert (first.outcome, first.num_blocks_freed > 0) == ("cancelled", True)
            assert {result.outcome for result in others} == {"already_cancelled"}
            assert (await collect(stream))[-1].outcome == told.of("a")
            assert await thread.abort("nobody") == AbortResult("not_found")

    run(main)


def test_abort_reaches_into_a_running_prefill(run: LoopRunner) -> None:
    async def main() -> None:
        with serving() as (thread, told):
            gate = Gate(thread.engine)
            gate.arm()
            stream = await thread.submit("a", PROMPT * 15, params(9))
            await until(gate.is_held.is_set)
            abort = asyncio.create_task(thread.abort("a"))
            await until(lambda: thread._commands)
            gate.open()
            result = await abort
            assert (result.outcome, result.phase) == ("cancelled", "prefill")
            assert result.num_blocks_freed == 12
            [record] = thread.engine.step_log
            assert record.layer_tokens == (45,)
            assert record.dropped == {"a": 1}
            assert (await collect(stream))[-1].outcome == told.of("a")

    run(main)


def test_an_id_that_is_aborted_and_taken_again_keeps_its_streams_apart(run: LoopRunner) -> None:
    async def main() -> None:
        with serving() as (thread, _):
            gate = Gate(thread.engine)
            gate.arm()
            old = await thread.submit("a", PROMPT, params(120))
            await until(gate.is_held.is_set)
            # Both commands wait for the same pause between two steps.
            thread._commands.append((lambda: thread.engine.abort("a"), asyncio.Future()))
            new = asyncio.create_task(collect(thread.generate("a", PROMPT, params(4))))
            await until(lambda: len(thread._commands) == 2)
            gate.open()
            outcome = (await collect(old))[-1].outcome
            assert outcome is not None
            assert (outcome.kind, outcome.phase) == ("cancelled", "decode")
            assert tokens_of(await new) == dense_greedy(tiny_model(), PROMPT, 4)

    run(main)


@pytest.mark.parametrize(
    ("prompt", "error"), [([1] * 128, PromptTooLongError), ([], ValueError), ("\ud800", ValueError)]
)
def test_a_prompt_that_is_refused_raises_before_the_first_output(
    run: LoopRunner, prompt: Any, error: type[Exception]
) -> None:
    async def main() -> None:
        with serving() as (thread, told):
            with pytest.raises(error):
                await thread.submit("a", prompt)
            with pytest.raises(error):
                await collect(thread.generate("a", prompt))
            assert told.outcomes == []
            assert thread.stats().num_requests == 0

    run(main)


def test_what_the_engine_refuses_reaches_the_submitter(run: LoopRunner) -> None:
    async def main() -> None:
        with serving(max_queue=1, max_num_seqs=1) as (thread, _):
            gate = Gate(thread.engine)
            gate.arm()
            async with await thread.submit("runs", PROMPT, params(120)):
                await until(gate.is_held.is_set)
                same_id, waits, late = (
                    asyncio.create_task(thread.submit(name, PROMPT))
                    for name in ("runs", "waits", "late")
                )
                await until(lambda: len(thread._commands) == 3)
                gate.open()
                with pytest.raises(DuplicateRequestError):
                    await same_id
                (await waits).close()
                with pytest.raises(QueueFullError):
                    await late

    run(main)


def test_several_prompts_are_queued_together_or_not_at_all(run: LoopRunner) -> None:
    async def main() -> None:
        with serving(max_queue=2, max_num_seqs=1) as (thread, told):
            with pytest.raises(ValueError, match="3 answers are wanted"):
                await thread.submit_all({"a": [], "b": [], "c": []})  # before one is looked at
            with pytest.raises(ValueError, match="no tokens"):
                await thread.submit_all({"a": PROMPT, "b": []})
            gate = Gate(thread.engine)
            gate.arm()
            async with await thread.submit("runs", PROMPT, params(120)):
                await until(gate.is_held.is_set)
                together, late = (
                    asyncio.create_task(thread.submit_all(dict.fromkeys(names, PROMPT), params(2)))
                    for names in ("ab", "cd")
                )
                await until(lambda: len(thread._commands) == 2)
                gate.open()
                streams = await together
                assert [stream.request.request_id for stream in streams] == ["a", "b"]
                with pytest.raises(QueueFullError):
                    await late
            for stream in streams:
                assert len(tokens_of(await collect(stream))) == 2
            assert {name for name, _ in told.outcomes} == {"runs", "a", "b"}
            assert thread.stats().num_requests == 3

    run(main)


def test_who_is_cancelled_while_his_prompts_are_on_their_way_leaves_none_of_them(
    run: LoopRunner,
) -> None:
    async def main() -> None:
        with serving() as (thread, told):
            gate = Gate(thread.engine)
            gate.arm()
            async with await thread.submit("runs", PROMPT, params(120)):
                await until(gate.is_held.is_set)
                coming = asyncio.create_task(
                    thread.submit_all(dict.fromkeys("ab", PROMPT), params(120))
                )
                await until(lambda: thread._commands)
                coming.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await coming
                gate.open()
                await until(lambda: len(told.outcomes) == 2)
            for name in "ab":
                assert (told.of(name).kind, told.of(name).phase) == ("cancelled", "waiting")

    run(main)


def test_a_long_text_is_tokenized_off_the_loop(run: LoopRunner) -> None:
    async def main() -> None:
        with serving(max_model_len=None, num_blocks=2000) as (thread, _):
            encode = thread.engine.tokenizer.encode
            threads: list[threading.Thread] = []

            def spy(text: str) -> list[int]:
                threads.append(threading.current_thread())
                return encode(text)[:5]

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(thread.engine.tokenizer, "encode", spy)
                await collect(thread.generate("short", "x" * 4096, params(1)))
                await collect(thread.generate("long", "x" * 4097, params(1)))
            assert threads[0] is threading.current_thread()
            assert threads[1] is not threading.current_thread()

    run(main)


def test_close_lets_requests_finish_within_the_grace(run: LoopRunner) -> None:
    async def main() -> None:
        with serving() as (thread, told):
            stream = await thread.submit("a", PROMPT, params(30))
            await asyncio.to_thread(thread.close, 20.0)
            assert told.of("a").kind == "finished"
            assert len(tokens_of(await collect(stream))) == 30
            with pytest.raises(EngineClosedError):
                await thread.submit("b", PROMPT)

    run(main)


def test_close_cancels_what_is_left_after_the_grace(run: LoopRunner) -> None:
    async def main() -> None:
        with serving(max_num_seqs=1) as (thread, told):
            gate = Gate(thread.engine)
            gate.arm()
            runs = await thread.submit("a", PROMPT, params(120))
            await until(gate.is_held.is_set)
            waits = asyncio.create_task(thread.submit("b", PROMPT, params(120)))
            await until(lambda: thread._commands)
            closing = asyncio.create_task(asyncio.to_thread(thread.close))
            await until(lambda: not thread.is_accepting)
            gate.open()
            await closing
            for name, stream in (("a", runs), ("b", await waits)):
                assert (await collect(stream))[-1].outcome == told.of(name)
                assert told.of(name).reason is Reason.SHUTDOWN
            # With no thread left, an abort is answered at once.
            assert (await thread.abort("a")).outcome == "already_cancelled"
            thread.close()

    run(main)


def test_an_idle_engine_does_no_steps_and_wakes_for_a_request(run: LoopRunner) -> None:
    async def main() -> None:
        with serving() as (thread, _):
            await collect(thread.generate("a", PROMPT, params(3)))
            turns: list[None] = []
            wait = thread._wake.wait

            def count(timeout: float | None = None) -> bool:
                turns.append(None)
                return wait(timeout)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(thread._wake, "wait", count)
                await collect(thread.generate("b", PROMPT, params(3)))
                await until(lambda: turns)
                num_steps = thread.stats().num_steps
                await collect(thread.generate("c", PROMPT, params(3)))
                assert thread.stats().num_steps == num_steps + 3

    run(main)


def test_a_loop_that_was_closed_loses_its_requests(run: LoopRunner) -> None:
    async def leave_behind(thread: EngineThread, gate: Gate) -> None:
        gate.arm()
        await thread.submit("a", PROMPT, params(120))
        await until(gate.is_held.is_set)

    with serving() as (thread, told):
        gate = Gate(thread.engine)
        asyncio.run(leave_behind(thread, gate))
        gate.open()
        wait_until(lambda: told.outcomes)
        assert told.of("a").reason is Reason.OWNER_CLOSED

        async def others_go_on() -> None:
            assert len(tokens_of(await collect(thread.generate("b", PROMPT, params(5))))) == 5

        run(others_go_on)


def test_an_engine_that_fails_ends_its_requests_and_takes_no_more(
    run: LoopRunner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        with serving() as (thread, told):
            gate = Gate(thread.engine)
            gate.arm()
            stream = await thread.submit("a", PROMPT, params(120))
            await until(gate.is_held.is_set)

            def fail() -> None:
                raise RuntimeError("a bug in the scheduler")

            monkeypatch.setattr(thread.engine._scheduler, "schedule", fail)
            gate.open()
            outcome = (await collect(stream))[-1].outcome
            assert outcome is not None
            assert outcome == told.of("a")
            assert outcome.error == "RuntimeError: a bug in the scheduler"
            await until(lambda: not thread.is_accepting)
            with pytest.raises(EngineClosedError, match="was closed or has failed"):
                await thread.submit("b", PROMPT)

    with caplog.at_level(logging.CRITICAL, "disconnect_watch.engine"):
        run(main)


def test_a_request_accepted_while_the_engine_fails_fails_with_it(
    run: LoopRunner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is told of the failure, not of a shutdown that nobody asked for."""

    async def main() -> None:
        with serving() as (thread, told):
            gate = Gate(thread.engine)
            gate.arm()
            await thread.submit("a", PROMPT, params(120))
            await until(gate.is_held.is_set)
            late = asyncio.create_task(collect(thread.generate("late", PROMPT)))
            await until(lambda: thread._commands)

            def fail(*_: object) -> None:
                raise RuntimeError("a bug in the step")

            monkeypatch.setattr(thread.engine, "_log_step", fail)
            gate.open()
            outcome = (await late)[-1].outcome
            assert not thread.is_accepting
            assert outcome is not None
            assert outcome == told.of("late")
            assert (outcome.kind, outcome.error) == ("failed", "RuntimeError: a bug in the step")

    with caplog.at_level(logging.CRITICAL, "disconnect_watch.engine"):
        run(main)


@pytest.mark.parametrize("broken", ["fail_all", "stats", "take_outputs"])
def test_an_engine_that_cannot_even_fail_ends_every_stream(
    run: LoopRunner,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    broken: str,
) -> None:
    """Whoever waits, for an output, an admission, an abort or a view, is told why in vain."""

    async def main() -> None:
        with serving() as (thread, told):
            gate = Gate(thread.engine)
            gate.arm()
            stream = await thread.submit("a", PROMPT, params(120))
            await until(gate.is_held.is_set)
            late = asyncio.create_task(thread.submit("late", PROMPT))
            abort = asyncio.create_task(thread.abort("late"))
            view = asyncio.create_task(thread.view())
            await until(lambda: len(thread._commands) == 3)

            def fail(*_: object) -> None:
                raise RuntimeError("a bug at the end")

            monkeypatch.setattr(thread.engine._scheduler, "schedule", fail)
            monkeypatch.setattr(thread.engine, "_log_step", fail)
            monkeypatch.setattr(thread.engine, broken, fail)
            gate.open()
            outcome = (await collect(stream))[-1].outcome
            assert outcome is not None
            assert (outcome.kind, outcome.error) == ("failed", "RuntimeError: a bug at the end")
            assert outcome == told.of("a")
            assert stream.is_over
            for asked in (late, abort, view):
                with contextlib.suppress(RuntimeError):
                    await asked
            assert not thread.is_accepting
            monkeypatch.undo()
            thread.engine.cancel_all(Reason.SHUTDOWN)

    with caplog.at_level(logging.CRITICAL, "disconnect_watch.engine"):
        run(main)


def test_a_thread_that_was_never_started_refuses_and_closes(run: LoopRunner) -> None:
    async def main() -> None:
        thread = EngineThread(make_engine())
        with pytest.raises(EngineClosedError):
            await thread.submit("a", PROMPT)
        assert (await thread.abort("a")).outcome == "not_found"
        thread.close()

    run(main)
