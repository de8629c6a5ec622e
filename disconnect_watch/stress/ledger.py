"""What the server says of its requests: its ``dw_*`` metrics, before and after."""

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from disconnect_watch.stress.exchange import WrongAnswerError
from disconnect_watch.stress.http import HttpResponse
from disconnect_watch.stress.target import Address, Target

__all__ = ["ServerCounts", "read_counts", "settled_counts"]

_SCRAPE_TIMEOUT = 5.0
_SCRAPE_PERIOD = 0.05


@dataclass(frozen=True, slots=True)
class ServerCounts:
    """One reading. The first three only grow, the others are of the moment.

    Attributes:
        num_held: KV blocks that are in use or retained.
    """

    num_finished: int
    num_cancelled: int
    num_failed: int
    num_waiting: int
    num_running: int
    num_held: int
    num_unacked: int

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left of any request."""
        return self.num_waiting == self.num_running == self.num_held == self.num_unacked == 0


async def read_counts(target: Target) -> ServerCounts | None:
    """Read the metrics page at ``target``; None if there is none, or it is no page of ours."""
    try:
        async with asyncio.timeout(_SCRAPE_TIMEOUT):
            text = await _get(await target.resolve(), target)
        return _parse(text)
    except (OSError, EOFError, WrongAnswerError, ValueError):
        return None


async def settled_counts(
    target: Target, *, is_settled: Callable[[ServerCounts], bool], within: float
) -> ServerCounts | None:
    """Read until two readings in a row are settled; after ``within`` seconds the last one.

    Two, since a request may be on its way into the engine at the first.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + within
    num_settled = 0
    while True:
        counts = await read_counts(target)
        num_settled = num_settled + 1 if counts is not None and is_settled(counts) else 0
        if num_settled == 2 or loop.time() >= deadline:
            return counts
        await asyncio.sleep(_SCRAPE_PERIOD)


async def _get(address: Address, target: Target) -> str:
    loop = asyncio.get_running_loop()
    response, body = HttpResponse(), b""
    with socket.socket(address.family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as sock:
        await loop.sock_connect(sock, address.sockaddr)
        head = f"GET {target.path} HTTP/1.1\r\nHost: {target.authority}\r\n\r\n"
        await loop.sock_sendall(sock, head.encode())
        while not response.is_complete:
            data = await loop.sock_recv(sock, 1 << 16)
            if not data:
                raise EOFError
            body += response.feed(data)
    return body.decode()


def _parse(text: str) -> ServerCounts | None:
    values: dict[str, int] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "dw_requests_total":
                key = sample.labels["outcome"]
            elif sample.name in ("dw_requests", "dw_kv_blocks"):
                key = sample.labels["state"]
            else:
                key = sample.name
            values[key] = values.get(key, 0) + int(sample.value)
    try:
        return ServerCounts(
            num_finished=values["finished"],
            num_cancelled=values["cancelled"],
            num_failed=values["failed"],
            num_waiting=values["waiting"],
            num_running=values["running"],
            num_held=values["used"] + values["retained"],
            num_unacked=values["dw_unacked_cancels"],
        )
    except KeyError:
        return None
