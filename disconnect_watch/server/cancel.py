"""Cancel a request by its id, and say what came of it once it has come of it.

What runs in an engine is marked there, so that the step that runs now already sees it, and waited
for there, until its blocks are freed: a client that does not read its answer, and so keeps the
request's handler waiting, delays no acknowledgement. What is elsewhere, or not submitted yet, is
cancelled by its token, and waited for until its handler is done.
"""

import asyncio
from dataclasses import dataclass
from typing import Any, Literal

from disconnect_watch.engine import AbortResult
from disconnect_watch.engine.outcome import Phase
from disconnect_watch.server.access import RequestRecord
from disconnect_watch.server.ledger import RequestLedger
from disconnect_watch.token import Reason

__all__ = ["Cancelled", "cancel"]

Status = Literal["cancelled", "already_finished", "already_cancelled", "not_found", "pending"]

_PHASES: tuple[Phase | None, ...] = (None, "waiting", "prefill", "decode")


@dataclass(frozen=True, slots=True)
class Cancelled:
    """What a cancel by id came to.

    Attributes:
        request_id: as it was given.
        status: ``cancelled`` is told to one caller only; ``pending`` where the flag is set and
            the effect was not there in time.
        phase: what the request was doing; None if that is not known, or it was not cancelled.
        num_blocks_freed: KV blocks that nobody holds any more.
        latency_ns: from the flag to the free blocks.
    """

    request_id: str
    status: Status
    phase: Phase | None = None
    num_blocks_freed: int = 0
    latency_ns: int = 0

    def document(self) -> dict[str, Any]:
        """As it is told."""
        return {
            "request_id": self.request_id,
            "status": self.status,
            "phase": self.phase,
            "blocks_freed": self.num_blocks_freed,
            "latency_ms": round(self.latency_ns / 1e6, 3),
        }


async def cancel(
    ledger: RequestLedger, record: RequestRecord, *, name: str, wait: float
) -> Cancelled:
    """Cancel a request that was found, and wait for the effect.

    Args:
        name: by which it was asked for.
        wait: seconds until the effect is called pending.
    """
    if not record.works and (record.outcome is not None or not ledger.is_live(record)):
        # Its work is over, though its answer may still be on the way.
        return Cancelled(name, _ended_as(record))
    ledger.signal(record, Reason.ABORTED)
    try:
        async with asyncio.timeout(wait):
            result = await _effect(ledger, record)
    except TimeoutError:
        return Cancelled(name, "pending")
    finally:
        # What the request would yet have done ends before it begins.
        record.token.cancel(Reason.ABORTED)
    return Cancelled(name, result.outcome, result.phase, result.num_blocks_freed, result.latency_ns)


async def _effect(ledger: RequestLedger, record: RequestRecord) -> AbortResult:
    """Cancel a live request; returns when it is out of all that worked on it."""
    if record.works:
        return _joined(await asyncio.gather(*(work.abort() for work in record.works)))
    is_first = record.token.cancel(Reason.ABORTED)
    await ledger.wait_ended(record)
    status = _ended_as(record)
    if status == "already_finished" or not is_first:
        return AbortResult(status)
    if record.outcome is None:
        return AbortResult("cancelled")
    outcome = record.outcome
    return AbortResult(
        "cancelled",
        phase=outcome.phase,
        num_blocks_freed=outcome.num_blocks_freed,
        latency_ns=max(0, outcome.freed_at_ns - outcome.flag_at_ns),
    )


def _joined(results: list[AbortResult]) -> AbortResult:
    """What came of all parts of a request."""
    cancelled = [result for result in results if result.outcome == "cancelled"]
    if cancelled:
        return AbortResult(
            "cancelled",
            phase=max((result.phase for result in cancelled), key=_PHASES.index),
            num_blocks_freed=sum(result.num_blocks_freed for result in cancelled),
            latency_ns=max(result.latency_ns for result in cancelled),
        )
    is_cancelled = any(result.outcome == "already_cancelled" for result in results)
    return AbortResult("already_cancelled" if is_cancelled else "already_finished")


def _ended_as(record: RequestRecord) -> Literal["already_finished", "already_cancelled"]:
    if record.outcome is not None:
        is_cancelled = record.outcome.kind == "cancelled"
    else:
        # What never reached an engine: its answer tells whether it was cut short.
        is_cancelled = record.token.cancelled and record.status >= 400
    return "already_cancelled" if is_cancelled else "already_finished"
