"""What the routes share: the models, the limits, and who is being served now."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from disconnect_watch.backends import Backend
from disconnect_watch.engine import RequestOutput, SamplingParams
from disconnect_watch.engine.errors import EngineClosedError, QueueFullError
from disconnect_watch.errors import cut
from disconnect_watch.server.access import RequestRecord
from disconnect_watch.server.errors import (
    FailedError,
    ModelNotFoundError,
    OverloadedError,
    ProtocolError,
    ShuttingDownError,
)
from disconnect_watch.token import CancelToken, Reason

__all__ = ["Frontend", "FrontendStats", "Generation"]


@dataclass(frozen=True, slots=True)
class Generation:
    """One request to generate, as understood.

    Attributes:
        client_id: the client's own name for it, echoed and used for nothing else.
    """

    prompt: str
    params: SamplingParams
    client_id: str = ""


@dataclass(frozen=True, slots=True)
class FrontendStats:
    """A snapshot of a ``Frontend``.

    Attributes:
        num_live: requests that are being generated.
        num_unacked: those of them that are cancelled and whose outcome is not known yet.
        is_draining: whether no more are taken.
    """

    num_live: int
    num_unacked: int
    is_draining: bool


class Frontend:
    """The served models and their running requests.

    Args:
        backends: one a model; the frontend does not close them.
        max_body_bytes: of a request.

    Threads: the loop's only.
    """

    def __init__(self, *backends: Backend, max_body_bytes: int = 1 << 26) -> None:
        self.backends = {backend.name: backend for backend in backends}
        self.max_body_bytes = max_body_bytes
        self._live: set[CancelToken] = set()
        self._is_draining = False

    def stats(self) -> FrontendStats:
        """How many requests are being generated, and whether more are taken."""
        return FrontendStats(
            num_live=len(self._live),
            num_unacked=sum(token.cancelled for token in self._live),
            is_draining=self._is_draining,
        )

    @property
    def is_ready(self) -> bool:
        """Whether a request sent now would be served."""
        return not self._is_draining and all(b.is_ready for b in self.backends.values())

    def find(self, model: str, version: str | None) -> Backend:
        """The backend of a model.

        Raises:
            ModelNotFoundError: in Triton's words.
        """
        backend = self.backends.get(model)
        if backend is None:
            raise ModelNotFoundError(f"Request for unknown model: '{model}' is not found")
        if version not in (None, backend.version):
            raise ModelNotFoundError(
                f"Request for unknown model: '{model}' version {version} is not found"
            )
        return backend

    async def generate(
        self, backend: Backend, generation: Generation, record: RequestRecord
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run one request, and keep its token at hand for a shutdown meanwhile.

        Raises:
            RequestError: it can't be taken, or the engine died underneath it.
        """
        if self._is_draining:
            raise ShuttingDownError("the server is shutting down")
        prefix = f"[request id: {cut(generation.client_id) or '<id_unknown>'}] "
        self._live.add(record.token)
        has_started = False
        try:
            outputs = backend.generate(
                record.request_id, generation.prompt, generation.params, cancel=record.token
            )
            async with aclosing(outputs):
                async for output in outputs:
                    has_started = True
                    if output.outcome is not None:
                        record.outcome = output.outcome
                    yield output
        except QueueFullError as error:
            raise OverloadedError(f"{prefix}Exceeds maximum queue size: {error}") from error
        except EngineClosedError as error:
            raise FailedError(f"{prefix}{error}") from error
        except ValueError as error:
            # The engine's word for a prompt that it can't take.
            if has_started:
                raise
            raise ProtocolError(f"{prefix}{error}") from error
        finally:
            self._live.discard(record.token)

    def begin_drain(self) -> None:
        """Take no more requests; those that run go on."""
        self._is_draining = True

    def cancel_all(self, reason: Reason = Reason.SHUTDOWN) -> int:
        """Set the token of every running request; returns how many were not set before."""
        return sum(token.cancel(reason) for token in self._live)
