"""A backend by hand, for the tests of routes: it says what a test wants said."""

from collections.abc import AsyncGenerator, Callable, Sequence

from disconnect_watch.backends import Tensor
from disconnect_watch.backends.engine import INPUTS, OUTPUTS
from disconnect_watch.engine import EngineStats, Outcome, RequestOutput, SamplingParams
from disconnect_watch.token import CancelToken

FINISHED = Outcome("finished", finish_reason="length", num_generated_tokens=3)


class ScriptedBackend:
    """Yields the texts of a script, then its outcome or its error.

    Attributes:
        calls: prompt and parameters of each request that got here.
    """

    version = "1"
    platform = "script"
    inputs: Sequence[Tensor] = INPUTS
    outputs: Sequence[Tensor] = OUTPUTS

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
        self.calls: list[tuple[str, SamplingParams]] = []
        self.num_open = 0

    async def generate(
        self, request_id: str, prompt: str, params: SamplingParams, *, cancel: CancelToken
    ) -> AsyncGenerator[RequestOutput, None]:
        self.calls.append((prompt, params))
        self.num_open += 1
        try:
            for text in self.texts:
                yield _output(request_id, text, None)
            if self.error is not None:
                raise self.error
            yield _output(request_id, "", self.outcome)
        finally:
            self.num_open -= 1

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
            num_stale_events=0,
        )

    def listen(self, on_outcome: Callable[[str, Outcome], None]) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True


def _output(request_id: str, text: str, outcome: Outcome | None) -> RequestOutput:
    return RequestOutput(
        request_id=request_id,
        text_delta=text,
        token_ids=(),
        outcome=outcome,
        num_prompt_tokens=1,
        num_generated_tokens=0,
    )
