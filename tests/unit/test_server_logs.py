"""A request's line, which is written in a shorter way than others, says the same."""

import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from disconnect_watch.engine import Outcome
from disconnect_watch.server.access import RequestRecord, logger
from disconnect_watch.server.logs import configure_logging
from disconnect_watch.token import CancelToken


@pytest.fixture
def handler() -> Iterator[logging.Handler]:
    """As ``serve`` sets it; what it changes is the process's, and is put back."""
    root, uvicorn = logging.getLogger(), logging.getLogger("uvicorn")
    names = ("logThreads", "logProcesses", "logMultiprocessing")
    switches = {name: getattr(logging, name) for name in names}
    handlers, levels = root.handlers, (root.level, uvicorn.level)
    configure_logging("info")
    try:
        yield root.handlers[0]
    finally:
        root.handlers = handlers
        root.setLevel(levels[0])
        uvicorn.setLevel(levels[1])
        for name, value in switches.items():
            setattr(logging, name, value)


@pytest.mark.parametrize("path", ["/v2", '/v2/models/\xe9\x00"/infer'])
def test_a_requests_line_says_what_structlog_would(handler: logging.Handler, path: str) -> None:
    request = RequestRecord(CancelToken(), status=200)
    request.add_outcome(Outcome("finished", finish_reason="length", num_generated_tokens=3))
    line = logger.makeRecord(
        logger.name, logging.INFO, "", 0, "%s %s", ("GET", path), None, extra=request.fields()
    )
    formatter = handler.formatter
    assert formatter is not None
    short, whole = (
        json.loads(text)
        for text in (
            formatter.format(line),
            structlog.stdlib.ProcessorFormatter.format(formatter, line),  # type: ignore[arg-type]
        )
    )
    assert short.pop("timestamp")[:16] <= whole.pop("timestamp")[:16]
    assert short == whole
    assert short["event"] == f"GET {path}"
    assert formatter.format(line).isascii()
