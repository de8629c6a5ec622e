"""Runs loads of a cache beside the step loop, on threads of their own."""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from disconnect_watch.engine.remote import KVLoad

__all__ = ["KVLoader"]

logger = logging.getLogger(__name__)

#: Loads at the same time. They wait for a network more than they compute.
MAX_LOADS = 8


class KVLoader:
    """Carries out loads, and tells how each has ended.

    Args:
        on_end: called once for each load, on its thread, with the error if it had one.

    Threads: ``start`` the engine's, ``close`` any.
    """

    def __init__(self, on_end: Callable[[KVLoad, Exception | None], None]) -> None:
        self._on_end = on_end
        self._threads = ThreadPoolExecutor(MAX_LOADS, thread_name_prefix="disconnect-watch-load")

    def start(self, load: KVLoad) -> None:
        """Begin one; returns at once."""
        try:
            self._threads.submit(self._run, load)
        except RuntimeError as closed:
            self._on_end(load, closed)

    def close(self) -> None:
        """Start no more, and wait for those that run, which whoever wants that has cancelled."""
        self._threads.shutdown(wait=True)

    def _run(self, load: KVLoad) -> None:
        error: Exception | None = None
        try:
            if not load.cancel.cancelled:
                load.pull(load.block_ids, first_block=load.first_block, cancel=load.cancel)
        except Exception as failure:
            error = failure
        self._on_end(load, error)
