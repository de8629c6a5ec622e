"""The routes below ``/v1/responses``."""

from collections.abc import AsyncGenerator
from contextlib import aclosing, nullcontext
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from disconnect_watch.errors import shown
from disconnect_watch.keys import Caller
from disconnect_watch.server.access import RECORD_KEY, RequestRecord
from disconnect_watch.server.documents import encode
from disconnect_watch.server.events import EventStream
from disconnect_watch.server.frontend import Frontend
from disconnect_watch.server.guard import CALLER_KEY
from disconnect_watch.server.openai.chat import prompt_of
from disconnect_watch.server.openai.common import find, json_response, now, read, with_errors
from disconnect_watch.server.openai.errors import InvalidFieldError
from disconnect_watch.server.openai.responses.errors import ElsewhereError
from disconnect_watch.server.openai.responses.generate import Plan
from disconnect_watch.server.openai.responses.items import items_of, messages_of
from disconnect_watch.server.openai.responses.live import Live, frames_of
from disconnect_watch.server.openai.responses.schema import ResponseRequest
from disconnect_watch.server.openai.responses.transcript import Transcript
from disconnect_watch.server.openai.sampling import generation_of

__all__ = [
    "cancel_response",
    "count_input_tokens",
    "create_response",
    "delete_response",
    "list_input_items",
    "retrieve_response",
]

#: Seconds for which a cancel waits for its effect.
WAIT = 10.0
#: Items on one page of a list.
DEFAULT_PAGE, MAX_PAGE = 20, 100


async def create_response(request: Request) -> Response:
    """``POST /v1/responses``: at once, as a stream, or in the background."""
    frontend, record, asked = await read(request, ResponseRequest)
    plan = await _plan_of(frontend, _caller(request), record, asked)
    live = await frontend.responses.begin(plan, record)
    if asked.stream:
        frames = (
            live.follow(0, token=record.token) if asked.background else with_errors(_told(live))
        )
        return EventStream(frames, source=live)
    if asked.background:
        return json_response(live.transcript.first_document())
    with live:
        await live.wait_over()
    if live.error is not None:
        raise live.error
    return json_response(live.transcript.document())


async def retrieve_response(request: Request) -> Response:
    """``GET /v1/responses/{id}``: as it is now, or as a stream from any event on."""
    responses, caller, response_id = _asked_about(request)
    starting_after = _number(request, "starting_after")
    if not _is_true(request, "stream"):
        return json_response((await responses.get(caller, response_id)).document())
    number = 0 if starting_after is None else starting_after + 1
    live = responses.find_live(caller, response_id)
    if live is not None:
        record: RequestRecord = request.scope["state"][RECORD_KEY]
        return EventStream(live.follow(number, token=record.token), source=nullcontext())
    transcript = await responses.get(caller, response_id)
    if transcript.ending is None:
        raise ElsewhereError(response_id)
    return EventStream(_replayed(transcript, number), source=nullcontext())


async def cancel_response(request: Request) -> Response:
    """``POST /v1/responses/{id}/cancel``: the response as it is after it; 202 where it runs on.

    What has ended stays as it is, so that a second cancel is answered as the first.
    """
    responses, caller, response_id = _asked_about(request)
    frontend: Frontend = request.app.state.frontend
    await frontend.take_cancels(caller, 1)
    wait = _number(request, "wait", at_most=60)
    transcript = await responses.cancel(
        caller, response_id, wait=WAIT if wait is None else float(wait)
    )
    status = 202 if transcript.ending is None else 200
    return Response(encode(transcript.document()), status, media_type="application/json")


async def delete_response(request: Request) -> Response:
    """``DELETE /v1/responses/{id}``, which cancels one that runs."""
    responses, caller, response_id = _asked_about(request)
    frontend: Frontend = request.app.state.frontend
    await frontend.take_cancels(caller, 1)
    await responses.delete(caller, response_id)
    return json_response({"id": response_id, "object": "response", "deleted": True})


async def list_input_items(request: Request) -> Response:
    """``GET /v1/responses/{id}/input_items``: what was asked, a page of it."""
    responses, caller, response_id = _asked_about(request)
    order = request.query_params.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidFieldError("order", f"order is {shown(order)}, it must be asc or desc")
    limit = _number(request, "limit", at_least=1, at_most=MAX_PAGE) or DEFAULT_PAGE
    items = (await responses.get(caller, response_id)).input_items
    if order == "desc":
        items = items[::-1]
    after = _place(request, "after", items)
    before = _place(request, "before", items)
    items = items[0 if after is None else after + 1 : before]
    page = items[:limit]
    return json_response(
        {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": len(items) > len(page),
        }
    )


def _place(request: Request, name: str, items: list[dict[str, Any]]) -> int | None:
    """Where the item is that a field of the query names; None without one."""
    item_id = request.query_params.get(name)
    if not item_id:
        return None
    for place, item in enumerate(items):
        if item["id"] == item_id:
            return place
    raise InvalidFieldError(name, f"{name} is {shown(item_id)}, no item has that id")


async def count_input_tokens(request: Request) -> Response:
    """``POST /v1/responses/input_tokens``: how long the prompt would be."""
    frontend, record, asked = await read(request, ResponseRequest)
    plan = await _plan_of(frontend, _caller(request), record, asked)
    num_tokens = len(plan.generation.prompt)
    return json_response({"object": "response.input_tokens", "input_tokens": num_tokens})


async def _plan_of(
    frontend: Frontend, caller: Caller, record: RequestRecord, asked: ResponseRequest
) -> Plan:
    """What is to be generated for a request.

    Raises:
        RequestError: it asks for what makes no sense, or is not there.
    """
    asked.refuse_unsupported()
    backend = find(frontend, asked.model)
    items = items_of(asked.input, request_id=record.request_id)
    before = await frontend.responses.history(caller, asked.previous_response_id)
    chat = asked.as_chat(messages_of(asked.instructions, [*before, *items]))
    # Before the prompt is made: what is refused anyway is not worth it.
    generation_of(chat, "")
    try:
        generation = generation_of(chat, await prompt_of(backend, chat))
    except InvalidFieldError as error:
        # What the chat calls messages came in as the input.
        param = "input" if error.param == "messages" else error.param
        raise InvalidFieldError(param, str(error)) from error
    head = _head_of(asked, record.request_id)
    return Plan(
        Transcript(head=head, input_items=items, has_begun=not asked.background),
        backend,
        generation,
        is_stored=asked.is_stored,
        is_streamed=bool(asked.stream),
        wants_logprobs=asked.wants_logprobs,
    )


def _head_of(asked: ResponseRequest, request_id: str) -> dict[str, Any]:
    """What of the response does not change."""
    return {
        "id": f"resp_{request_id}",
        "object": "response",
        "created_at": now(),
        "model": asked.model,
        "background": bool(asked.background),
        "store": asked.is_stored,
        "instructions": asked.instructions,
        "previous_response_id": asked.previous_response_id,
        "max_output_tokens": asked.max_output_tokens,
        "metadata": asked.metadata or {},
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "reasoning": {"effort": None, "summary": None},
        "service_tier": "default",
        "temperature": 1.0 if asked.temperature is None else asked.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": asked.tool_choice or "auto",
        "tools": asked.tools or [],
        "top_logprobs": asked.top_logprobs or 0,
        "top_p": 1.0 if asked.top_p is None else asked.top_p,
        "truncation": "disabled",
    }


async def _told(live: Live) -> AsyncGenerator[bytes, None]:
    """The events for the client that a response is generated for.

    Raises:
        RequestError: it was cancelled, for which there is no event.
    """
    async with aclosing(live.follow(0)) as frames:
        async for data in frames:
            yield data
    if live.error is not None and live.transcript.status != "failed":
        raise live.error


async def _replayed(transcript: Transcript, number: int) -> AsyncGenerator[bytes, None]:
    for data in frames_of(transcript, number):
        yield data


def _asked_about(request: Request) -> tuple[Any, Caller, str]:
    frontend: Frontend = request.app.state.frontend
    return frontend.responses, _caller(request), request.path_params["response_id"]


def _caller(request: Request) -> Caller:
    caller: Caller = request.scope["state"][CALLER_KEY]
    return caller


def _is_true(request: Request, name: str) -> bool:
    value = request.query_params.get(name, "false").lower()
    if value not in ("true", "false"):
        raise InvalidFieldError(name, f"{name} is {shown(value)}, it must be true or false")
    return value == "true"


def _number(
    request: Request, name: str, *, at_least: int = 0, at_most: int = 1 << 53
) -> int | None:
    text = request.query_params.get(name)
    if text is None:
        return None
    number = int(text) if text.isascii() and text.isdigit() and len(text) <= 16 else -1
    if not at_least <= number <= at_most:
        raise InvalidFieldError(
            name, f"{name} is {shown(text)}, it must be a number from {at_least} to {at_most}"
        )
    return number
