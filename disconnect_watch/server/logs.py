"""Log lines as JSON on standard error, for everything that logs in this process."""

import logging
import sys

import structlog

__all__ = ["LEVELS", "configure_logging"]

LEVELS = ("debug", "info", "warning", "error")


def configure_logging(level: str) -> None:
    """Give the root logger one handler that writes a JSON object a line.

    For a process of our own, never for a library's user: it replaces what was set.

    Args:
        level: one of ``LEVELS``.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
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
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    # Its lines of starting and stopping say again what ours say.
    logging.getLogger("uvicorn").setLevel("DEBUG" if level == "debug" else "WARNING")
