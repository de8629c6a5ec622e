"""A backend by hand, for the tests of routes: it says what a test wants said."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence

from disconnect_watch.backends import Tensor
from disconnect_watch.backends.engine_tensors import INPUTS, OUTPUTS
from disconnect_watch.engine import (
    AbortResult,
    ChatTemplate,
    EngineStats,
    Outcome,
    RequestOutput,
    SamplingParams,
)
from disconnect_watch.token import CancelToken

FINISHED = Outcome("finished", finish_reason="length", num_generated_tokens=3)


class ScriptedBackend:
    """Yields the texts of a script, then its outcome or its error.

    Attributes:
        calls: prompt and parameters of each request that got here.
        num_open: streams that were neither read to their end nor closed.
    """

    version = "1"
    platform = "script"
    inputs: Sequence[Tensor] = INPUTS
    outputs: Sequence[Tensor] = OUTPUTS
    chat_template: ChatTemplate | None = None

    def __init__(
        self,
        *texts: str,
        outcome: Outcome = FINISHED,
        error: Exception | None = None,
        name: str = "script",
    ) -> None:
        self.name = name
        self.texts = texts
        self.outcome = outcome
        self.error = error
        self.is_ready = True
        self.is_closed = False
        self.calls: list[tuple[str | Sequence[int], SamplingParams]] = []
        self.num_open = 0

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])

    async def submit(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        cancel: CancelToken,
        priority: int = 0,
        time_limit: float | None = None,
    ) -> "Script":
        self.calls.append((prompt, params))
        if self.error is not None and not self.texts:
            raise self.error
        self.num_open += 1
        return Script(self, request_id)

    async def submit_all(
        self,
        prompts: Mapping[str, str | Sequence[int]],
        params: SamplingParams,
        *,
        cancel: CancelToken,
        priority: int = 0,
        time_limit: float | None = None,
    ) -> "list[Script]":
        return [
            await self.submit(
                request_id,
                prompt,
                params,
                cancel=cancel,
                priority=priority,
                time_limit=time_limit,
            )
            for request_id, prompt in prompts.items()
        ]

    async def abort(self, request_id: str) -> AbortResult:
        raise AssertionError("no test cancels a script by its id")

    def stats(self) -> EngineStats:
        return EngineStats(
            num_waiting=0,
            num_running=self.num_open,
            num_blocks=8,
            num_blocks_used=0,
            num_blocks_cached=0,
            num_blocks_free=8,
            num_blocks_retained=0,
            num_steps=0,
            num_requests=len(self.calls),
            num_preemptions=0,
            num_prompt_tokens=0,
            num_cached_tokens=0,
            num_generated_tokens=0,
            num_wasted_tokens=0,
            stale_events={},
        )

    def listen(self, on_outcome: Callable[[str, Outcome], None]) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True


class Script(AsyncIterator[RequestOutput]):
    """The outputs of one request to a ``ScriptedBackend``; an error comes behind its texts."""

    def __init__(self, backend: ScriptedBackend, request_id: str) -> None:
        self._backend = backend
        self._request_id = request_id
        self._texts = iter(backend.texts)
        self._is_open = True

    @property
    def is_over(self) -> bool:
        return not self._is_open

    async def __anext__(self) -> RequestOutput:
        if not self._is_open:
            raise StopAsyncIteration
        for text in self._texts:
            return _output(self._request_id, text, None)
        self.close()
        if self._backend.error is not None:
            raise self._backend.error
        return _output(self._request_id, "", self._backend.outcome)

    def close(self) -> None:
        self._backend.num_open -= self._is_open
        self._is_open = False


def _output(request_id: str, text: str, outcome: Outcome | None) -> RequestOutput:
    return RequestOutput(
        request_id=request_id,
        text_delta=text,
        token_ids=(),
        outcome=outcome,
        num_prompt_tokens=1,
        num_generated_tokens=0,
    )
