"""Which log lines are written, to be changed while it serves."""

import logging
from collections.abc import Mapping
from typing import Any

__all__ = ["LogSettings"]

_SWITCHES = {"log_info": logging.INFO, "log_warning": logging.WARNING, "log_error": logging.ERROR}


class LogSettings(logging.Filter):
    """Triton's settings of its log, as a filter for handlers.

    Threads: any.
    """

    def __init__(self) -> None:
        super().__init__()
        # Replaced as a whole, since other threads log meanwhile.
        self._settings: dict[str, Any] = {
            "log_file": "",
            "log_info": True,
            "log_warning": True,
            "log_error": True,
            "log_verbose_level": 0,
            "log_format": "default",
        }
        self._silenced: frozenset[int] = frozenset()

    def as_dict(self) -> dict[str, Any]:
        """The settings, in Triton's order."""
        return dict(self._settings)

    def change(self, changes: Mapping[str, Any]) -> None:
        """Set those that are named."""
        self._settings = settings = {**self._settings, **changes}
        self._silenced = frozenset(level for name, level in _SWITCHES.items() if not settings[name])

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno not in self._silenced
