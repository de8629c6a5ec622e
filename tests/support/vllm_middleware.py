"""A middleware for ``vllm serve`` that keeps a disconnect to itself, if its request says so."""

import asyncio
from typing import Any

HEADER = b"x-deaf"


class Deaf:
    """Stands between the server and vLLM's application."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        is_deaf = HEADER in dict(scope.get("headers", ()))

        async def hear() -> Any:
            message = await receive()
            if is_deaf and message["type"] == "http.disconnect":
                await asyncio.Event().wait()
            return message

        await self._app(scope, hear, send)
