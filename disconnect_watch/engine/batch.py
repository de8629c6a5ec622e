"""One step's rows as tensors: tokens behind each other, and where each finds its context."""

from array import array
from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from disconnect_watch.engine.attention import DecodeGroup, PagedAttention, PrefillRow
from disconnect_watch.engine.kv_cache import KVCache
from disconnect_watch.engine.schedule import ScheduledRow

#: More than any vector of ``native.py`` has.
MAX_LANES = 16

__all__ = ["PackedBatch", "Singles", "TokenBatch"]


class Singles:
    """Tokens that attend each by itself, as the C of ``native.py`` takes them: not padded.

    Attributes:
        first: index of the first of them in the batch.
        num_rows: so many tokens from there on.
        num_blocks: entries of one token's table; 0 if all share one.
        num_padded: the longest context, up to the end of its last vector.
        tables_at: address of [num_rows, num_blocks], int32: the blocks of each.
        lengths_at: address of [num_rows], int32: to how many tokens each attends.
    """

    def __init__(
        self, first: int, *, lengths: Iterable[int], tables: Iterable[int], num_blocks: int
    ) -> None:
        self._lengths, self._tables = array("i", lengths), array("i", tables)
        self.first = first
        self.num_rows = len(self._lengths)
        self.num_blocks = num_blocks
        self.num_padded = -(-max(self._lengths) // MAX_LANES) * MAX_LANES
        self.tables_at, _ = self._tables.buffer_info()
        self.lengths_at, _ = self._lengths.buffer_info()

    @classmethod
    def of_rows(cls, rows: Sequence[ScheduledRow], *, block_size: int) -> "Singles":
        """The first tokens of a batch, which are one a row."""
        num_blocks = -(-max(row.stop for row in rows) // block_size)
        tables: list[int] = []
        for row in rows:
            own = row.block_ids[:num_blocks]
            tables += own
            tables += [0] * (num_blocks - len(own))
        return cls(0, lengths=[row.stop for row in rows], tables=tables, num_blocks=num_blocks)

    @classmethod
    def of_tokens(cls, row: ScheduledRow, first: int) -> "Singles":
        """The tokens of one row, each of which sees those before it."""
        lengths = range(row.start + 1, row.stop + 1)
        return cls(first, lengths=lengths, tables=row.block_ids, num_blocks=0)


class TokenBatch:
    """A step's rows with their tokens behind each other: single-token rows first, then the longer.

    Args:
        rows: at least one.
        block_size: tokens in a block of the cache.
        device: where the tensors are to be.

    Attributes:
        rows: in packed order.
        num_singles: how many of them have one token.
        firsts: index of each row's first token; one more entry holds the number of tokens.
        token_ids, positions, slots: [num_tokens], int64.
    """

    def __init__(
        self,
        rows: Sequence[ScheduledRow],
        *,
        block_size: int,
        device: torch.device | str = "cpu",
    ) -> None:
        singles = sorted((row for row in rows if row.num_tokens == 1), key=lambda row: row.stop)
        self.rows = [*singles, *(row for row in rows if row.num_tokens > 1)]
        self.num_singles = len(singles)
        self.firsts = [0]
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        for row in self.rows:
            blocks = row.block_ids
            token_ids += row.request.token_ids[row.start : row.stop]
            positions += range(row.start, row.stop)
            slots += [
                blocks[p // block_size] * block_size + p % block_size
                for p in range(row.start, row.stop)
            ]
            self.firsts.append(len(token_ids))
        self.token_ids = torch.tensor(token_ids, device=device)
        self.positions = torch.tensor(positions, device=device)
        self.slots = torch.tensor(slots, device=device)

    @property
    def num_tokens(self) -> int:
        return self.firsts[-1]

    @property
    def has_longer(self) -> bool:
        """Whether any row has several tokens."""
        return self.num_singles < len(self.rows)

    @property
    def is_left(self) -> bool:
        """Whether nobody wants any of the rows any more. Threads: any."""
        return are_left(self.rows)


def are_left(rows: Sequence[ScheduledRow]) -> bool:
    """Whether nobody wants any of the rows any more. Threads: any."""
    return all(row.request.is_cancelled for row in rows)


class PackedBatch(TokenBatch):
    """A batch for a CPU.

    Single-token rows are padded to a common context to be computed in one operation; sorted and
    grouped so that no row is padded to more than twice its own length.

    Args:
        rows: at least one.
        cache: where their blocks lie.
        is_native: leave single-token rows to ``native.py``.
        is_invariant: and the others, too.

    Attributes:
        singles: what is left to ``native.py``.
        attention: over exactly these tokens, but for ``singles``.
    """

    def __init__(
        self,
        rows: Sequence[ScheduledRow],
        *,
        cache: KVCache,
        is_native: bool = False,
        is_invariant: bool = False,
    ) -> None:
        super().__init__(rows, block_size=cache.block_size)
        self._cache = cache
        singles, longer = self.rows[: self.num_singles], self.rows[self.num_singles :]
        firsts = self.firsts[self.num_singles :]
        self.singles: list[Singles] = []
        if is_native and singles:
            self.singles.append(Singles.of_rows(singles, block_size=cache.block_size))
        if is_invariant:
            self.singles += map(Singles.of_tokens, longer, firsts)
        self.attention = PagedAttention(
            cache,
            slot_mapping=self.slots,
            decodes=[] if is_native else self._group(singles),
            prefills=[] if is_invariant else list(map(self._prefill, longer, firsts)),
            is_left=partial(are_left, self.rows),
        )

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
        return PrefillRow(first, last, self._slots([row], row.stop)[0] if row.start else None)

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
