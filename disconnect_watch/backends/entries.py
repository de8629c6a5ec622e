"""Where each model of a repository stands, version by version."""

import asyncio
from typing import TYPE_CHECKING, Protocol

from disconnect_watch.backends.infer import ServedModel
from disconnect_watch.backends.statistics import ModelStatistics

if TYPE_CHECKING:
    from disconnect_watch.backends.directories import Stamp
    from disconnect_watch.backends.overrides import Overrides

__all__ = ["Entry", "ManagedModel", "Version"]


class ManagedModel(ServedModel, Protocol):
    """A model that a repository loads and unloads."""

    @property
    def statistics(self) -> ModelStatistics:
        """What it has done up to now."""

    async def load(self, *, auto_complete: bool = True) -> None:
        """Make it ready."""

    async def drain(self, grace: float) -> None:
        """Take no more, and finish what there is."""

    async def close(self, grace: float = 5.0) -> None:
        """Release all."""


class Version:
    """One version of a model, from its first load on."""

    def __init__(self) -> None:
        self.state = "LOADING"
        self.reason: str | None = None
        #: Of the last load, which may have left an older model at work.
        self.load_error: str | None = None
        self.model: ManagedModel | None = None


class Entry:
    """One model of the repository."""

    def __init__(self) -> None:
        self.versions: dict[int, Version] = {}
        self.lock = asyncio.Lock()
        self.was_ready = False
        self.overrides: Overrides | None = None
        self.steps: set[str] = set()
        #: What the files were when they were loaded, where they are polled.
        self.stamp: Stamp = frozenset()

    @property
    def is_ready(self) -> bool:
        """Whether some version can be asked."""
        return any(one.state == "READY" for one in self.versions.values())

    @property
    def is_loading(self) -> bool:
        """Whether some version is on its way."""
        return any(one.state == "LOADING" for one in self.versions.values())

    def fail(self, reason: str) -> None:
        """What is served goes on; else the model has one version, which there is not."""
        for one in self.versions.values():
            one.load_error = reason
        if not any(one.model is not None for one in self.versions.values()):
            one = self.versions.setdefault(1, Version())
            one.state, one.reason, one.load_error = "UNAVAILABLE", reason, reason
