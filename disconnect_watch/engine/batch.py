"""One step's rows as tensors: tokens behind each other, and where each finds its context."""

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from disconnect_watch.engine.attention import DecodeGroup, PagedAttention, PrefillRow
from disconnect_watch.engine.kv_cache import KVCache
from disconnect_watch.engine.schedule import ScheduledRow

#: More than any vector of ``native.py`` has.
MAX_LANES = 16

__all__ = ["PackedBatch", "Singles"]


class Singles:
    """Rows of one token each as the C of ``native.py`` takes them: not padded, only named.

    Attributes:
        num_rows: so many first tokens of the batch.
        num_blocks: entries of one row's table.
        num_padded: the longest context, up to the end of its last vector.
        tables_at: address of [num_rows, num_blocks], int32: the blocks of each row.
        lengths_at: address of [num_rows], int32: how many tokens each row attends to.
    """

    def __init__(self, rows: Sequence[ScheduledRow], *, block_size: int) -> None:
        longest = max(row.stop for row in rows)
        self.num_rows = len(rows)
        self.num_blocks = -(-longest // block_size)
        self.num_padded = -(-longest // MAX_LANES) * MAX_LANES
        self._lengths = array("i", [row.stop for row in rows])
        self._tables = array("i")
        for row in rows:
            own = row.block_ids[: self.num_blocks]
            self._tables.extend(own)
            self._tables.extend([0] * (self.num_blocks - len(own)))
        self.tables_at, _ = self._tables.buffer_info()
        self.lengths_at, _ = self._lengths.buffer_info()


class PackedBatch:
    """The packed form of a schedule: single-token rows first, then the longer ones.

    Single-token rows are padded to a common context to be computed in one operation; sorted and
    grouped so that no row is padded to more than twice its own length.

    Args:
        rows: at least one.
        cache: where their blocks lie.
        is_native: leave single-token rows to ``native.py``.

    Attributes:
        rows: in packed order.
        firsts: index of each row's first token; one more entry holds the number of tokens.
        token_ids, positions, slots: [num_tokens], int64.
        singles: those rows for ``native.py``; None if there are none, or torch does it all.
        attention: over exactly these tokens, but for ``singles``.
    """

    def __init__(
        self, rows: Sequence[ScheduledRow], *, cache: KVCache, is_native: bool = False
    ) -> None:
        singles = sorted((row for row in rows if row.num_tokens == 1), key=lambda row: row.stop)
        longer = [row for row in rows if row.num_tokens > 1]
        self.rows = [*singles, *longer]
        self._cache = cache
        self._is_native = is_native
        self.firsts = [0]
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        size = cache.block_size
        for row in self.rows:
            blocks = row.block_ids
            token_ids += row.request.token_ids[row.start : row.stop]
            positions += range(row.start, row.stop)
            slots += [blocks[p // size] * size + p % size for p in range(row.start, row.stop)]
            self.firsts.append(len(token_ids))
        self.token_ids = torch.tensor(token_ids)
        self.positions = torch.tensor(positions)
        self.slots = torch.tensor(slots)
        is_ours = is_native and bool(singles)
        self.singles = Singles(singles, block_size=size) if is_ours else None
        self.attention = PagedAttention(
            cache,
            slot_mapping=self.slots,
            decodes=[] if is_ours else self._group(singles),
            prefills=[
                self._prefill(row, first)
                for row, first in zip(longer, self.firsts[len(singles) :], strict=False)
            ],
        )

    @property
    def num_tokens(self) -> int:
        return self.firsts[-1]

    def without(self, dead: Sequence[ScheduledRow]) -> tuple["PackedBatch", Tensor]:
        """Build the batch of the rows that stay.

        Returns:
            That batch, and the indices of its tokens in this one, [num_tokens], int64.
        """
        gone = {row.request.key for row in dead}
        batch = PackedBatch(
            [row for row in self.rows if row.request.key not in gone],
            cache=self._cache,
            is_native=self._is_native,
        )
        first_of = {
            row.request.key: first for row, first in zip(self.rows, self.firsts, strict=False)
        }
        kept: list[int] = []
        for row in batch.rows:
            first = first_of[row.request.key]
            kept += range(first, first + row.num_tokens)
        return batch, torch.tensor(kept)

    def _group(self, singles: list[ScheduledRow]) -> list[DecodeGroup]:
        groups: list[DecodeGroup] = []
        first = 0
        for index in range(1, len(singles) + 1):
            if index == len(singles) or singles[index].stop > 2 * singles[first].stop:
                groups.append(self._decode(singles[first:index], first))
                first = index
        return groups

    def _decode(self, rows: list[ScheduledRow], first: int) -> DecodeGroup:
        context = rows[-1].stop
        slots = self._slots(rows, context)
        mask = None
        if rows[0].stop != context:
            stops = torch.tensor([[row.stop] for row in rows])
            is_padding = torch.arange(context) >= stops
            slots = slots.masked_fill(is_padding, self._cache.null_block * self._cache.block_size)
            mask = self._mask(is_padding)[:, None, None, :]
        return DecodeGroup(first, first + len(rows), slots.flatten(), mask)

    def _prefill(self, row: ScheduledRow, first: int) -> PrefillRow:
        last = first + row.num_tokens
        if row.start == 0:
            return PrefillRow(first, last, None, None)
        is_later = torch.arange(row.stop) > torch.arange(row.start, row.stop)[:, None]
        return PrefillRow(first, last, self._slots([row], row.stop)[0], self._mask(is_later))

    def _slots(self, rows: list[ScheduledRow], context: int) -> Tensor:
        """Return the slots of the first ``context`` tokens of each row, [rows, context]."""
        size = self._cache.block_size
        num_blocks = -(-context // size)
        blocks: list[int] = []
        for row in rows:
            own = row.block_ids[:num_blocks]
            blocks += own
            blocks += [self._cache.null_block] * (num_blocks - len(own))
        slots = torch.tensor(blocks).view(len(rows), num_blocks, 1) * size + torch.arange(size)
        return slots.view(len(rows), -1)[:, :context]

    def _mask(self, is_hidden: Tensor) -> Tensor:
        zeros = torch.zeros(is_hidden.shape, dtype=self._cache.keys[0].dtype)
        return zeros.masked_fill_(is_hidden, -torch.inf)
