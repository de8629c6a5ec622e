"""One response while it is generated, and those who follow it."""

import asyncio
from collections.abc import AsyncGenerator, Iterator

from disconnect_watch.adapters import LEAVES
from disconnect_watch.server.access import RequestRecord
from disconnect_watch.server.documents import encode
from disconnect_watch.server.errors import CancelledByPeer, RequestError
from disconnect_watch.server.openai.responses.transcript import Piece, Transcript
from disconnect_watch.token import CancelToken, Reason

__all__ = ["Live", "frames_of"]


class Live:
    """A response that has not ended.

    Of the foreground it belongs to who is in it as a context manager: left before its end, it is
    cancelled.

    Attributes:
        transcript: replaced by the one with the end, once that is stored.
        record: of the request that it is generated for; in the background not the client's.
        is_deleted: whether its owner wants no more of it.
        error: what its client is answered in place of a result, once it is over.

    Threads: the loop's only.
    """

    def __init__(self, transcript: Transcript, record: RequestRecord) -> None:
        self.transcript = transcript
        self.record = record
        self.is_deleted = False
        self.error: RequestError | None = None
        self._accepted = asyncio.Event()
        self._over = asyncio.Event()
        self._is_accepted = False
        self._followers: set[asyncio.Event] = set()

    def __enter__(self) -> "Live":
        return self

    def __exit__(self, *_: object) -> None:
        if not self.is_over and not self.transcript.is_background:
            self.record.token.cancel(Reason.OWNER_CLOSED)

    @property
    def is_accepted(self) -> bool:
        """Whether it came to be queued."""
        return self._is_accepted

    @property
    def is_over(self) -> bool:
        """Whether nothing of it will change any more."""
        return self._over.is_set()

    def accept(self) -> None:
        """It is queued, and stored if it is to be."""
        self._is_accepted = True
        self._accepted.set()

    def add(self, piece: Piece) -> None:
        """Take what a step brought."""
        self.transcript.add(piece)
        self._tell()

    def end(self, transcript: Transcript, error: RequestError | None) -> None:
        """Tell its end to all who wait for it."""
        self.transcript = transcript
        self.error = error
        self._over.set()
        self._accepted.set()
        self._tell()

    async def wait_accepted(self) -> None:
        """Wait until it is queued.

        Raises:
            RequestError: why it is not.
        """
        await self._accepted.wait()
        if not self._is_accepted:
            assert self.error is not None
            raise self.error

    async def wait_over(self) -> None:
        """Wait for its end."""
        await self._over.wait()

    async def follow(
        self, number: int, *, token: CancelToken | None = None
    ) -> AsyncGenerator[bytes, None]:
        """Its events from a number on, as frames, until it is over.

        Args:
            token: of a request that only follows it. Of the one that it is generated for, the
                outcome tells of the leave, and is waited for.

        Raises:
            CancelledByPeer: the client of the request that follows it left.
        """
        news = asyncio.Event()

        def on_cancel(_: CancelToken) -> None:
            news.set()

        self._followers.add(news)
        if token is not None:
            token.add_callback(on_cancel, loop=asyncio.get_running_loop())
        try:
            while True:
                news.clear()
                if token is not None and token.reason in LEAVES:
                    raise CancelledByPeer(f"the client left: {token.reason}")
                while (event := self.transcript.event(number)) is not None:
                    yield _frame(event)
                    number += 1
                if self.is_over:
                    return
                await news.wait()
        finally:
            if token is not None:
                token.remove_callback(on_cancel)
            self._followers.discard(news)

    def _tell(self) -> None:
        for news in self._followers:
            news.set()


def frames_of(transcript: Transcript, number: int) -> Iterator[bytes]:
    """The events of one that is over, from a number on, as frames."""
    event = transcript.event(number) or transcript.cut_event(number)
    while event is not None:
        yield _frame(event)
        number += 1
        event = transcript.event(number)


def _frame(event: dict[str, object]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (str(event["type"]).encode(), encode(event))
