"""Many requests' flags, looked at together: a few calls of numpy, whatever their number."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from disconnect_watch.remote import FLAG_KEY, FlagName, RemoteFlag, RemoteTables

__all__ = ["Look", "flags_of"]

logger = logging.getLogger("vllm.disconnect_watch")

_tables = RemoteTables()
#: Processes whose table cannot be read, of which one line in the log is enough.
_unreadable: set[int] = set()


def flags_of(params: Any) -> list[RemoteFlag]:
    """The flags that sampling parameters name, those that can be read."""
    extra = getattr(params, "extra_args", None)
    names = extra.get(FLAG_KEY) if extra else None
    if not isinstance(names, list):
        return []
    flags = [_find(name) for name in names]
    return [flag for flag in flags if flag is not None]


def _find(name: Any) -> RemoteFlag | None:
    try:
        return _tables.find(FlagName(*name))
    except (OSError, TypeError, ValueError) as error:
        pid = name[0] if isinstance(name, list) and name and isinstance(name[0], int) else 0
        if pid not in _unreadable:
            _unreadable.add(pid)
            logger.warning("cannot look at the flags of process %s: %s", pid, error)
        return None


class Look:
    """The flags of some requests, by id; one that fired is enough.

    Threads: one at a time. Flags may be set by any meanwhile.
    """

    def __init__(self, flags: Mapping[str, Sequence[RemoteFlag]]) -> None:
        by_table: dict[int, tuple[memoryview, list[tuple[str, RemoteFlag]]]] = {}
        for request_id, own in flags.items():
            for flag in own:
                by_table.setdefault(id(flag.words), (flag.words, []))[1].append((request_id, flag))
        self._groups = [
            _Group(
                np.frombuffer(words, np.uint32),
                np.array([flag.slot for _, flag in named], np.intp),
                np.array([flag.live for _, flag in named], np.uint32),
                [request_id for request_id, _ in named],
            )
            for words, named in by_table.values()
        ]

    def has_fired(self) -> bool:
        """Whether any was set."""
        return any(group.fired().any() for group in self._groups)

    def fired(self) -> list[str]:
        """The ids of those that were."""
        ids = (
            group.ids[index] for group in self._groups for index in np.flatnonzero(group.fired())
        )
        return list(dict.fromkeys(ids))


class _Group:
    """Flags of one table.

    Attributes:
        words: ``[num_slots], uint32``, the table's own memory.
        slots: ``[num_flags], intp``.
        live: ``[num_flags], uint32``, what each word is until it is set.
    """

    def __init__(
        self,
        words: npt.NDArray[np.uint32],
        slots: npt.NDArray[np.intp],
        live: npt.NDArray[np.uint32],
        ids: list[str],
    ) -> None:
        self._words = words
        self._slots = slots
        self._live = live
        self.ids = ids

    def fired(self) -> npt.NDArray[np.bool_]:
        """Of each flag whether it was set: the same generation, with a reason."""
        # 0, a live one, becomes the greatest number there is.
        fired: npt.NDArray[np.bool_] = (self._words[self._slots] ^ self._live) - 1 < 255
        return fired
