"""Loading and unloading: from the files of a model to one that can be asked, and back.

A model that is loaded again replaces the one that is served once it is ready, which then
finishes what it has.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from disconnect_watch.backends.directories import ModelDirectories, stamp_of
from disconnect_watch.backends.engines import EngineTable
from disconnect_watch.backends.ensemble import EnsembleModel
from disconnect_watch.backends.entries import Entry, ManagedModel, Version
from disconnect_watch.backends.infer import ServedModel
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
from disconnect_watch.backends.sweeper import Sweeper
from disconnect_watch.backends.versions import choose_versions, versions_in

if TYPE_CHECKING:
    from disconnect_watch.engine import EngineConfig

__all__ = ["Loader"]

_logger = logging.getLogger("disconnect_watch.models")


class Loader:
    """Brings the models of directories into entries, and takes them out again.

    Args:
        find: finds a model that can be asked, for those that ask others.
        is_added: whether there is a model of a name that is no part of the directories.
        others: see ``ModelRepository``.

    Attributes:
        entries: by name, of all models that were ever loaded.

    Threads: the loop's only.
    """

    def __init__(
        self,
        directories: ModelDirectories,
        *,
        find: Callable[[str, str | None], ServedModel],
        is_added: Callable[[str], bool],
        auto_complete: bool,
        kill_after: float | None,
        grace: float,
        engines: EngineTable,
        engine_config: "EngineConfig | None",
    ) -> None:
        self.entries: dict[str, Entry] = {}
        self._directories = directories
        self._find = find
        self._is_added = is_added
        self._auto_complete = auto_complete
        self._kill_after = kill_after
        self._grace = grace
        self._engines = engines
        self._engine_config = engine_config
        self._sweeper = Sweeper(asyncio.get_running_loop())
        self._calls = CallServer(find)
        #: What ends models that were replaced.
        self._ending: dict[asyncio.Task[None], ManagedModel] = {}
        self._ensembles = asyncio.Lock()

    async def load_all(self, names: Iterable[str]) -> None:
        """Load models, a few at a time, those that are made of others behind these."""
        limit = asyncio.Semaphore(max(2, os.cpu_count() or 1))

        async def load(name: str) -> None:
            async with limit:
                await self.load(name, None)

        single: list[str] = []
        composed: list[str] = []
        for name in sorted(names):
            (composed if self._directories.is_ensemble(name) else single).append(name)
        for group in (single, composed):
            await asyncio.gather(*map(load, group))

    async def load(self, name: str, overrides: Overrides | None) -> None:
        if self._directories.is_ensemble(name) or (
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
        entry = self.entries.setdefault(name, Entry())
        async with entry.lock:
            began = time.monotonic()
            try:
                directory = overrides.directory if overrides else None
                directory = directory or self._directories.path_of(name)
                config = overrides.config if overrides else None
                config = config or read_config(directory)
                complete(config, name)
                check(config, name)
                entry.stamp = stamp_of(directory)
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
                entry.fail(f"Invalid argument: {error}")
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
        self.entries[config.name].steps = steps
        for name in sorted(steps):
            if name in within:
                raise ConfigError(f"ensemble '{name}' is a step of itself")
            entry = self.entries.get(name)
            if self._is_added(name) or (entry is not None and entry.is_ready):
                continue
            if name in self._directories.names():
                await self._load_one(name, None, within)

    async def _load_version(self, entry: Entry, config: Any, directory: Path, number: int) -> None:
        one = entry.versions.setdefault(number, Version())
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
            return EnsembleModel(config, directory, number, sweeper=self._sweeper, find=self._find)
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

    async def unload(self, name: str, *, unload_dependents: bool) -> None:
        entry = self.entries.get(name)
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
                await self.unload(step, unload_dependents=True)

    def _steps_of(self, name: str) -> set[str]:
        """The models that an ensemble was made of when it was loaded last."""
        return self.entries[name].steps if name in self.entries else set()

    def _steps_in_use(self) -> set[str]:
        return {step for entry in self.entries.values() if entry.is_ready for step in entry.steps}

    async def _retire(self, one: Version) -> None:
        model = one.model
        assert model is not None
        one.state = "UNLOADING"
        await _end(model, self._grace)
        one.model = None
        one.state, one.reason = "UNAVAILABLE", "unloaded"

    async def close(self) -> None:
        """Unload all."""
        models = [
            one.model
            for entry in self.entries.values()
            for one in entry.versions.values()
            if one.model is not None
        ]
        models += self._ending.values()
        await asyncio.gather(*(model.close() for model in models))
        await asyncio.gather(*self._ending)
        for entry in self.entries.values():
            if entry.overrides is not None:
                entry.overrides.close()
        await asyncio.get_running_loop().run_in_executor(None, self._sweeper.close)


async def _end(model: ManagedModel, grace: float) -> None:
    await model.drain(grace)
    await model.close()
