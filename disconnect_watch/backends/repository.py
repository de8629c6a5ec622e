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
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from stat import S_ISREG
from typing import TYPE_CHECKING, Any, Protocol, Self

from disconnect_watch.backends.engines import EngineTable
from disconnect_watch.backends.ensemble import EnsembleModel
from disconnect_watch.backends.infer import Code, InferError, ServedModel
from disconnect_watch.backends.model_config import (
    ENGINE,
    ConfigError,
    check,
    complete,
    read_config,
)
from disconnect_watch.backends.overrides import Overrides
from disconnect_watch.backends.python_model.calls import CallServer
from disconnect_watch.backends.python_model.instance import LoadError
from disconnect_watch.backends.python_model.model import PythonModel
from disconnect_watch.backends.statistics import IndexEntry, ModelStatistics
from disconnect_watch.backends.sweeper import Sweeper
from disconnect_watch.backends.versions import choose_versions, versions_in

if TYPE_CHECKING:
    from disconnect_watch.engine import EngineConfig

__all__ = ["MODES", "ManagedModel", "ModelRepository"]

_logger = logging.getLogger("disconnect_watch.models")

#: When models are loaded: all at the start; as clients say; as the directory changes.
MODES = ("none", "explicit", "poll")


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


class _Version:
    """One version of a model, from its first load on."""

    def __init__(self) -> None:
        self.state = "LOADING"
        self.reason: str | None = None
        #: Of the last load, which may have left an older model at work.
        self.load_error: str | None = None
        self.model: ManagedModel | None = None


class _Entry:
    """One model of the repository."""

    def __init__(self) -> None:
        self.versions: dict[int, _Version] = {}
        self.lock = asyncio.Lock()
        self.was_ready = False
        self.overrides: Overrides | None = None
        self.steps: set[str] = set()
        #: What the files were when they were loaded, where they are polled.
        self.stamp: frozenset[tuple[str, int, int]] = frozenset()

    @property
    def is_ready(self) -> bool:
        """Whether some version can be asked."""
        return any(one.state == "READY" for one in self.versions.values())


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
        for directory in directories:
            if not directory.is_dir():
                raise ValueError(f"model repository '{directory}' is no directory")
        self.mode = mode
        self._directories = tuple(directory.resolve() for directory in directories)
        self._load_models = tuple(load_models)
        self._poll_seconds = poll_seconds
        self._auto_complete = auto_complete
        self._kill_after = kill_after
        self._grace = grace
        self._engines = EngineTable() if engines is None else engines
        self._engine_config = engine_config
        self._entries: dict[str, _Entry] = {}
        self._added: dict[str, ServedModel] = {}
        self._sweeper = Sweeper(asyncio.get_running_loop())
        self._calls = CallServer(self.find)
        self._polling: asyncio.Task[None] | None = None
        #: What ends models that were replaced.
        self._ending: dict[asyncio.Task[None], ManagedModel] = {}
        self._ensembles = asyncio.Lock()
        self._is_closed = False

    async def start(self) -> None:
        """Load what the mode says; what can't be loaded is told by ``index``."""
        names = self._on_disk()
        if self.mode == "explicit":
            chosen = set(self._load_models)
            for unknown in sorted(chosen - names - {"*"}):
                _logger.error("model '%s' is not in the repository", unknown)
            names = names if "*" in chosen else names & chosen
        await self._load_all(names)
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
        return sorted(self._on_disk() | set(self._entries) | set(self._added))

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
        if entry is None or not (entry.was_ready or _is_loading(entry)):
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
        if overrides is None and name not in self._on_disk():
            raise InferError(
                Code.INTERNAL, f"failed to load '{name}', failed to poll from model repository"
            )
        await self._load(name, overrides)
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
        await self._unload(name, unload_dependents=unload_dependents)

    async def close(self) -> None:
        """Unload all. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._polling is not None:
            self._polling.cancel()
            await asyncio.gather(self._polling, return_exceptions=True)
        models = [
            one.model
            for entry in self._entries.values()
            for one in entry.versions.values()
            if one.model is not None
        ]
        models += self._ending.values()
        await asyncio.gather(*(model.close() for model in models))
        await asyncio.gather(*self._ending)
        for entry in self._entries.values():
            if entry.overrides is not None:
                entry.overrides.close()
        await asyncio.get_running_loop().run_in_executor(None, self._sweeper.close)

    def _refuse_unless_explicit(self) -> None:
        if self.mode != "explicit":
            raise InferError(
                Code.UNAVAILABLE,
                "explicit model load / unload is not allowed if polling is enabled",
            )

    def _on_disk(self) -> set[str]:
        return {
            path.name
            for directory in self._directories
            for path in directory.iterdir()
            if path.is_dir() and not path.name.startswith(".")
        }

    def _directory(self, name: str) -> Path:
        for directory in self._directories:
            # A name is one of those in the directory, and so no path that leads out of it.
            if name in self._on_disk() and (directory / name).is_dir():
                return directory / name
        raise ConfigError(f"model '{name}' is not in the repository")

    async def _load_all(self, names: Iterable[str]) -> None:
        """Load models, a few at a time, those that are made of others behind these."""
        limit = asyncio.Semaphore(max(2, os.cpu_count() or 1))

        async def load(name: str) -> None:
            async with limit:
                await self._load(name, None)

        single: list[str] = []
        composed: list[str] = []
        for name in sorted(names):
            (composed if self._is_ensemble(name) else single).append(name)
        for group in (single, composed):
            await asyncio.gather(*map(load, group))

    def _is_ensemble(self, name: str) -> bool:
        with suppress(ConfigError):
            config = read_config(self._directory(name))
            return bool(config.platform == "ensemble" or config.HasField("ensemble_scheduling"))
        return False

    async def _load(self, name: str, overrides: Overrides | None) -> None:
        if self._is_ensemble(name) or (
            overrides and overrides.config.HasField("ensemble_scheduling")
        ):
            # One at a time: it may load others, and two could wait for each other.
            async with self._ensembles:
                await self._load_one(name, overrides, ())
        else:
            await self._load_one(name, overrides, ())

    async def _load_one(
        self, name: str, overrides: Overrides | None, within: tuple[str, ...]
    ) -> None:
        """Load one model, for the sake of the ensembles that it is a step of."""
        entry = self._entries.setdefault(name, _Entry())
        async with entry.lock:
            began = time.monotonic()
            try:
                directory = overrides.directory if overrides else None
                directory = directory or self._directory(name)
                config = overrides.config if overrides else None
                config = config or read_config(directory)
                complete(config, name)
                check(config, name)
                entry.stamp = _stamp(directory)
                wanted = choose_versions(config.version_policy, versions_in(directory))
                if not wanted:
                    raise ConfigError(f"at least one version must be available under {directory}")
                if config.backend == ENGINE and len(wanted) > 1:
                    raise ConfigError(
                        f"model '{name}' has the versions {wanted} by its policy, an engine is "
                        "served in one version: leave out version_policy"
                    )
                await self._load_steps(config, (*within, name))
            except (ConfigError, OSError) as error:
                _logger.error("model '%s' can't be loaded: %s", name, str(error))
                _fail_all(entry, f"Invalid argument: {error}")
                return
            old_overrides, entry.overrides = entry.overrides, overrides
            await asyncio.gather(
                *(self._load_version(entry, config, directory, number) for number in wanted)
            )
            await asyncio.gather(
                *(
                    self._retire(one)
                    for number, one in entry.versions.items()
                    if number not in wanted and one.model is not None
                )
            )
            if old_overrides is not None:
                old_overrides.close()
            _logger.info("model '%s' took %.3f s to load", name, time.monotonic() - began)

    async def _load_steps(self, config: Any, within: tuple[str, ...]) -> None:
        """Load what an ensemble is made of and is not loaded yet."""
        steps = {step.model_name for step in config.ensemble_scheduling.step}
        self._entries[config.name].steps = steps
        for name in sorted(steps):
            if name in within:
                raise ConfigError(f"ensemble '{name}' is a step of itself")
            entry = self._entries.get(name)
            if name in self._added or (entry is not None and entry.is_ready):
                continue
            if name in self._on_disk():
                await self._load_one(name, None, within)

    async def _load_version(self, entry: _Entry, config: Any, directory: Path, number: int) -> None:
        one = entry.versions.setdefault(number, _Version())
        old = one.model
        one.load_error = None
        if old is None:
            one.state, one.reason = "LOADING", None
        own_config = type(config)()
        own_config.CopyFrom(config)
        try:
            model = self._make(own_config, directory, number)
            await model.load(auto_complete=self._auto_complete)
        except (LoadError, ConfigError) as error:
            # The text alone: who keeps records would keep the error's frames, and so the process.
            _logger.error("model '%s' version %d failed: %s", config.name, number, str(error))
            one.load_error = f"Internal: {error}"
            if old is None:  # else the old one goes on
                one.state, one.reason = "UNAVAILABLE", one.load_error
            return
        one.model, one.state, one.reason = model, "READY", None
        entry.was_ready = True
        if old is not None:
            task = asyncio.ensure_future(_end(old, self._grace))
            self._ending[task] = old
            task.add_done_callback(self._ending.pop)

    def _make(self, config: Any, directory: Path, number: int) -> ManagedModel:
        if config.platform == "ensemble":
            return EnsembleModel(config, directory, number, sweeper=self._sweeper, find=self.find)
        if config.backend == ENGINE:
            # Not before one is wanted: it brings torch.
            from disconnect_watch.backends.repository_engine import RepositoryEngine

            return RepositoryEngine(
                config,
                directory,
                number,
                engines=self._engines,
                engine_config=self._engine_config,
            )
        return PythonModel(
            config,
            directory,
            number,
            sweeper=self._sweeper,
            calls=self._calls,
            kill_after=self._kill_after,
        )

    async def _unload(self, name: str, *, unload_dependents: bool) -> None:
        entry = self._entries.get(name)
        if entry is None:
            return
        async with entry.lock:
            await asyncio.gather(
                *(self._retire(one) for one in entry.versions.values() if one.model is not None)
            )
            if entry.overrides is not None:
                entry.overrides.close()
                entry.overrides = None
        if unload_dependents:
            for step in self._steps_of(name) - self._steps_in_use():
                await self._unload(step, unload_dependents=True)

    def _steps_of(self, name: str) -> set[str]:
        """The models that an ensemble was made of when it was loaded last."""
        return self._entries[name].steps if name in self._entries else set()

    def _steps_in_use(self) -> set[str]:
        return {step for entry in self._entries.values() if entry.is_ready for step in entry.steps}

    async def _retire(self, one: _Version) -> None:
        model = one.model
        assert model is not None
        one.state = "UNLOADING"
        await _end(model, self._grace)
        one.model = None
        one.state, one.reason = "UNAVAILABLE", "unloaded"

    async def _poll(self) -> None:
        """Follow what changes in the directories."""
        while True:
            await asyncio.sleep(self._poll_seconds)
            await self.poll()

    async def poll(self) -> None:
        """Look at the directories once, and load and unload what changed in them."""
        there = self._on_disk()
        changed = set()
        for name in there:
            entry = self._entries.get(name)
            with suppress(OSError, ConfigError):
                if entry is None or entry.stamp != _stamp(self._directory(name)):
                    changed.add(name)
        await self._load_all(changed)
        for name in set(self._entries) - there:
            await self._unload(name, unload_dependents=False)


async def _end(model: ManagedModel, grace: float) -> None:
    await model.drain(grace)
    await model.close()


def _is_loading(entry: _Entry) -> bool:
    return any(one.state == "LOADING" for one in entry.versions.values())


def _fail_all(entry: _Entry, reason: str) -> None:
    """What is served goes on; else the model has one version, which there is not."""
    for one in entry.versions.values():
        one.load_error = reason
    if not any(one.model is not None for one in entry.versions.values()):
        one = entry.versions.setdefault(1, _Version())
        one.state, one.reason, one.load_error = "UNAVAILABLE", reason, reason


def _stamp(directory: Path) -> frozenset[tuple[str, int, int]]:
    """What the files of a model are now: a change of any makes another.

    Directories do not count: Python's cache in one of them, which the model's own process
    makes, would be a change.
    """
    found = ((path, path.stat()) for path in directory.rglob("*"))
    return frozenset(
        (str(path), stat.st_mtime_ns, stat.st_size)
        for path, stat in found
        if S_ISREG(stat.st_mode) and "__pycache__" not in path.parts
    )


def _not_found(name: str, what: str) -> InferError:
    return InferError(Code.NOT_FOUND, f"Request for unknown model: '{name}' {what}")
