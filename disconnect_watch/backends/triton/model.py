"""A model of a Triton's as the frontend asks it."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from grpc import aio

from disconnect_watch.backends.infer import InferError, InferRequest, InferResponse
from disconnect_watch.backends.model_config import inputs_of, outputs_of
from disconnect_watch.backends.pending import cancelled_error
from disconnect_watch.backends.triton.failures import (
    error_of_text,
    failure_of,
    is_refusal,
    was_never_sent,
)
from disconnect_watch.backends.triton.fleet import Fleet
from disconnect_watch.backends.triton.headers import HeaderPassing
from disconnect_watch.backends.triton.messages import message_of, response_of
from disconnect_watch.backends.triton.upstream import Upstream

if TYPE_CHECKING:
    from disconnect_watch.backends.base import Tensor

__all__ = ["TritonModel"]


class TritonModel:
    """One model, or one version of it, on whichever Tritons have it.

    Args:
        config: as Triton has completed it.
        version: None where the client names none, and Triton's policy decides.

    Threads: the loop's only.
    """

    def __init__(
        self, fleet: Fleet, config: Any, version: str | None, passing: HeaderPassing
    ) -> None:
        self.config = config
        self.name: str = config.name
        self.version = version or ""
        self.is_decoupled: bool = config.model_transaction_policy.decoupled
        self.inputs: Sequence[Tensor] = inputs_of(config)
        self.outputs: Sequence[Tensor] = outputs_of(config)
        self._fleet = fleet
        self._version = version
        self._passing = passing

    @property
    def is_ready(self) -> bool:
        """Whether some Triton has it ready."""
        return any(
            upstream.is_connected and upstream.is_serving(self.name, self._version)
            for upstream in self._fleet.upstreams
        )

    def labels(self, output: str) -> Sequence[str]:
        """None: Triton puts them to the classes itself."""
        return ()

    async def infer(self, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        """See ``ServedModel.infer``.

        What could not be sent for lack of a connection is sent to another Triton; what may
        have been begun is not.
        """
        message = message_of(request, self.name, self.version)
        metadata = self._passing.metadata(request.headers)
        tried: list[Upstream] = []
        request.phase = "waiting"
        while True:
            if request.cancel.cancelled:
                raise cancelled_error(request)
            upstream = self._fleet.choose(self.name, self._version, request, tried=tried)
            request.phase = "decode"
            responses = self._stream if self.is_decoupled else self._single
            outcome = "cancelled"  # unless it comes to an end
            try:
                async with aclosing(responses(upstream, message, metadata, request)) as answers:
                    async for response in answers:
                        yield response
            except aio.AioRpcError as error:
                if was_never_sent(error):
                    outcome = ""
                    upstream.lost()
                    tried.append(upstream)
                    continue
                outcome = "failed"
                yield self._error(request, failure_of(error, upstream.name))
                return
            except InferError:
                outcome = "failed"
                raise
            except asyncio.CancelledError:
                task = asyncio.current_task()
                assert task is not None
                # What cancels a call raises this where it is awaited, without a cancelled task.
                if task.cancelling() or not request.cancel.cancelled:
                    raise
                raise cancelled_error(request) from None
            else:
                outcome = "finished"
                return
            finally:
                if outcome:
                    upstream.outcomes[outcome] += 1

    async def _single(
        self, upstream: Upstream, message: Any, metadata: Any, request: InferRequest
    ) -> AsyncGenerator[InferResponse, None]:
        call = upstream.stub.ModelInfer(message, metadata=metadata)
        with self._fleet.running(upstream, call, request.cancel):
            response = response_of(await call, request)
        response.is_final = True
        yield response

    async def _stream(
        self, upstream: Upstream, message: Any, metadata: Any, request: InferRequest
    ) -> AsyncGenerator[InferResponse, None]:
        call = upstream.stub.ModelStreamInfer(_once(message), metadata=metadata)
        with self._fleet.running(upstream, call, request.cancel):
            async for answer in call:
                if text := answer.error_message:
                    error = error_of_text(text)
                    if is_refusal(text):
                        raise error
                    yield self._error(request, error, is_final=False)
                else:
                    yield response_of(answer.infer_response, request)

    def _error(
        self, request: InferRequest, error: InferError, *, is_final: bool = True
    ) -> InferResponse:
        return InferResponse(self.name, self.version, request.id, error=error, is_final=is_final)


async def _once(message: Any) -> AsyncIterator[Any]:
    yield message
