"""An infer response: its JSON, and behind it the tensors that go in binary, uncopied.

Source: KServe v2 "Inference Response", Triton's binary data extension.
"""

import json
import math
from dataclasses import dataclass
from typing import Any

import msgspec

from disconnect_watch.backends.infer import Buffer, InferResponse, InferTensor, ServedModel
from disconnect_watch.server.errors import FailedError
from disconnect_watch.server.v2._fast import plain_document
from disconnect_watch.server.v2.classify import classify
from disconnect_watch.server.v2.elements import to_json
from disconnect_watch.server.v2.parse import ParsedInfer, Wanted

__all__ = ["Rendered", "encode_document", "render_infer"]

_encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class Rendered:
    """The body of an answer.

    Attributes:
        pieces: to be sent one behind the other; the first is the JSON.
        header_length: of the JSON, for ``Inference-Header-Content-Length``; None where the
            body is nothing else.
    """

    pieces: list[Buffer]
    header_length: int | None


def render_infer(
    parsed: ParsedInfer, response: InferResponse, model: ServedModel, *, strict: bool = False
) -> Rendered:
    """Write a response as its request wanted it.

    Args:
        strict: write NaN and Infinity as such, as Triton does, though that is no JSON;
            else they are null.

    Raises:
        ProtocolError: an output can't be had in the way it was wanted.
        FailedError: an output is larger than its place in shared memory.
    """
    if not parsed.is_binary and not parsed.wanted:
        plain = plain_document(response)
        if plain is not None:
            return Rendered([_encode(plain)], None)
    document: dict[str, Any] = {}
    if response.id:
        document["id"] = response.id
    document["model_name"] = response.model_name
    document["model_version"] = response.model_version
    if response.parameters:
        document["parameters"] = response.parameters
    outputs = document["outputs"] = []
    binary: list[Buffer] = []
    for tensor in response.outputs:
        wanted = parsed.wanted.get(tensor.name)
        if wanted is None:
            if parsed.wanted:
                continue
            wanted = Wanted(is_binary=parsed.is_binary)
        if wanted.num_classes and not tensor.is_classified:
            tensor = classify(
                tensor,
                wanted.num_classes,
                labels=model.labels(tensor.name),
                is_batched=model.config.max_batch_size > 0,
            )
        entry: dict[str, Any] = {
            "name": tensor.name,
            "datatype": tensor.datatype,
            "shape": tensor.shape,
        }
        outputs.append(entry)
        if wanted.loan is not None:
            _store(tensor, wanted.loan.view)
        elif wanted.is_binary:
            data = memoryview(tensor.data).cast("B")
            entry["parameters"] = {"binary_data_size": len(data)}
            if len(data):
                binary.append(data)
        else:
            entry["data"] = to_json(tensor)
    body = encode_document(document, strict=strict)
    return Rendered([body, *binary], len(body) if binary else None)


def encode_document(document: dict[str, Any], *, strict: bool) -> bytes:
    """As JSON, with its members in the order in which they stand."""
    body = _encode(document)
    # Only what msgspec wrote as null can have been no number.
    if strict and b"null" in body and _has_no_number(document):
        return json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    return body


def _has_no_number(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_no_number, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_has_no_number, value))
    return isinstance(value, float) and not math.isfinite(value)


def _store(tensor: InferTensor, place: memoryview) -> None:
    data = memoryview(tensor.data).cast("B")
    if len(data) > len(place):
        raise FailedError(
            f"shared memory size specified with the request for output '{tensor.name}' "
            f"({len(place)} bytes) should be at least {len(data)} bytes to hold the results"
        )
    place[: len(data)] = data
