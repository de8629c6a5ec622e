"""The nodes that a proxy sends to: which are there, and which has the least to do."""

import asyncio
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from urllib.parse import urlsplit

import aiohttp

__all__ = ["Node", "NodeLostError", "NodePool"]

logger = logging.getLogger("disconnect_watch.pd_proxy")

#: Questions in a row that a node may leave unanswered.
MAX_SILENT = 3


class NodeLostError(ConnectionError):
    """The node has not answered whether it is there for too long."""


class Node:
    """One node, as the proxy knows it.

    Attributes:
        url: ``http://host:port``.
        num_running: requests that it has from this proxy.
        is_there: whether it answered when it was last asked.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
            raise ValueError(f"cannot take {url!r} for a node: give http://HOST:PORT")
        self.url = url.rstrip("/")
        self.num_running = 0
        self.is_there = True
        self._num_silent = 0
        self._waiting: set[asyncio.Task[object]] = set()

    def answered(self, is_ready: bool) -> None:
        """Note an answer to the question how it is."""
        self._num_silent = 0
        if is_ready is not self.is_there:
            logger.info("%s is %s", self.url, "ready" if is_ready else "not ready")
        self.is_there = is_ready

    def refused(self) -> None:
        """Note that it takes no connection, so that nobody else has to find that out."""
        if self.is_there:
            logger.warning("%s takes no connections", self.url)
        self.is_there = False

    def was_silent(self) -> None:
        """Note a question without an answer; a stopped process takes connections all the same."""
        self._num_silent += 1
        if self._num_silent < MAX_SILENT:
            return
        if self.is_there:
            logger.warning("%s does not answer", self.url)
        self.is_there = False
        for task in self._waiting:
            task.cancel()
        self._waiting.clear()

    @contextmanager
    def busy(self) -> Iterator[None]:
        """It has one request more for as long as this lasts."""
        self.num_running += 1
        try:
            yield
        finally:
            self.num_running -= 1

    @contextmanager
    def depended_on(self) -> Iterator[None]:
        """What runs in here ends when the node is silent for too long.

        Raises:
            NodeLostError: it was.
        """
        task = asyncio.current_task()
        assert task is not None
        self._waiting.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if task in self._waiting or task.uncancel():
                raise  # the client left, perhaps at the same time
            raise NodeLostError(f"{self.url} does not answer any more") from None
        finally:
            self._waiting.discard(task)


class NodePool:
    """Nodes of one kind.

    Raises:
        ValueError: a URL is none.
    """

    def __init__(self, urls: Sequence[str]) -> None:
        self.nodes = [Node(url) for url in urls]

    def candidates(self) -> list[Node]:
        """Those that are there, the one with the least to do first."""
        return sorted((node for node in self.nodes if node.is_there), key=lambda n: n.num_running)

    async def watch(self, session: aiohttp.ClientSession, *, every: float) -> None:
        """Ask all of them how they are, again and again."""
        await asyncio.gather(*(_watch(node, session, every) for node in self.nodes))


async def _watch(node: Node, session: aiohttp.ClientSession, every: float) -> None:
    limit = aiohttp.ClientTimeout(total=every)
    while True:
        try:
            async with session.get(f"{node.url}/health", timeout=limit) as response:
                node.answered(response.status == 200)
        except TimeoutError:
            node.was_silent()
            continue
        except aiohttp.ClientError:
            node.refused()
        await asyncio.sleep(every)
