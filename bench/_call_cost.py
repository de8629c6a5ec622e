"""CPU time of single calls: through Python, on a loop, and in C.

Every sample is the calling thread's own CPU time averaged over a batch, so other
people's work on the machine shows less than in the time of the wall. Batches
take turns within a round.
"""

import asyncio
import socket
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from types import TracebackType

import uvloop

import disconnect_watch as dw
from bench._build import build_program

__all__ = ["Costs", "c_command", "measure_blocks", "measure_c_calls", "measure_calls"]

#: Cost of one call by name, one sample a round.
Costs = dict[str, list[float]]

#: attach and detach are system calls and slow: this much fewer of them.
FEWER = 20


def measure_calls(num_rounds: int, num_calls: int) -> Costs:
    """Nanoseconds a call through Python, the ``for`` loop around it included."""
    ours, theirs = socket.socketpair()
    with ours, theirs, dw.Watcher() as watcher, watcher.attach(ours) as connection:
        token = dw.CancelToken()

        def empty(count: int) -> None:
            for _ in range(count):
                pass

        def arm_disarm(count: int) -> None:
            for _ in range(count):
                connection.disarm(connection.arm(token))

        def read_flag(count: int) -> None:
            for _ in range(count):
                token.cancelled  # noqa: B018 the read is what is measured

        def make_token(count: int) -> None:
            for _ in range(count):
                dw.CancelToken()

        def attach_detach(count: int) -> None:
            for _ in range(count):
                watcher.attach(theirs).detach()

        batches: dict[str, tuple[Callable[[int], None], int]] = {
            "empty loop": (empty, num_calls),
            "arm+disarm": (arm_disarm, num_calls),
            "token.cancelled": (read_flag, num_calls),
            "CancelToken()": (make_token, num_calls),
            "attach+detach": (attach_detach, num_calls // FEWER + 1),
        }
        costs: Costs = defaultdict(list)
        for round_ in range(num_rounds + 1):
            for name, (batch, count) in batches.items():
                start_ns = time.thread_time_ns()
                batch(count)
                # The first round is the warm-up.
                if round_:
                    costs[name].append((time.thread_time_ns() - start_ns) / count)
        return costs


class Empty:
    """The ``async with`` that does nothing."""

    async def __aenter__(self) -> None:
        pass

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        pass


Block = Callable[[], AbstractAsyncContextManager[object]]


def measure_blocks(num_rounds: int, num_blocks: int) -> dict[str, Costs]:
    """Microseconds of one ``async with``, by loop, by what it enters and what it awaits.

    A body that waits lets the loop run once, which is when uvloop tells the
    kernel that reading is paused; a body that does not pays nothing for that.
    """
    return {
        "uvloop": uvloop.run(_measure_blocks(num_rounds, num_blocks)),
        "asyncio": asyncio.run(_measure_blocks(num_rounds, num_blocks)),
    }


async def _measure_blocks(num_rounds: int, num_blocks: int) -> Costs:
    is_over = asyncio.Event()

    async def stay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()
        is_over.set()

    server = await asyncio.start_server(stay, "127.0.0.1", 0)
    async with server:
        _, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
        entered: dict[str, Block] = {
            "empty block": Empty,
            "watch": lambda: dw.watch(writer),
            "watch of a transport": lambda: dw.watch(writer.transport),
            "watch, reading on": lambda: dw.watch(writer, pause_reading=False),
            "asyncio.timeout(60)": lambda: asyncio.timeout(60),
        }
        costs: Costs = defaultdict(list)
        for round_ in range(num_rounds + 1):
            for name, block in entered.items():
                for body, batch in (("", _enter), (", one wait inside", _enter_and_wait)):
                    start_ns = time.thread_time_ns()
                    await batch(block, num_blocks)
                    if round_:
                        spent_ns = time.thread_time_ns() - start_ns
                        costs[name + body].append(spent_ns / num_blocks / 1000)
        writer.close()
        await writer.wait_closed()
        await is_over.wait()
    return costs


async def _enter(block: Block, count: int) -> None:
    for _ in range(count):
        async with block():
            pass


async def _enter_and_wait(block: Block, count: int) -> None:
    for _ in range(count):
        async with block():
            await asyncio.sleep(0)


def measure_c_calls(num_rounds: int, num_calls: int, num_connections: int) -> Costs:
    """Nanoseconds a call of the core from C, and bytes of memory a connection; see core_cost.c."""
    done = subprocess.run(
        c_command(num_rounds, num_calls, num_connections),
        capture_output=True,
        text=True,
        check=True,
    )
    costs: Costs = defaultdict(list)
    for line in done.stdout.splitlines():
        name, value = line.split()
        costs[name].append(float(value))
    return costs


def c_command(num_rounds: int, num_calls: int, num_connections: int) -> list[str]:
    """The C program's command line."""
    numbers = (num_rounds, num_calls, num_connections)
    return [str(build_program("core_cost", with_core=True)), *map(str, numbers)]
