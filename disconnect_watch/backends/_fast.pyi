# Held to the truth by stubtest and by tests/unit/test_surface.py.
from collections.abc import Iterable, Sequence
from typing import Literal

from typing_extensions import disjoint_base

from disconnect_watch.backends.infer import (
    Buffer,
    InferError,
    InferRequest,
    InferTensor,
    Parameter,
)
from disconnect_watch.token import CancelToken

@disjoint_base
class TensorFields:
    name: str
    datatype: str
    shape: tuple[int, ...]
    data: Buffer
    parameters: dict[str, Parameter]
    is_classified: bool
    def __init__(
        self,
        name: str,
        datatype: str,
        shape: tuple[int, ...],
        data: Buffer,
        parameters: dict[str, Parameter] | None = None,
        is_classified: bool = False,
    ) -> None: ...

@disjoint_base
class RequestFields:
    id: str
    inputs: list[InferTensor]
    requested_outputs: list[str]
    num_classes: dict[str, int]
    headers: Sequence[tuple[bytes, bytes]]
    parameters: dict[str, Parameter]
    sequence_id: int | str
    sequence_start: bool
    sequence_end: bool
    priority: int
    timeout_us: int
    cancel: CancelToken
    phase: Literal["waiting", "decode"] | None
    def __init__(
        self,
        id: str = "",  # noqa: A002  it is the name of the field
        inputs: list[InferTensor] | None = None,
        requested_outputs: list[str] | None = None,
        num_classes: dict[str, int] | None = None,
        headers: Sequence[tuple[bytes, bytes]] = (),
        parameters: dict[str, Parameter] | None = None,
        sequence_id: int | str = 0,
        sequence_start: bool = False,
        sequence_end: bool = False,
        priority: int = 0,
        timeout_us: int = 0,
        cancel: CancelToken | None = None,
        phase: Literal["waiting", "decode"] | None = None,
    ) -> None: ...

@disjoint_base
class ResponseFields:
    model_name: str
    model_version: str
    id: str
    parameters: dict[str, Parameter]
    outputs: list[InferTensor]
    error: InferError | None
    is_final: bool
    def __init__(
        self,
        model_name: str,
        model_version: str,
        id: str = "",  # noqa: A002  it is the name of the field
        parameters: dict[str, Parameter] | None = None,
        outputs: list[InferTensor] | None = None,
        error: InferError | None = None,
        is_final: bool = True,
    ) -> None: ...

@disjoint_base
class PlainCheck:
    def __new__(
        cls,
        inputs: Iterable[tuple[str, str, tuple[int, ...], int]],
        outputs: Iterable[str],
        max_batch_size: int,
    ) -> PlainCheck: ...
    def batch_size(self, request: InferRequest) -> int: ...
