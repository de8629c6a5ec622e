"""Triton's trace settings: for all models, and what single ones have instead."""

from typing import Any

from disconnect_watch.errors import cut, shown
from disconnect_watch.server.errors import ProtocolError, UnsupportedError

__all__ = ["TraceSettings"]

_LEVELS = ("OFF", "TIMESTAMPS", "TENSORS")


class TraceSettings:
    """The settings for all models, and what single ones have instead.

    They are kept and given back; spans go to OpenTelemetry, which has settings of its own.
    """

    def __init__(self) -> None:
        self._defaults: dict[str, Any] = {
            "trace_level": ["OFF"],
            "trace_rate": "1000",
            "trace_count": "-1",
            "log_frequency": "0",
            "trace_file": "",
            "trace_mode": "triton",
        }
        self._all = dict(self._defaults)
        self._of_model: dict[str, dict[str, Any]] = {}

    def of(self, model: str | None) -> dict[str, Any]:
        """The settings of a model, or those for all."""
        return self._all | self._of_model.get(model or "", {})

    def change(self, model: str | None, document: dict[str, Any]) -> None:
        """Set what a document names; null sets back to what is for all, or to the default.

        Raises:
            RequestError: in Triton's words; nothing is changed then.
        """
        if document.get("trace_file") is not None:
            raise UnsupportedError(
                "trace file location can not be updated through network protocol"
            )
        changes = {
            key: read(key, document[key])
            for key, read in _READERS.items()
            if document.get(key) is not None
        }
        cleared = [key for key in _READERS if key in document and document[key] is None]
        if model is None:
            self._all |= {key: self._defaults[key] for key in cleared} | changes
        else:
            own = self._of_model.setdefault(model, {})
            own |= changes
            for key in cleared:
                own.pop(key, None)


def _levels(key: str, value: Any) -> list[str]:
    if not isinstance(value, list) or not all(level in _LEVELS for level in value):
        raise ProtocolError(
            f"Unable to parse '{key}', got: {shown(value)}: give an array of {', '.join(_LEVELS)}"
        )
    if "OFF" in value and len(value) > 1:
        raise ProtocolError("Expect only one trace level 'OFF' is specified")
    return value


def _number(key: str, value: Any) -> str:
    lowest = -1 if key == "trace_count" else 0
    text = str(value) if isinstance(value, str | int) and not isinstance(value, bool) else ""
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 10) or int(text) < lowest:
        raise ProtocolError(f"Unable to parse '{key}', got: {cut(str(value))}")
    return text


_READERS = {
    "trace_level": _levels,
    "trace_rate": _number,
    "trace_count": _number,
    "log_frequency": _number,
}
