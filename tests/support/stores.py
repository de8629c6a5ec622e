"""Stores of responses for tests, and what is put in them."""

from disconnect_watch.server.openai.responses.store import Entry

__all__ = ["ended", "entry", "name_of"]


def name_of(number: int) -> str:
    """The id of a response, by a number."""
    return f"resp_{number:032x}"


def entry(number: int, *, size: int = 10, owner: str = "alice") -> Entry:
    """A response that runs."""
    return Entry(name_of(number), owner, created_at=1000.0, ended_at=None, body=b"x" * size)


def ended(number: int, *, at: float = 1000.0, size: int = 10, owner: str = "alice") -> Entry:
    """The same with its end."""
    return Entry(name_of(number), owner, created_at=1000.0, ended_at=at, body=b"y" * size)
