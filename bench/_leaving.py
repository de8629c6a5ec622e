"""How long a model goes on when its client has left: the same for ours and for Triton.

The models are those of ``_frontend_models`` that wait. They look at their flag each 0.1 ms and say
when they begin and when they end, on the clock that all processes of the machine share.
"""

import random
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench._frontend_asked import leaving_request

__all__ = ["WAYS", "WORK_SECONDS", "Events", "Way", "is_run_all_the_same", "leave"]

#: How long a request's model works that nobody cancels; its client leaves early in it.
WORK_SECONDS = 1.2
#: The first chunk of a stream that comes late.
LATE_SECONDS = 0.8
#: A client leaves at any time within so many seconds, the distance of two chunks: who leaves as
#: soon as it has a chunk meets its model always at the same point of its round.
MAX_DELAY = 0.02
#: Seconds that are waited for an event.
LIMIT = 30.0


@dataclass(frozen=True, slots=True)
class Way:
    """What a client asks for, and when it leaves.

    Attributes:
        first: seconds until a stream's first chunk.
        needs_chunk: leaves only when it has one.
    """

    path: str
    first: float = 0.0
    needs_chunk: bool = False


WAYS = {
    "infer": Way("/v2/models/waits/infer"),
    "generate": Way("/v2/models/waits/generate"),
    "generate_stream, chunks flowing": Way("/v2/models/streams/generate_stream", needs_chunk=True),
    "generate_stream, before its first chunk": Way(
        "/v2/models/streams/generate_stream", first=LATE_SECONDS
    ),
}


class Events:
    """What the models have said so far."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.touch()

    def find(self, what: str, name: str) -> int | None:
        """When it was said of a request, ``time.monotonic_ns``."""
        for line in self._path.read_text().rpartition("\n")[0].splitlines():
            at, said, of = line.split(" ", 2)
            if (said, of) == (what, name):
                return int(at)
        return None

    def wait(self, what: str, name: str) -> int:
        """Wait for it."""
        found = _wait(lambda: self.find(what, name))
        if found is None:
            raise RuntimeError(f"the model did not say {what!r} of {name!r} in {LIMIT:.0f} s")
        return found


def leave(port: int, way: Way, name: str, events: Events, *, by_reset: bool) -> float:
    """Have a client leave; returns the milliseconds that the model went on behind it."""
    request = leaving_request(way.path, name, seconds=WORK_SECONDS, first=way.first)
    with socket.create_connection(("127.0.0.1", port), timeout=LIMIT) as client:
        client.sendall(request)
        if way.needs_chunk and not client.recv(1):
            raise RuntimeError(f"{way.path} was closed before its first chunk")
        events.wait("begin", name)
        time.sleep(random.uniform(0, MAX_DELAY))
        if by_reset:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        left_ns = time.monotonic_ns()
    return (events.wait("end", name) - left_ns) / 1e6


def is_run_all_the_same(port: int, name: str, events: Events) -> bool:
    """Whether a request that waits behind another is run though its client has left."""
    path = "/v2/models/waits_alone/infer"
    ahead, behind, after = (f"{name}-{part}" for part in ("ahead", "behind", "after"))

    def ask(of: str, seconds: float) -> socket.socket:
        client = socket.create_connection(("127.0.0.1", port), timeout=LIMIT)
        client.sendall(leaving_request(path, of, seconds=seconds, first=0))
        return client

    with ask(ahead, 0.3) as first:
        events.wait("begin", ahead)
        ask(behind, 0.05).close()
        with ask(after, 0.0) as last:
            first.recv(1)
            last.recv(1)  # what came behind has had its turn
    return events.find("begin", behind) is not None


def _wait(look: Callable[[], int | None]) -> int | None:
    deadline = time.monotonic() + LIMIT
    while (found := look()) is None and time.monotonic() < deadline:
        time.sleep(0.001)
    return found
