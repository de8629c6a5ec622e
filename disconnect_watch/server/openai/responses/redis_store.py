"""Responses in Redis, for several servers behind one address. Needs the ``redis`` extra.

A server holds a lease for as long as it runs and renews it by a heartbeat; a response that has not
ended and whose server has no lease any more is abandoned. Each change is one script, which Redis
runs as a whole.
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import redis
import redis.asyncio

from disconnect_watch.server.openai.responses.store import (
    Entry,
    EntryTooLargeError,
    StoreError,
    StoreFullError,
    StoreLimits,
    StoreStats,
)

__all__ = ["RedisStore"]

#: What all keys begin with; the braces keep them on one node of a cluster.
PREFIX = "{disconnect_watch}:responses"
LEASE = 30.0
#: Seconds for an answer of Redis.
PATIENCE = 5.0

# Entries are hashes; ids of those that run are a set, of those that have ended a sorted set by
# when they did.
_COMMON = """
local prefix = KEYS[1]
local running, ended, bytes = prefix .. ':running', prefix .. ':ended', prefix .. ':bytes'

local function key_of(id)
    return prefix .. ':entry:' .. id
end

local function forget(id)
    local size = redis.call('HGET', key_of(id), 'size')
    if not size then
        return 0
    end
    redis.call('DEL', key_of(id))
    redis.call('SREM', running, id)
    redis.call('ZREM', ended, id)
    redis.call('DECRBY', bytes, size)
    return 1
end

local function drop_expired(before)
    for _, id in ipairs(redis.call('ZRANGEBYSCORE', ended, '-inf', '(' .. before)) do
        forget(id)
    end
end

local function num_entries()
    return redis.call('SCARD', running) + redis.call('ZCARD', ended)
end

local function num_bytes()
    return tonumber(redis.call('GET', bytes) or '0')
end

local function make_room(count, size, max_count, max_bytes)
    while num_entries() + count > max_count or num_bytes() + size > max_bytes do
        local first = redis.call('ZRANGE', ended, 0, 0)[1]
        if not first then
            return false
        end
        forget(first)
    end
    return true
end
"""
_CREATE = """
local id, owner, created_at, size, body, server = unpack(ARGV, 1, 6)
drop_expired(ARGV[7])
if redis.call('EXISTS', key_of(id)) == 1 then
    return 'twice'
end
if not make_room(1, tonumber(size), tonumber(ARGV[8]), tonumber(ARGV[9])) then
    return 'full'
end
redis.call('HSET', key_of(id), 'owner', owner, 'created_at', created_at, 'size', size,
    'body', body, 'server', server)
redis.call('SADD', running, id)
redis.call('INCRBY', bytes, size)
return 'done'
"""
_FINISH = """
local id, ended_at, size, body = unpack(ARGV, 1, 4)
if redis.call('SREM', running, id) == 0 then
    return 0
end
redis.call('INCRBY', bytes, size - redis.call('HGET', key_of(id), 'size'))
redis.call('HSET', key_of(id), 'ended_at', ended_at, 'size', size, 'body', body)
redis.call('ZADD', ended, ended_at, id)
make_room(0, 0, tonumber(ARGV[5]), tonumber(ARGV[6]))
return 1
"""
_GET = """
drop_expired(ARGV[2])
return redis.call('HMGET', key_of(ARGV[1]), 'owner', 'created_at', 'ended_at', 'body')
"""
_DELETE = "return forget(ARGV[1])"
_STATS = "return {num_entries(), num_bytes()}"


class RedisStore:
    """Keeps responses in one Redis; see ``ResponseStore``.

    Args:
        url: ``redis://``, ``rediss://`` or ``unix://``, as redis-py takes it.
        limits: see ``StoreLimits``; the same for all servers that share it.
        clock: seconds since the epoch.
        lease: seconds for which a server that is not heard of is taken to run.

    Raises:
        StoreError: the URL is none, or nobody answers there.
    """

    def __init__(
        self,
        url: str,
        *,
        limits: StoreLimits | None = None,
        clock: Callable[[], float] = time.time,
        lease: float = LEASE,
    ) -> None:
        self._limits = limits or StoreLimits()
        self._clock = clock
        self._lease = lease
        self._server = secrets.token_hex(16)
        parts = urlsplit(url)
        # Not the whole URL, which may have a password.
        self._name = f"Redis at {parts.hostname or parts.path}"
        options: dict[str, Any] = {
            "socket_timeout": PATIENCE,
            "socket_connect_timeout": PATIENCE,
        }
        try:
            with contextlib.closing(redis.Redis.from_url(url, **options)) as first:
                first.ping()
            self._client = redis.asyncio.Redis.from_url(url, **options)
        except (redis.RedisError, OSError, ValueError) as error:
            raise StoreError(f"cannot use the responses in {self._name}: {error}") from error
        script = self._client.register_script
        self._create = script(_COMMON + _CREATE)
        self._finish = script(_COMMON + _FINISH)
        self._get = script(_COMMON + _GET)
        self._delete = script(_COMMON + _DELETE)
        self._stats = script(_COMMON + _STATS)
        self._heartbeat: asyncio.Task[None] | None = None
        self._is_closed = False

    async def create(self, entry: Entry) -> None:
        """See ``ResponseStore``."""
        size, limits = len(entry.body), self._limits
        if size > limits.max_bytes:
            raise EntryTooLargeError(
                f"a response of {size} bytes was to be stored, where {limits.max_bytes} is all "
                "that there is room for"
            )
        if self._heartbeat is None:
            self._heartbeat = asyncio.create_task(self._beat())
            await self._call(self._renew())
        answer = await self._run(
            self._create,
            entry.response_id,
            entry.owner,
            entry.created_at,
            size,
            entry.body,
            self._server,
            self._clock() - limits.max_age,
            limits.max_count,
            limits.max_bytes,
        )
        if answer == b"full":
            raise StoreFullError("what is stored and runs leaves no room for one more response")
        if answer == b"twice":
            raise StoreError(f"response {entry.response_id} is stored already")

    async def finish(self, entry: Entry) -> bool:
        """See ``ResponseStore``."""
        done = await self._run(
            self._finish,
            entry.response_id,
            entry.ended_at,
            len(entry.body),
            entry.body,
            self._limits.max_count,
            self._limits.max_bytes,
        )
        return bool(done)

    async def get(self, response_id: str) -> Entry | None:
        """See ``ResponseStore``."""
        owner, created_at, ended_at, body = await self._run(
            self._get, response_id, self._clock() - self._limits.max_age
        )
        if body is None:
            return None
        return Entry(
            response_id,
            owner.decode(),
            float(created_at),
            None if ended_at is None else float(ended_at),
            body,
        )

    async def delete(self, response_id: str) -> bool:
        """See ``ResponseStore``."""
        return bool(await self._run(self._delete, response_id))

    async def running(self) -> list[str]:
        """See ``ResponseStore``."""
        names = await self._call(self._client.smembers(f"{PREFIX}:running"))
        return [name.decode() for name in names]

    async def is_abandoned(self, response_id: str) -> bool:
        """Whether it has not ended, and its server has no lease, or is this one."""
        server, ended_at = await self._call(
            self._client.hmget(f"{PREFIX}:entry:{response_id}", ["server", "ended_at"])
        )
        if server is None or ended_at is not None:
            return False
        if server.decode() == self._server:
            return True
        return not await self._call(self._client.exists(f"{PREFIX}:server:{server.decode()}"))

    async def stats(self) -> StoreStats:
        """See ``ResponseStore``."""
        return StoreStats(*await self._run(self._stats))

    async def close(self) -> None:
        """See ``ResponseStore``."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._heartbeat is not None:
            self._heartbeat.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._heartbeat
            with contextlib.suppress(redis.RedisError, OSError):
                await self._client.delete(self._lease_key)
        await self._client.aclose()

    @property
    def _lease_key(self) -> str:
        return f"{PREFIX}:server:{self._server}"

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._lease / 3)
            # Where Redis is away for a moment, the next beat comes in time.
            with contextlib.suppress(redis.RedisError, OSError):
                await self._renew()

    async def _renew(self) -> Any:
        return await self._client.set(self._lease_key, b"", px=int(self._lease * 1000))

    async def _run(self, script: Any, *args: object) -> Any:
        return await self._call(script(keys=[PREFIX], args=args))

    async def _call(self, answer: Any) -> Any:
        if self._is_closed:
            answer.close()
            raise StoreError(f"the responses in {self._name} were closed")
        try:
            return await answer
        except (redis.RedisError, OSError) as error:
            raise StoreError(f"the responses in {self._name}: {error}") from error
