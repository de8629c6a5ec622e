"""The embedded engine as a model of a repository.

    llm/
        config.pbtxt    backend: "disconnect_watch_engine"
        1/              a Hugging Face directory, or empty with the parameter ``model``

It takes tensors as every model does, so that others ask it and ensembles end with it; and it
stands among the engines of the frontend, so that ``generate`` and ``/v1`` have it too. Both
ways lead into one batch.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from disconnect_watch.backends.engine import EngineBackend
from disconnect_watch.backends.engine_counts import engine_statistics
from disconnect_watch.backends.engine_model import EngineModel
from disconnect_watch.backends.engines import EngineTable
from disconnect_watch.backends.infer import InferRequest, InferResponse
from disconnect_watch.backends.model_config import ConfigError, parameters_of
from disconnect_watch.backends.statistics import ModelStatistics
from disconnect_watch.engine import CheckpointError, EngineConfig

if TYPE_CHECKING:
    from disconnect_watch.backends.base import Tensor

__all__ = ["RepositoryEngine"]

#: Seconds between looks whether its last request has ended.
TICK = 0.05
#: What the engine says of itself, and a configuration can't.
_OWN = (
    "input",
    "output",
    "max_batch_size",
    "dynamic_batching",
    "sequence_batching",
    "model_warmup",
)


class RepositoryEngine:
    """One version of a model that our engine runs.

    Its parameters are the fields of ``EngineConfig``, ``model`` (a Hugging Face directory, from
    the version's on, which it is itself without one) and ``chat_template`` (a file).

    Args:
        config: complete and checked; replaced by what the engine says of itself.
        directory: of the model; the version's lies in it.
        engines: where it stands while it is served.
        engine_config: for what the parameters leave out.

    Threads: the loop's only.

    Raises:
        ConfigError: the configuration has what an engine says itself, or a parameter that makes
            no sense.
    """

    is_decoupled = True

    def __init__(
        self,
        config: Any,
        directory: Path,
        version: int,
        *,
        engines: EngineTable,
        engine_config: EngineConfig | None,
    ) -> None:
        self.config = config
        self.name: str = config.name
        self.version = str(version)
        self.inputs: Sequence[Tensor] = EngineBackend.inputs
        self.outputs: Sequence[Tensor] = EngineBackend.outputs
        self._engines = engines
        self._backend: EngineBackend | None = None
        self._model: EngineModel | None = None
        self._is_draining = False
        given = {field.name for field, _ in config.ListFields()}
        for field in _OWN:
            if field in given:
                raise ConfigError(
                    f"model '{self.name}' is an engine, which says itself what it takes: "
                    f"leave out {field}"
                )
        parameters = parameters_of(config)
        versions_own = directory / self.version
        self._path = versions_own / parameters.pop("model", "")
        template = parameters.pop("chat_template", None)
        self._chat_template = versions_own / template if template else None
        self._engine_config = _configured(self.name, engine_config or EngineConfig(), parameters)

    async def load(self, *, auto_complete: bool = True) -> None:
        """Load the checkpoint and start the engine.

        Raises:
            ConfigError: there is no checkpoint, or not one that it can run.
        """
        began = time.monotonic()
        try:
            backend = await asyncio.to_thread(
                EngineBackend.from_pretrained,
                self._path,
                name=self.name,
                config=self._engine_config,
                chat_template=self._chat_template,
            )
        except (CheckpointError, ValueError, OSError) as error:
            raise ConfigError(f"model '{self.name}': {error}") from error
        backend.version = self.version
        self._backend, self._model = backend, EngineModel(backend)
        policy, self.config = self.config.version_policy, self._model.config
        self.config.version_policy.CopyFrom(policy)
        self._load_seconds = time.monotonic() - began
        self._engines.add(backend)

    @property
    def is_ready(self) -> bool:
        """Whether it takes requests."""
        return self._backend is not None and self._backend.is_ready and not self._is_draining

    @property
    def statistics(self) -> ModelStatistics:
        """Of now, by whichever way requests came."""
        assert self._backend is not None
        statistics = engine_statistics(self._backend)
        statistics.load_seconds = self._load_seconds
        return statistics

    def labels(self, output: str) -> Sequence[str]:
        """None of its outputs is a score of classes."""
        return ()

    def infer(self, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        """See ``ServedModel.infer``."""
        assert self._model is not None
        return self._model.infer(request)

    async def drain(self, grace: float) -> None:
        """Take no more, and let what there is end within ``grace`` seconds."""
        self._is_draining = True
        if self._backend is None:
            return
        self._engines.remove(self._backend)
        until = time.monotonic() + grace
        while time.monotonic() < until:
            stats = self._backend.stats()
            if stats.num_waiting == stats.num_running == 0:
                return
            await asyncio.sleep(TICK)

    async def close(self, grace: float = 5.0) -> None:
        """Cancel what is left, and end the engine; ``drain`` took it off the table. Idempotent."""
        backend = self._backend
        if backend is not None:
            await asyncio.to_thread(backend.close)


def _configured(name: str, base: EngineConfig, parameters: dict[str, str]) -> EngineConfig:
    types = {field.name: field.type for field in fields(EngineConfig)}
    try:
        given = {}
        for key, text in parameters.items():
            if key not in types:
                raise ValueError(f"there is no {key}, but model, chat_template, {', '.join(types)}")
            given[key] = msgspec.convert(text, types[key], strict=False)
        return replace(base, **given)
    except ValueError as error:  # msgspec's is one
        raise ConfigError(f"parameters of model '{name}': {error}") from error
