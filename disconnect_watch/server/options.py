"""What the frontend allows, and how it answers."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from disconnect_watch.server.v2.restricted import Restriction

__all__ = ["FrontendOptions"]


@dataclass(frozen=True, slots=True)
class FrontendOptions:
    """Options of a ``Frontend``.

    Attributes:
        max_body_bytes: of a request, and of what it is when it is decompressed.
        request_timeout: seconds that a request may take which brings no limit of its own; None
            for no limit.
        cancel_bound: seconds from a cancel to its effect, behind which the server is not ready;
            infinity for never.
        strict: answer in all as Triton does: what was cancelled is 400 instead of 499 and
            counts as a success, NaN and Infinity are bare words.
        strict_readiness: not ready while a model is not.
        allow_client_shm: whether clients may have tensors in shared memory.
        header_forward_pattern: names of headers that models get as parameters.
        live_page: whether there is a page that shows what runs.
        restrictions: see ``v2.restricted.parse_restrictions``.
    """

    max_body_bytes: int = 1 << 26
    request_timeout: float | None = None
    cancel_bound: float = 30.0
    strict: bool = False
    strict_readiness: bool = True
    allow_client_shm: bool = False
    header_forward_pattern: re.Pattern[str] | None = None
    live_page: bool = True
    restrictions: Mapping[str, "Restriction"] = field(default_factory=dict)
