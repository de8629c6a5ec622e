"""A directory of models, as Triton's: what is in it, what of it is loaded, and what is asked.

    repository/
        MODEL/
            config.pbtxt        may leave anything out
            VERSION/model.py    VERSION: a positive integer

What a model is made of is read when it is loaded; a model that is loaded again replaces
the one that is served once it is ready, which then finishes what it has.
"""

import asyncio
import logging
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from disconnect_watch.backends.directories import ModelDirectories
from disconnect_watch.backends.engines import EngineTable
from disconnect_watch.backends.infer import Code, InferError, ServedModel
from disconnect_watch.backends.loader import Loader
from disconnect_watch.backends.overrides import Overrides
from disconnect_watch.backends.python_model.model import PythonModel
from disconnect_watch.backends.statistics import IndexEntry, ModelStatistics

if TYPE_CHECKING:
    from disconnect_watch.engine import EngineConfig

__all__ = ["MODES", "ModelRepository"]

_logger = logging.getLogger("disconnect_watch.models")

#: When models are loaded: all at the start; as clients say; as the directory changes.
MODES = ("none", "explicit", "poll")


class ModelRepository:
    """The models of one or more directories.

    Args:
        directories: the first that holds a model of a name has it.
        mode: one of ``MODES``.
        load_models: those to load at the start where the mode is ``explicit``; ``*`` is all.
        poll_seconds: between two looks at the directories where the mode is ``poll``.
        auto_complete: whether models may complete their configuration.
        kill_after: seconds, see ``PythonModel``.
        grace: seconds that requests have to end when their model is unloaded.
        engines: where models that our own engine runs stand for ``generate`` and ``/v1``.
        engine_config: of these, but for what their parameters say.

    Threads: the loop's on which it was made.

    Raises:
        ValueError: an argument makes no sense; the message says which.
    """

    def __init__(
        self,
        *directories: Path,
        mode: str = "none",
        load_models: Iterable[str] = (),
        poll_seconds: float = 15.0,
        auto_complete: bool = True,
        kill_after: float | None = None,
        grace: float = 30.0,
        engines: EngineTable | None = None,
        engine_config: "EngineConfig | None" = None,
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"model control mode '{mode}', it must be one of {', '.join(MODES)}")
        if load_models and mode != "explicit":
            raise ValueError("models to load can be named in the mode 'explicit' only")
        self.mode = mode
        self._directories = ModelDirectories(*directories)
        self._load_models = tuple(load_models)
        self._poll_seconds = poll_seconds
        self._added: dict[str, ServedModel] = {}
        self._loader = Loader(
            self._directories,
            find=self.find,
            is_added=self._added.__contains__,
            auto_complete=auto_complete,
            kill_after=kill_after,
            grace=grace,
            engines=EngineTable() if engines is None else engines,
            engine_config=engine_config,
        )
        self._entries = self._loader.entries
        self._polling: asyncio.Task[None] | None = None
        self._is_closed = False

    async def start(self) -> None:
        """Load what the mode says; what can't be loaded is told by ``index``."""
        names = self._directories.names()
        if self.mode == "explicit":
            chosen = set(self._load_models)
            for unknown in sorted(chosen - names - {"*"}):
                _logger.error("model '%s' is not in the repository", unknown)
            names = names if "*" in chosen else names & chosen
        await self._loader.load_all(names)
        if self.mode == "poll":
            self._polling = asyncio.ensure_future(self._poll())

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def add(self, model: ServedModel) -> None:
        """Serve a model that is no part of the directories, such as the embedded engine.

        The repository does not close it.
        """
        self._added[model.name] = model

    @property
    def names(self) -> list[str]:
        """Of all models there are, loaded or not."""
        return sorted(self._directories.names() | set(self._entries) | set(self._added))

    def find(self, name: str, version: str | None = None) -> ServedModel:
        """A model that can be asked.

        Args:
            version: None takes the latest that is ready.

        Raises:
            InferError: NOT_FOUND or UNAVAILABLE, in Triton's words.
        """
        added = self._added.get(name)
        if added is not None:
            if version in (None, added.version):
                return added
            raise _not_found(name, f"version {version} is not found")
        entry = self._entries.get(name)
        if entry is None or not (entry.was_ready or entry.is_loading):
            raise _not_found(name, "is not found")
        if version is None:
            ready = [number for number, one in entry.versions.items() if one.state == "READY"]
            if not ready:
                raise _not_found(name, "has no available versions")
            model = entry.versions[max(ready)].model
            assert model is not None
            return model
        one = entry.versions.get(int(version))
        if one is None:
            raise _not_found(name, f"version {version} is not found")
        if one.state != "READY" or one.model is None:
            raise InferError(
                Code.UNAVAILABLE,
                f"Request for unknown model: '{name}' version {version} is not at ready state",
            )
        return one.model

    def index(self, *, ready: bool = False) -> list[IndexEntry]:
        """One entry for each version that was ever loaded, and for each model that was not.

        Args:
            ready: leaves out whatever can't be asked.
        """
        entries = []
        for name in self.names:
            added = self._added.get(name)
            if added is not None:
                state = "READY" if added.is_ready else "UNAVAILABLE"
                entries.append(IndexEntry(name, added.version, state))
                continue
            entry = self._entries.get(name)
            versions = entry.versions if entry is not None else {}
            if not versions:
                entries.append(IndexEntry(name))
            entries += (
                IndexEntry(name, str(number), one.state, one.reason)
                for number, one in sorted(versions.items())
            )
        return [one for one in entries if one.state == "READY"] if ready else entries

    def unheeded(self) -> list[int]:
        """See ``Models.unheeded``."""
        models = [
            version.model for entry in self._entries.values() for version in entry.versions.values()
        ]
        return [at for model in models if isinstance(model, PythonModel) for at in model.unheeded()]

    def is_ready(self, *, strict: bool = True) -> bool:
        """Whether the server may be called ready.

        Args:
            strict: only if every model that was to be loaded is.
        """
        if self._is_closed:
            return False
        states = [one.state for one in self.index() if one.state is not None]
        if not strict:
            return True
        return all(
            state == "READY" or (state == "UNAVAILABLE" and one.reason == "unloaded")
            for one in self.index()
            if (state := one.state) is not None
        ) and bool(states or not self._load_models)

    def statistics(
        self, name: str | None = None, version: str | None = None
    ) -> list[ModelStatistics]:
        """What models have done; of one model or version, or of all that are ready.

        Raises:
            InferError: INVALID_ARG, there is no such model or version.
        """
        if name is not None:
            entry = self._entries.get(name)
            one = None if entry is None else entry.versions
            found = {
                number: each.model.statistics
                for number, each in sorted((one or {}).items())
                if each.model is not None and each.state == "READY"
            }
            added = getattr(self._added.get(name), "statistics", None)
            if added is not None:
                found = {int(added.version): added}
            if not found:
                raise InferError(Code.INVALID_ARG, f"requested model '{name}' is not available")
            if version is None:
                return list(found.values())
            if int(version) not in found:
                raise InferError(
                    Code.INVALID_ARG,
                    f"requested model version is not available for model '{name}'",
                )
            return [found[int(version)]]
        everything: list[ModelStatistics] = []
        for each in self.names:
            with suppress(InferError):
                everything += self.statistics(each)
        return everything

    async def load(self, name: str, parameters: dict[str, Any] | None = None) -> None:
        """Load a model, or load it again; returns when it can be asked.

        Args:
            parameters: ``config``, a configuration as JSON that takes the place of the file's,
                and ``file:VERSION/NAME``, the content of files in base64.

        Raises:
            InferError: it can't be loaded, or this repository loads by itself.
        """
        self._refuse_unless_explicit()
        overrides = Overrides.parse(name, parameters or {})
        if overrides is None and name not in self._directories.names():
            raise InferError(
                Code.INTERNAL, f"failed to load '{name}', failed to poll from model repository"
            )
        await self._loader.load(name, overrides)
        failed = [
            f"version {number} is at UNAVAILABLE state: {one.load_error};"
            for number, one in sorted(self._entries[name].versions.items())
            if one.load_error is not None
        ]
        if failed:
            raise InferError(
                Code.INVALID_ARG, f"load failed for model '{name}': {' '.join(failed)}"
            )

    async def unload(self, name: str, *, unload_dependents: bool = False) -> None:
        """Unload a model; returns when it has finished what it had.

        Args:
            unload_dependents: also the models that an ensemble is made of.

        Raises:
            InferError: this repository loads by itself.
        """
        self._refuse_unless_explicit()
        await self._loader.unload(name, unload_dependents=unload_dependents)

    async def load_from(self, name: str, directory: Path, config: dict[str, Any]) -> None:
        """Load a model that lies in none of the directories; returns when it can be asked.

        Args:
            config: in the place of its file's, as JSON.

        Raises:
            InferError: see ``load``.
        """
        self._directories.place(name, directory)
        try:
            await self.load(name, {"config": config})
        except BaseException:
            self._directories.forget(name)
            raise

    async def unload_from(self, name: str) -> None:
        """Unload a model of ``load_from``, and forget where it lay."""
        await self.unload(name)
        self._directories.forget(name)

    async def close(self) -> None:
        """Unload all. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._polling is not None:
            self._polling.cancel()
            await asyncio.gather(self._polling, return_exceptions=True)
        await self._loader.close()

    def _refuse_unless_explicit(self) -> None:
        if self.mode != "explicit":
            raise InferError(
                Code.UNAVAILABLE,
                "explicit model load / unload is not allowed if polling is enabled",
            )

    async def _poll(self) -> None:
        """Follow what changes in the directories."""
        while True:
            await asyncio.sleep(self._poll_seconds)
            await self.poll()

    async def poll(self) -> None:
        """Look at the directories once, and load and unload what changed in them."""
        there = self._directories.names()
        changed = set()
        for name in there:
            entry, stamp = self._entries.get(name), self._directories.stamp(name)
            if stamp is not None and (entry is None or entry.stamp != stamp):
                changed.add(name)
        await self._loader.load_all(changed)
        for name in set(self._entries) - there:
            await self._loader.unload(name, unload_dependents=False)


def _not_found(name: str, what: str) -> InferError:
    return InferError(Code.NOT_FOUND, f"Request for unknown model: '{name}' {what}")
