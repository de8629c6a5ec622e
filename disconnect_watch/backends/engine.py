"""The embedded engine as a backend: its thread, and what its requests look like."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from disconnect_watch.backends.engine_tensors import INPUTS, OUTPUTS, model_name
from disconnect_watch.backends.model_config import ENGINE
from disconnect_watch.engine import (
    DEFAULT_MODEL,
    AbortResult,
    ChatTemplate,
    Engine,
    EngineConfig,
    EngineStats,
    EngineThread,
    EngineView,
    Outcome,
    RequestStream,
    SamplingParams,
)
from disconnect_watch.engine.remote import RemotePrefill
from disconnect_watch.token import CancelToken

__all__ = ["EngineBackend"]


class EngineBackend:
    """Serves one engine, on its thread, from now until ``close``.

    Args:
        engine: not to be used by others from now on, but for its ledgers.
        name: of the model in URLs.
        chat_template: of the model; None refuses chats.
    """

    platform = ENGINE
    inputs = INPUTS
    outputs = OUTPUTS

    def __init__(
        self, engine: Engine, *, name: str, chat_template: ChatTemplate | None = None
    ) -> None:
        self.name = name
        self.version = "1"
        self.chat_template = chat_template
        self.engine = engine
        # Replaced as a whole, so that the engine's thread may read it at any time.
        self._listeners: tuple[Callable[[str, Outcome], None], ...] = ()
        self._thread = EngineThread(engine, on_outcome=self._tell)
        self._thread.start()

    @classmethod
    def from_pretrained(
        cls,
        path: Path = DEFAULT_MODEL,
        *,
        name: str | None = None,
        config: EngineConfig | None = None,
        chat_template: Path | None = None,
        allocate: Callable[[tuple[int, ...], str], Any] | None = None,
    ) -> Self:
        """Load a Hugging Face directory and serve it.

        Args:
            chat_template: a Jinja file to take for the directory's own template, if it has one.
            allocate: see ``KVCache``.
            name: of the model; None takes the directory's. Percent-encoded where a path
                needs it, since the frontend takes names as the client wrote them.

        Raises:
            CheckpointError, ValueError: see ``Engine.from_pretrained``.
        """
        template = ChatTemplate.of_directory(path, file=chat_template)
        engine = Engine.from_pretrained(path, config, allocate=allocate)
        return cls(
            engine,
            name=model_name(path, name),
            chat_template=template,
        )

    @property
    def is_ready(self) -> bool:
        """False once it was closed, or its thread died of an error."""
        return self._thread.is_accepting

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """See ``Tokenizer.encode``."""
        return self.engine.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """See ``Tokenizer.bytes_of``."""
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
        prefill_only: bool = False,
        remote: RemotePrefill | None = None,
    ) -> RequestStream:
        """See ``EngineThread.submit`` and ``Engine.make_request``."""
        return await self._thread.submit(
            request_id,
            prompt,
            params,
            cancel=cancel,
            priority=priority,
            time_limit=time_limit,
            prefill_only=prefill_only,
            remote=remote,
        )

    async def submit_all(
        self,
        prompts: Mapping[str, str | Sequence[int]],
        params: SamplingParams,
        *,
        cancel: CancelToken,
        priority: int = 0,
        time_limit: float | None = None,
    ) -> list[RequestStream]:
        """See ``EngineThread.submit_all``."""
        return await self._thread.submit_all(
            prompts, params, cancel=cancel, priority=priority, time_limit=time_limit
        )

    async def abort(self, request_id: str) -> AbortResult:
        """See ``EngineThread.abort``."""
        return await self._thread.abort(request_id)

    async def view(self) -> EngineView:
        """See ``EngineThread.view``."""
        return await self._thread.view()

    def stats(self) -> EngineStats:
        """As they were after the engine's last step."""
        return self._thread.stats()

    def enqueue(
        self, streams: Sequence[RequestStream], *, loop: asyncio.AbstractEventLoop
    ) -> asyncio.Future[ValueError | None]:
        """See ``EngineThread.enqueue``."""
        return self._thread.enqueue(streams, loop=loop)

    def listen(self, on_outcome: Callable[[str, Outcome], None]) -> None:
        """Call ``on_outcome`` on the engine's thread for every request that ends."""
        self._listeners = (*self._listeners, on_outcome)

    def close(self) -> None:
        """Cancel what is left with reason SHUTDOWN, and join the thread."""
        self._thread.close()

    def _tell(self, request_id: str, outcome: Outcome) -> None:
        for listener in self._listeners:
            listener(request_id, outcome)
