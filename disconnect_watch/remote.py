"""A flag by its name, for another process that is to read it.

    request.extra["flag"] = list(name_of(token))  # goes along with the request, as four numbers
    flag = tables.find(FlagName(*request.extra["flag"]))

A table is a file in memory, and ``/proc`` has a way to each file that a process of the same user
has open. So nothing need be inherited or sent along, whatever started the two processes; they
must see each other there. A reader holds no reference: a slot that has gone to another tenant
reads as one that was not set.
"""

import ctypes
import os
from dataclasses import dataclass
from typing import NamedTuple

from disconnect_watch import _core
from disconnect_watch.token import CancelToken, flag_table

__all__ = ["FLAG_KEY", "FlagName", "RemoteFlag", "RemoteTables", "name_of", "words_of"]

#: Under which a request to an engine in another process carries the names of its flags.
FLAG_KEY = "disconnect_watch.flags"


class FlagName(NamedTuple):
    """Where a flag is.

    Attributes:
        pid: of a process that has the table open, as both see it.
        fd: of the table there.
    """

    pid: int
    fd: int
    slot: int
    generation: int


def name_of(token: CancelToken) -> FlagName:
    """The name of a token's flag, good for as long as this process is there."""
    return FlagName(os.getpid(), token.table.fileno(), token.slot, token.generation)


def words_of(table: _core.Flags) -> memoryview:
    """The words of a table, ``[num_slots], uint32``; the table must outlive them."""
    words = ctypes.c_uint32 * table.num_slots
    return memoryview(words.from_address(table.words_address)).cast("B").cast("I")


@dataclass(frozen=True, slots=True)
class RemoteFlag:
    """A flag as it is read here.

    Attributes:
        table: whose words are there for as long as this is.
        live: what its word is until somebody cancels.
    """

    table: _core.Flags
    words: memoryview
    slot: int
    live: int

    @property
    def cancelled(self) -> bool:
        """Whether it was set, and has no other tenant since."""
        return 0 < self.words[self.slot] ^ self.live < 256


class RemoteTables:
    """The tables of other processes, each mapped when its first flag is asked for, and kept.

    Threads: one at a time.
    """

    def __init__(self) -> None:
        self._tables: dict[tuple[int, int], tuple[_core.Flags, memoryview]] = {}

    def find(self, name: FlagName) -> RemoteFlag:
        """The flag of that name.

        Raises:
            OSError: there is no such process or fd, it is another user's, or no flag table.
            ValueError: the name is none.
        """
        if not all(type(number) is int and number >= 0 for number in name):
            raise ValueError(f"name of a flag {tuple(name)!r}: must be four numbers")
        table, words = self._table(name.pid, name.fd)
        if name.slot >= len(words):
            raise ValueError(f"name of a flag {tuple(name)!r}: its table has {len(words)} slots")
        return RemoteFlag(table, words, name.slot, name.generation << 8)

    def _table(self, pid: int, fd: int) -> tuple[_core.Flags, memoryview]:
        found = self._tables.get((pid, fd))
        if found is None:
            table = flag_table() if pid == os.getpid() else _open(pid, fd)
            found = self._tables[pid, fd] = table, words_of(table)
        return found


def _open(pid: int, fd: int) -> _core.Flags:
    own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return _core.Flags(own)
    finally:
        os.close(own)
