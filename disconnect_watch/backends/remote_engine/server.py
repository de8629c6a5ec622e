"""The engine's side: one engine, and the links of all frontends that use it."""

import asyncio
import socket
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from disconnect_watch.backends.engine import EngineBackend
from disconnect_watch.backends.remote_engine.frames import FrameLink
from disconnect_watch.backends.remote_engine.messages import (
    Abort,
    Aborted,
    Admitted,
    Answers,
    Asked,
    Close,
    Ended,
    Output,
    Submit,
    View,
    Viewed,
    refusal_of,
    unpack_tokens,
)
from disconnect_watch.engine import (
    EngineClosedError,
    Outcome,
    Request,
    RequestOutput,
    RequestStream,
)
from disconnect_watch.token import BorrowedToken, Reason

__all__ = ["EngineServer"]


class EngineServer:
    """Serves one engine to frontends in other processes.

    Args:
        backend: not closed by this.
        on_drained: called with the id of a link whose frontend is gone, when none of its requests
            is in the engine any more: its flags may be taken back.
        on_failed: called once if the engine's thread dies, when all that it had is told so.

    Threads: the loop's only.
    """

    def __init__(
        self,
        backend: EngineBackend,
        *,
        on_drained: Callable[[int], object],
        on_failed: Callable[[], object] = lambda: None,
    ) -> None:
        self.backend = backend
        self.on_drained = on_drained
        self._on_failed = on_failed
        self._has_failed = False
        self._links: dict[int, _Link] = {}
        # Appended to by the engine's thread, each in one operation.
        self._outcomes: deque[tuple[str, Outcome]] = deque()
        backend.listen(lambda request_id, outcome: self._outcomes.append((request_id, outcome)))

    @property
    def num_links(self) -> int:
        """Frontends that are there, or whose requests are."""
        return len(self._links)

    async def add(self, link_id: int, sock: socket.socket) -> None:
        """Serve the frontend at the other end of a socket."""
        link = self._links[link_id] = _Link(self, link_id)
        await link.open(sock)

    def close(self) -> None:
        """Let go of all frontends; what they had goes on until the backend is closed."""
        for link in self._links.values():
            link.close()

    async def wait_closed(self) -> None:
        """Wait until all frontends have heard what they were told before ``close``, or are gone."""
        await asyncio.gather(*(link.closed.wait() for link in [*self._links.values()]))

    def tell_outcomes(self) -> None:
        """Tell all frontends of what has ended since the last time."""
        while self._outcomes:
            ended = Ended(*self._outcomes.popleft())
            for link in self._links.values():
                link.push(ended)

    def look(self) -> None:
        """See whether the engine is still there."""
        if not (self._has_failed or self.backend.is_ready):
            self._has_failed = True
            self._on_failed()

    def forget(self, link_id: int) -> None:
        """A frontend and its requests are gone."""
        del self._links[link_id]
        self.on_drained(link_id)


class _Link:
    """One frontend and its requests."""

    def __init__(self, server: EngineServer, link_id: int) -> None:
        self._server = server
        self.closed = asyncio.Event()
        self._link_id = link_id
        self._loop = asyncio.get_running_loop()
        self._frames: FrameLink | None = None
        self._streams: dict[int, _Forwarded] = {}
        self._questions: set[asyncio.Task[None]] = set()
        self._told: list[Any] = []
        self._decoder = msgspec.msgpack.Decoder(Asked)
        self._encoder = msgspec.msgpack.Encoder()

    async def open(self, sock: socket.socket) -> None:
        self._frames = await FrameLink.connect(sock, self._hear, self._lost)
        # So that the frontend knows at once what computes.
        self._frames.send(self._encoder.encode(Answers([], self._server.backend.stats())))
        # A frontend that is killed as it starts may be gone by now.
        self._forget_if_drained()

    def close(self) -> None:
        if self._frames is not None:
            self._flush()
            self._frames.close()

    def push(self, told: Admitted | Output | Ended | Aborted | Viewed) -> None:
        """Tell the frontend, together with all else that there is to tell in this turn."""
        if not self._told:
            self._loop.call_soon(self._flush)
        self._told.append(told)

    def ended(self, number: int) -> None:
        """A request is out of the engine, or never came in."""
        del self._streams[number]
        self._server.look()
        self._forget_if_drained()

    def _flush(self) -> None:
        if self._told and self._frames is not None:
            answers = Answers(self._told, self._server.backend.stats())
            self._told = []
            self._frames.send(self._encoder.encode(answers))

    def _hear(self, frame: memoryview) -> None:
        asked = self._decoder.decode(frame)
        if isinstance(asked, Submit):
            self._submit(asked)
        elif isinstance(asked, Close):
            # It may have ended while the word was on its way.
            if (stream := self._streams.get(asked.number)) is not None:
                stream.request.mark_cancelled(Reason.ABORTED)
        else:
            question = self._loop.create_task(self._answer(asked))
            self._questions.add(question)
            question.add_done_callback(self._questions.discard)

    def _submit(self, asked: Submit) -> None:
        backend = self._server.backend
        cancel = BorrowedToken(asked.slot, asked.generation)
        try:
            streams = {
                prompt.number: _Forwarded(
                    self,
                    prompt.number,
                    backend.engine.make_request(
                        unpack_tokens(prompt.token_ids),
                        asked.params,
                        request_id=prompt.request_id,
                        cancel=cancel,
                        priority=asked.priority,
                        time_limit=asked.time_limit,
                    ),
                    loop=self._loop,
                )
                for prompt in asked.prompts
            }
            answer = backend.enqueue([*streams.values()], loop=self._loop)
        except (ValueError, EngineClosedError) as error:
            self.push(Admitted(asked.call, refusal_of(error)))
            return
        self._streams |= streams

        def tell(answer: asyncio.Future[ValueError | None]) -> None:
            # An error, of one whose thread has died.
            refusal = answer.exception() or answer.result()
            self.push(Admitted(asked.call, None if refusal is None else refusal_of(refusal)))
            if refusal is not None:
                for number in streams:
                    self.ended(number)

        answer.add_done_callback(tell)

    async def _answer(self, asked: Abort | View) -> None:
        backend = self._server.backend
        if isinstance(asked, Abort):
            self.push(Aborted(asked.call, await backend.abort(asked.request_id)))
        else:
            self.push(Viewed(asked.call, await backend.view()))

    def _lost(self) -> None:
        self.closed.set()
        for stream in self._streams.values():
            stream.request.mark_cancelled(Reason.OWNER_CLOSED)
        self._forget_if_drained()

    def _forget_if_drained(self) -> None:
        if self._frames is not None and self._frames.is_lost and not self._streams:
            self._server.forget(self._link_id)

    def tell_outcomes(self) -> None:
        self._server.tell_outcomes()


class _Forwarded(RequestStream):
    """A stream that nobody reads here."""

    def __init__(
        self, link: _Link, number: int, request: Request, *, loop: asyncio.AbstractEventLoop
    ) -> None:
        super().__init__(request, loop=loop)
        self._link = link
        self._number = number

    def deliver(self, output: RequestOutput) -> None:
        self._link.push(
            Output(
                self._number,
                output.text_delta,
                output.token_ids,
                output.num_prompt_tokens,
                output.num_generated_tokens,
                output.logprobs,
                output.index,
                output.finish_reason,
                output.stop_reason,
                output.outcome,
            )
        )
        if output.outcome is not None:
            # Of all that the engine has decided by now, this one at least.
            self._link.tell_outcomes()
            self._link.ended(self._number)
