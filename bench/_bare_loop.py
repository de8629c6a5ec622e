"""The baseline: a thread in a bare C epoll loop (c/bare_loop.c)."""

import asyncio
import ctypes
import time
from types import TracebackType
from typing import Self

from bench._build import build_library

__all__ = ["BareLoop"]

GIVE_UP = 5.0


class BareLoop:
    """Says when it woke for a leaving peer; knows one connection at a time."""

    def __init__(self) -> None:
        library = ctypes.CDLL(str(build_library("bare_loop")))
        library.bare_loop_start.restype = ctypes.c_void_p
        for function in (library.bare_loop_add, library.bare_loop_remove):
            function.argtypes = (ctypes.c_void_p, ctypes.c_int)
        library.bare_loop_take.argtypes = (ctypes.c_void_p,)
        library.bare_loop_take.restype = ctypes.c_uint64
        library.bare_loop_stop.argtypes = (ctypes.c_void_p,)
        self._library = library
        self._loop: int | None = library.bare_loop_start()
        if self._loop is None:
            raise OSError("start the bare epoll loop: no fd or no thread left")

    def add(self, fd: int) -> None:
        """Watch the fd."""
        self._check(self._library.bare_loop_add(self._loop, fd), "add", fd)

    def remove(self, fd: int) -> None:
        """Watch it no longer."""
        self._check(self._library.bare_loop_remove(self._loop, fd), "remove", fd)

    async def woken_ns(self) -> int:
        """When it woke for the last event, ``time.monotonic_ns``. Each is told once.

        Raises:
            TimeoutError: there was none for seconds.
        """
        deadline = time.monotonic() + GIVE_UP
        while not (woken_ns := int(self._library.bare_loop_take(self._loop))):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the bare epoll loop saw nothing for {GIVE_UP} seconds")
            await asyncio.sleep(0.001)
        return woken_ns

    def close(self) -> None:
        """End the thread. Idempotent."""
        loop, self._loop = self._loop, None
        if loop is not None:
            self._library.bare_loop_stop(loop)

    @staticmethod
    def _check(rc: int, tried: str, fd: int) -> None:
        if rc < 0:
            raise OSError(-rc, f"{tried} fd {fd} in the bare epoll loop")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
