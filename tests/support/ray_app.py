"""Runs in the venv of ``.ci/ray``: Ray Serve with our proxy callback, and an engine as an actor.

    python -m tests.support.ray_app DIRECTORY PORT

Prints a line of JSON when it serves, and ends with its stdin. What the deployments do they
write to ``DIRECTORY/events``, a line of JSON each.
"""

import asyncio
import contextlib
import json
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import ray
from ray import serve
from starlette.requests import Request
from starlette.responses import StreamingResponse

from disconnect_watch import CancelToken
from disconnect_watch.adapters.ray_serve import cancellable, client_token
from disconnect_watch.backends.ray_actor import generate
from disconnect_watch.engine import EngineConfig, SamplingParams
from tests.support.documents import blocks_of

ENDLESS = SamplingParams(max_tokens=1000, ignore_eos=True)


class Log:
    """Appends events to a file that several processes write."""

    def __init__(self, directory: str) -> None:
        self._path = Path(directory) / "events"

    def write(self, **event: Any) -> None:
        line = json.dumps({**event, "at_ns": time.monotonic_ns()}) + "\n"
        with self._path.open("ab", buffering=0) as file:
            file.write(line.encode())

    @contextlib.contextmanager
    def running(self, name: str) -> Iterator[CancelToken]:
        token = client_token()
        self.write(name=name, event="begun")
        ended = "done"
        try:
            yield token
        except BaseException as error:
            ended = type(error).__name__
            raise
        finally:
            self.write(
                name=name, event="ended", by=ended, told=token.cancelled, reason=token.reason
            )


@serve.deployment(ray_actor_options={"num_cpus": 0})
class Back:
    """What the front calls through a handle."""

    def __init__(self, log: Log) -> None:
        self._log = log

    @cancellable
    async def items(self) -> AsyncIterator[bytes]:
        with self._log.running("items"):
            yield b"one"
            await asyncio.Event().wait()

    @cancellable
    def steps(self) -> Iterator[bytes]:
        with self._log.running("steps") as token:
            yield b"one"
            token.wait()
            yield b"never read"


@serve.deployment(ray_actor_options={"num_cpus": 0})
class Front:
    """A method for each path."""

    def __init__(self, log: Log, back: Any, engine: Any) -> None:
        self._log = log
        self._back = back
        self._engine = engine

    async def __call__(self, request: Request) -> Any:
        return await getattr(self, request.url.path.strip("/"))()

    @cancellable
    async def answers(self) -> dict[str, Any]:
        with self._log.running("answers") as token:
            return {"cancelled": token.cancelled}

    @cancellable
    async def waits(self) -> None:
        with self._log.running("waits"):
            await asyncio.Event().wait()

    @cancellable
    async def waits_for_a_thread(self) -> None:
        """Sees its cancel, and waits for what only the token stops."""
        with self._log.running("waits_for_a_thread") as token:
            thread = threading.Thread(target=token.wait)
            thread.start()
            try:
                await asyncio.Event().wait()
            finally:
                thread.join()

    @cancellable
    def plain(self) -> None:
        with self._log.running("plain") as token:
            token.wait()

    @cancellable
    async def streams(self) -> StreamingResponse:
        async def items() -> AsyncIterator[bytes]:
            with self._log.running("streams"):
                yield b"one"
                await asyncio.Event().wait()

        return StreamingResponse(items())

    async def items(self) -> StreamingResponse:
        return StreamingResponse(self._back.options(stream=True).items.remote())

    async def steps(self) -> StreamingResponse:
        return StreamingResponse(self._back.options(stream=True).steps.remote())

    @cancellable
    async def engine(self) -> StreamingResponse:
        async def items() -> AsyncIterator[str]:
            with self._log.running("engine") as token:
                outputs = generate(self._engine, "A class is", ENDLESS, token=token)
                async with contextlib.aclosing(outputs):
                    async for output in outputs:
                        yield output.text_delta

        return StreamingResponse(items())

    async def reasons_of_the_page(self) -> list[str | None]:
        return list(await serve.get_app_handle("page").reasons.remote())

    async def num_requests(self) -> int:
        """Requests that the engine knows."""
        stats = await self._engine.stats.remote()
        return int(stats.num_waiting + stats.num_running)


class Caller:
    """Has requests of the engine, and is killed."""

    async def begin(self, engine: Any, num_requests: int) -> None:
        self._streams = [
            generate(engine, "A class is", ENDLESS, token=CancelToken())
            for _ in range(num_requests)
        ]
        num_before = (await engine.stats.remote()).num_requests
        self._reads = [asyncio.ensure_future(anext(stream)) for stream in self._streams]
        while (await engine.stats.remote()).num_requests < num_before + num_requests:
            pass


async def num_ended(engine: Any) -> dict[str, int]:
    """How many requests ended, by kind, once none runs."""
    while True:
        stats = await engine.stats.remote()
        if not stats.num_waiting + stats.num_running:
            kinds: dict[str, int] = {}
            for (kind, _), count in stats.outcomes.items():
                kinds[kind] = kinds.get(kind, 0) + count
            return kinds


async def in_engine(engine: Any) -> dict[str, Any]:
    """What becomes of requests whose token fires."""
    found: dict[str, Any] = {}
    short = SamplingParams(max_tokens=4, ignore_eos=True)
    outcome: Any
    outputs = [out async for out in generate(engine, "A class is", short, token=CancelToken())]
    outcome = outputs[-1].outcome
    found["stays"] = outcome.kind
    token = CancelToken()
    async for output in generate(engine, "A class is", ENDLESS, token=token):
        token.cancel()
        outcome = output.outcome
    found["leaves"] = outcome.kind, outcome.reason
    found["cancel_ms"] = (outcome.flag_at_ns - token.cancelled_at_ns) / 1e6
    try:
        await anext(generate(engine, "A class is", short, token=token))
    except ConnectionError as error:
        found["gone_before"] = str(error)
    closed = generate(engine, "A class is", ENDLESS, token=CancelToken())
    await anext(closed)
    await closed.aclose()
    found["ended"] = await num_ended(engine)
    caller = ray.remote(Caller).options(num_cpus=0).remote()
    await caller.begin.remote(engine, 20)
    ray.kill(caller)
    found["ended_after_a_caller_was_killed"] = await num_ended(engine)
    return found


def main(directory: str, port: int) -> None:
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    page: dict[str, Any] = {"__name__": "docs.ray"}
    for block in blocks_of("adapters/ray.md"):
        exec(block, page)
    engine = page["start"](EngineConfig(max_num_seqs=1))
    found = asyncio.run(in_engine(engine))
    answer = page["answer"](engine, "A class is", CancelToken())
    found["answer_of_the_page"] = asyncio.run(answer)
    log = Log(directory)
    serve.run(page["app"], name="page", route_prefix="/page")
    front: Any = Front  # which are deployments
    back: Any = Back
    serve.run(front.bind(log, back.bind(log), engine), name="front", route_prefix="/")
    print(json.dumps(found), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    # Not below DIRECTORY: the paths of sockets are short.
    with tempfile.TemporaryDirectory(prefix="dw-ray-", ignore_cleanup_errors=True) as temporary:
        ray.init(
            num_cpus=3,
            include_dashboard=False,
            object_store_memory=100 << 20,
            _temp_dir=temporary,
        )
        try:
            main(sys.argv[1], int(sys.argv[2]))
        finally:
            serve.shutdown()
            ray.shutdown()
