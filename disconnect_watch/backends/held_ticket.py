"""What another node keeps for a request of this one, from when we hear of it to its end.

A request may wait long for its turn here; its blocks stay where they are as long as their node
hears from us. None of this waits for a network on the caller's thread, but for the pull.
"""

import logging
import threading
from collections.abc import Callable

from disconnect_watch.disagg import Connector, KVBlocks, KVMemory, Ticket, TransferError
from disconnect_watch.token import CancelToken

__all__ = ["HeldTicket"]

logger = logging.getLogger(__name__)


class HeldTicket:
    """One ticket. Ends with ``pull`` or ``release``, whichever is first.

    Args:
        call_soon: runs a function on another thread.

    Threads: any.
    """

    def __init__(
        self,
        connector: Connector,
        ticket: Ticket,
        *,
        call_soon: Callable[[Callable[[], None]], object],
    ) -> None:
        self.ticket = ticket
        self._connector = connector
        self._call_soon = call_soon
        self._lock = threading.Lock()
        self._has_ended = False
        connector.hold(ticket)

    def pull(self, block_ids: tuple[int, ...], *, first_block: int, cancel: CancelToken) -> None:
        """Fill blocks of this node; see ``engine.remote.Pull``.

        Raises:
            TransferError: see ``Connector.pull``; or it was released before.
        """
        if not self._end():
            raise TransferError("pull: this node has let go of it before")
        connector = self._connector
        if not first_block:
            connector.pull(self.ticket, KVBlocks(connector.memory, block_ids), cancel=cancel)
            return
        # Those in front are shared with requests that read them just now.
        aside = KVMemory.empty(connector.memory.layout, len(block_ids))
        connector.pull(self.ticket, KVBlocks(aside, range(len(block_ids))), cancel=cancel)
        for index in range(first_block, len(block_ids)):
            connector.memory.block(block_ids[index])[:] = aside.block(index)

    def release(self) -> None:
        """Let go of the blocks unpulled. Does nothing after a ``pull``, or the second time.

        It neither blocks nor raises: if the other node can't be told, its lease tells it.
        """
        if self._end():
            self._call_soon(self._release)

    def _release(self) -> None:
        try:
            self._connector.release(self.ticket)
        except TransferError as error:
            logger.warning("release at %s: %s", self.ticket.address, error)

    def _end(self) -> bool:
        with self._lock:
            is_first = not self._has_ended
            self._has_ended = True
        return is_first
