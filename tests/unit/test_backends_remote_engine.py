"""An engine behind a socket: what a frontend sees of it, and what either leaves behind.

Both ends are on one loop here, over one flag table; ``test_frontends_*`` have processes.
"""

import asyncio
import contextlib
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import uvloop

from disconnect_watch import CancelToken, Reason
from disconnect_watch.backends.engine import EngineBackend
from disconnect_watch.backends.remote_engine.client import RemoteEngine, RemoteStream
from disconnect_watch.backends.remote_engine.frames import FrameLink
from disconnect_watch.backends.remote_engine.server import EngineServer
from disconnect_watch.engine import (
    EngineLostError,
    Outcome,
    PromptTooLongError,
    QueueFullError,
    RequestOutput,
    SamplingParams,
)
from tests.support.gate import Gate, gated, slowed
from tests.support.net import PATIENCE, until
from tests.support.serve import packaged_engine

ENDLESS = SamplingParams(max_tokens=100_000, ignore_eos=True)


class Pair:
    """An engine's process and a frontend's, without the processes."""

    def __init__(self, backend: EngineBackend) -> None:
        self.backend = backend
        self.drained: list[int] = []
        self.failed: list[None] = []
        self.server = EngineServer(
            backend, on_drained=self.drained.append, on_failed=lambda: self.failed.append(None)
        )
        self.remote = RemoteEngine(backend.engine.tokenizer, name="tiny")

    async def connect(self, remote: RemoteEngine | None = None) -> int:
        link_id = self.server.num_links
        ours, theirs = socket.socketpair()
        await self.server.add(link_id, theirs)
        await (remote or self.remote).connect(ours)
        return link_id

    async def submit(
        self, name: str, params: SamplingParams, prompt: Any = "The class", **options: Any
    ) -> RemoteStream:
        return await self.remote.submit(name, prompt, params, cancel=CancelToken(), **options)


@contextlib.asynccontextmanager
async def paired(**config: Any) -> AsyncIterator[Pair]:
    backend = EngineBackend(packaged_engine(**config), name="tiny")
    pair = Pair(backend)
    await pair.connect()
    try:
        # Else ENDLESS has an end, which a busy machine may see before what a test does.
        with slowed(backend.engine):
            yield pair
    finally:
        pair.remote.close()
        await asyncio.to_thread(backend.close)
        await until(lambda: not pair.server.num_links)


def run(main: Callable[[], Any]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


async def read(stream: RemoteStream) -> list[RequestOutput]:
    return [output async for output in stream]


def is_empty(backend: EngineBackend) -> bool:
    stats = backend.stats()
    return (
        stats.num_waiting == stats.num_running == 0
        and stats.num_blocks_available == stats.num_blocks
    )


def test_outputs_are_those_of_the_engine_itself() -> None:
    async def main() -> None:
        async with paired() as pair:
            params = SamplingParams(max_tokens=12, n=2, logprobs=2, temperature=0.7, seed=5)
            told = await read(await pair.submit("far", params))
            stream = await pair.backend.submit("near", "The class", params, cancel=CancelToken())
            expected = [output async for output in stream]
            for one, other in zip(told, expected, strict=True):
                assert one.request_id == "far"
                assert (one.text_delta, one.token_ids, one.index, one.finish_reason) == (
                    other.text_delta,
                    other.token_ids,
                    other.index,
                    other.finish_reason,
                )
                assert [each.top for each in one.logprobs] == [each.top for each in other.logprobs]
            assert told[-1].outcome is not None
            assert told[-1].outcome.kind == "finished"
            assert pair.remote.stats().outcomes["finished", None] >= 1

    run(main)


def test_a_store_in_memory_cancels_and_no_message_is_sent() -> None:
    async def main() -> None:
        async with paired() as pair:
            token = CancelToken()
            stream = await pair.remote.submit("r", "The class", ENDLESS, cancel=token)
            await anext(stream)
            sent: list[int] = []
            pair.remote.tell_closed = sent.append  # type: ignore[assignment, method-assign]
            token.cancel(Reason.FIN)
            outcome = (await read(stream))[-1].outcome
            assert outcome is not None
            assert (outcome.kind, outcome.reason, outcome.phase) == (
                "cancelled",
                Reason.FIN,
                "decode",
            )
            assert sent == []
            assert token.acked > 0
            await until(lambda: is_empty(pair.backend))

    run(main)


def test_a_stream_that_is_closed_ends_alone_though_its_token_is_shared() -> None:
    async def main() -> None:
        async with paired() as pair:
            token = CancelToken()
            one, other = [
                await pair.remote.submit(name, "The class", ENDLESS, cancel=token)
                for name in ("one", "other")
            ]
            outcomes: dict[str, Outcome] = {}
            pair.remote.listen(outcomes.__setitem__)
            one.close()
            await until(lambda: "one" in outcomes)
            assert outcomes["one"].reason is Reason.ABORTED
            assert one.is_over
            assert not other.is_over
            assert not token.cancelled
            other.close()
            await until(lambda: "other" in outcomes)

    run(main)


def test_refusals_are_those_of_the_engine() -> None:
    async def main() -> None:
        async with paired(max_queue=1, max_num_seqs=1) as pair:
            with pytest.raises(PromptTooLongError) as caught:
                await pair.submit("long", ENDLESS, [1] * 5000)
            assert caught.value.num_prompt_tokens == 5000
            for prompt, said in (
                ([], "no tokens"),
                ([1 << 40], "outside"),
                ([-1], "outside"),
                ([1 << 70], "out of range"),
                ([1.5], "no integer"),
                ("\ud800", "lone surrogate"),
            ):
                with pytest.raises(ValueError, match=said):
                    await pair.submit("wrong", ENDLESS, prompt)
            for priority in (1 << 63, 1 << 70):
                with pytest.raises(ValueError, match=f"priority is {priority}"):
                    await pair.submit("wrong", ENDLESS, priority=priority)
            runs = await pair.submit("runs", ENDLESS)
            await anext(runs)
            waits = await pair.submit("waits", ENDLESS)
            with pytest.raises(QueueFullError) as full:
                await pair.submit("over", ENDLESS)
            assert full.value.max_queue == 1
            waits.close()
            await until(lambda: waits.is_over)
            with pytest.raises(ValueError, match="in use"):
                await pair.submit("runs", ENDLESS)
            runs.close()

    run(main)


def test_of_several_prompts_all_are_taken_or_none() -> None:
    async def main() -> None:
        async with paired(max_queue=3) as pair:
            params = SamplingParams(max_tokens=2)
            prompts: dict[str, Any] = {"one": "The class", "two": [5, 6, 7]}
            streams = await pair.remote.submit_all(prompts, params, cancel=CancelToken())
            for stream in streams:
                outputs = await read(stream)
                assert outputs[-1].outcome is not None
                assert outputs[-1].outcome.num_generated_tokens == 2
            before = pair.backend.stats().num_requests
            wrong: dict[str, Any]
            for wrong in ({"three": []}, {f"r{number}": "The class" for number in range(3)}):
                with pytest.raises(ValueError, match=r"no tokens|answers are wanted"):
                    await pair.remote.submit_all(
                        {"good": "The class", **wrong}, params, cancel=CancelToken()
                    )
            assert pair.backend.stats().num_requests == before
            assert pair.remote._streams == {}

    run(main)


def test_whoever_is_cancelled_before_it_is_admitted_leaves_nothing() -> None:
    async def main() -> None:
        async with paired(max_queue=1, max_num_seqs=1) as pair:
            with gated(pair.backend.engine, layer=1) as gate:
                first = await pair.submit("first", ENDLESS)
                await asyncio.to_thread(gate.wait)
                # In the step that is held nothing is admitted.
                asked = [
                    asyncio.create_task(pair.submit(name, ENDLESS)) for name in ("waits", "over")
                ]
                await until(lambda: len(pair.remote._submitted) == 2)
                for each in asked:
                    each.cancel()
                await asyncio.wait(asked)
                first.close()
            await until(lambda: pair.remote._streams == {})
            assert pair.remote._submitted == {}
            await until(lambda: is_empty(pair.backend))

    run(main)


def test_abort_and_view_are_answered() -> None:
    async def main() -> None:
        async with paired() as pair:
            stream = await pair.submit("r", ENDLESS)
            await anext(stream)
            view = await pair.remote.view()
            assert [request.key for request in view.requests] == ["r"]
            assert len(view.blocks) == view.stats.num_blocks
            result = await pair.remote.abort("r")
            assert (result.outcome, result.phase) == ("cancelled", "decode")
            assert result.num_blocks_freed > 0
            assert (await pair.remote.abort("r")).outcome == "already_cancelled"
            assert (await pair.remote.abort("never")).outcome == "not_found"

    run(main)


def test_a_side_that_ends_as_the_link_begins_is_gone() -> None:
    # Symptom: the slots of a frontend that was killed as it started were never taken back.
    async def main() -> None:
        async with paired() as pair:
            ours, theirs = socket.socketpair()
            ours.close()
            await pair.server.add(7, theirs)
            await until(lambda: pair.drained == [7])
            other = RemoteEngine(pair.backend.engine.tokenizer, name="tiny")
            ours, theirs = socket.socketpair()
            theirs.close()
            await other.connect(ours)
            await until(lambda: not other.is_ready)
            with pytest.raises(EngineLostError, match="started again"):
                await other.submit("r", "The class", ENDLESS, cancel=CancelToken())
            assert await pair.connect(other) == 1
            assert other.is_ready
            other.close()

    run(main)


def test_each_frontend_hears_how_requests_of_all_ended() -> None:
    async def main() -> None:
        async with paired() as pair:
            other = RemoteEngine(pair.backend.engine.tokenizer, name="tiny")
            await pair.connect(other)
            heard: list[str] = []
            other.listen(lambda request_id, outcome: heard.append(request_id))
            await read(await pair.submit("r", SamplingParams(max_tokens=2)))
            await until(lambda: heard == ["r"])
            other.close()

    run(main)


@pytest.mark.parametrize("phase", ["waiting", "prefill", "decode"])
def test_requests_of_a_frontend_that_is_gone_end_and_it_is_told_when_all_have(phase: str) -> None:
    async def main() -> None:
        async with paired(max_num_seqs=1) as pair, _in(phase, pair) as (hold, outcomes):
            pair.remote.close()
            await until(lambda: not pair.remote.is_ready)
            if hold is not None:
                request = pair.backend.engine.find("r")
                assert request is not None
                await until(lambda: request.is_cancelled)  # the engine's side has noticed
                # The step that runs still has its flag: nothing may be taken back yet.
                assert pair.drained == []
                hold.open()
            await until(lambda: pair.drained == [0])
            assert outcomes["r"].phase == phase
            assert outcomes["r"].reason is Reason.OWNER_CLOSED
            await until(lambda: is_empty(pair.backend))

    run(main)


@pytest.mark.parametrize("phase", ["waiting", "prefill", "decode"])
def test_requests_of_an_engine_that_is_gone_are_told_behind_what_came(phase: str) -> None:
    async def main() -> None:
        async with paired(max_num_seqs=1) as pair, _in(phase, pair, lost=True):
            pass

    run(main)


@contextlib.asynccontextmanager
async def _in(
    phase: str, pair: Pair, *, lost: bool = False
) -> AsyncIterator[tuple[Gate | None, dict[str, Outcome]]]:
    """A request "r" in a phase; with ``lost``, its engine then goes."""
    outcomes: dict[str, Outcome] = {}
    pair.backend.listen(outcomes.__setitem__)
    with gated(pair.backend.engine, layer=1, after_steps=10**9) as gate:
        if phase == "waiting":
            first = await pair.submit("first", ENDLESS)
            await anext(first)
        if phase == "prefill":
            gate.hold()
        submitted = asyncio.create_task(pair.submit("r", ENDLESS))
        if phase == "prefill":
            await asyncio.to_thread(gate.wait)
        stream = await submitted
        if phase == "decode":
            await anext(stream)
            gate.hold()
            await asyncio.to_thread(gate.wait)
        if lost:
            pair.server.close()
            with pytest.raises(EngineLostError, match="ended before the request did"):
                await read(stream)
            assert stream.is_over
            with pytest.raises(EngineLostError, match="started again"):
                await pair.submit("next", ENDLESS)
            assert (await pair.remote.abort("r")).outcome == "already_finished"
            assert (await pair.remote.view()).requests == ()
            await pair.connect()
            gate.open()
            assert len(await read(await pair.submit("next", SamplingParams(max_tokens=2)))) > 0
        yield (None if phase == "waiting" else gate), outcomes


def test_the_engines_death_is_told_once() -> None:
    async def main() -> None:
        async with paired() as pair:
            stream = await pair.submit("r", ENDLESS)
            await anext(stream)

            def fail() -> None:
                raise RuntimeError("as no step does")

            pair.backend.engine.step = fail  # type: ignore[assignment]
            assert (await read(stream))[-1].outcome.kind == "failed"  # type: ignore[union-attr]
            await until(lambda: pair.failed == [None])
            with pytest.raises(EngineLostError):
                await pair.submit("next", ENDLESS)

    run(main)


def test_frames_come_whole_however_they_are_cut() -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        heard: list[bytes] = []
        lost = asyncio.Event()
        link = await FrameLink.connect(ours, lambda frame: heard.append(bytes(frame)), lost.set)
        frames = [b"", b"a", bytes(range(256)) * 1000]
        wire = b"".join(len(frame).to_bytes(4, "little") + frame for frame in frames)
        theirs.setblocking(True)
        loop = asyncio.get_running_loop()
        for start, end in ((0, 1), (1, 5), (5, 9), (9, 70_000), (70_000, len(wire))):
            await loop.run_in_executor(None, theirs.sendall, wire[start:end])
            # Each piece is read before the next is there.
            await until(lambda: sum(map(len, heard)) + 4 * len(heard) + len(link._rest) >= end)  # noqa: B023
        assert heard == frames
        theirs.close()
        await lost.wait()
        assert link.is_lost
        link.send(b"to nobody")
        link.close()

    run(main)


def test_a_frontend_before_it_loads_no_torch() -> None:
    script = (
        "import sys, disconnect_watch.server.run\n"
        "from disconnect_watch.backends.remote_engine.client import RemoteEngine\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=PATIENCE)
