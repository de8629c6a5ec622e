"""One model that vLLM runs, as the frontend asks for it."""

import asyncio
import signal
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMError
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from disconnect_watch.backends.engine_tensors import INPUTS, OUTPUTS
from disconnect_watch.backends.vllm.params import vllm_params
from disconnect_watch.backends.vllm.stats import Gauges
from disconnect_watch.backends.vllm.stream import VllmStream
from disconnect_watch.engine import (
    AbortResult,
    ChatTemplate,
    EngineStats,
    Outcome,
    SamplingParams,
)
from disconnect_watch.engine.errors import EngineClosedError, PromptTooLongError
from disconnect_watch.engine.tokenizer import Tokenizer
from disconnect_watch.token import CancelToken, Reason

__all__ = ["VllmBackend"]

#: Outcomes that are kept for who aborts too late.
MAX_ENDED = 1024


class VllmBackend:
    """Serves one ``AsyncLLM``, whose engine runs in processes of its own, until ``close``.

    Args:
        llm: not to be used by others from now on.
        gauges: what it tells its numbers to.
        path: of the checkpoint's tokenizer and templates.

    Threads: the loop's only, but ``stats``, ``tokenize`` and ``token_bytes``.
    """

    platform = "vllm"
    inputs = INPUTS
    outputs = OUTPUTS
    version = "1"

    def __init__(
        self,
        llm: AsyncLLM,
        *,
        gauges: Gauges,
        path: Path,
        name: str,
        chat_template: Path | None = None,
    ) -> None:
        self.name = name
        self.chat_template = ChatTemplate.of_directory(path, file=chat_template)
        self.max_model_len: int = llm.model_config.max_model_len
        self._llm = llm
        self._gauges = gauges
        self._tokenizer = Tokenizer.from_pretrained(path)
        self._listeners: tuple[Callable[[str, Outcome], None], ...] = ()
        self._live: dict[str, VllmStream] = {}
        self._ended: OrderedDict[str, Outcome] = OrderedDict()
        # The loop has weak references to tasks only.
        self._aborts: set[asyncio.Task[None]] = set()
        self._is_closed = False
        group = entry_points(group="vllm.general_plugins")
        self._looks = any("disconnect_watch" in entry.value for entry in group)

    @classmethod
    def from_args(
        cls, args: AsyncEngineArgs, *, name: str | None = None, chat_template: Path | None = None
    ) -> Self:
        """Start vLLM's engine, which takes as long as it takes, and serve it.

        Raises:
            ValueError: vLLM refuses the model or an option.
            CheckpointError: the model has no tokenizer that can be read here.
        """
        made: list[Gauges] = []

        def gauges(config: Any, index: int = 0) -> Gauges:
            made.append(Gauges(config, index))
            return made[-1]

        try:
            with _ended_by_sigterm():
                llm = AsyncLLM.from_engine_args(args, stat_loggers=[gauges])
        except (RuntimeError, OSError) as error:
            raise ValueError(f"vLLM cannot serve {args.model}: {error}") from error
        given = Path(args.model)
        return cls(
            llm,
            gauges=made[0],
            path=given if given.is_dir() else _fetched(args.model),
            name=quote(given.resolve().name if name is None else name, safe=""),
            chat_template=chat_template,
        )

    @property
    def is_ready(self) -> bool:
        """False once it was closed, or vLLM's engine has died."""
        return not (self._is_closed or self._llm.errored)

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """See ``Tokenizer.encode``."""
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """See ``Tokenizer.bytes_of``."""
        return self._tokenizer.bytes_of(token_id)

    async def submit(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        cancel: CancelToken,
        priority: int = 0,
        time_limit: float | None = None,
    ) -> VllmStream:
        """Send one request to vLLM, with the names of both flags that may end it.

        Raises:
            ValueError: vLLM refuses it.
            EngineClosedError: it was closed, or its engine has died.
        """
        if not self.is_ready:
            raise EngineClosedError("vLLM's engine is not running, nothing is taken any more")
        tokens = self.tokenize(prompt) if isinstance(prompt, str) else list(prompt)
        room = self.max_model_len - len(tokens)
        if room < 1:
            raise PromptTooLongError(len(tokens), self.max_model_len)
        own = CancelToken()
        asked = vllm_params(params, room=room, flags=(cancel, own))
        try:
            collector = await self._llm.add_request(
                request_id, {"prompt_token_ids": tokens}, asked, priority=priority
            )
        except EngineDeadError as error:
            raise EngineClosedError(f"vLLM's engine has died: {error}") from error
        except VLLMError as error:
            raise ValueError(str(error)) from error
        self._gauges.num_requests += 1
        stream = VllmStream(
            request_id,
            collector,
            own=own,
            client=cancel,
            num_prompt_tokens=len(tokens),
            num_logprobs=params.logprobs or 0,
            on_end=self._end,
            abort=self._abort_soon,
        )
        self._live[request_id] = stream
        if time_limit is not None:
            loop = asyncio.get_running_loop()
            loop.call_later(max(0.0, time_limit), self._expire, stream)
        return stream

    async def submit_all(
        self,
        prompts: Mapping[str, str | Sequence[int]],
        params: SamplingParams,
        *,
        cancel: CancelToken,
        priority: int = 0,
        time_limit: float | None = None,
    ) -> list[VllmStream]:
        """As ``submit``, for several that are wanted together; ends all if one is refused."""
        streams: list[VllmStream] = []
        try:
            for request_id, prompt in prompts.items():
                stream = await self.submit(
                    request_id,
                    prompt,
                    params,
                    cancel=cancel,
                    priority=priority,
                    time_limit=time_limit,
                )
                streams.append(stream)
        except BaseException:
            for stream in streams:
                stream.close()
            raise
        return streams

    async def abort(self, request_id: str) -> AbortResult:
        """Cancel a request by its id; returns when vLLM has told of its end."""
        stream = self._live.get(request_id)
        if stream is None:
            ended = self._ended.get(request_id)
            if ended is None:
                return AbortResult("not_found")
            is_cancelled = ended.kind == "cancelled"
            return AbortResult("already_cancelled" if is_cancelled else "already_finished")
        loop = asyncio.get_running_loop()
        began = loop.time()
        is_first = stream.cancel(Reason.ABORTED)
        await stream.has_ended.wait()
        outcome = stream.outcome
        assert outcome is not None
        if outcome.kind != "cancelled":
            return AbortResult("already_finished")
        return AbortResult(
            "cancelled" if is_first else "already_cancelled",
            phase=outcome.phase,
            latency_ns=int((loop.time() - began) * 1e9),
        )

    def stats(self) -> EngineStats:
        """As they were after vLLM's last step."""
        return self._gauges.stats()

    def listen(self, on_outcome: Callable[[str, Outcome], None]) -> None:
        """Call ``on_outcome`` on the loop for every request that ends."""
        self._listeners = (*self._listeners, on_outcome)

    def close(self) -> None:
        """Cancel what is left with reason SHUTDOWN, and end vLLM's processes. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        for stream in self._live.values():
            stream.own.cancel(Reason.SHUTDOWN)
        # Its loop may have ended before it.
        with suppress(RuntimeError):
            self._llm.shutdown(timeout=0)

    def _end(self, stream: VllmStream, outcome: Outcome) -> None:
        if self._live.get(stream.request_id) is stream:
            del self._live[stream.request_id]
        self._ended[stream.request_id] = outcome
        while len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)
        self._gauges.count(outcome)
        for listener in self._listeners:
            listener(stream.request_id, outcome)

    def _expire(self, stream: VllmStream) -> None:
        if stream.outcome is None:
            stream.cancel(Reason.DEADLINE)

    def _abort_soon(self, stream: VllmStream) -> None:
        """Tell vLLM, where its engine does not look at flags itself."""
        if self._looks or self._is_closed:
            return
        abort = self._llm.abort(stream.internal_id, internal=True)
        task = asyncio.get_running_loop().create_task(abort)
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Have a SIGTERM raise, as Ctrl-C does: else vLLM's processes outlive ours as they begin."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _fetched(model: str) -> Path:
    """Where the files of a model are that vLLM has fetched from Hugging Face."""
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model, allow_patterns=["*.json", "*.jinja"]))
