"""What the page shows: frames of the engines' state and of the last cancels, for each viewer.

An engine is looked at only while somebody watches, ten times a second at the most, however many
watch; a frame that would say the same as the one before is not sent.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from dataclasses import asdict, dataclass
from itertools import count, groupby
from typing import Any

from disconnect_watch.backends import Backend, Viewable
from disconnect_watch.engine import EngineView, Outcome
from disconnect_watch.server.documents import encode
from disconnect_watch.server.errors import CancelledByPeer, OverloadedError
from disconnect_watch.token import CancelToken

__all__ = ["LiveHub"]

#: Seconds between two frames.
TICK = 0.1
#: Frames that say nothing new until one is sent all the same, so that a proxy keeps the stream.
MAX_UNCHANGED = 100
#: Requests of one engine that a frame tells of; the others are counted.
MAX_REQUESTS = 64
MAX_CANCELS = 32
MAX_VIEWERS = 32


@dataclass(frozen=True, slots=True)
class Cancel:
    """One request that was cancelled, as the page shows it.

    Attributes:
        number: counts up, so that a page knows those that it has shown.
        milliseconds: from the cause as the watcher saw it to the blocks being free.
    """

    number: int
    request_id: str
    reason: str
    phase: str
    num_tokens: int
    milliseconds: float


class LiveHub:
    """Frames for those who watch.

    Args:
        backends: by name; those that are ``Viewable`` are shown.

    Threads: the loop's, but for the notes that engines leave of their outcomes.
    """

    def __init__(self, backends: Mapping[str, Backend]) -> None:
        self._backends = {
            name: backend for name, backend in backends.items() if isinstance(backend, Viewable)
        }
        # Appended to by engines' threads, each in one operation.
        self._cancels: deque[Cancel] = deque(maxlen=MAX_CANCELS)
        self._numbers = count(1)
        self._viewers: set[asyncio.Event] = set()
        self._is_closed = False
        self._turn = asyncio.Lock()
        self._frame = b""
        self._made_at = 0.0
        for backend in backends.values():
            backend.listen(self._note)

    @property
    def num_viewers(self) -> int:
        """How many watch."""
        return len(self._viewers)

    def close(self) -> None:
        """End all streams; whoever comes later gets one that has ended."""
        self._is_closed = True
        for ended in self._viewers:
            ended.set()

    def require_room(self) -> None:
        """Return where one more may watch.

        Raises:
            OverloadedError: there are too many.
        """
        if len(self._viewers) >= MAX_VIEWERS:
            raise OverloadedError(f"{MAX_VIEWERS} watch already, which is as many as may")

    async def frames(self, token: CancelToken) -> AsyncGenerator[bytes, None]:
        """Events for one viewer, until it leaves or the hub is closed.

        Args:
            token: fires when the viewer leaves.

        Raises:
            CancelledByPeer: the viewer has left.
        """
        ended = asyncio.Event()

        def leave(_: CancelToken) -> None:
            ended.set()

        self._viewers.add(ended)
        token.add_callback(leave, loop=asyncio.get_running_loop())
        shown, num_unchanged = b"", 0
        try:
            while not (self._is_closed or ended.is_set()):
                frame = await self._current()
                num_unchanged = num_unchanged + 1 if frame == shown else 0
                if num_unchanged in (0, MAX_UNCHANGED):
                    shown, num_unchanged = frame, 0
                    yield frame
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(TICK):
                        await ended.wait()
        finally:
            token.remove_callback(leave)
            self._viewers.discard(ended)
        if token.cancelled:
            raise CancelledByPeer("the viewer left")

    async def _current(self) -> bytes:
        """The frame of this moment, made once for all who ask for it."""
        async with self._turn:
            now = time.monotonic()
            if now - self._made_at >= TICK / 2:
                views = {name: await backend.view() for name, backend in self._backends.items()}
                self._frame = b"data: %b\n\n" % encode(self._document(views))
                self._made_at = now
        return self._frame

    def _document(self, views: Mapping[str, EngineView]) -> dict[str, Any]:
        return {
            "models": [_model(name, view) for name, view in views.items()],
            "cancels": [asdict(cancel) for cancel in reversed(self._cancels.copy())],
        }

    def _note(self, request_id: str, outcome: Outcome) -> None:
        if outcome.kind != "cancelled":
            return
        self._cancels.append(
            Cancel(
                next(self._numbers),
                request_id,
                str(outcome.reason),
                str(outcome.phase),
                outcome.num_generated_tokens,
                round((outcome.freed_at_ns - outcome.flag_at_ns) / 1e6, 3),
            )
        )


def _model(name: str, view: EngineView) -> dict[str, Any]:
    stats = view.stats
    shown = view.requests[:MAX_REQUESTS]
    cost = stats.busy_seconds / stats.num_generated_tokens if stats.num_generated_tokens else 0.0
    return {
        "name": name,
        "arithmetic": stats.arithmetic,
        "num_running": stats.num_running,
        "num_waiting": stats.num_waiting,
        "requests": [asdict(request) for request in shown],
        "num_more": len(view.requests) - len(shown),
        # Runs of equal blocks: thousands of them are mostly alike.
        "blocks": [[place, len(list(run))] for place, run in groupby(view.blocks)],
        "num_cancelled": sum(n for (kind, _), n in stats.outcomes.items() if kind == "cancelled"),
        "num_finished": sum(n for (kind, _), n in stats.outcomes.items() if kind == "finished"),
        "num_generated_tokens": stats.num_generated_tokens,
        "num_spared_tokens": stats.num_spared_tokens,
        # By what a token has cost so far; an answer might have ended by itself before.
        "seconds_spared": round(stats.num_spared_tokens * cost, 3),
    }
