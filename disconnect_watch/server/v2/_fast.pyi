# Held to the truth by stubtest and by tests/unit/test_surface.py.
from typing import Any

from disconnect_watch.backends.infer import InferResponse, InferTensor

def plain_inputs(document: Any) -> list[InferTensor] | None: ...
def plain_document(response: InferResponse) -> dict[str, Any] | None: ...
