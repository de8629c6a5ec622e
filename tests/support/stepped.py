"""A real engine as a backend whose every step is a test's, on the test's own loop."""

import asyncio
from collections.abc import Callable, Mapping, Sequence

from disconnect_watch.backends import Tensor
from disconnect_watch.backends.engine_tensors import INPUTS, OUTPUTS
from disconnect_watch.engine import (
    AbortResult,
    ChatTemplate,
    Engine,
    EngineStats,
    Outcome,
    RequestOutput,
    RequestStream,
    SamplingParams,
)
from disconnect_watch.token import CancelToken, Reason

__all__ = ["SteppedBackend"]

TEMPLATE = "{% for message in messages %}{{ message.role[0] }}{{ message.content }}{% endfor %}"


class SteppedBackend:
    """Does nothing until ``step``; what a step brought is there at once.

    Attributes:
        outcomes: by request id, as the engine told them.
    """

    name = "tiny"
    version = "1"
    platform = "stepped"
    inputs: Sequence[Tensor] = INPUTS
    outputs: Sequence[Tensor] = OUTPUTS
    is_ready = True

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.chat_template = ChatTemplate({"default": TEMPLATE}, tokens={})
        self.outcomes: dict[str, Outcome] = {}
        self._listeners: list[Callable[[str, Outcome], None]] = []
        self._streams: dict[str, RequestStream] = {}
        engine.on_outcome = self._note

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self.engine.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        return self.engine.tokenizer.bytes_of(token_id)

    async def submit(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        cancel: CancelToken,
        priority: int = 0,
        time_limit: float | None = None,
    ) -> RequestStream:
        (stream,) = await self.submit_all(
            {request_id: prompt}, params, cancel=cancel, priority=priority, time_limit=time_limit
        )
        return stream

    async def submit_all(
        self,
        prompts: Mapping[str, str | Sequence[int]],
        params: SamplingParams,
        *,
        cancel: CancelToken,
        priority: int = 0,
        time_limit: float | None = None,
    ) -> list[RequestStream]:
        requests = [
            self.engine.make_request(
                prompt,
                params,
                request_id=request_id,
                cancel=cancel,
                priority=priority,
                time_limit=time_limit,
            )
            for request_id, prompt in prompts.items()
        ]
        self.engine.admit(*requests)
        loop = asyncio.get_running_loop()
        streams = {request.request_id: RequestStream(request, loop=loop) for request in requests}
        self._streams |= streams
        return list(streams.values())

    async def abort(self, request_id: str) -> AbortResult:
        result = self.engine.abort(request_id)
        self._deliver(self.engine.take_outputs())
        return result

    def step(self) -> None:
        """One step of the engine."""
        self._deliver(self.engine.step())

    def cancel_all(self) -> None:
        """End all that runs, as with the server."""
        self._deliver(self.engine.cancel_all(Reason.SHUTDOWN))

    def stats(self) -> EngineStats:
        return self.engine.stats()

    def listen(self, on_outcome: Callable[[str, Outcome], None]) -> None:
        self._listeners.append(on_outcome)

    def close(self) -> None:
        self.cancel_all()

    def _note(self, request_id: str, outcome: Outcome) -> None:
        assert request_id not in self.outcomes, "it ended twice"
        self.outcomes[request_id] = outcome
        for listener in self._listeners:
            listener(request_id, outcome)

    def _deliver(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            self._streams[output.request_id].deliver(output)
            if output.outcome is not None:
                del self._streams[output.request_id]
