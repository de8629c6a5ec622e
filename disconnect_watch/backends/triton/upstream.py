"""One Triton: its channel, whether it can be asked, what it serves, and what it has now.

connected   the channel is: known at once when it is lost, and told by gRPC when it is back
ready       and Triton says so, asked every ``probe_seconds`` and after each reconnection
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import grpc
from grpc import aio
from tritonclient.grpc import service_pb2, service_pb2_grpc  # type: ignore[import-untyped]

from disconnect_watch.backends.models import UpstreamStats
from disconnect_watch.backends.statistics import IndexEntry
from disconnect_watch.backends.triton.endpoint import Connecting, Endpoint

__all__ = ["Upstream", "cancel_call"]

#: Seconds for an answer of a Triton that does not have to work for it.
ANSWER_WITHIN = 5.0
#: Seconds for what gRPC still says of a call that was cancelled or a channel that was closed.
LAST_EVENT_WITHIN = 1.0

_logger = logging.getLogger("disconnect_watch.gateway")


def cancel_call(call: Any) -> None:
    """Cancel a call that somebody awaits, who is told by gRPC's core as soon as it has ended.

    ``call.cancel()`` also cancels what waits for the core. Its last event then comes to nobody,
    and if the loop is closed by then, the call holds its connection for as long as the
    process lives (1.85).
    """
    call._cancel("cancelled by its client")


class Upstream:
    """A Triton behind us.

    Attributes:
        is_ready: what it said last; false while there is no connection.
        num_outstanding: calls that it has not answered.
        outcomes: calls that ended, by ``finished``, ``cancelled`` and ``failed``.

    Threads: the loop's only.
    """

    def __init__(self, endpoint: Endpoint, connecting: Connecting) -> None:
        self.endpoint = endpoint
        self.name = str(endpoint)
        self.is_connected = False
        self.is_ready = False
        self.num_outstanding = 0
        self.outcomes: Counter[str] = Counter()
        self._channel = connecting.open(endpoint)
        self.stub: Any = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._metadata = tuple(connecting.headers)
        self._probe_seconds = connecting.probe_seconds
        self._states: dict[tuple[str, str], IndexEntry] = {}
        self._probed = asyncio.Event()
        self._is_due = asyncio.Event()
        self._following = asyncio.create_task(self._follow())
        self._probing = asyncio.create_task(self._probe_again_and_again())

    def stats(self) -> UpstreamStats:
        """How it is now."""
        return UpstreamStats(self.name, self.is_ready, self.num_outstanding, dict(self.outcomes))

    async def wait_probed(self) -> None:
        """Wait until it has answered a first probe."""
        await self._probed.wait()

    def index(self) -> Iterable[IndexEntry]:
        """The versions of models that it had when it was asked last."""
        return self._states.values()

    def is_serving(self, model: str, version: str | None) -> bool:
        """Whether a model can be asked there; of None, any version."""
        if version is not None:
            entry = self._states.get((model, version))
            return entry is not None and entry.state == "READY"
        return any(
            entry.name == model and entry.state == "READY" for entry in self._states.values()
        )

    async def ask(self, method: str, request: Any, *, within: float | None = None) -> Any:
        """Make a call of a short answer.

        Who is cancelled meanwhile has it as soon as the call has ended, see ``cancel_call``.

        Args:
            within: seconds after which it is given up.

        Raises:
            aio.AioRpcError: it failed.
        """
        call = getattr(self.stub, method)(request, metadata=self._metadata, timeout=within)
        answer = asyncio.ensure_future(call)
        try:
            return await asyncio.shield(answer)
        except aio.AioRpcError as error:
            raise error.with_traceback(None)  # noqa: B904 - it is the same
        except asyncio.CancelledError:
            cancel_call(call)
            await asyncio.wait([answer], timeout=LAST_EVENT_WITHIN)
            raise
        finally:
            # A channel has not ended while a call of it is there, were it only in a traceback.
            del call, answer

    async def look_at_index(self) -> None:
        """Ask what it serves.

        Raises:
            aio.AioRpcError: it failed.
        """
        request = service_pb2.RepositoryIndexRequest()
        answer = await self.ask("RepositoryIndex", request, within=ANSWER_WITHIN)
        self._states = {
            (model.name, model.version): IndexEntry(
                model.name, model.version or None, model.state or None, model.reason or None
            )
            for model in answer.models
        }

    def lost(self) -> None:
        """A call found that there is no connection: take it for that before gRPC says so."""
        if self.is_connected:
            _logger.warning("%s is not connected any more", self.name)
        self.is_connected = self.is_ready = False

    async def close(self) -> None:
        """Cancel what it still has, and close the channel. Idempotent."""
        self._probing.cancel()
        await asyncio.gather(self._probing, return_exceptions=True)
        self.is_connected = self.is_ready = False
        await self._channel.close()
        # gRPC tells it of the end by an event for this loop, which is not to be closed before:
        # an event for a closed loop keeps those behind it from the others (1.85).
        await asyncio.wait([self._following], timeout=LAST_EVENT_WITHIN)
        self._following.cancel()
        await asyncio.gather(self._following, return_exceptions=True)

    async def _follow(self) -> None:
        """Keep ``is_connected`` what the channel is, and the channel connecting."""
        while True:
            state = self._look_at_channel()
            if state is grpc.ChannelConnectivity.SHUTDOWN:
                return
            self._is_due.set()
            await self._channel.wait_for_state_change(state)

    async def _probe_again_and_again(self) -> None:
        while True:
            self._is_due.clear()
            # A connection that a call found lost may be back already, unnoticed between two looks.
            self._look_at_channel()
            if self.is_connected:
                await self._probe()
            # Not wait_for(), which until Python 3.12 took a cancel that came with the event for it.
            with suppress(TimeoutError):
                async with asyncio.timeout(self._probe_seconds):
                    await self._is_due.wait()

    def _look_at_channel(self) -> grpc.ChannelConnectivity:
        state = self._channel.get_state(try_to_connect=True)
        if state is not grpc.ChannelConnectivity.READY:
            self.lost()
        elif not self.is_connected:
            _logger.info("%s is connected", self.name)
            self.is_connected = True
        return state

    async def _probe(self) -> None:
        was_ready = self.is_ready
        try:
            answer = await self.ask(
                "ServerReady", service_pb2.ServerReadyRequest(), within=ANSWER_WITHIN
            )
            await self.look_at_index()
        except aio.AioRpcError as error:
            self.is_ready = False
            _logger.warning("%s does not answer: %s", self.name, error.details())
        else:
            self.is_ready = answer.ready and self.is_connected
            self._probed.set()
        if self.is_ready != was_ready:
            _logger.info("%s is %s", self.name, "ready" if self.is_ready else "not ready")
