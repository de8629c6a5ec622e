"""What the frontend asks of whatever holds the models that take tensors."""

from collections.abc import Sequence
from typing import Any, Protocol

from disconnect_watch.backends.infer import ServedModel
from disconnect_watch.backends.statistics import IndexEntry, ModelStatistics

__all__ = ["Models"]


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

    def is_ready(self, *, strict: bool = True) -> bool:
        """Whether requests are served; ``strict`` asks that every model is ready."""
