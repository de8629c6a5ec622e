"""What the frontend asks of whatever holds the models that take tensors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from disconnect_watch.backends.infer import ServedModel
from disconnect_watch.backends.statistics import IndexEntry, ModelStatistics

__all__ = ["Models", "RemoteModels", "UpstreamStats"]


class Models(Protocol):
    """Models by name and version, which may come and go.

    Threads: the loop's only.
    """

    def find(self, name: str, version: str | None = None) -> ServedModel:
        """A version of a model, or by its policy the newest.

        Raises:
            InferError: there is none that is served, in Triton's words.
        """

    def index(self, *, ready: bool = False) -> Sequence[IndexEntry]:
        """Every version of every model, or those that are ready."""

    async def load(self, name: str, parameters: dict[str, Any] | None = None) -> None:
        """Load a model, or load it anew; returns when it serves.

        Raises:
            InferError: it can't be loaded, or nobody may by request.
        """

    async def unload(self, name: str, *, unload_dependents: bool = False) -> None:
        """Serve a model no more; its running requests end first.

        Raises:
            InferError: nobody may by request.
        """

    def statistics(
        self, name: str | None = None, version: str | None = None
    ) -> Sequence[ModelStatistics]:
        """Of all models, of one, or of one version of it.

        Raises:
            InferError: there is no such.
        """

    def unheeded(self) -> Sequence[int]:
        """When requests were cancelled, on ``time.monotonic_ns``, that a model still works on."""

    def is_ready(self, *, strict: bool = True) -> bool:
        """Whether requests are served; ``strict`` asks that every model is ready."""


@dataclass(frozen=True, slots=True)
class UpstreamStats:
    """What is known of a server behind this one.

    Attributes:
        num_outstanding: requests that it has not answered.
        outcomes: requests that ended there, by ``finished``, ``cancelled`` and ``failed``.
    """

    name: str
    is_ready: bool
    num_outstanding: int
    outcomes: Mapping[str, int]


class RemoteModels(Models, Protocol):
    """Models that other servers run. What the methods above say of them is a copy.

    Threads: the loop's only.
    """

    async def refresh(self, category: str, name: str | None, version: str | None) -> None:
        """Bring the copy up to date, before a request is answered from it.

        Args:
            category: of the request, as Triton's restricted APIs have them.
            name, version: of the model that it is about, if it is about one.

        Raises:
            InferError: there is no such model, or nobody who can be asked.
        """

    async def server_metadata(self) -> dict[str, Any]:
        """Name, version and extensions of the other server.

        Raises:
            InferError: nobody can be asked.
        """

    async def log_settings(self, changes: dict[str, Any]) -> dict[str, Any]:
        """What it logs, once ``changes`` are made.

        Raises:
            InferError: it refuses them.
        """

    async def trace_settings(self, model: str | None, changes: dict[str, Any]) -> dict[str, Any]:
        """How it traces a model, or all, once ``changes`` are made.

        Raises:
            InferError: it refuses them, or has no such model.
        """

    def upstreams(self) -> Sequence[UpstreamStats]:
        """How the other servers are."""
