"""The frontend's side: a backend whose engine is in another process."""

import asyncio
import itertools
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import msgspec

from disconnect_watch.backends.engine_tensors import INPUTS, OUTPUTS, model_name
from disconnect_watch.backends.model_config import ENGINE
from disconnect_watch.backends.remote_engine.frames import FrameLink
from disconnect_watch.backends.remote_engine.messages import (
    Abort,
    Aborted,
    Admitted,
    Answers,
    Close,
    Ended,
    Output,
    Prompt,
    Submit,
    View,
    error_of,
    output_of,
    pack_tokens,
)
from disconnect_watch.engine import (
    AbortResult,
    ChatTemplate,
    EngineLostError,
    EngineStats,
    EngineView,
    Outcome,
    SamplingParams,
)
from disconnect_watch.engine.stream import OutputQueue
from disconnect_watch.engine.tokenizer import Tokenizer
from disconnect_watch.token import CancelToken

__all__ = ["RemoteEngine", "RemoteStream"]

#: Prompts longer than this many characters are tokenized off the loop, see ``engine.thread``.
MAX_INLINE_PROMPT = 4096

_NO_STATS = EngineStats(
    num_waiting=0,
    num_running=0,
    num_blocks=1,
    num_blocks_used=0,
    num_blocks_cached=0,
    num_blocks_free=1,
    num_blocks_retained=0,
    num_steps=0,
    num_requests=0,
    num_preemptions=0,
    num_prompt_tokens=0,
    num_cached_tokens=0,
    num_generated_tokens=0,
    num_wasted_tokens=0,
    stale_events={},
)


class RemoteEngine:
    """An engine of another process as a ``Backend``, from ``connect`` on.

    Text is turned into tokens here, so that it costs the engine nothing. A request's token is held
    until the engine has said how the request ended, or is gone: the engine takes no reference.

    Args:
        name: of the model in URLs.
        chat_template: of the model; None refuses chats.

    Threads: the loop's only, but ``stats``, ``tokenize`` and ``token_bytes`` any. Listeners are
    called on the loop, of the requests of all frontends.
    """

    platform = ENGINE
    inputs = INPUTS
    outputs = OUTPUTS
    version = "1"

    def __init__(
        self, tokenizer: Tokenizer, *, name: str, chat_template: ChatTemplate | None = None
    ) -> None:
        self.name = name
        self.chat_template = chat_template
        self._tokenizer = tokenizer
        self._frames: FrameLink | None = None
        self._numbers = itertools.count(1)
        self._streams: dict[int, RemoteStream] = {}
        # By call, the numbers of what was not admitted yet.
        self._submitted: dict[int, list[int]] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._listeners: tuple[Callable[[str, Outcome], None], ...] = ()
        self._stats = _NO_STATS
        self._decoder = msgspec.msgpack.Decoder(Answers)
        self._encoder = msgspec.msgpack.Encoder()
        self._connected = asyncio.Event()
        self._is_closed = False

    @classmethod
    def from_pretrained(
        cls, path: Path, *, name: str | None = None, chat_template: Path | None = None
    ) -> Self:
        """Read of a Hugging Face directory what a frontend needs, which is not the weights.

        Args:
            name, chat_template: see ``EngineBackend.from_pretrained``.

        Raises:
            CheckpointError: there is no tokenizer, or one that is not supported.
        """
        return cls(
            Tokenizer.from_pretrained(path),
            name=model_name(path, name),
            chat_template=ChatTemplate.of_directory(path, file=chat_template),
        )

    async def connect(self, sock: socket.socket) -> None:
        """Use the engine at the other end of a socket from now on, in place of the one before."""
        before, self._frames = self._frames, None
        if before is not None:
            before.close()
            self._lost(before)
        links: list[FrameLink] = []

        def lost() -> None:
            if links:  # else it ended as it began
                self._lost(links[0])

        link = await FrameLink.connect(sock, self._hear, lost)
        links.append(link)
        if not link.is_lost:
            self._frames = link
        self._connected.set()

    async def wait_connected(self) -> None:
        """Wait for the first engine."""
        await self._connected.wait()

    @property
    def is_ready(self) -> bool:
        """Whether there is an engine now."""
        return self._frames is not None and not self._is_closed

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
    ) -> "RemoteStream":
        """See ``Backend.submit``.

        Raises:
            EngineLostError: there is no engine now.
        """
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
    ) -> "list[RemoteStream]":
        """See ``Backend.submit_all``.

        Raises:
            EngineLostError: there is no engine now.
        """
        num_characters = sum(len(each) for each in prompts.values() if isinstance(each, str))
        is_long = num_characters > MAX_INLINE_PROMPT
        packed = await asyncio.to_thread(self._pack, prompts) if is_long else self._pack(prompts)
        call = next(self._numbers)
        asked = Submit(call, packed, params, cancel.slot, cancel.generation, priority, time_limit)
        try:
            frame = self._encoder.encode(asked)
        except OverflowError as error:  # of priority, which the engine bounds by its type only
            raise ValueError(f"priority is {priority}, it must be in [-2**63, 2**63)") from error
        streams = [RemoteStream(self, each.number, each.request_id, cancel) for each in packed]
        answer = self._send(call, frame)
        self._submitted[call] = [each.number for each in packed]
        self._streams.update(zip(self._submitted[call], streams, strict=True))
        try:
            refusal = await answer
        except asyncio.CancelledError:
            for stream in streams:
                stream.close()
            raise
        finally:
            self._calls.pop(call, None)
        if refusal is not None:
            raise error_of(refusal)
        return streams

    def _pack(self, prompts: Mapping[str, str | Sequence[int]]) -> list[Prompt]:
        return [
            Prompt(
                next(self._numbers),
                request_id,
                pack_tokens(self.tokenize(prompt) if isinstance(prompt, str) else prompt),
            )
            for request_id, prompt in prompts.items()
        ]

    async def abort(self, request_id: str) -> AbortResult:
        """See ``Backend.abort``; what the engine had has ended with it."""
        try:
            result: AbortResult = await self._ask(lambda call: Abort(call, request_id))
        except EngineLostError:
            return AbortResult("already_finished")
        return result

    async def view(self) -> EngineView:
        """See ``Viewable.view``; empty while there is no engine."""
        try:
            view: EngineView = await self._ask(View)
        except EngineLostError:
            return EngineView((), b"", self._stats)
        return view

    def stats(self) -> EngineStats:
        """As they were when the engine last had something to tell here."""
        return self._stats

    def listen(self, on_outcome: Callable[[str, Outcome], None]) -> None:
        """See ``Backend.listen``."""
        self._listeners = (*self._listeners, on_outcome)

    def close(self) -> None:
        """Let go of the engine, which then cancels what is left. Idempotent."""
        self._is_closed = True
        if self._frames is not None:
            self._frames.close()

    def tell_closed(self, number: int) -> None:
        """A stream was closed before its end."""
        if self._frames is not None:
            self._frames.send(self._encoder.encode(Close(number)))

    async def _ask(self, make: Callable[[int], Any]) -> Any:
        call = next(self._numbers)
        try:
            return await self._send(call, self._encoder.encode(make(call)))
        finally:
            self._calls.pop(call, None)

    def _send(self, call: int, frame: bytes) -> asyncio.Future[Any]:
        """Send what is answered, and return the answer."""
        if self._frames is None or self._is_closed:
            raise _no_engine()
        answer = self._calls[call] = asyncio.get_running_loop().create_future()
        self._frames.send(frame)
        return answer

    def _hear(self, frame: memoryview) -> None:
        answers = self._decoder.decode(frame)
        # Whoever is told of an outcome finds it counted.
        self._stats = answers.stats
        for told in answers.told:
            if isinstance(told, Output):
                stream = self._streams[told.number]
                if told.outcome is not None:
                    del self._streams[told.number]
                    stream.is_over = True
                stream.deliver(output_of(told, stream.request_id))
            elif isinstance(told, Ended):
                for listener in self._listeners:
                    listener(told.request_id, told.outcome)
            elif isinstance(told, Admitted):
                numbers = self._submitted.pop(told.call)
                if told.refusal is not None:
                    for number in numbers:
                        self._streams.pop(number).is_over = True
                self._resolve(told.call, told.refusal)
            elif isinstance(told, Aborted):
                self._resolve(told.call, told.result)
            else:
                self._resolve(told.call, told.view)

    def _resolve(self, call: int, result: Any) -> None:
        answer = self._calls.get(call)
        if answer is not None and not answer.done():  # else whoever asked was cancelled
            answer.set_result(result)

    def _lost(self, frames: FrameLink) -> None:
        if frames is not self._frames and self._frames is not None:
            return
        self._frames = None
        self._stats = _NO_STATS
        self._submitted.clear()
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.is_over = True
            stream.fail(_lost_engine(stream))
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(_no_engine())


class RemoteStream(OutputQueue):
    """The outputs of one request; see ``RequestStream``.

    Attributes:
        cancel: held for the engine, until that has said that it is done with the request.
        is_over: whether it has its outcome.
        has_output: whether any came.
    """

    def __init__(
        self, engine: RemoteEngine, number: int, request_id: str, cancel: CancelToken
    ) -> None:
        super().__init__(loop=asyncio.get_running_loop())
        self.request_id = request_id
        self.cancel = cancel
        self.is_over = False
        self._engine = engine
        self._number = number

    def close(self) -> None:
        """Abort the request unless its outcome is known; what was not read yet is dropped."""
        if not self._has_ended:
            self._has_ended = True
            self._engine.tell_closed(self._number)
        self._outputs.clear()


def _no_engine() -> EngineLostError:
    return EngineLostError("the engine is being started again, try again later")


def _lost_engine(stream: RemoteStream) -> EngineLostError:
    return EngineLostError("the engine ended before the request did, try again later")
