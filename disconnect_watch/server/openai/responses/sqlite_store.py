"""Responses in a file, or in memory, by SQLite.

The file belongs to one server at a time, which holds its lock for as long as it runs: whatever
in it has not ended when a server opens it was left behind by one that is gone.
"""

import asyncio
import os
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from disconnect_watch.server.openai.responses.store import (
    Entry,
    EntryTooLargeError,
    StoreError,
    StoreFullError,
    StoreLimits,
    StoreStats,
)

__all__ = ["SqliteStore"]

#: Of the table below; a file with another is refused.
VERSION = 1
#: Seconds for a server that is about to end.
PATIENCE = 5.0

_SCHEMA = """
CREATE TABLE responses (
    id TEXT PRIMARY KEY,
    owner TEXT NOT NULL,
    created_at REAL NOT NULL,
    ended_at REAL,
    size INTEGER NOT NULL,
    body BLOB NOT NULL
);
CREATE INDEX responses_ended ON responses (ended_at);
"""

R = TypeVar("R")


class SqliteStore:
    """Keeps responses in one file; see ``ResponseStore``.

    Args:
        path: of the file, which is made for its owner alone to read; None is in memory.
        limits: see ``StoreLimits``. Bytes are those of bodies; the file has an overhead, and does
            not shrink.
        clock: seconds since the epoch.

    Raises:
        StoreError: it is no such file, another server has it, or it cannot be made.

    Threads: a file is used on a thread of its own, since a disk may take its time.
    """

    def __init__(
        self,
        path: Path | None = None,
        *,
        limits: StoreLimits | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._name = "memory" if path is None else str(path)
        self._limits = limits or StoreLimits()
        self._clock = clock
        try:
            if path is not None:
                os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
            self._database = sqlite3.connect(
                ":memory:" if path is None else path,
                timeout=PATIENCE,
                isolation_level=None,
                check_same_thread=False,
            )
        except (OSError, sqlite3.Error) as error:
            raise StoreError(f"cannot open the responses in {self._name}: {error}") from error
        try:
            self._open()
        except sqlite3.Error as error:
            self._database.close()
            raise StoreError(
                f"cannot use the responses in {self._name}: {error}; give a file of its own to "
                "each server, or one that is not there yet"
            ) from error
        except StoreError:
            self._database.close()
            raise
        self._thread = None if path is None else ThreadPoolExecutor(1, "disconnect-watch-responses")
        self._is_closed = False

    def _open(self) -> None:
        database = self._database
        # Before the first access: then the lock is taken once, and no shared memory is made.
        database.execute("PRAGMA locking_mode = EXCLUSIVE")
        database.execute("PRAGMA journal_mode = WAL")
        # A process that dies loses nothing; a machine may lose its last moments, and no more.
        database.execute("PRAGMA synchronous = NORMAL")
        database.execute("BEGIN EXCLUSIVE")
        ((version,),) = database.execute("PRAGMA user_version")
        num_tables = database.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0]
        if version != VERSION and (version or num_tables):
            raise StoreError(
                f"{self._name} is of version {version}, this server reads version {VERSION}; "
                "give a file that is not there yet"
            )
        if not version:
            for statement in _SCHEMA.split(";"):
                database.execute(statement)
            database.execute(f"PRAGMA user_version = {VERSION}")
        database.execute("COMMIT")
        self._count, self._bytes = database.execute(
            "SELECT COUNT(*), COALESCE(SUM(size), 0) FROM responses"
        ).fetchone()

    async def create(self, entry: Entry) -> None:
        """See ``ResponseStore``."""
        await self._call(lambda: self._create(entry))

    async def finish(self, entry: Entry) -> bool:
        """See ``ResponseStore``."""
        return await self._call(lambda: self._finish(entry))

    async def get(self, response_id: str) -> Entry | None:
        """See ``ResponseStore``."""
        return await self._call(lambda: self._get(response_id))

    async def delete(self, response_id: str) -> bool:
        """See ``ResponseStore``."""
        return await self._call(lambda: self._delete(response_id))

    async def running(self) -> list[str]:
        """See ``ResponseStore``."""
        return await self._call(self._running)

    async def is_abandoned(self, response_id: str) -> bool:
        """Whether it has not ended: nobody else can have the file."""
        entry = await self.get(response_id)
        return entry is not None and entry.ended_at is None

    async def stats(self) -> StoreStats:
        """See ``ResponseStore``."""
        return await self._call(lambda: StoreStats(self._count, self._bytes))

    async def close(self) -> None:
        """See ``ResponseStore``."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._thread is None:
            self._database.close()
        else:
            # Behind what is still to be written.
            await asyncio.get_running_loop().run_in_executor(self._thread, self._database.close)
            self._thread.shutdown()

    async def _call(self, function: Callable[[], R]) -> R:
        """One transaction, on the thread. It comes to its end also if nobody waits for it."""
        if self._is_closed:
            raise StoreError(f"the responses in {self._name} were closed")

        def call() -> R:
            counts = self._count, self._bytes
            try:
                self._database.execute("BEGIN IMMEDIATE")
                result = function()
                self._database.execute("COMMIT")
            except BaseException as error:
                self._count, self._bytes = counts
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK")
                if isinstance(error, sqlite3.Error):
                    raise StoreError(f"the responses in {self._name}: {error}") from error
                raise
            return result

        if self._thread is None:
            return call()
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    def _create(self, entry: Entry) -> None:
        size, limits = len(entry.body), self._limits
        if size > limits.max_bytes:
            raise EntryTooLargeError(
                f"a response of {size} bytes was to be stored, where {limits.max_bytes} is all "
                "that there is room for"
            )
        self._drop_expired()
        if not self._make_room(1, size):
            raise StoreFullError(
                f"{self._count} responses with {self._bytes} bytes are stored and run, there is "
                "no room for one more"
            )
        self._database.execute(
            "INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?)",
            (entry.response_id, entry.owner, entry.created_at, entry.ended_at, size, entry.body),
        )
        self._count += 1
        self._bytes += size

    def _finish(self, entry: Entry) -> bool:
        found = self._database.execute(
            "SELECT size FROM responses WHERE id = ? AND ended_at IS NULL", (entry.response_id,)
        ).fetchone()
        if found is None:
            return False
        size = len(entry.body)
        self._database.execute(
            "UPDATE responses SET ended_at = ?, size = ?, body = ? WHERE id = ?",
            (entry.ended_at, size, entry.body, entry.response_id),
        )
        self._bytes += size - found[0]
        # As the last that ended it goes last; alone too large, it goes too.
        self._make_room(0, 0)
        return True

    def _get(self, response_id: str) -> Entry | None:
        self._drop_expired()
        row = self._database.execute(
            "SELECT id, owner, created_at, ended_at, body FROM responses WHERE id = ?",
            (response_id,),
        ).fetchone()
        return None if row is None else Entry(*row)

    def _delete(self, response_id: str) -> bool:
        found = self._database.execute(
            "DELETE FROM responses WHERE id = ? RETURNING size", (response_id,)
        ).fetchall()
        self._forget(found)
        return bool(found)

    def _running(self) -> list[str]:
        rows = self._database.execute("SELECT id FROM responses WHERE ended_at IS NULL")
        return [response_id for (response_id,) in rows]

    def _drop_expired(self) -> None:
        self._forget(
            self._database.execute(
                "DELETE FROM responses WHERE ended_at < ? RETURNING size",
                (self._clock() - self._limits.max_age,),
            ).fetchall()
        )

    def _make_room(self, count: int, size: int) -> bool:
        """Drop what ended first until so much more fits; returns whether it does."""
        limits = self._limits
        while self._count + count > limits.max_count or self._bytes + size > limits.max_bytes:
            dropped = self._database.execute(
                "DELETE FROM responses WHERE id = (SELECT id FROM responses WHERE ended_at IS NOT "
                "NULL ORDER BY ended_at, rowid LIMIT 1) RETURNING size"
            ).fetchall()
            if not dropped:
                return False
            self._forget(dropped)
        return True

    def _forget(self, sizes: list[tuple[int]]) -> None:
        self._count -= len(sizes)
        self._bytes -= sum(size for (size,) in sizes)
