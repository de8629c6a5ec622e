"""A step's forward, whose errors are the end of the guilty request alone."""

import logging
from collections.abc import Sequence

from disconnect_watch.engine.outcome import Drawn
from disconnect_watch.engine.schedule import LayerCheck, Runner, ScheduledRow

__all__ = ["run_guarded"]

logger = logging.getLogger(__name__)


def run_guarded(
    runner: Runner, rows: Sequence[ScheduledRow], *, step: int, layer_check: LayerCheck
) -> dict[str, Drawn]:
    """Run the rows together; if that fails, each by itself, so that only the guilty fail.

    Args:
        runner, rows, step, layer_check: see ``Runner.run``.

    Returns:
        Tokens or error by request key; nothing for rows that were dropped, or whose chunk does not
        reach their last token.
    """
    try:
        return runner.run(rows, step=step, layer_check=layer_check)
    except Exception as error:
        # Whatever the model raises, it is the end of one request, not of the server.
        if len(rows) == 1:
            logger.exception("request %s failed", rows[0].request.request_id)
            return {rows[0].request.key: [error]}
    results: dict[str, Drawn] = {}
    for row in rows:
        if row.request.is_live:
            results.update(run_guarded(runner, [row], step=step, layer_check=layer_check))
    return results
