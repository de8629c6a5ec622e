"""The embedded engine as a model that takes tensors, one among those of a repository.

So a Python model asks it as it asks any other, and an ensemble has it for its last step;
the request's token goes with it, and a client that leaves ends all of it. Each step's text
is one response, with ``index`` where there are several answers.
"""

import asyncio
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec
import numpy as np

from disconnect_watch.backends.base import Backend, Tensor
from disconnect_watch.backends.infer import (
    Code,
    InferError,
    InferRequest,
    InferResponse,
    InferTensor,
    encode_strings,
)
from disconnect_watch.backends.model_config import complete, from_document
from disconnect_watch.backends.pending import Pending, cancelled_error
from disconnect_watch.backends.statistics import ModelStatistics
from disconnect_watch.backends.tally import Tally
from disconnect_watch.backends.validate import Validator, prefix_of
from disconnect_watch.engine import Outcome, RequestOutput, SamplingParams
from disconnect_watch.engine.errors import EngineClosedError, EngineLostError, QueueFullError
from disconnect_watch.token import Reason

__all__ = ["EngineModel", "config_of"]


class EngineModel:
    """Serves one backend with tensors. It does not close it.

    Threads: the loop's only.
    """

    is_decoupled = True

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.name = backend.name
        self.version = backend.version
        self.inputs: Sequence[Tensor] = backend.inputs
        self.outputs: Sequence[Tensor] = backend.outputs
        self.config = config_of(backend)
        self.statistics = ModelStatistics(self.name, self.version)
        self._tally = Tally(self.statistics)
        self._validator = Validator(self.config)

    @property
    def is_ready(self) -> bool:
        """Whether the backend is."""
        return self._backend.is_ready

    def labels(self, output: str) -> Sequence[str]:
        """None of its outputs is a score of classes."""
        return ()

    async def infer(self, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        """See ``ServedModel.infer``."""
        self._validator.check(request)
        prompt, params, options = _parse(request)
        pending = Pending(request, 1, None, asyncio.get_running_loop())
        pending.dispatched_ns = pending.arrived_ns
        stream = None
        try:
            try:
                stream = await self._backend.submit(
                    uuid.uuid4().hex, prompt, params, cancel=request.cancel, **options
                )
                async for output in stream:
                    for response in self._responses(request, output, params.n):
                        self._tally.response(pending, response)
                        if response.is_final:
                            self._finish(pending, output)
                        yield response
            except QueueFullError as error:
                self._tally.fail(pending, "REJECTED")
                message = f"{prefix_of(request)}Exceeds maximum queue size: {error}"
                raise InferError(Code.UNAVAILABLE, message) from error
            except EngineLostError as error:
                raise InferError(Code.UNAVAILABLE, f"{prefix_of(request)}{error}") from error
            except EngineClosedError as error:
                raise InferError(Code.INTERNAL, f"{prefix_of(request)}{error}") from error
            except ValueError as error:  # the engine's word for a prompt that it can't take
                message = f"{prefix_of(request)}{error}"
                raise InferError(Code.INVALID_ARG, message) from error
        except InferError as error:
            if pending.outcome is None:
                if error.code is Code.CANCELLED:
                    self._tally.cancel(pending)
                else:
                    self._tally.fail(pending, "BACKEND")
            raise
        finally:
            if stream is not None:
                stream.close()
            if pending.outcome is None:
                request.cancel.cancel(Reason.ABORTED)
                self._tally.cancel(pending)

    def _finish(self, pending: Pending, output: RequestOutput) -> None:
        self._tally.executed([pending], pending.arrived_ns, pending.arrived_ns)
        self._tally.success(pending)

    def _responses(
        self, request: InferRequest, output: RequestOutput, num_answers: int
    ) -> list[InferResponse]:
        """What a step's output is told as: its text, and that it was the last.

        Raises:
            InferError: it was cancelled, or failed.
        """
        responses = []
        if output.text_delta or output.logprobs:
            made = {"text_output": [output.text_delta.encode()]}
            if output.logprobs:
                made["logprobs"] = [msgspec.json.encode(output.logprobs)]
            outputs = [
                InferTensor(name, "BYTES", (1,), encode_strings(np.array(elements, object)))
                for name, elements in made.items()
            ]
            if num_answers > 1:
                outputs.append(
                    InferTensor("index", "INT32", (1,), output.index.to_bytes(4, "little"))
                )
            wanted = request.requested_outputs
            responses.append(
                InferResponse(
                    self.name,
                    self.version,
                    request.id,
                    outputs=[one for one in outputs if not wanted or one.name in wanted],
                    is_final=False,
                )
            )
        if output.outcome is not None:
            _raise_unless_finished(output.outcome, request)
            responses.append(InferResponse(self.name, self.version, request.id))
        return responses


def _raise_unless_finished(outcome: Outcome, request: InferRequest) -> None:
    if outcome.kind == "cancelled":
        raise cancelled_error(request)
    if outcome.kind == "failed":
        raise InferError(Code.INTERNAL, outcome.error or "the model failed")


def config_of(backend: Backend) -> Any:
    """A configuration that says what the backend takes and computes by, as a client reads it."""
    stats = backend.stats()
    document = {
        "name": backend.name,
        "backend": backend.platform,
        "input": [
            {**_described(tensor), "optional": tensor.is_optional} for tensor in backend.inputs
        ],
        "output": [_described(tensor) for tensor in backend.outputs],
        "model_transaction_policy": {"decoupled": True},
        "parameters": {
            "arithmetic": {"string_value": stats.arithmetic},
            "missing": {"string_value": "; ".join(stats.missing)},
        },
    }
    config = from_document(document)
    complete(config, backend.name)
    return config


def _described(tensor: Tensor) -> dict[str, Any]:
    kind = "STRING" if tensor.datatype == "BYTES" else tensor.datatype
    return {"name": tensor.name, "data_type": f"TYPE_{kind}", "dims": list(tensor.shape)}


def _parse(request: InferRequest) -> tuple[str, SamplingParams, dict[str, Any]]:
    """Prompt, parameters, and what else ``submit`` takes.

    Raises:
        InferError: INVALID_ARG, a value makes no sense.
    """
    fields: dict[str, Any] = {}
    try:
        for tensor in request.inputs:
            values = tensor.to_numpy().reshape(-1).tolist()
            if tensor.datatype == "BYTES":
                values = [value.decode() for value in values]
            is_list = tensor.name in ("stop", "stop_token_ids")
            fields[tensor.name] = tuple(values) if is_list else values[0]
        prompt = fields.pop("text_input")
        options = {
            "priority": fields.pop("priority", request.priority),
            "time_limit": fields.pop("time_limit", None),
        }
        return prompt, SamplingParams(**fields), options
    except ValueError as error:  # UnicodeDecodeError is one
        raise InferError(Code.INVALID_ARG, f"{prefix_of(request)}{error}") from error
