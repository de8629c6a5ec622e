"""Who may have a request parted, and the route that lets go of what was kept for one."""

from typing import Annotated

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from disconnect_watch.backends.engine_node import EngineNode
from disconnect_watch.keys import Caller, Role
from disconnect_watch.server.access import RECORD_KEY, App, Receive, RequestRecord, Scope, Send
from disconnect_watch.server.answers import error_response
from disconnect_watch.server.disagg.messages import PREFILL_HEADER, TICKET_HEADER, Prefilled
from disconnect_watch.server.disagg.parts import (
    DecodePart,
    Part,
    PartAnswer,
    PartAnswered,
    PrefillPart,
)
from disconnect_watch.server.disagg.role import NodeRole
from disconnect_watch.server.documents import encode
from disconnect_watch.server.errors import ForbiddenError, RequestError
from disconnect_watch.server.guard import CALLER_KEY, HEADERS_KEY
from disconnect_watch.server.limits import read_body
from disconnect_watch.server.openai.schema import decode_request

__all__ = ["Parting", "parted"]

_PREFILL, _TICKET = PREFILL_HEADER.encode(), TICKET_HEADER.encode()

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]


def parted(app: Starlette, served: App, node: NodeRole) -> App:
    """What a node serves: requests that are parted, and a way to let go of what is kept for one.

    Args:
        app: gets the routes.
        served: has it all so far.
    """
    app.router.routes.append(Route("/v1/kv/release", release_transfer, methods=["POST"]))
    app.add_exception_handler(PartAnswered, answer_part)
    app.state.node = node.node
    return Parting(served, node.node, prefills=node.prefills, decodes=node.decodes)


class Parting:
    """ASGI middleware inside ``Guard`` and ``Tracking``, of a node.

    A ticket says where to connect to, so only those who speak for others may bring one: a proxy's
    key, or an admin's.

    Args:
        prefills, decodes: what the node is for.
    """

    def __init__(self, app: App, node: EngineNode, *, prefills: bool, decodes: bool) -> None:
        self._app = app
        self._node = node
        self._prefills = prefills
        self._decodes = decodes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = scope["state"][HEADERS_KEY] if scope["type"] == "http" else {}
        if _PREFILL not in headers and _TICKET not in headers:
            await self._app(scope, receive, send)
            return
        record: RequestRecord = scope["state"][RECORD_KEY]
        try:
            record.part = part = self._part(scope["state"][CALLER_KEY], record, headers)
        except RequestError as error:
            answer = error_response(scope["path"], error.status, str(error), error)
            await answer(scope, receive, send)
            return
        try:
            await self._app(scope, receive, send)
        finally:
            part.close()

    def _part(self, caller: Caller, record: RequestRecord, headers: dict[bytes, bytes]) -> Part:
        if caller.role not in (Role.SERVICE, Role.ADMIN):
            raise ForbiddenError(
                f"{PREFILL_HEADER} and {TICKET_HEADER} are for a proxy, whose key has role service"
            )
        is_prefill = _PREFILL in headers
        if not (self._prefills if is_prefill else self._decodes):
            raise ForbiddenError(
                f"this node does not {'prefill' if is_prefill else 'decode'} for others, see --role"
            )
        if is_prefill:
            return PrefillPart(self._node, record)
        return DecodePart(self._node, Prefilled.of_header(headers[_TICKET]))


async def answer_part(request: Request, error: Exception) -> Response:
    """The answer to a prefill."""
    assert isinstance(error, PartAnswered)
    return PartAnswer(error)


class Release(msgspec.Struct, forbid_unknown_fields=True):
    """``POST /v1/kv/release``: the id of a transfer, or the caller's own name of a request."""

    name: Name


async def release_transfer(request: Request) -> Response:
    """Let go of what is kept for a request of the caller's, or will be.

    200 whatever is there: of a request that has not come yet it leaves a tombstone.
    """
    body = await read_body(request, 1 << 16)
    caller: Caller = request.scope["state"][CALLER_KEY]
    node: EngineNode = request.app.state.node
    released = node.release(decode_request(Release, body).name, caller.name)
    document = {
        "outcome": released.outcome,
        "kind": released.kind,
        "blocks_freed": released.num_blocks,
    }
    return Response(encode(document), media_type="application/json")
