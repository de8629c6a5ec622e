"""What one node does of a request that is parted, from its headers to its end."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, Self

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from disconnect_watch.backends import Backend, OutputStream
from disconnect_watch.backends.engine import EngineBackend
from disconnect_watch.backends.engine_node import EngineNode, Retained
from disconnect_watch.engine import AbortResult, RequestOutput, RequestStream, SamplingParams
from disconnect_watch.engine.remote import RemotePrefill, prompt_digest
from disconnect_watch.server.access import RequestRecord
from disconnect_watch.server.disagg.messages import Prefilled
from disconnect_watch.server.documents import encode
from disconnect_watch.server.errors import AbortedError
from disconnect_watch.server.outcome import raise_unless_finished
from disconnect_watch.server.running import Running

if TYPE_CHECKING:
    from disconnect_watch.backends.held_ticket import HeldTicket

__all__ = ["DecodePart", "Part", "PartAnswer", "PartAnswered", "PrefillPart"]


class PartAnswered(Exception):
    """A request was prefilled: it is answered by its part, not in the form that it was asked in."""

    def __init__(self, part: "PrefillPart", document: Prefilled) -> None:
        super().__init__("prefilled")
        self.part = part
        self.document = document


class PrefillPart:
    """A request of which this node computes the prompt.

    What it retains is released when the connection that asked for it is lost, or when the request
    is cancelled by its id, until a decode node has fetched it.
    """

    def __init__(self, node: EngineNode, record: RequestRecord) -> None:
        self._node = node
        self._record = record
        self._orders = ExitStack()
        self.retained: Retained | None = None

    def of(self, backend: Backend) -> Self:
        """Be what the request is handed to."""
        self._backend = backend
        return self

    async def submit_all(
        self, prompts: Mapping[str, str | Sequence[int]], params: SamplingParams, **options: Any
    ) -> list[RequestStream]:
        """As ``Backend.submit_all``, but for the prompt alone.

        Raises:
            PartAnswered: this cannot be parted.
        """
        backend = self._backend
        if len(prompts) > 1 or params.num_generations > 1 or not isinstance(backend, EngineBackend):
            raise PartAnswered(self, Prefilled())
        ((work_id, prompt),) = prompts.items()
        record = self._record
        name = record.client_id or record.request_id
        self._orders.enter_context(self._node.ordered(work_id, owner=record.owner, name=name))
        return [await backend.submit(work_id, prompt, params, prefill_only=True, **options)]

    async def finish(
        self, streams: Sequence[OutputStream], runnings: Sequence[Running]
    ) -> NoReturn:
        """Wait for the prompt, instead of the whole answer.

        Raises:
            PartAnswered: it was computed.
            RequestError: it was not.
        """
        (stream,), (running,) = streams, runnings
        assert isinstance(stream, RequestStream)
        first: RequestOutput | None = None
        retained: object | None = None
        with running:
            async for output in running:
                first = first or (output if output.token_ids else None)
                if output.outcome is not None:
                    raise_unless_finished(output.outcome)
                    retained = output.outcome.transfer
        assert first is not None, "a prefill has finished without a token"
        ticket = None
        if isinstance(retained, Retained):
            self.retained = retained
            ticket = retained.ticket
            if retained.ended.done():
                raise AbortedError("released before it came")
        request = stream.request
        digest = prompt_digest(request.token_ids[: request.num_prompt_tokens])
        document = Prefilled.of(first, seed=request.seed, digest=digest, ticket=ticket)
        raise PartAnswered(self, document)

    async def wait_fetched(self) -> None:
        """Return when nothing is kept for the request any more. A cancel by its id ends that."""
        retained = self.retained
        if retained is None or retained.ended.done():
            return
        self._record.works.add(self)
        try:
            await asyncio.wrap_future(retained.ended)
        finally:
            self._record.works.discard(self)

    async def abort(self) -> AbortResult:
        """Release what is kept; the cancel by id calls it."""
        assert self.retained is not None
        ticket = self.retained.ticket
        released = self._node.release(ticket.transfer_id, ticket.owner)
        if released.num_blocks:
            return AbortResult("cancelled", phase="prefill", num_blocks_freed=released.num_blocks)
        return AbortResult("already_finished")

    def close(self) -> None:
        """Let go of what nobody has fetched."""
        self._orders.close()
        if self.retained is not None and not self.retained.ended.done():
            ticket = self.retained.ticket
            self._node.release(ticket.transfer_id, ticket.owner)


class PartAnswer(Response):
    """The answer to a prefill: a line of JSON at once, and the end when its cache was fetched.

    So whoever asked keeps a connection for as long as blocks are kept for it, and losing one is
    losing the other.
    """

    media_type = "application/x-ndjson"

    def __init__(self, answered: PartAnswered) -> None:
        super().__init__()
        del self.headers["content-length"]
        self._part = answered.part
        self._document = answered.document

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        line = encode(self._document) + b"\n"
        await send({"type": "http.response.body", "body": line, "more_body": True})
        await self._part.wait_fetched()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class DecodePart:
    """A request whose prompt another node has computed.

    What that node keeps is released in band at the latest when the request has ended, whatever
    became of it: refused, cancelled in the queue, or never understood.
    """

    def __init__(self, node: EngineNode, document: Prefilled) -> None:
        self._document = document
        ticket = document.ticket
        self._held: HeldTicket | None = node.hold(ticket.ticket()) if ticket else None

    def of(self, backend: Backend) -> Self:
        """Be what the request is handed to."""
        self._backend = backend
        return self

    async def submit_all(
        self, prompts: Mapping[str, str | Sequence[int]], params: SamplingParams, **options: Any
    ) -> Sequence[OutputStream]:
        """As ``Backend.submit_all``; what cannot be parted is computed whole."""
        backend, document, held = self._backend, self._document, self._held
        if (
            document.first_token is None
            or len(prompts) > 1
            or params.num_generations > 1
            or not isinstance(backend, EngineBackend)
        ):
            self.close()
            return await backend.submit_all(prompts, params, **options)
        remote = RemotePrefill(
            document.sampled,
            document.seed,
            document.digest,
            pull=None if held is None else held.pull,
            release=self.close,
        )
        ((work_id, prompt),) = prompts.items()
        return [await backend.submit(work_id, prompt, params, remote=remote, **options)]

    async def finish(self, streams: Sequence[OutputStream], runnings: Sequence[Running]) -> None:
        """The answer is the request's own."""

    def close(self) -> None:
        """Let go of what was not fetched."""
        if self._held is not None:
            self._held.release()


class Part(Protocol):
    """Either; and what a request with it is handed to in place of its backend."""

    def of(self, backend: Backend) -> Self: ...

    async def submit_all(
        self, prompts: Mapping[str, str | Sequence[int]], params: SamplingParams, **options: Any
    ) -> Sequence[OutputStream]: ...

    async def finish(
        self, streams: Sequence[OutputStream], runnings: Sequence[Running]
    ) -> None: ...

    def close(self) -> None: ...
