"""One client on a raw socket, from its connect to its end."""

import asyncio
import contextlib
import hashlib
import os
import ssl
import time
from dataclasses import dataclass, field
from enum import StrEnum

from disconnect_watch.stress.connection import Connection, Connections
from disconnect_watch.stress.exchange import Answer, Exchange, WrongAnswerError
from disconnect_watch.stress.plan import ClientPlan, Leave, Point
from disconnect_watch.testing import ways

__all__ = ["Ending", "Outcome", "Times", "run_client"]

_RECV_BYTES = 1 << 16
#: What one that reads slowly takes at a time, and how long it rests in between, seconds.
_SLOW_BYTES = 256
_SLOW_PAUSE = 0.005


class Outcome(StrEnum):
    """Each client ends in exactly one."""

    ANSWERED = "answered"
    LEFT = "left"
    FAILED = "failed"


@dataclass(slots=True)
class Times:
    """Seconds since the client was due; 0 for what never came.

    Attributes:
        connected: its connection stood.
        first: the first piece of the answer was there.
        whole: all of the answer was.
    """

    connected: float = 0.0
    first: float = 0.0
    whole: float = 0.0


@dataclass(frozen=True, slots=True)
class Ending:
    """How a client ended.

    Attributes:
        error: why it failed.
        is_request_complete: whether it had sent all of its request.
        num_pieces: of the answer that it read.
        digest: of the text of a whole answer; the same for the same text.
    """

    outcome: Outcome
    error: str = ""
    is_request_complete: bool = False
    num_pieces: int = 0
    digest: str = field(default="", compare=False)
    times: Times = field(default_factory=Times, compare=False)


async def run_client(
    connections: Connections,
    exchange: Exchange,
    *,
    plan: ClientPlan,
    within: float,
    usual: float = 0.0,
    due: float | None = None,
) -> Ending:
    """Do what the plan says. Whatever the server does is an ending, not an exception.

    A client that has its whole answer before it could leave is answered. So is one that
    half-closed and was answered all the same; one that was refused or cut off after it
    is taken for left.

    Args:
        connections: to the server.
        exchange: what is asked, and what is a right answer.
        plan: of this client.
        within: seconds for all of it.
        usual: seconds that an answer takes, which ``Point.AROUND`` is about.
        due: by ``time.monotonic``, when it was to begin; without it now. What it waited since
            counts as the server's time.
    """
    client = _Client(connections, exchange, plan, usual, due)
    error = ""
    try:
        async with asyncio.timeout(within):
            outcome = await client.run()
    except TimeoutError:
        outcome, error = Outcome.FAILED, f"not answered within {within:g} s"
    except EOFError:
        outcome, error = Outcome.FAILED, "closed by the server before the answer was complete"
    except WrongAnswerError as wrong:
        outcome, error = Outcome.FAILED, str(wrong)
    except ssl.SSLError as failure:
        outcome, error = Outcome.FAILED, f"TLS: {failure.reason or failure}"
    except OSError as failure:
        # Not its own message, which may name the port of this one client.
        outcome, error = Outcome.FAILED, os.strerror(failure.errno or 0)
    finally:
        client.close()
    answer = client.answer
    digest = ""
    if outcome is Outcome.ANSWERED:
        digest = hashlib.blake2b(answer.text.encode(), digest_size=6).hexdigest()
    return Ending(
        outcome, error, client.is_request_complete, answer.num_pieces, digest, client.times
    )


class _Client:
    def __init__(
        self,
        connections: Connections,
        exchange: Exchange,
        plan: ClientPlan,
        usual: float,
        due: float | None,
    ) -> None:
        leave = plan.leave
        self.is_request_complete = False
        self.times = Times()
        self.answer: Answer = exchange.answer(plan.index)
        self._exchange = exchange
        self._request = exchange.request(
            plan.index, leaves=leave is not None and leave.point is not Point.AROUND
        )
        self._connections = connections
        self._connection: Connection | None = None
        self._plan = plan
        self._usual = usual
        # Not the loop's clock: uvloop's stands still within a turn, and has milliseconds only.
        self._due = time.monotonic() if due is None else due

    async def run(self) -> Outcome:
        kept = self._connections.take() if self._plan.is_kept else None
        if kept is not None:
            self._connection = kept
            try:
                return await self._exchange_over(kept)
            except (EOFError, ConnectionError):
                # The server closed it while the request was on its way, as it may (RFC 9112
                # 9.3.1); it has not begun with it.
                if self.answer.num_pieces or kept.num_answers == 0 or self.times.first:
                    raise
                kept.close()
                self.answer = self._exchange.answer(self._plan.index)
        self._connection = await self._connections.open(is_slow=self._plan.is_slow)
        return await self._exchange_over(self._connection)

    def close(self) -> None:
        """Close, or keep the connection for the next."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        is_whole = self.answer.is_complete and self._plan.leave is None
        if is_whole and self.answer.is_reusable and not self._plan.is_slow:
            connection.num_answers += 1
            self._connections.keep(connection)
        else:
            connection.close()

    async def _exchange_over(self, connection: Connection) -> Outcome:
        self.times.connected = self._since_due()
        leave = self._plan.leave
        if leave is not None and leave.point in (Point.CONNECTED, Point.IN_REQUEST):
            if leave.point is Point.IN_REQUEST:
                await connection.send(self._request[: int(leave.fraction * len(self._request))])
            await self._go(connection, leave)
            return Outcome.LEFT
        await connection.send(self._request)
        self.is_request_complete = True
        if leave is None:
            await self._read(connection)
            return Outcome.ANSWERED
        await self._until_it_leaves(connection, leave)
        if not self.answer.is_complete:
            await self._go(connection, leave)
        return Outcome.ANSWERED if self.answer.is_complete else Outcome.LEFT

    async def _until_it_leaves(self, connection: Connection, leave: Leave) -> None:
        match leave.point:
            case Point.STREAMING:
                await self._read(connection, leave.num_pieces)
            case Point.STALLED:
                await self._read(connection, leave.num_pieces)
                if not self.answer.is_complete:
                    await asyncio.sleep(leave.delay)
            case Point.WAITING:
                await asyncio.sleep(leave.delay)
            case Point.AROUND:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(2 * leave.fraction * self._usual):
                        await self._read(connection)

    async def _go(self, connection: Connection, leave: Leave) -> None:
        """Leave; what is answered to a half-close is read to its end."""
        if isinstance(connection.sock, ssl.SSLSocket) and leave.point is not Point.STALLED:
            # Unread session tickets would make a reset of every close.
            connection.discard_what_came()
        if parting := ways.parting_bytes(leave.way, self._request):
            await connection.send(parting)
        # The child that is killed in one of the ways must not be waited for on the loop's thread.
        if leave.way is ways.Way.KILLED:
            await asyncio.to_thread(ways.part, connection.sock, leave.way)
        else:
            ways.part(connection.sock, leave.way)
        if leave.way is ways.Way.HALF_CLOSE:
            with contextlib.suppress(EOFError, OSError, WrongAnswerError):
                await self._read(connection)
        elif leave.way is ways.Way.VANISH:
            self._connections.hold(connection.sock)
            self._connection = None

    async def _read(self, connection: Connection, num_pieces: int | None = None) -> None:
        """Read the whole answer, or until so much of it has come."""
        answer, is_slow = self.answer, self._plan.is_slow
        while not answer.is_complete:
            if num_pieces is not None and answer.num_pieces >= num_pieces:
                return
            data = await connection.receive(_SLOW_BYTES if is_slow else _RECV_BYTES)
            if not data:
                self._take_the_end()
                break
            answer.feed(data)
            if not self.times.first and answer.num_pieces:
                self.times.first = self._since_due()
            if is_slow:
                await asyncio.sleep(_SLOW_PAUSE)
        self.times.whole = self._since_due()
        self.times.first = self.times.first or self.times.whole

    def _take_the_end(self) -> None:
        self.answer.end()
        if not self.answer.is_complete:
            raise EOFError

    def _since_due(self) -> float:
        return time.monotonic() - self._due
