"""What every store of responses promises, and what SQLite's file does beyond that."""

import asyncio
import contextlib
import sqlite3
import stat
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

from disconnect_watch.server.openai.responses import sqlite_store
from disconnect_watch.server.openai.responses.opening import open_store
from disconnect_watch.server.openai.responses.redis_store import RedisStore
from disconnect_watch.server.openai.responses.sqlite_store import SqliteStore
from disconnect_watch.server.openai.responses.store import (
    EntryTooLargeError,
    ResponseStore,
    StoreError,
    StoreFullError,
    StoreLimits,
    StoreStats,
)
from tests.support.net import PATIENCE
from tests.support.stores import ended, entry, name_of, redis_server

Open = Callable[..., ResponseStore]


@pytest.fixture(params=["memory", "file", "redis"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    """Opens the store of this test, with limits as they are given."""
    url = request.getfixturevalue("redis_url") if request.param == "redis" else ""
    path = tmp_path / "responses.db" if request.param == "file" else None

    def open_store(clock: Callable[[], float] = lambda: 1000.0, **limits: Any) -> ResponseStore:
        if url:
            return RedisStore(url, limits=StoreLimits(**limits), clock=clock)
        return SqliteStore(path, limits=StoreLimits(**limits), clock=clock)

    return open_store


@pytest.fixture
def redis_url() -> Iterator[str]:
    with redis_server() as url:
        yield url


@asynccontextmanager
async def closing(store: ResponseStore) -> AsyncIterator[ResponseStore]:
    try:
        yield store
    finally:
        await store.close()


async def keep(store: ResponseStore, number: int, **fields: Any) -> None:
    await store.create(entry(number))
    assert await store.finish(ended(number, **fields))


async def kept(store: ResponseStore, *numbers: int) -> list[int]:
    return [number for number in numbers if await store.get(name_of(number)) is not None]


def test_a_response_is_there_from_its_beginning_to_its_deletion(opened: Open) -> None:
    async def main() -> None:
        async with closing(opened()) as store:
            assert await store.get(name_of(1)) is None
            await store.create(entry(1))
            assert await store.get(name_of(1)) == entry(1)
            assert await store.running() == [name_of(1)]
            assert await store.finish(ended(1, size=30))
            assert await store.get(name_of(1)) == ended(1, size=30)
            assert await store.running() == []
            assert not await store.is_abandoned(name_of(1))
            assert await store.delete(name_of(1))
            assert not await store.delete(name_of(1))
            assert await store.get(name_of(1)) is None

    asyncio.run(main())


def test_the_first_end_counts(opened: Open) -> None:
    async def main() -> None:
        async with closing(opened()) as store:
            await store.create(entry(1))
            assert await store.finish(ended(1, size=20))
            assert not await store.finish(ended(1, size=30))
            assert await store.get(name_of(1)) == ended(1, size=20)
            assert await store.stats() == StoreStats(num_responses=1, num_bytes=20)

    asyncio.run(main())


def test_an_end_does_not_bring_back_what_was_deleted(opened: Open) -> None:
    async def main() -> None:
        async with closing(opened()) as store:
            await store.create(entry(1))
            await store.delete(name_of(1))
            assert not await store.finish(ended(1))
            assert await store.get(name_of(1)) is None

    asyncio.run(main())


def test_what_ended_first_makes_room_by_count(opened: Open) -> None:
    async def main() -> None:
        async with closing(opened(max_count=3)) as store:
            await keep(store, 1, at=1000.0)
            await keep(store, 2, at=998.0)
            await store.create(entry(3))
            await keep(store, 4, at=1001.0)
            assert await kept(store, 1, 2, 3, 4) == [1, 3, 4]
            await keep(store, 5, at=1002.0)
            assert await kept(store, 1, 3, 4, 5) == [3, 4, 5]

    asyncio.run(main())


def test_what_ended_first_makes_room_by_bytes(opened: Open) -> None:
    async def main() -> None:
        async with closing(opened(max_bytes=100)) as store:
            await keep(store, 1, size=40)
            await keep(store, 2, size=40, at=1001.0)
            await store.create(entry(3, size=20))
            assert await kept(store, 1, 2, 3) == [1, 2, 3]
            # What grew takes the place of others.
            assert await store.finish(ended(3, size=70, at=1002.0))
            assert await kept(store, 1, 2, 3) == [3]
            await store.delete(name_of(3))
            await keep(store, 4, size=100)
            assert await kept(store, 4) == [4]

    asyncio.run(main())


def test_one_that_grew_too_large_for_any_room_is_let_go(opened: Open) -> None:
    async def main() -> None:
        async with closing(opened(max_bytes=100)) as store:
            await store.create(entry(1))
            assert await store.finish(ended(1, size=101))
            assert await kept(store, 1) == []
            await keep(store, 2, size=100)
            assert await kept(store, 2) == [2]

    asyncio.run(main())


def test_what_runs_is_never_dropped(opened: Open) -> None:
    async def main() -> None:
        async with closing(opened(max_count=2, max_bytes=30)) as store:
            await store.create(entry(1))
            await keep(store, 2)
            await store.create(entry(3))
            with pytest.raises(StoreFullError, match="no room for one more"):
                await store.create(entry(4))
            with pytest.raises(EntryTooLargeError, match="31 bytes"):
                await store.create(entry(5, size=31))
            assert await kept(store, 1, 2, 3, 4, 5) == [1, 3]
            # A refusal has taken nothing.
            await store.delete(name_of(1))
            await store.create(entry(6))

    asyncio.run(main())


def test_what_is_too_old_is_gone(opened: Open) -> None:
    async def main() -> None:
        now = 1000.0
        async with closing(opened(clock=lambda: now, max_age=10.0, max_count=2)) as store:
            await keep(store, 1, at=now)
            await store.create(entry(2))
            now += 10.0
            assert await kept(store, 1, 2) == [1, 2]
            now += 0.5
            assert await kept(store, 1, 2) == [2]
            await store.create(entry(3))

    asyncio.run(main())


@pytest.mark.parametrize("name", ["max_count", "max_bytes", "max_age"])
def test_a_limit_is_above_nothing(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} of stored responses is 0"):
        StoreLimits(**{name: 0})


def test_a_store_that_was_closed_says_so(opened: Open) -> None:
    async def main() -> None:
        store = opened()
        await store.close()
        await store.close()
        with pytest.raises(StoreError, match="were closed"):
            await store.get(name_of(1))

    asyncio.run(main())


def test_a_file_is_found_again_with_all_that_counts(tmp_path: Path) -> None:
    path = tmp_path / "responses.db"
    limits = StoreLimits(max_count=3, max_bytes=100)

    async def main() -> None:
        async with closing(SqliteStore(path, limits=limits, clock=lambda: 1000.0)) as store:
            await keep(store, 1, size=60)
            await store.create(entry(2))
        async with closing(SqliteStore(path, limits=limits, clock=lambda: 1000.0)) as store:
            assert await store.running() == [name_of(2)]
            assert await store.is_abandoned(name_of(2))
            assert await store.get(name_of(1)) == ended(1, size=60)
            await store.create(entry(3, size=40))
            assert await kept(store, 1, 2, 3) == [2, 3]

    asyncio.run(main())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("name", ["", "responses.db"])
def test_what_is_refused_has_made_no_room(tmp_path: Path, name: str) -> None:
    limits = StoreLimits(max_bytes=100)
    path = tmp_path / name if name else None

    async def main() -> None:
        async with closing(SqliteStore(path, limits=limits, clock=lambda: 1000.0)) as store:
            await keep(store, 1, size=40)
            await store.create(entry(2, size=50))
            before = await store.stats()
            for _ in range(2):
                # Without the first there would still be no room, beside what runs.
                with pytest.raises(StoreFullError):
                    await store.create(entry(3, size=60))
                assert await kept(store, 1, 2, 3) == [1, 2]
                assert await store.stats() == before
            await store.create(entry(4, size=10))
            assert await kept(store, 1, 2, 4) == [1, 2, 4]

    asyncio.run(main())


def test_a_file_belongs_to_one_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_store, "PATIENCE", 0.01)
    path = tmp_path / "responses.db"

    async def main() -> None:
        async with closing(SqliteStore(path)) as store:
            await store.create(entry(1))
            with pytest.raises(StoreError, match="a file of its own to each server"):
                SqliteStore(path)
            assert await store.get(name_of(1)) == entry(1)
        async with closing(SqliteStore(path)) as store:
            assert await store.get(name_of(1)) == entry(1)

    asyncio.run(main())


def test_a_file_that_is_none_of_ours_is_refused_and_left_alone(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_bytes(b"no database at all " * 100)
    with pytest.raises(StoreError, match="not a database"):
        SqliteStore(text)
    assert text.read_bytes() == b"no database at all " * 100
    other = tmp_path / "other.db"
    with sqlite3.connect(other) as database:
        database.execute("CREATE TABLE things (x)")
    database.close()
    with pytest.raises(StoreError, match="is of version 0"):
        SqliteStore(other)
    with pytest.raises(StoreError, match="cannot open the responses"):
        SqliteStore(tmp_path / "nowhere" / "responses.db")


def test_a_write_that_failed_has_changed_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        limits = StoreLimits(max_count=2)
        async with closing(SqliteStore(tmp_path / "r.db", limits=limits)) as store:
            await store.create(entry(1))
            with pytest.raises(StoreError, match="UNIQUE"):
                await store.create(entry(1))
            await store.create(entry(2))
            with pytest.raises(StoreFullError):
                await store.create(entry(3))

    asyncio.run(main())


def test_in_redis_a_response_is_abandoned_with_the_lease_of_its_server(redis_url: str) -> None:
    async def main() -> None:
        async with closing(RedisStore(redis_url)) as other:
            async with closing(RedisStore(redis_url)) as store:
                await store.create(entry(1))
                assert await other.running() == [name_of(1)]
                assert await other.get(name_of(1)) == entry(1)
                assert not await other.is_abandoned(name_of(1))
                # Whoever has it asks only about what it does not generate.
                assert await store.is_abandoned(name_of(1))
            assert await other.is_abandoned(name_of(1))
            assert await other.finish(ended(1))
            assert not await other.is_abandoned(name_of(1))
            assert not await other.is_abandoned(name_of(2))

    asyncio.run(main())


def test_a_lease_is_renewed_for_as_long_as_its_server_runs(redis_url: str) -> None:
    async def main() -> None:
        async with (
            closing(RedisStore(redis_url)) as other,
            closing(RedisStore(redis_url, lease=0.6)) as store,
        ):
            await store.create(entry(1))
            with contextlib.closing(redis.Redis.from_url(redis_url)) as client:
                for _ in range(2):
                    for key in client.scan_iter("*:server:*"):
                        client.delete(key)
                    async with asyncio.timeout(PATIENCE):
                        while await other.is_abandoned(name_of(1)):
                            pass

    asyncio.run(main())


def test_a_redis_that_does_not_answer_is_told_without_its_password(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="Redis at") as caught:
        open_store(f"unix://user:secret@{tmp_path}/nothing.sock", StoreLimits())
    assert "secret" not in str(caught.value)
    with redis_server() as url:
        store = open_store(url, StoreLimits())

    async def main() -> None:
        async with closing(store):
            with pytest.raises(StoreError, match="Redis at"):
                await store.get(name_of(1))

    asyncio.run(main())
