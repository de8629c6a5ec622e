"""Which servers and frameworks are installed, and which adapter is for each; none is imported."""

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from disconnect_watch.doctor.finding import Finding, Status
from disconnect_watch.testing.server import our_protocol

__all__ = ["installed_findings", "version_of"]

_AREA = "installed"
_ASGI = "disconnect_watch.adapters.asgi.CancelOnDisconnect, outermost"

#: By distribution: the module of ours that serves it, and how it is put in.
_ADAPTERS = {
    "uvicorn": ("uvicorn", f"--http {our_protocol()}"),
    "gunicorn": ("asgi", _ASGI),
    "hypercorn": ("asgi", _ASGI),
    "granian": ("asgi", _ASGI),
    "daphne": ("asgi", _ASGI),
    "starlette": ("asgi", _ASGI),
    "fastapi": ("asgi", _ASGI),
    "litestar": ("asgi", _ASGI),
    "quart": ("asgi", _ASGI),
    "blacksheep": ("asgi", _ASGI),
    "aiohttp": ("aiohttp", "disconnect_watch.adapters.aiohttp.middleware()"),
    "sanic": ("sanic", "disconnect_watch.adapters.sanic.setup(app)"),
    "tornado": ("tornado", "disconnect_watch.adapters.tornado.setup(app)"),
    "grpcio": ("grpc", "disconnect_watch.adapters.grpc.Interceptor()"),
}
#: Nothing needs an adapter for these.
_OTHERS = ("uvloop", "httptools")


def version_of(distribution: str) -> str | None:
    """The installed version; None where there is none."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def installed_findings() -> list[Finding]:
    """A finding for each that is there."""
    found = []
    for name in (*_OTHERS, *_ADAPTERS):
        if (release := version_of(name)) is None:
            continue
        value = release
        if name in _ADAPTERS:
            module, how = _ADAPTERS[name]
            has_adapter = find_spec(f"disconnect_watch.adapters.{module}") is not None
            value = f"{release}: {how}" if has_adapter else f"{release}: no adapter"
        found.append(Finding(_AREA, name, Status.OK, value))
    if not any(finding.name in _ADAPTERS for finding in found):
        advice = "any asyncio server: disconnect_watch.watch(writer)"
        found.append(Finding(_AREA, "servers", Status.NOTE, "none that has an adapter", advice))
    return found
