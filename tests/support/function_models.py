"""Models in this process, for the tests of routes: a configuration and a function."""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import httpx
from google.protobuf import text_format

from disconnect_watch.backends.infer import (
    Code,
    InferError,
    InferRequest,
    InferResponse,
    InferTensor,
)
from disconnect_watch.backends.model_config import complete, inputs_of, outputs_of
from disconnect_watch.backends.schema import model_config_class
from disconnect_watch.backends.statistics import IndexEntry, ModelStatistics
from disconnect_watch.backends.validate import Validator
from disconnect_watch.server import Frontend, FrontendOptions
from tests.support.serve import request_app

if TYPE_CHECKING:
    import numpy as np

    from disconnect_watch.backends import Tensor

Arrays = dict[str, "np.ndarray[Any, Any]"]
#: Gives the arrays of each response; one that raises ends the request so.
Function = Callable[[InferRequest], AsyncIterator[Arrays | InferError]]


class FunctionModel:
    """Serves a function by the configuration that it is given.

    Attributes:
        requests: all that got here.
        num_open: those that run now.
    """

    def __init__(self, config: str, function: Function, **labels: Sequence[str]) -> None:
        self.config = text_format.Parse(config, model_config_class()())
        complete(self.config, self.config.name)
        self.name = self.config.name
        self.version = "1"
        self.is_ready = True
        self.is_decoupled = self.config.model_transaction_policy.decoupled
        self.inputs: Sequence[Tensor] = inputs_of(self.config)
        self.outputs: Sequence[Tensor] = outputs_of(self.config)
        self.requests: list[InferRequest] = []
        self.num_open = 0
        self._function = function
        self._labels = labels
        self._validator = Validator(self.config)

    def labels(self, output: str) -> Sequence[str]:
        return self._labels.get(output, ())

    async def infer(self, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        self._validator.check(request)
        self.requests.append(request)
        request.phase = "decode"
        self.num_open += 1
        try:
            async for arrays in self._function(request):
                response = InferResponse(self.name, self.version, request.id, is_final=False)
                if isinstance(arrays, InferError):
                    response.error = arrays
                else:
                    response.outputs = [
                        InferTensor.from_numpy(name, array) for name, array in arrays.items()
                    ]
                yield response
            if self.is_decoupled:
                yield InferResponse(self.name, self.version, request.id)
        finally:
            self.num_open -= 1


class ModelTable:
    """Models by name, one version each, which nobody can load."""

    def __init__(self, *models: FunctionModel) -> None:
        self._models = {model.name: model for model in models}

    def find(self, name: str, version: str | None = None) -> FunctionModel:
        if name not in self._models:
            raise InferError(Code.NOT_FOUND, f"Request for unknown model: '{name}' is not found")
        if version not in (None, "1"):
            raise InferError(
                Code.NOT_FOUND,
                f"Request for unknown model: '{name}' version {version} is not found",
            )
        return self._models[name]

    def index(self, *, ready: bool = False) -> Sequence[IndexEntry]:
        return [
            IndexEntry(model.name, "1", "READY" if model.is_ready else "UNAVAILABLE")
            for model in self._models.values()
            if model.is_ready or not ready
        ]

    async def load(self, name: str, parameters: dict[str, Any] | None = None) -> None:
        raise InferError(
            Code.UNAVAILABLE, "explicit model load / unload is not allowed if polling is enabled"
        )

    async def unload(self, name: str, *, unload_dependents: bool = False) -> None:
        await self.load(name, {})

    def statistics(
        self, name: str | None = None, version: str | None = None
    ) -> Sequence[ModelStatistics]:
        if name is not None and name not in self._models:
            raise InferError(Code.INVALID_ARG, f"requested model '{name}' is not available")
        return [ModelStatistics(each, "1") for each in self._models if name in (None, each)]

    def unheeded(self) -> Sequence[int]:
        return ()

    def is_ready(self, *, strict: bool = True) -> bool:
        return not strict or all(model.is_ready for model in self._models.values())


def tensor_config(name: str, datatype: str, dims: str = "-1", *, more: str = "") -> str:
    """The text of a configuration with one input and one output of one type."""
    return (
        f'name: "{name}" input {{ name: "INPUT0" data_type: TYPE_{datatype} dims: [{dims}] }} '
        f'output {{ name: "OUTPUT0" data_type: TYPE_{datatype} dims: [{dims}] }} {more}'
    )


async def echo(request: InferRequest) -> AsyncIterator[Arrays | InferError]:
    """The inputs as the outputs."""
    yield {tensor.name.replace("IN", "OUT", 1): tensor.to_numpy() for tensor in request.inputs}


def identity(
    name: str = "identity", datatype: str = "FP32", dims: str = "-1", more: str = ""
) -> FunctionModel:
    """A model that gives what it gets."""
    return FunctionModel(tensor_config(name, datatype, dims, more=more), echo)


async def post_models(
    models: Sequence[FunctionModel],
    path: str,
    content: bytes | str | AsyncIterator[bytes],
    headers: Mapping[str, str] | None = None,
    **options: Any,
) -> httpx.Response:
    """One POST to models, without a server."""
    frontend = Frontend(models=ModelTable(*models), options=FrontendOptions(**options))
    return await request_app(frontend, "POST", path, content=content, headers=headers)
