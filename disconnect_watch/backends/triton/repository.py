"""The models of a fleet of Tritons, as the frontend asks for them.

What is known of them here is a copy: ``refresh`` brings it up to date before a request is
answered from it. For requests to a model a copy of a few seconds will do, since Triton
itself looks at each of them again.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Self

from grpc import aio
from tritonclient.grpc import service_pb2  # type: ignore[import-untyped]

from disconnect_watch.backends.infer import Code, InferError, InferRequest
from disconnect_watch.backends.models import UpstreamStats
from disconnect_watch.backends.statistics import IndexEntry, ModelStatistics
from disconnect_watch.backends.triton import settings
from disconnect_watch.backends.triton.endpoint import Connecting, Endpoint
from disconnect_watch.backends.triton.failures import failure_of
from disconnect_watch.backends.triton.fleet import Fleet
from disconnect_watch.backends.triton.headers import HeaderPassing
from disconnect_watch.backends.triton.loading import load_parameters
from disconnect_watch.backends.triton.model import TritonModel
from disconnect_watch.backends.triton.statistics import added
from disconnect_watch.backends.triton.upstream import Upstream

__all__ = ["TritonRepository"]

_logger = logging.getLogger("disconnect_watch.gateway")

#: The states of a version, the one that says most about several Tritons first.
_STATES = ("READY", "LOADING", "UNLOADING", "UNAVAILABLE", None)

_Key = tuple[str, str | None]


class TritonRepository:
    """Serves what one or more Tritons serve; use it as an asynchronous context manager.

    Args:
        endpoints: all serve the same models, though not all need to be there.
        passing: which headers of requests go along.
        max_age: seconds for which a model is taken to be what it was.
        patience: seconds that they get to be there at the start, which does without them, too.

    Threads: the loop's on which it was started.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        *,
        connecting: Connecting | None = None,
        passing: HeaderPassing | None = None,
        max_age: float = 5.0,
        patience: float = 5.0,
    ) -> None:
        self._endpoints = tuple(endpoints)
        self._connecting = connecting or Connecting()
        self._passing = passing or HeaderPassing()
        self._max_age = max_age
        self._patience = patience
        self._fleet: Fleet
        self._models: dict[_Key, tuple[TritonModel, float]] = {}
        self._learning: dict[_Key, asyncio.Task[None]] = {}
        self._statistics: list[ModelStatistics] = []

    async def __aenter__(self) -> Self:
        upstreams = [Upstream(endpoint, self._connecting) for endpoint in self._endpoints]
        self._fleet = Fleet(upstreams)
        looks = [asyncio.create_task(upstream.wait_probed()) for upstream in upstreams]
        _, absent = await asyncio.wait(looks, timeout=self._patience)
        for look in absent:
            look.cancel()
        for upstream in upstreams:
            if not upstream.is_connected:
                _logger.warning("%s can't be reached yet", upstream.name)
        return self

    async def __aexit__(self, *_: object) -> None:
        learning = tuple(self._learning.values())
        for task in learning:
            task.cancel()
        await asyncio.gather(*learning, return_exceptions=True)
        await self._fleet.close()

    def upstreams(self) -> Sequence[UpstreamStats]:
        """How the Tritons are, in the order in which they were named."""
        return [upstream.stats() for upstream in self._fleet.upstreams]

    def find(self, name: str, version: str | None = None) -> TritonModel:
        """See ``Models.find``; what ``refresh`` was not asked for is not found."""
        try:
            return self._models[name, version][0]
        except KeyError:
            raise InferError(
                Code.NOT_FOUND, f"Request for unknown model: '{name}' is not found"
            ) from None

    def index(self, *, ready: bool = False) -> Sequence[IndexEntry]:
        """See ``Models.index``; of a version that several have, the best state."""
        merged: dict[tuple[str, str | None], IndexEntry] = {}
        for upstream in self._fleet.upstreams:
            if not upstream.is_connected:
                continue
            for entry in upstream.index():
                other = merged.setdefault((entry.name, entry.version), entry)
                if _STATES.index(entry.state) < _STATES.index(other.state):
                    merged[entry.name, entry.version] = entry
        return [entry for entry in merged.values() if not ready or entry.state == "READY"]

    def unheeded(self) -> Sequence[int]:
        """None: what its models do with a cancel, a Triton does not tell."""
        return ()

    def is_ready(self, *, strict: bool = True) -> bool:
        """Whether a Triton says that it is; ``strict`` is its own option."""
        return any(upstream.is_ready for upstream in self._fleet.upstreams)

    def statistics(
        self, name: str | None = None, version: str | None = None
    ) -> Sequence[ModelStatistics]:
        """See ``Models.statistics``; the sums over all Tritons, of the last ``refresh``."""
        return self._statistics

    async def refresh(self, category: str, name: str | None, version: str | None) -> None:
        """Bring up to date what a request is answered from.

        Args:
            category: of the request, as Triton's restricted APIs have them.
            name, version: of the model that it is about.

        Raises:
            InferError: there is no such model, or nobody to ask.
        """
        match category:
            case "inference" if name is not None:
                await self._learn_if_needed((name, version))
            case "statistics":
                self._statistics = await self._sum_statistics(name, version)
            case "model-repository" if name is None:
                await self._look_at_indexes()
            case "metadata" | "model-config" if name is not None:
                await asyncio.gather(self._look_at_indexes(), self._learn((name, version)))
            case "health" if name is not None:
                await self._look_at_indexes()
                with suppress(InferError):  # who does not know the model has it not ready
                    await self._learn((name, version))

    async def load(self, name: str, parameters: dict[str, Any] | None = None) -> None:
        """Have every Triton load a model; see ``Models.load``."""
        request = service_pb2.RepositoryModelLoadRequest(model_name=name)
        load_parameters(request, parameters or {})
        await self._change("RepositoryModelLoad", request, name)

    async def unload(self, name: str, *, unload_dependents: bool = False) -> None:
        """Have every Triton unload a model; see ``Models.unload``."""
        request = service_pb2.RepositoryModelUnloadRequest(model_name=name)
        request.parameters["unload_dependents"].bool_param = unload_dependents
        await self._change("RepositoryModelUnload", request, name)

    async def server_metadata(self) -> dict[str, Any]:
        """Name, version and extensions of a Triton."""
        answer = await self._ask_one("ServerMetadata", service_pb2.ServerMetadataRequest())
        extensions = [each for each in answer.extensions if each != "cuda_shared_memory"]
        return {"name": answer.name, "version": answer.version, "extensions": extensions}

    async def log_settings(self, changes: dict[str, Any]) -> dict[str, Any]:
        """What the Tritons log; what ``changes`` names is set first, at each of them."""
        request = settings.log_request(changes)
        answers = await self._ask_all("LogSettings", request)
        return settings.log_document(answers[0])

    async def trace_settings(self, model: str | None, changes: dict[str, Any]) -> dict[str, Any]:
        """How the Tritons trace a model, or all; null sets back to what is for all."""
        request = settings.trace_request(model, changes)
        answers = await self._ask_all("TraceSetting", request)
        return settings.trace_document(answers[0])

    async def _learn_if_needed(self, key: _Key) -> None:
        known = self._models.get(key)
        if known is None:
            await self._learn(key)
        elif time.monotonic() - known[1] > self._max_age and key not in self._learning:
            # Behind its back: no request waits for what is most likely known already.
            self._begin_to_learn(key)

    async def _learn(self, key: _Key) -> None:
        """Ask what a model is. Those who ask at the same time share one answer."""
        task = self._learning.get(key) or self._begin_to_learn(key)
        await asyncio.shield(task)

    def _begin_to_learn(self, key: _Key) -> asyncio.Task[None]:
        task = asyncio.create_task(self._ask_config(key))
        self._learning[key] = task

        def end(task: asyncio.Task[None]) -> None:
            del self._learning[key]
            with suppress(asyncio.CancelledError):
                task.exception()  # where nobody waits for it

        task.add_done_callback(end)
        return task

    async def _ask_config(self, key: _Key) -> None:
        name, version = key
        request = service_pb2.ModelConfigRequest(name=name, version=version or "")
        try:
            answer = await self._ask_one("ModelConfig", request, model=key)
        except InferError as error:
            # A Triton that can't be reached says nothing of the model.
            if error.code is not Code.UNAVAILABLE:
                self._models.pop(key, None)
            raise
        model = TritonModel(self._fleet, answer.config, version, self._passing)
        self._models[key] = model, time.monotonic()

    async def _ask_one(self, method: str, request: Any, *, model: _Key = ("", None)) -> Any:
        upstream = self._fleet.choose(*model, InferRequest())
        try:
            return await upstream.ask(method, request)
        except aio.AioRpcError as error:
            raise failure_of(error, upstream.name) from error

    async def _ask_all(self, method: str, request: Any) -> list[Any]:
        """The answers of all that are connected.

        Raises:
            InferError: that of the first that failed; the others have been asked all the same.
        """
        upstreams = self._fleet.connected()
        asked = [upstream.ask(method, request) for upstream in upstreams]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        for upstream, answer in zip(upstreams, answers, strict=True):
            if isinstance(answer, aio.AioRpcError):
                raise failure_of(answer, upstream.name) from answer
            if isinstance(answer, BaseException):
                raise answer
        return answers

    async def _change(self, method: str, request: Any, name: str) -> None:
        try:
            await self._ask_all(method, request)
        finally:
            for key in [key for key in self._models if key[0] == name]:
                del self._models[key]
            await self._look_at_indexes()

    async def _look_at_indexes(self) -> None:
        looks = [each.look_at_index() for each in self._fleet.upstreams if each.is_connected]
        await asyncio.gather(*looks, return_exceptions=True)

    async def _sum_statistics(self, name: str | None, version: str | None) -> list[ModelStatistics]:
        request = service_pb2.ModelStatisticsRequest(name=name or "", version=version or "")
        sums: dict[tuple[str, str], ModelStatistics] = {}
        for answer in await self._ask_all("ModelStatistics", request):
            for of_model in answer.model_stats:
                key = of_model.name, of_model.version
                sums[key] = added(sums.get(key) or ModelStatistics(*key), of_model)
        return list(sums.values())
