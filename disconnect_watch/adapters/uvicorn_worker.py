"""gunicorn's uvicorn worker with our protocols; needs the package ``uvicorn-worker``.

::

    gunicorn app:app -k disconnect_watch.adapters.uvicorn_worker.UvicornWorker
"""

from typing import Any, ClassVar

import uvicorn_worker  # type: ignore[import-untyped] # it has no types

__all__ = ["UvicornH11Worker", "UvicornWorker"]

PROTOCOLS = "disconnect_watch.adapters.uvicorn"


class UvicornWorker(uvicorn_worker.UvicornWorker):  # type: ignore[misc]
    """Takes ``HttpTools`` and, where it is installed, uvloop."""

    CONFIG_KWARGS: ClassVar[dict[str, Any]] = {"loop": "auto", "http": f"{PROTOCOLS}:HttpTools"}


class UvicornH11Worker(uvicorn_worker.UvicornH11Worker):  # type: ignore[misc]
    """Takes ``H11`` and asyncio's own loop, and needs nothing compiled but this package."""

    CONFIG_KWARGS: ClassVar[dict[str, Any]] = {"loop": "asyncio", "http": f"{PROTOCOLS}:H11"}
