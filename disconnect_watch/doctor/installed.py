"""Which servers and frameworks are installed, and which adapter is for each; none is imported."""

from importlib.metadata import PackageNotFoundError, version

from disconnect_watch.doctor.finding import Finding, Status
from disconnect_watch.testing.server import our_protocol

__all__ = ["installed_findings", "version_of"]

_AREA = "installed"
_ASGI = "disconnect_watch.adapters.asgi.CancelOnDisconnect, outermost"

#: By distribution: what of ours serves it, and how that is put in.
_ADAPTERS = {
    "uvicorn": f"--http {our_protocol()}",
    "gunicorn": _ASGI,
    "hypercorn": _ASGI,
    "granian": _ASGI,
    "daphne": _ASGI,
    "starlette": _ASGI,
    "fastapi": _ASGI,
    "litestar": _ASGI,
    "quart": _ASGI,
    "blacksheep": _ASGI,
    "aiohttp": "disconnect_watch.adapters.aiohttp.middleware()",
    "sanic": "disconnect_watch.adapters.sanic.setup(app)",
    "tornado": "disconnect_watch.adapters.tornado.setup(app)",
    "grpcio": "disconnect_watch.adapters.grpc.Interceptor()",
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
            value = f"{release}: {_ADAPTERS[name]}"
        found.append(Finding(_AREA, name, Status.OK, value))
    if not any(finding.name in _ADAPTERS for finding in found):
        advice = "any asyncio server: disconnect_watch.watch(writer)"
        found.append(Finding(_AREA, "servers", Status.NOTE, "none that has an adapter", advice))
    return found
