"""``/`` and what it loads: the page, and the stream of events that fills it."""

from contextlib import nullcontext
from importlib.resources import files
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

from disconnect_watch.server.access import RECORD_KEY
from disconnect_watch.server.events import EventStream

if TYPE_CHECKING:
    from disconnect_watch.server.access import RequestRecord
    from disconnect_watch.server.live.hub import LiveHub

__all__ = ["PAGES", "live_events", "live_page"]

#: What stands in the package, by path.
PAGES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/live.js": ("live.js", "text/javascript; charset=utf-8"),
    "/live.css": ("live.css", "text/css; charset=utf-8"),
}
_CONTENT = {
    path: files("disconnect_watch.server.live").joinpath("page", name).read_bytes()
    for path, (name, _) in PAGES.items()
}
#: The page talks to this server alone, and is framed by nobody.
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


async def live_page(request: Request) -> Response:
    """The page, or a file that it loads."""
    path = request.scope["path"]
    headers = {**_HEADERS, "content-type": PAGES[path][1]}
    return Response(_CONTENT[path], headers=headers)


async def live_events(request: Request) -> Response:
    """What happens, as server-sent events; see ``hub`` for what one carries."""
    hub: LiveHub = request.app.state.frontend.live
    record: RequestRecord = request.scope["state"][RECORD_KEY]
    hub.require_room()
    return EventStream(hub.frames(record.token), source=nullcontext())
