"""What keeps blocks from being freed while a copy is under way."""

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from disconnect_watch.disagg.records import Direction, ReleaseKind, Transfer

__all__ = ["Pin", "Pull"]


class Pin:
    """One copy from or into the blocks of a transfer. Made by ``RetainedStore.pin``.

    As a context manager it is dropped at the end of the block.

    Attributes:
        blocks: the ids of the blocks, in the order of the tokens, as ``retain`` got them.
        is_lapsed: the lease ran out under the copy; whoever asked for it is not waited for.

    Threads: any.
    """

    #: How the transfer is released if this is its last use.
    end_kind = ReleaseKind.ABORT

    def __init__(
        self,
        transfer: Transfer,
        blocks: Sequence[int],
        direction: Direction,
        *,
        on_release: Callable[[], object],
        on_drop: "Callable[[Pin], bool]",
    ) -> None:
        self.transfer = transfer
        self.blocks = blocks
        self.direction = direction
        self.on_release = on_release
        self.is_lapsed = False
        self._on_drop = on_drop

    def drop(self) -> bool:
        """Say that nothing touches the blocks any more. Idempotent.

        Returns:
            Whether they were the transfer's up to now: nobody had released it.
        """
        return self._on_drop(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.drop()


class Pull(Pin):
    """The one copy of a transfer's blocks to a decode node. Made by ``begin_pull``.

    Its end releases the transfer, since there is no second one. As a context manager it is
    aborted at the end of a block that has not finished it.
    """

    #: Whatever ends it was the decode node's word, be it only that it hung up.
    end_kind = ReleaseKind.IN_BAND

    def finish(self) -> bool:
        """The decode node has all of it: release. Idempotent.

        Returns:
            Whether that is good: False if it was aborted, or the transfer released, before; what
            was copied is then not to be used.
        """
        return self.drop()

    def abort(self) -> bool:
        """The copy was given up: release. Idempotent."""
        return self.drop()
