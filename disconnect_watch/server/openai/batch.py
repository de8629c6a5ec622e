"""One or several generations of one request, as one: admitted together, ended together."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Self

from disconnect_watch.backends import Backend
from disconnect_watch.engine import Outcome, RequestOutput
from disconnect_watch.server.access import RequestRecord
from disconnect_watch.server.frontend import Frontend
from disconnect_watch.server.generation import Generation
from disconnect_watch.server.outcome import raise_unless_finished
from disconnect_watch.server.running import Running

__all__ = ["Batch"]


class Batch:
    """The generations that one request asks for, one a prompt.

    Leaving it ends those that still run.
    """

    def __init__(self, runnings: Sequence[Running]) -> None:
        self._runnings = runnings
        self._outcomes: list[Outcome] = []

    @classmethod
    async def submit(
        cls,
        frontend: Frontend,
        backend: Backend,
        generation: Generation,
        record: RequestRecord,
    ) -> Self:
        """Hand over the generation for all its prompts, or for none.

        Raises:
            RequestError: one of them can't be taken.
        """
        return cls(await frontend.submit_all(backend, generation, record))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for running in self._runnings:
            running.close()

    async def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Yield each output with the number of its generation, as they come.

        Raises:
            RequestError: one did not finish, which is the end of all; it is told when they have
                ended, so that what is logged of the request has all its parts.
        """
        source = self._single() if len(self._runnings) == 1 else self._merged()
        broken: Outcome | None = None
        async for part, output in source:
            outcome = output.outcome
            if outcome is not None:
                self._outcomes.append(outcome)
                if outcome.kind != "finished" and broken is None:
                    broken = outcome
                    await self._end_others()
            if broken is None:
                yield part, output
        if broken is not None:
            raise_unless_finished(broken)

    async def _end_others(self) -> None:
        """Abort what still runs; what ended one of them may have ended it already."""
        left = [running for running in self._runnings if not running.is_over]
        await asyncio.gather(*(running.abort() for running in left))

    def usage(self) -> dict[str, object]:
        """Numbers of tokens, once all have finished."""
        num_prompt = sum(outcome.num_prompt_tokens for outcome in self._outcomes)
        num_generated = sum(outcome.num_generated_tokens for outcome in self._outcomes)
        num_cached = sum(outcome.num_cached_tokens for outcome in self._outcomes)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_generated,
            "total_tokens": num_prompt + num_generated,
            "prompt_tokens_details": {"cached_tokens": num_cached},
        }

    async def _single(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        async for output in self._runnings[0]:
            yield 0, output

    async def _merged(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        waiting = {self._next(part): part for part in range(len(self._runnings))}
        try:
            while waiting:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    part, output = waiting.pop(task), task.result()
                    if output.outcome is None:
                        waiting[self._next(part)] = part
                    yield part, output
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    def _next(self, part: int) -> "asyncio.Future[RequestOutput]":
        return asyncio.ensure_future(anext(self._runnings[part]))
