"""The routes that cancel requests by id, in our form, in SGLang's and in vLLM's.

Nothing is ever cancelled that was not named and is not the caller's: an empty body, or one that
makes no sense, is refused; ids are compared whole; another's request is as unknown as one that
never was. The rules are the same for all forms.

Source of the two others: SGLang ``/abort_request`` ``{"rid", "abort_all"}``, answered 200
always; vLLM ``/abort_requests`` ``{"request_ids"}``.
"""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated
from urllib.parse import unquote

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from disconnect_watch.errors import cut
from disconnect_watch.keys import Caller
from disconnect_watch.server.access import RequestRecord
from disconnect_watch.server.cancel import Cancelled, cancel
from disconnect_watch.server.documents import encode
from disconnect_watch.server.errors import ForbiddenError, RequestError
from disconnect_watch.server.guard import CALLER_KEY
from disconnect_watch.server.ledger import AmbiguousNameError, RequestLedger
from disconnect_watch.server.limits import read_body
from disconnect_watch.server.openai.errors import InvalidFieldError
from disconnect_watch.server.openai.schema import decode_request

if TYPE_CHECKING:
    from disconnect_watch.server.frontend import Frontend

__all__ = [
    "abort_request",
    "abort_requests",
    "cancel_all",
    "cancel_known",
    "cancel_live",
    "cancel_many",
    "cancel_one",
]

#: Ids in one request.
MAX_IDS = 256

#: Seconds for which a cancel waits for its effect.
WAIT = 1.0

Id = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=60)]
Ids = Annotated[list[Id], msgspec.Meta(min_length=1, max_length=MAX_IDS)]


class CancelOne(msgspec.Struct, forbid_unknown_fields=True):
    """Of one request, whose id is in the path; the body may be left out."""

    wait: Seconds = WAIT


class CancelMany(msgspec.Struct, forbid_unknown_fields=True):
    """Of several requests."""

    request_ids: Ids
    wait: Seconds = WAIT


class CancelAll(msgspec.Struct, forbid_unknown_fields=True):
    """Of everything that runs; ``confirm`` must be true."""

    confirm: bool
    wait: Seconds = WAIT


class SGLangAbort(msgspec.Struct):
    """SGLang's form; ``abort_all`` is the admin's."""

    rid: str | None = None
    abort_all: bool = False


class NotFoundError(RequestError):
    """No request of that id, or none of the caller's."""

    status = 404
    code = "request_not_found"


class AmbiguousError(RequestError):
    """Several live requests have a name that was given; all such names are told."""

    status = 409
    code = "request_ambiguous"
    is_final = True

    def __init__(self, names: Sequence[str]) -> None:
        told = ", ".join(f"'{cut(name)}'" for name in names)
        super().__init__(
            f"several live requests each have the name {told}: nothing was cancelled, take the "
            "X-Request-Id of the answers"
        )


async def cancel_one(request: Request) -> Response:
    """``POST /v1/requests/{id}/cancel`` and ``DELETE /v1/requests/{id}``."""
    body = await _body(request)
    asked = decode_request(CancelOne, body) if body.strip() else CancelOne()
    name = unquote(request.path_params["request_id"])
    (result,) = await _cancel(request, [name], wait=asked.wait)
    if result.status == "not_found":
        raise NotFoundError(f"no request '{cut(name)}' of yours is known")
    return _answer(result.document(), [result])


async def cancel_many(request: Request) -> Response:
    """``POST /v1/requests/cancel``: each id has a result of its own."""
    asked = decode_request(CancelMany, await _body(request))
    results = await _cancel(request, asked.request_ids, wait=asked.wait)
    return _answer({"results": [result.document() for result in results]}, results)


async def cancel_all(request: Request) -> Response:
    """``POST /v1/admin/cancel_all``: everybody's requests, by the admin alone."""
    asked = decode_request(CancelAll, await _body(request))
    if not asked.confirm:
        raise InvalidFieldError("confirm", "confirm is false, nothing was cancelled")
    results = await _cancel_live(request, wait=asked.wait)
    return _answer({"results": [result.document() for result in results]}, results)


async def abort_request(request: Request) -> Response:
    """SGLang's ``POST /abort_request``."""
    asked = decode_request(SGLangAbort, await _body(request))
    if asked.abort_all:
        if not _caller(request).is_admin:
            raise ForbiddenError("abort_all cancels what others wait for, an admin may")
        results = await _cancel_live(request, wait=WAIT)
    elif asked.rid:
        results = await _cancel(request, [asked.rid], wait=WAIT)
    else:
        raise InvalidFieldError("rid", "rid is empty, nothing was cancelled")
    return _answer({"results": [result.document() for result in results]}, ())


async def abort_requests(request: Request) -> Response:
    """vLLM's ``POST /abort_requests``."""
    asked = decode_request(CancelMany, await _body(request))
    results = await _cancel(request, asked.request_ids, wait=asked.wait)
    return _answer({"results": [result.document() for result in results]}, ())


async def _body(request: Request) -> bytes:
    frontend: Frontend = request.app.state.frontend
    return await read_body(request, min(frontend.options.max_body_bytes, 1 << 20))


async def _cancel(request: Request, names: Sequence[str], *, wait: float) -> list[Cancelled]:
    """Cancel those that the caller may, at the same time."""
    frontend: Frontend = request.app.state.frontend
    caller = _caller(request)
    await frontend.take_cancels(caller, len(names))
    results = await cancel_known(frontend.ledger, caller, names, wait=wait)
    unknown = [result.request_id for result in results if result.status == "not_found"]
    if unknown and frontend.peers is not None:
        elsewhere = await frontend.peers.cancel(caller, unknown, wait=wait)
        results = [elsewhere.get(result.request_id, result) for result in results]
    return results


async def cancel_known(
    ledger: RequestLedger, caller: Caller, names: Sequence[str], *, wait: float
) -> list[Cancelled]:
    """Cancel those of a ledger that the caller may, at the same time.

    Raises:
        AmbiguousError: names cannot be told apart, and nothing was cancelled.
    """
    # Each once, however often it was named; and all are looked for before any is cancelled, since
    # names that cannot be told apart are the answer to the whole request.
    once: dict[str, RequestRecord | None] = {}
    ambiguous: list[str] = []
    for name in dict.fromkeys(names):
        try:
            once[name] = ledger.find(caller, name)
        except AmbiguousNameError:
            ambiguous.append(name)
    if ambiguous:
        raise AmbiguousError(ambiguous)
    results = await asyncio.gather(
        *(_cancel_found(ledger, once[name], name, wait=wait) for name in once)
    )
    by_name = dict(zip(once, results, strict=True))
    return [by_name[name] for name in names]


async def _cancel_found(
    ledger: RequestLedger, record: RequestRecord | None, name: str, *, wait: float
) -> Cancelled:
    if record is None:
        return Cancelled(name, "not_found")
    return await cancel(ledger, record, name=name, wait=wait)


async def _cancel_live(request: Request, *, wait: float) -> list[Cancelled]:
    frontend: Frontend = request.app.state.frontend
    results = cancel_live(frontend.ledger, wait=wait)
    if frontend.peers is None:
        return await results
    here, elsewhere = await asyncio.gather(results, frontend.peers.cancel_all(wait=wait))
    return [*here, *elsewhere]


async def cancel_live(ledger: RequestLedger, *, wait: float) -> list[Cancelled]:
    """Cancel all that runs, at the same time."""
    return await asyncio.gather(
        *(cancel(ledger, record, name=record.request_id, wait=wait) for record in ledger.live())
    )


def _caller(request: Request) -> Caller:
    caller: Caller = request.scope["state"][CALLER_KEY]
    return caller


def _answer(document: object, results: Sequence[Cancelled]) -> Response:
    """202 where an effect is still to come."""
    is_pending = any(result.status == "pending" for result in results)
    return Response(encode(document), 202 if is_pending else 200, media_type="application/json")
