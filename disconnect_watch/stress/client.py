"""One client on a raw socket, from its connect to its end."""

import asyncio
import contextlib
import os
import socket
from dataclasses import dataclass
from enum import StrEnum

from disconnect_watch.stress.exchange import Answer, Exchange, WrongAnswerError
from disconnect_watch.stress.plan import ClientPlan, Leave, Point
from disconnect_watch.stress.target import Address
from disconnect_watch.testing import ways

__all__ = ["Ending", "Outcome", "run_client"]

_RECV_BYTES = 1 << 16


class Outcome(StrEnum):
    """Each client ends in exactly one."""

    ANSWERED = "answered"
    LEFT = "left"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Ending:
    """How a client ended.

    Attributes:
        error: why it failed.
        is_request_complete: whether it had sent all of its request.
        num_pieces: of the answer that it read.
    """

    outcome: Outcome
    error: str = ""
    is_request_complete: bool = False
    num_pieces: int = 0


async def run_client(
    address: Address, exchange: Exchange, *, plan: ClientPlan, within: float
) -> Ending:
    """Do what the plan says. Whatever the server does is an ending, not an exception.

    A client that has its whole answer before it could leave is answered. So is one that
    half-closed and was answered all the same; one that was refused or cut off after it
    is taken for left.

    Args:
        address: of the server.
        exchange: what is asked, and what is a right answer.
        plan: of this client.
        within: seconds for all of it.
    """
    with socket.socket(address.family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as sock:
        client = _Client(sock, exchange, plan)
        error = ""
        try:
            async with asyncio.timeout(within):
                outcome = await client.run(address)
        except TimeoutError:
            outcome, error = Outcome.FAILED, f"not answered within {within:g} s"
        except EOFError:
            outcome, error = Outcome.FAILED, "closed by the server before the answer was complete"
        except WrongAnswerError as wrong:
            outcome, error = Outcome.FAILED, str(wrong)
        except OSError as failure:
            # Not its own message, which may name the port of this one client.
            outcome, error = Outcome.FAILED, os.strerror(failure.errno or 0)
        return Ending(outcome, error, client.is_request_complete, client.answer.num_pieces)


class _Client:
    def __init__(self, sock: socket.socket, exchange: Exchange, plan: ClientPlan) -> None:
        self.is_request_complete = False
        self.answer: Answer = exchange.answer(plan.index)
        self._request = exchange.request(plan.index, leaves=plan.leave is not None)
        self._sock = sock
        self._leave = plan.leave
        self._loop = asyncio.get_running_loop()

    async def run(self, address: Address) -> Outcome:
        await self._loop.sock_connect(self._sock, address.sockaddr)
        leave = self._leave
        if leave is not None and leave.point is Point.IN_REQUEST:
            await self._send(self._request[: int(leave.fraction * len(self._request))])
            await self._go(leave)
            return Outcome.LEFT
        await self._send(self._request)
        self.is_request_complete = True
        if leave is None:
            await self._read()
        elif leave.point is Point.STREAMING:
            await self._read(leave.num_pieces)
        elif leave.point is Point.WAITING:
            await asyncio.sleep(leave.delay)
        if leave is not None and not self.answer.is_complete:
            await self._go(leave)
        return Outcome.ANSWERED if self.answer.is_complete else Outcome.LEFT

    async def _go(self, leave: Leave) -> None:
        """Leave; what is answered to a half-close is read to its end."""
        way = ways.Way(leave.way)
        if parting := ways.parting_bytes(way, self._request):
            await self._send(parting)
        ways.part(self._sock, way)
        if way is ways.Way.HALF_CLOSE:
            with contextlib.suppress(EOFError, ConnectionError, WrongAnswerError):
                await self._read()

    async def _read(self, num_pieces: int | None = None) -> None:
        """Read the whole answer, or until so much of it has come."""
        while not self.answer.is_complete:
            if num_pieces is not None and self.answer.num_pieces >= num_pieces:
                return
            data = await self._loop.sock_recv(self._sock, _RECV_BYTES)
            if data:
                self.answer.feed(data)
                continue
            self.answer.end()
            if not self.answer.is_complete:
                raise EOFError

    async def _send(self, data: bytes) -> None:
        await self._loop.sock_sendall(self._sock, data)
