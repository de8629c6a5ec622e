"""What a client asks of Triton's generate extension, understood.

The body is one flat JSON object: ``text_input``, the sampling parameters, and whatever
else a client sends along, at the top level or under ``parameters``. What is no input of
the model is a request parameter: checked for its type, and not used by this engine.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from disconnect_watch.backends import Backend, Tensor
from disconnect_watch.engine import SamplingParams
from disconnect_watch.errors import cut, shown
from disconnect_watch.server.errors import MalformedJSONError, ProtocolError

__all__ = ["Generation", "parse_generation"]


@dataclass(frozen=True, slots=True)
class Generation:
    """One request to generate, as understood.

    Attributes:
        prompt: text, or token ids.
        others: further prompts, that are taken with the first or not at all.
        client_id: the client's own name for it, echoed and used for nothing else.
        priority: the lowest number runs first.
        time_limit: seconds that it may take; None for no limit.
        prefix: what stands before a complaint about it.
    """

    prompt: str | Sequence[int]
    params: SamplingParams
    others: Sequence[str | Sequence[int]] = ()
    client_id: str = ""
    priority: int = 0
    time_limit: float | None = None
    prefix: str = ""


def parse_generation(document: dict[str, Any], backend: Backend) -> Generation:
    """Understand a request body.

    Raises:
        ProtocolError: a field is missing, unknown in type, out of range, or given twice.
        MalformedJSONError: ``text_input`` is no string, for which Triton answers 500.
    """
    nested = document.get("parameters", {})
    if not isinstance(nested, dict):
        raise ProtocolError(f"'parameters' is {shown(nested)}, it must be a JSON object")
    fields = {key: value for key, value in document.items() if key not in ("parameters", "id")}
    if twice := fields.keys() & nested.keys():
        raise ProtocolError(
            f"'{cut(min(twice))}' is given twice, at the top level and in 'parameters', "
            "give it once"
        )
    fields |= nested
    client_id = document.get("id", "")
    if not isinstance(client_id, str):
        raise ProtocolError(f"'id' is {shown(client_id)}, it must be a string")

    inputs = {
        tensor.name: _elements(tensor, fields.pop(tensor.name))
        for tensor in backend.inputs
        if tensor.name in fields
    }
    for key, value in fields.items():
        if not isinstance(value, str | int | float):
            raise ProtocolError(
                f"parameter '{cut(key)}' has invalid type. "
                "It should be either 'int', 'bool', or 'string'."
            )
    _require_all(backend, inputs, client_id)
    prompt = inputs.pop("text_input")
    if not isinstance(prompt, str):
        raise MalformedJSONError(
            "Unable to parse JSON bytes array: attempt to access JSON non-string as string"
        )
    priority, time_limit = inputs.pop("priority", 0), inputs.pop("time_limit", None)
    if "time_limit" in document.keys() | nested.keys():
        time_limit = parse_time_limit("time_limit", time_limit)
    try:
        params = SamplingParams(**inputs)
    except ValueError as error:
        raise ProtocolError(str(error)) from error
    return Generation(
        prompt=prompt,
        params=params,
        client_id=client_id,
        priority=priority,
        time_limit=time_limit,
        prefix=_prefix(client_id),
    )


def parse_time_limit(name: str, value: Any) -> float:
    """Seconds, of a type that the engine takes; it knows the range itself.

    Raises:
        ProtocolError: no number.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ProtocolError(f"{name} is {shown(value)}, it must be a number of seconds")
    try:
        return float(value)
    except OverflowError:
        raise ProtocolError(f"{name} is {shown(value)}, it must be a number of seconds") from None


def _prefix(client_id: str) -> str:
    """What Triton puts before a complaint about a request."""
    return f"[request id: {cut(client_id) or '<id_unknown>'}] "


def _elements(tensor: Tensor, value: Any) -> Any:
    """A tensor's one element, given as such or as an array of one; else a tuple of all."""
    if tensor.shape == (-1,):
        return tuple(value) if isinstance(value, list) else (value,)
    if not isinstance(value, list):
        return value
    if len(value) != 1:
        raise ProtocolError(
            f"The schema can not convert input '{tensor.name}' to tensor with proper shape"
        )
    return value[0]


def _require_all(backend: Backend, inputs: dict[str, Any], client_id: str) -> None:
    required = [tensor.name for tensor in backend.inputs if not tensor.is_optional]
    if missing := [name for name in required if name not in inputs]:
        raise ProtocolError(
            f"{_prefix(client_id)}expected number of inputs between {len(required)} and "
            f"{len(backend.inputs)} but got {len(inputs)} inputs for model '{backend.name}'. "
            f"Got input(s) {list(inputs)}, but missing required input(s) {missing}. Please "
            "provide all required input(s)."
        )
