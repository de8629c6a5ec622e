"""Which headers of a request go along with its call, as gRPC's metadata."""

import re
from collections.abc import Iterable, Sequence

__all__ = ["TRACE_CONTEXT", "HeaderPassing"]

#: What a trace is followed by.
#: Source: W3C Trace Context, W3C Baggage.
TRACE_CONTEXT = "traceparent|tracestate|baggage"
#: Of one hop, or what gRPC says itself.
_OWN = frozenset(
    {
        "connection",
        "content-encoding",
        "content-length",
        "content-type",
        "expect",
        "host",
        "keep-alive",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "user-agent",
        "accept-encoding",
    }
)
_NAME = re.compile(r"[0-9a-z_.-]+")
#: gRPC over HTTP/2, "Custom-Metadata"; a value with anything else in it would end the call.
_VALUE = re.compile(r"[\x20-\x7e]*")


class HeaderPassing:
    """Turns headers into metadata.

    Args:
        fixed: go with every call.
        pattern: names of headers that are passed on, matched whole and whatever their case.

    Raises:
        ValueError: what is fixed can't be metadata.
        re.error: the pattern is none.
    """

    def __init__(self, fixed: Sequence[tuple[str, str]] = (), pattern: str = TRACE_CONTEXT) -> None:
        for name, value in fixed:
            if not _is_metadata(name.lower(), value):
                raise ValueError(
                    f"header {name!r} with the value {value!r} can't go with a gRPC call: give "
                    "letters, digits, '-', '_' and '.' for its name, printable ASCII for its value"
                )
        self.fixed = tuple((name.lower(), value) for name, value in fixed)
        self._pattern = re.compile(pattern, re.IGNORECASE)

    def metadata(self, headers: Iterable[tuple[bytes, bytes]]) -> tuple[tuple[str, str], ...]:
        """What goes with the call of a request with these headers, in lower case."""
        passed = []
        for raw_name, raw_value in headers:
            name = raw_name.decode("latin-1")
            if self._pattern.fullmatch(name):
                value = raw_value.decode("latin-1")
                if _is_metadata(name, value):
                    passed.append((name, value))
        return (*self.fixed, *passed) if passed else self.fixed


def _is_metadata(name: str, value: str) -> bool:
    return (
        _NAME.fullmatch(name) is not None
        and _VALUE.fullmatch(value) is not None
        and name not in _OWN
        and not name.startswith("grpc-")
        and not name.endswith("-bin")  # whose values are bytes in base64
    )
