"""Stores of responses for tests, and what is put in them."""

import contextlib
import subprocess
import tempfile
from collections.abc import Iterator

import pytest
import redis

from disconnect_watch.server.openai.responses.store import Entry
from tests.support.net import wait_until
from tests.support.tools import path_of

__all__ = ["ended", "entry", "name_of", "redis_server"]


@contextlib.contextmanager
def redis_server() -> Iterator[str]:
    """A Redis of one's own, in memory, on a Unix socket; yields its URL."""
    program = path_of("redis-server")
    if not program:
        pytest.skip("redis-server is not here: make test-programs")
    # Short, as paths of Unix sockets have to be.
    with tempfile.TemporaryDirectory() as directory:
        url = f"unix://{directory}/redis.sock"
        options = ["--port", "0", "--unixsocket", f"{directory}/redis.sock", "--save", ""]
        with subprocess.Popen(
            [program, *options, "--dir", directory], stdout=subprocess.DEVNULL
        ) as process:
            try:
                wait_until(lambda: process.poll() is not None or _answers(url))
                yield url
            finally:
                process.kill()


def _answers(url: str) -> bool:
    with contextlib.suppress(redis.RedisError), contextlib.closing(redis.Redis.from_url(url)) as r:
        return bool(r.ping())
    return False


def name_of(number: int) -> str:
    """The id of a response, by a number."""
    return f"resp_{number:032x}"


def entry(number: int, *, size: int = 10, owner: str = "alice") -> Entry:
    """A response that runs."""
    return Entry(name_of(number), owner, created_at=1000.0, ended_at=None, body=b"x" * size)


def ended(number: int, *, at: float = 1000.0, size: int = 10, owner: str = "alice") -> Entry:
    """The same with its end."""
    return Entry(name_of(number), owner, created_at=1000.0, ended_at=at, body=b"y" * size)
