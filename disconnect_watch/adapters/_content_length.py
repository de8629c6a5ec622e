"""How long a response is, and so which piece of it is the last that its client waits for."""

import contextlib
import math
from collections.abc import Mapping
from typing import Any

__all__ = ["content_length"]


def content_length(head: Mapping[str, Any] | None) -> float:
    """How many bytes a response's body has; infinity where its head does not say."""
    for name, value in head.get("headers", ()) if head else ():
        if name.lower() == b"content-length":
            with contextlib.suppress(ValueError):
                return int(value)
    return math.inf
