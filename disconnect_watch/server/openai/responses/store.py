"""Where responses are kept: what the endpoints ask of a store, and what bounds it."""

from dataclasses import dataclass
from typing import Protocol

from disconnect_watch.errors import DisconnectWatchError

__all__ = [
    "Entry",
    "EntryTooLargeError",
    "ResponseStore",
    "StoreError",
    "StoreFullError",
    "StoreLimits",
    "StoreStats",
]


@dataclass(frozen=True, slots=True)
class Entry:
    """One response, as a store sees it.

    Attributes:
        owner: whose it is, by the name of a key; empty for nobody in particular.
        created_at, ended_at: seconds since the epoch; it has not ended while that is None.
        body: whatever the endpoints know of it.
    """

    response_id: str
    owner: str
    created_at: float
    ended_at: float | None
    body: bytes


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """What a store holds at most.

    What has ended goes when there is no room, the first that ended first, or when it is too old.
    What runs is never dropped, so that room for what is new may be lacking.

    Attributes:
        max_count: responses.
        max_bytes: of all bodies together.
        max_age: seconds since a response ended.
    """

    max_count: int = 10_000
    max_bytes: int = 1 << 28
    max_age: float = 30 * 86_400.0

    def __post_init__(self) -> None:
        for name in ("max_count", "max_bytes", "max_age"):
            value = getattr(self, name)
            if value <= 0:
                raise ValueError(f"{name} of stored responses is {value}, it must be above 0")


@dataclass(frozen=True, slots=True)
class StoreStats:
    """What a store holds now.

    Attributes:
        num_responses: those that run among them.
        num_bytes: of their bodies.
    """

    num_responses: int
    num_bytes: int


class StoreError(DisconnectWatchError):
    """The store cannot be opened, read or written."""


class StoreFullError(StoreError):
    """What runs leaves no room."""


class EntryTooLargeError(StoreError):
    """One response alone is larger than all may be together."""


class ResponseStore(Protocol):
    """A bounded place for responses, which is there again after a restart.

    Every method may raise ``StoreError``.

    Threads: those of the loop that uses it first.
    """

    async def create(self, entry: Entry) -> None:
        """Keep a response that has not ended, making room for it.

        Raises:
            StoreFullError: what runs leaves none.
            EntryTooLargeError: there can be none.
        """

    async def finish(self, entry: Entry) -> bool:
        """Put the end of a response in its place; returns False where it was deleted, or has one.

        The first end counts: one that was given up stays so.
        """

    async def get(self, response_id: str) -> Entry | None:
        """The response of that id, if it is there."""

    async def delete(self, response_id: str) -> bool:
        """Forget a response; returns whether it was there."""

    async def running(self) -> list[str]:
        """The ids of those that have not ended, whoever generates them."""

    async def is_abandoned(self, response_id: str) -> bool:
        """Whether it has not ended, and no server is there any more that could end it.

        Asked only about what the asking server does not generate itself.
        """

    async def stats(self) -> StoreStats:
        """How much there is."""

    async def close(self) -> None:
        """Let go of everything. Idempotent."""
