# Held to the truth by stubtest and by tests/unit/test_surface.py.
from collections.abc import Iterable

from typing_extensions import disjoint_base

from disconnect_watch.backends.infer import InferRequest

@disjoint_base
class PlainCheck:
    def __new__(
        cls,
        inputs: Iterable[tuple[str, str, tuple[int, ...], int]],
        outputs: Iterable[str],
        max_batch_size: int,
    ) -> PlainCheck: ...
    def batch_size(self, request: InferRequest) -> int: ...
