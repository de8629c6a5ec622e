"""The servers, and by what means a handler of theirs learns that its client left."""

from dataclasses import dataclass, field

__all__ = ["NUMS_MIDDLEWARES", "STACKS", "Stack"]

#: How many ``BaseHTTPMiddleware`` are around an ASGI application.
NUMS_MIDDLEWARES = (0, 1, 3)

# Of the modes, "own" is the server without us, in the best way that it has itself.
_ASGI_MODES = {"own": "`receive()`", "ours": "`CancelOnDisconnect`"}
_PROTOCOL_MODES = {"ours": "our protocol and `CancelOnDisconnect`", "token": "our protocol's token"}


@dataclass(frozen=True, slots=True)
class Stack:
    """One server that is started.

    Attributes:
        title: what the reader of the table sees.
        modes: what cuts the work off, by mode.
        server: of ``asgi_servers.SERVERS`` or ``tests.servers.loops``.
        app: an ASGI application, below ``tests.servers``; empty for servers of their own kind.
        nums_middlewares: around the application.
        has_tls: whether it is tried over TLS, too.
        is_twin: whether another one has the same server or protocol, so that only the whole
            matrix needs both.
        kinds: of the answers that it gives, see ``work``.
    """

    title: str
    server: str
    modes: dict[str, str] = field(hash=False)
    app: str = ""
    nums_middlewares: tuple[int, ...] = (0,)
    has_tls: bool = True
    is_twin: bool = False
    kinds: tuple[str, ...] = ("wait", "half", "stream", "flood", "head", "quick", "last")


def _asgi(title: str, server: str, modes: dict[str, str], *, is_twin: bool = False) -> Stack:
    return Stack(title, server, modes, "asgi_app:app", NUMS_MIDDLEWARES, is_twin=is_twin)


def _framework(title: str, own: str) -> Stack:
    modes = {"own": own, "ours": "`CancelOnDisconnect`"}
    app = f"framework_apps:{title.lower()}"
    kinds = ("wait", "stream", "head", "quick")
    return Stack(
        f"{title} on uvicorn", "uvicorn", modes, app, has_tls=False, is_twin=True, kinds=kinds
    )


STACKS: dict[str, Stack] = {
    "uvicorn": _asgi("uvicorn, httptools", "uvicorn", _ASGI_MODES),
    "uvicorn-ours": _asgi("uvicorn, httptools", "ours", _PROTOCOL_MODES),
    "uvicorn-unblind": Stack(
        "uvicorn, httptools",
        "ours-unblind",
        {"token": "our protocol's token, `unblind`"},
        "asgi_app:app",
        is_twin=True,
    ),
    "uvicorn-h11": _asgi("uvicorn, h11", "uvicorn-h11", _ASGI_MODES),
    "uvicorn-h11-ours": _asgi("uvicorn, h11", "ours-h11", _PROTOCOL_MODES),
    "hypercorn": _asgi("hypercorn", "hypercorn", _ASGI_MODES),
    "granian": _asgi("granian", "granian", _ASGI_MODES),
    "gunicorn": _asgi("gunicorn, its ASGI worker", "gunicorn", _ASGI_MODES),
    "gunicorn-uvicorn": _asgi(
        "gunicorn, uvicorn's worker", "gunicorn-uvicorn", _ASGI_MODES, is_twin=True
    ),
    "gunicorn-ours": _asgi("gunicorn, our worker", "gunicorn-ours", _PROTOCOL_MODES, is_twin=True),
    "fastapi": _framework("FastAPI", "`request.receive()`"),
    "quart": _framework("Quart", "its own cancel"),
    "litestar": _framework("Litestar", "`request.receive()`"),
    "blacksheep": _framework("BlackSheep", "`is_disconnected()` each 0.1 s"),
    "aiohttp": Stack(
        "aiohttp", "aiohttp", {"own": "`handler_cancellation=True`", "ours": "`middleware()`"}
    ),
    "sanic": Stack("Sanic", "sanic", {"own": "its own cancel", "ours": "`setup(app)`"}),
    "tornado": Stack(
        "Tornado", "tornado", {"own": "`on_connection_close`", "ours": "`setup(app)`"}
    ),
    "streams": Stack(
        "asyncio streams",
        "streams",
        {"own": "a read beside the work", "ours": "`dw.start_server`", "watch": "`dw.watch`"},
    ),
    "protocol": Stack(
        "an `asyncio.Protocol`",
        "protocol",
        {"own": "`connection_lost`", "ours": "`WatchedProtocol`"},
    ),
}
