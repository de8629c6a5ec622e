"""One response from its placeholder in the store to its end there.

The outcome of the engine tells how it ended, the leave of its client included, and with that what
is kept of it:

| outcome | in the foreground | in the background |
|---|---|---|
| finished | completed or incomplete | the same |
| its client left | forgotten | does not come to be: nobody's leave reaches it |
| cancelled by id | cancelled if it was streamed, else forgotten | cancelled |
| out of time, shut down, failed | failed if it was streamed, else forgotten | failed |

What is forgotten was answered by an error, or not at all, so that nobody knows its id.
"""

import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from disconnect_watch.backends import Backend
from disconnect_watch.engine import Outcome
from disconnect_watch.server.errors import AbortedError, FailedError, RequestError
from disconnect_watch.server.generation import Generation
from disconnect_watch.server.openai.errors import error_document
from disconnect_watch.server.openai.logprobs import chat_logprobs
from disconnect_watch.server.openai.responses.errors import told
from disconnect_watch.server.openai.responses.live import Live
from disconnect_watch.server.openai.responses.store import Entry, ResponseStore, StoreError
from disconnect_watch.server.openai.responses.transcript import Ending, Piece, Transcript
from disconnect_watch.server.outcome import error_of

if TYPE_CHECKING:
    from disconnect_watch.server.frontend import Frontend

__all__ = ["Plan", "failed", "generate"]

logger = logging.getLogger("disconnect_watch.responses")


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be generated.

    Attributes:
        transcript: of the response, which has not begun.
        is_stored: whether others can find it.
        is_streamed: whether its client has its id before its end.
        wants_logprobs: whether its pieces tell how likely they were.
    """

    transcript: Transcript
    backend: Backend
    generation: Generation
    is_stored: bool
    is_streamed: bool
    wants_logprobs: bool


async def generate(
    frontend: "Frontend",
    open_store: Callable[[], Awaitable[ResponseStore]],
    live: Live,
    plan: Plan,
) -> None:
    """Generate a response, keep what is to be kept of it, and then tell its end."""
    created_at = time.time()
    outcome: Outcome | None = None
    error: RequestError | None = None
    try:
        if plan.is_stored:
            # Before it is queued: whoever is told of it finds it, whatever happens to us.
            with told():
                await (await open_store()).create(_entry_of(live, live.transcript, created_at))
            if live.is_deleted:
                raise AbortedError("the response was deleted before it was queued")
        outcome = await _run(frontend, live, plan)
        error = None if outcome.kind == "finished" else error_of(outcome)
    except RequestError as refused:
        error = refused
    except Exception:
        logger.exception("a response failed")
        error = FailedError("internal error")
    ended = live.transcript.ended(_ending_of(outcome, error))
    if plan.is_stored:
        try:
            store = await open_store()
            if _is_unknown(live, plan, error):
                await store.delete(ended.response_id)
            else:
                await store.finish(_entry_of(live, ended, created_at))
        except (StoreError, RequestError):
            # Its client, if it has one, is answered all the same.
            logger.exception("a response is not stored")
    live.end(ended, error)


async def _run(frontend: "Frontend", live: Live, plan: Plan) -> Outcome:
    with await frontend.submit(plan.backend, plan.generation, live.record) as running:
        live.accept()
        async for output in running:
            outcome = output.outcome
            if outcome is None or outcome.kind == "finished":
                logprobs = (
                    chat_logprobs(plan.backend, output.logprobs)["content"]
                    if plan.wants_logprobs
                    else []
                )
                live.add(Piece(output.text_delta, logprobs))
            if outcome is not None:
                return outcome
    raise FailedError("the generation came to no end")


def _is_unknown(live: Live, plan: Plan, error: RequestError | None) -> bool:
    """Whether nobody has heard of the response, or wants to hear more of it."""
    if live.is_deleted or not live.is_accepted:
        return True
    if plan.transcript.is_background:
        return False
    return live.record.has_left or (error is not None and not plan.is_streamed)


def _entry_of(live: Live, transcript: Transcript, created_at: float) -> Entry:
    return Entry(
        transcript.response_id,
        live.record.owner,
        created_at,
        None if transcript.ending is None else time.time(),
        msgspec.json.encode(transcript),
    )


def _ending_of(outcome: Outcome | None, error: RequestError | None) -> Ending:
    at = int(time.time())
    usage = None if outcome is None else _usage_of(outcome)
    if error is None:
        assert outcome is not None
        if outcome.finish_reason == "length":
            return Ending(
                status="incomplete", at=at, usage=usage, incomplete_reason="max_output_tokens"
            )
        return Ending(status="completed", at=at, usage=usage)
    if error.status == 499:
        return Ending(status="cancelled", at=at, usage=usage)
    return failed(str(error), kind=error_document(error.status, "")["error"]["type"], usage=usage)


def failed(
    message: str, *, kind: str, usage: dict[str, object] | None = None, is_cut: bool = False
) -> Ending:
    """The end of a response that came to no result.

    Args:
        kind: as of an error of the API.
        is_cut: see ``Ending``.
    """
    error = {"code": "server_error", "message": message, "type": kind}
    return Ending(status="failed", at=int(time.time()), usage=usage, error=error, is_cut=is_cut)


def _usage_of(outcome: Outcome) -> dict[str, object]:
    num_prompt, num_generated = outcome.num_prompt_tokens, outcome.num_generated_tokens
    return {
        "input_tokens": num_prompt,
        "input_tokens_details": {
            "cached_tokens": outcome.num_cached_tokens,
            "cache_write_tokens": 0,
        },
        "output_tokens": num_generated,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": num_prompt + num_generated,
    }
