"""ASGI applications, under any server: one line, and a handler stops with its client.

::

    app = CancelOnDisconnect(app)

Outermost it finds the connection through what the server called it with, and the kernel
tells of a leave that the server itself would never notice: behind a pipelined request,
behind a body that nobody reads, behind any middleware. Where no connection is found, the
server's own ``http.disconnect`` is listened to; ``how_found`` says which it is, and
``stats`` counts it. HTTP/2 streams are judged one by one: they end with their connection,
or by the server's word.

The token of a request is ``scope["state"]["disconnect_watch.token"]``. For one route of
Starlette or FastAPI there are ``cancel_on_disconnect`` and ``client_token``, whose
implementation, in ``disconnect_watch.adapters.starlette``, is loaded on first use.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from disconnect_watch.adapters import TOKEN_KEY
from disconnect_watch.adapters._asgi_call import App, Scope, Send
from disconnect_watch.adapters._asgi_find import How, find
from disconnect_watch.adapters._asgi_uvicorn import calls
from disconnect_watch.adapters._fast import counts
from disconnect_watch.adapters._inbox import Receive
from disconnect_watch.aio._policy import OnDisconnect, policy
from disconnect_watch.watcher import Watcher

if TYPE_CHECKING:
    from disconnect_watch.adapters.starlette import cancel_on_disconnect, client_token

__all__ = [
    "TOKEN_KEY",
    "AsgiStats",
    "CancelOnDisconnect",
    "How",
    "cancel_on_disconnect",
    "client_token",
    "how_found",
    "stats",
]


@dataclass(frozen=True, slots=True)
class AsgiStats:
    """Counters of this process since its start.

    Attributes:
        num_requests: by how their connection was found; see ``how_found``.
        num_left: whose client left before it was answered.
        num_not_started: of these, whose client had left before they began.
    """

    num_requests: dict[How, int]
    num_left: int
    num_not_started: int


class CancelOnDisconnect:
    """Runs each request of an application for as long as its client is there.

    When the client leaves, an application that waits in ``receive()`` is told so and ends
    in its own way; any other has its task cancelled, as ``asyncio.timeout`` would do it.
    After the last byte of a response nothing is cancelled any more. Lifespan and
    websocket scopes pass through.

    Args:
        app: an ASGI 3 application.
        vanish_after: seconds of silence, though asked, after which a client that left
            without a word is gone; see ``Connection.set_vanish_after``.
        on_disconnect: "cancel", or ``grace(seconds)`` to let a request go on for a while.
        watcher: None for the process-wide one.

    Raises:
        ValueError: an option has a value that is none of these.
    """

    def __init__(
        self,
        app: App,
        *,
        vanish_after: float | None = None,
        on_disconnect: OnDisconnect = "cancel",
        watcher: Watcher | None = None,
    ) -> None:
        self.app = app
        checked = policy(vanish_after=vanish_after, on_disconnect=on_disconnect)
        self._calls = calls(checked, watcher)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = self._calls.outermost(scope, receive, send)
        if call is None:
            await self.app(scope, receive, send)
            return
        # Spelled out: `with` would cost as much as a tenth of all that we add.
        try:
            if call.begin():
                await self.app(scope, call.receive, call.send)
        except BaseException as error:
            if not call.end(error):
                raise
        else:
            call.end()
        if call.has_left:
            call.log()
            await call.answer_nobody()


def how_found(scope: Scope, receive: Receive, send: Send) -> How:
    """How the connection of a request would be found, were it to be watched here.

    "protocol": our own uvicorn protocol watches it. "transport": by the server's
    transport. "addresses": by its two ends, among the fds of this process. "none": not at
    all, so that only the server's ``http.disconnect`` tells of a leave.
    """
    return find(scope, receive, send).how


def stats() -> AsgiStats:
    """How the connections of this process's requests were found, and how many left."""
    ways: tuple[How, ...] = ("protocol", "transport", "addresses", "none")
    return AsgiStats(
        num_requests={how: getattr(counts, how) for how in ways},
        num_left=counts.left,
        num_not_started=counts.not_started,
    )


def __getattr__(name: str) -> Any:
    if name in ("cancel_on_disconnect", "client_token"):
        from disconnect_watch.adapters import starlette

        return getattr(starlette, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
