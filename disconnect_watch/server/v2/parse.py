"""An infer request: from the body's bytes to tensors that are views of it.

The body is JSON, behind which lie the tensors that are sent in binary, in the order of the
inputs. A body without JSON is the data of a model's only input.

Source: KServe v2 "Inference", Triton's binary data extension and raw binary request.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from disconnect_watch.backends.datatypes import BY_NAME
from disconnect_watch.backends.infer import (
    Buffer,
    InferRequest,
    InferTensor,
    Parameter,
    ServedModel,
    encode_strings,
)
from disconnect_watch.backends.model_config import datatype_of
from disconnect_watch.errors import cut
from disconnect_watch.server.documents import decode_object
from disconnect_watch.server.errors import ProtocolError
from disconnect_watch.server.v2._fast import plain_inputs
from disconnect_watch.server.v2.elements import from_json
from disconnect_watch.server.v2.fields import (
    as_array,
    as_bool,
    as_object,
    as_string,
    as_unsigned,
    parameter,
    require,
)
from disconnect_watch.server.v2.shared_memory import Loan, SharedMemory
from disconnect_watch.token import CancelToken

__all__ = ["ParsedInfer", "Wanted", "header_length_of", "parse_infer"]

_MAX_ELEMENTS = (1 << 63) - 1
#: Where the data of an input may be.
_SOURCES = (
    "'data'",
    "'binary_data_size' in 'parameters'",
    "'shared_memory_region' in 'parameters'",
)


@dataclass(slots=True)
class Wanted:
    """How the client wants an output.

    Attributes:
        num_classes: so many of the best, as "value:index:label"; 0 for the tensor itself.
        loan: where in the client's shared memory it goes; None for the response.
    """

    is_binary: bool
    num_classes: int = 0
    loan: Loan | None = None


@dataclass(slots=True)
class ParsedInfer:
    """A request, and how its answer is to be written.

    Attributes:
        wanted: by output; what is not named here comes as ``is_binary`` says.
        loans: of shared memory, given back by ``close``.
    """

    request: InferRequest
    is_binary: bool = False
    wanted: dict[str, Wanted] = field(default_factory=dict)
    loans: list[Loan] = field(default_factory=list)

    def close(self) -> None:
        """Give the shared memory back; the tensors in it are not to be touched any more."""
        for loan in self.loans:
            loan.close()


def header_length_of(header: bytes | None, num_bytes: int) -> int:
    """How many bytes of a body of ``num_bytes`` are JSON.

    Args:
        header: ``Inference-Header-Content-Length``; without it the whole body is JSON.
    """
    if header is None:
        return num_bytes
    text = header.decode("latin-1").strip()
    if not (text.isascii() and text.isdigit()) or len(text) > 20 or int(text) > num_bytes:
        raise ProtocolError(
            f"inference header size should be in range (0, {num_bytes}), got: {cut(text)}"
        )
    return int(text)


def parse_infer(
    body: Buffer,
    header_length: int,
    model: ServedModel,
    *,
    memory: SharedMemory,
    cancel: CancelToken,
    forwarded: Mapping[str, str] | None = None,
) -> ParsedInfer:
    """Understand a request.

    Args:
        body: decompressed. The request's tensors are views of it, so it must not change.
        header_length: of the JSON in it; 0 for a raw binary request.
        forwarded: headers that the model gets as parameters.

    Raises:
        ProtocolError: it makes no sense, or names shared memory that is not there.
        MalformedJSONError: no JSON, or not of the types that it must have.
    """
    view = memoryview(body)
    parameters: dict[str, Parameter] = dict(forwarded or ())
    if header_length == 0:
        tensor = _only_input(model, view)
        request = InferRequest(inputs=[tensor], parameters=parameters, cancel=cancel)
        return ParsedInfer(request, is_binary=True)

    document = decode_object(body if header_length == len(view) else view[:header_length])
    request = InferRequest(parameters=parameters, cancel=cancel)
    parsed = ParsedInfer(request)
    if "id" in document:
        request.id = as_string("id", document["id"])
    if header_length == len(view) and (tensors := plain_inputs(document)) is not None:
        # What it has not understood it has left to what follows.
        request.inputs = tensors
        return parsed
    if "parameters" in document:
        _take_parameters(parsed, as_object("parameters", document["parameters"]))
    reader = _Binary(view[header_length:], model.name)
    for entry in as_array("inputs", require("inputs", document)):
        tensor = _input(as_object("inputs", entry), reader, parsed, memory)
        request.inputs.append(tensor)
    reader.finish()
    for entry in as_array("outputs", document.get("outputs", [])):
        _take_output(as_object("outputs", entry), parsed, memory)
    return parsed


class _Binary:
    """What lies behind the JSON, handed out in pieces."""

    def __init__(self, view: memoryview, model: str) -> None:
        self._view = view
        self._model = model
        self._at = 0

    def take(self, name: str, size: int) -> memoryview:
        end = self._at + size
        if end > len(self._view):
            raise ProtocolError(
                f"unexpected size for input '{name}', expecting {end - len(self._view)} "
                f"additional bytes for model '{self._model}'"
            )
        piece = self._view[self._at : end]
        self._at = end
        return piece

    def finish(self) -> None:
        if self._at < len(self._view):
            raise ProtocolError(f"unexpected additional input data for model '{self._model}'")


def _take_parameters(parsed: ParsedInfer, parameters: dict[str, Any]) -> None:
    request = parsed.request
    for key, value in parameters.items():
        match key:
            case "sequence_id":
                request.sequence_id = (
                    value if isinstance(value, str) else as_unsigned("sequence_id", value)
                )
            case "sequence_start":
                request.sequence_start = as_bool(key, value)
            case "sequence_end":
                request.sequence_end = as_bool(key, value)
            case "priority":
                request.priority = as_unsigned(key, value)
            case "timeout":
                request.timeout_us = as_unsigned(key, value)
            case "binary_data_output":
                parsed.is_binary = as_bool(key, value)
            case _:
                request.parameters[key] = parameter(key, value)


def _input(
    entry: dict[str, Any], reader: _Binary, parsed: ParsedInfer, memory: SharedMemory
) -> InferTensor:
    name = as_string("name", require("name", entry))
    dims = as_array("shape", require("shape", entry))
    for dim in dims:
        as_unsigned("shape", dim)
    shape = tuple(dims)
    num_elements = prod(shape)
    if num_elements > _MAX_ELEMENTS or (num_elements == 0 and max(shape) > _MAX_ELEMENTS):
        raise ProtocolError(
            f"invalid shape for input '{cut(name)}': shape [{','.join(map(str, shape))}] causes "
            f"total element count to exceed maximum size of {_MAX_ELEMENTS}"
        )
    datatype = as_string("datatype", require("datatype", entry))
    if datatype not in BY_NAME:
        raise ProtocolError(
            f"input '{cut(name)}' has the datatype '{cut(datatype)}', "
            f"it must be one of {', '.join(BY_NAME)}"
        )
    parameters = as_object("parameters", entry.get("parameters", {}))
    size = parameters.get("binary_data_size")
    region = parameters.get("shared_memory_region")
    given = ("data" in entry, size is not None, region is not None)
    if sum(given) != 1 and (any(given) or num_elements):
        set_ = [label for label, is_given in zip(_SOURCES, given, strict=True) if is_given]
        raise ProtocolError(
            f"Input must set only one of the following fields: {', '.join(_SOURCES)}. "
            + (f"But set {' '.join(set_)}" if set_ else "But no field is set")
        )
    data: Buffer
    if region is not None:
        loan = _borrow(parameters, region, memory)
        parsed.loans.append(loan)
        data = loan.view
    elif size is not None:
        data = reader.take(name, as_unsigned("binary_data_size", size))
    elif datatype in ("FP16", "BF16"):
        raise ProtocolError(
            f"receiving {datatype} data via JSON is not supported. "
            f"Please use the binary data format for input {cut(name)}"
        )
    else:
        data = from_json(datatype, entry.get("data", []), num_elements)
    return InferTensor(name, datatype, shape, data)


def _borrow(parameters: dict[str, Any], region: Any, memory: SharedMemory) -> Loan:
    return memory.borrow(
        as_string("shared_memory_region", region),
        as_unsigned("shared_memory_offset", parameters.get("shared_memory_offset", 0)),
        as_unsigned("shared_memory_byte_size", require("shared_memory_byte_size", parameters)),
    )


def _take_output(entry: dict[str, Any], parsed: ParsedInfer, memory: SharedMemory) -> None:
    name = as_string("name", require("name", entry))
    parameters = as_object("parameters", entry.get("parameters", {}))
    wanted = Wanted(is_binary=parsed.is_binary)
    if "binary_data" in parameters:
        wanted.is_binary = as_bool("binary_data", parameters["binary_data"])
    if "classification" in parameters:
        wanted.num_classes = as_unsigned("classification", parameters["classification"])
        parsed.request.num_classes[name] = wanted.num_classes
    if "shared_memory_region" in parameters:
        if wanted.num_classes:
            raise ProtocolError("shared memory can't be used for classification outputs")
        if parameters.get("binary_data"):
            raise ProtocolError(
                f"output '{cut(name)}' has both 'binary_data' and 'shared_memory_region', "
                "give one of them"
            )
        wanted.loan = _borrow(parameters, parameters["shared_memory_region"], memory)
        parsed.loans.append(wanted.loan)
    parsed.wanted[name] = wanted
    parsed.request.requested_outputs.append(name)


def _only_input(model: ServedModel, view: memoryview) -> InferTensor:
    """The tensor of a raw binary request: all but its data is the model's configuration."""
    config = model.config
    if len(config.input) != 1:
        raise ProtocolError(
            "[request id: <id_unknown>] Raw request must only have 1 input (found 1) to be "
            f"deduced but got {len(config.input)} inputs in '{model.name}' model configuration"
        )
    (declared,) = config.input
    kind = BY_NAME[datatype_of(declared.data_type)]
    shape = [1, *declared.dims] if config.max_batch_size else list(declared.dims)
    wrong = f"[request id: <id_unknown>] cannot take a raw request for '{declared.name}': "
    data: Buffer = view
    if kind.name == "BYTES":
        if prod(shape) != 1:
            raise ProtocolError(f"{wrong}BYTES must be of shape [1], the model has {shape}")
        data = encode_strings(np.array([bytes(view)], object))
    elif shape.count(-1) > 1:
        raise ProtocolError(f"{wrong}one dimension may be of any size, the model has {shape}")
    elif -1 in shape:
        row_bytes = -prod(shape) * kind.size_bytes
        shape[shape.index(-1)] = len(view) // row_bytes if row_bytes else 0
    return InferTensor(declared.name, kind.name, tuple(shape), data)
