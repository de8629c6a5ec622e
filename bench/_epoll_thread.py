"""A baseline: a Python thread around ``select.epoll``, with the watcher's own interest."""

import asyncio
import contextlib
import os
import select
import threading
import time
from types import TracebackType
from typing import Self

__all__ = ["EpollThread"]


class EpollThread:
    """Says when it woke for a leaving peer, for which it needs the GIL.

    Knows one connection at a time.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._stop_fd = os.eventfd(0)
        self._epoll.register(self._stop_fd, select.EPOLLIN)
        self._woken: asyncio.Future[int] | None = None
        self._thread = threading.Thread(target=self._run, name="python-epoll")
        self._thread.start()

    def add(self, fd: int) -> "asyncio.Future[int]":
        """Watch the fd.

        Returns:
            A future of the running loop: when the thread woke, ``time.monotonic_ns``.
        """
        self._woken = asyncio.get_running_loop().create_future()
        self._epoll.register(fd, select.EPOLLRDHUP | select.EPOLLET)
        return self._woken

    def remove(self, fd: int) -> None:
        """Watch it no longer."""
        self._epoll.unregister(fd)
        self._woken = None

    def _run(self) -> None:
        while True:
            for fd, _ in self._epoll.poll():
                woken_ns = time.monotonic_ns()
                if fd == self._stop_fd:
                    return
                woken = self._woken
                if woken is not None:
                    woken.get_loop().call_soon_threadsafe(_set_once, woken, woken_ns)

    def close(self) -> None:
        """End the thread. Idempotent."""
        if not self._epoll.closed:
            os.eventfd_write(self._stop_fd, 1)
            self._thread.join()
            self._epoll.close()
            os.close(self._stop_fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _set_once(future: "asyncio.Future[int]", value: int) -> None:
    with contextlib.suppress(asyncio.InvalidStateError):
        future.set_result(value)
