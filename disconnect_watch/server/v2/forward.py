"""Headers that a model gets as request parameters."""

import re
from collections.abc import Iterable

from disconnect_watch.errors import cut
from disconnect_watch.server.errors import ProtocolError

__all__ = ["forwarded_headers"]

#: Names that mean something as a parameter.
RESERVED = frozenset(
    {
        "sequence_id",
        "sequence_start",
        "sequence_end",
        "priority",
        "timeout",
        "headers",
        "binary_data_output",
    }
)


def forwarded_headers(
    headers: Iterable[tuple[bytes, bytes]], pattern: re.Pattern[str] | None
) -> dict[str, str]:
    """The headers in whose name the pattern is found, in lower case.

    Raises:
        ProtocolError: one has a name that is another parameter's.
    """
    if pattern is None:
        return {}
    forwarded = {}
    for raw_name, value in headers:
        name = raw_name.decode("latin-1")
        if not pattern.search(name):
            continue
        if name in RESERVED or name.startswith("triton_"):
            raise ProtocolError(
                f"Header '{cut(name)}' is reserved for Triton usage and cannot be forwarded."
            )
        forwarded[name] = value.decode("latin-1")
    return forwarded
