"""Log lines as JSON on standard error, for everything that logs in this process."""

import logging
import sys
from datetime import UTC, datetime
from typing import Any

import structlog

from disconnect_watch.server.access import logger as access_logger
from disconnect_watch.server.documents import encode

__all__ = ["LEVELS", "LineFormatter", "configure_logging"]

LEVELS = ("debug", "info", "warning", "error")

#: What every record has; the rest was given along with it.
_OF_EVERY_RECORD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


class LineFormatter(structlog.stdlib.ProcessorFormatter):
    """As structlog's, with a short way for the one line that each request has."""

    def format(self, record: logging.LogRecord) -> str:
        if record.name == access_logger.name and not record.exc_info:
            line: dict[str, Any] = {
                key: value for key, value in vars(record).items() if key not in _OF_EVERY_RECORD
            }
            time = datetime.fromtimestamp(record.created, UTC).isoformat()
            line["event"] = record.getMessage()
            line["level"] = record.levelname.lower()
            line["logger"] = record.name
            line["timestamp"] = time.replace("+00:00", "Z")
            text = encode(line).decode()
            # What is no ASCII is escaped, which no encoding of the stream can spoil.
            if text.isascii():
                return text
        return super().format(record)


def configure_logging(level: str) -> None:
    """Give the root logger one handler that writes a JSON object a line.

    For a process of our own, never for a library's user: it replaces what was set.

    Args:
        level: one of ``LEVELS``.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        LineFormatter(
            foreign_pre_chain=[
                structlog.stdlib.add_log_level,
                structlog.stdlib.add_logger_name,
                structlog.stdlib.ExtraAdder(),
                structlog.processors.TimeStamper(fmt="iso", utc=True),
            ],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.format_exc_info,
                structlog.processors.JSONRenderer(),
            ],
        )
    )
    # Nobody's lines tell of them, and each record would ask for them.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    # Its lines of starting and stopping say again what ours say.
    logging.getLogger("uvicorn").setLevel("DEBUG" if level == "debug" else "WARNING")
