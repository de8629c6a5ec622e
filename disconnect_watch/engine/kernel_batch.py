"""A step's rows as the kernels of ``disconnect_watch.kernels`` take them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from disconnect_watch.engine.batch import TokenBatch
from disconnect_watch.engine.schedule import ScheduledRow
from disconnect_watch.kernels import FLAGS_PER_ROW, Control, RowState

__all__ = ["KernelBatch", "RowPart", "flags_of", "signed"]


class RowPart:
    """Neighbouring rows of a batch, which one kernel works on.

    Attributes:
        rows: their state, in the memory of the whole batch's.
        block_tables: [num_rows, max_blocks], int32.
    """

    def __init__(self, whole: RowState, own: slice, rows: Sequence[ScheduledRow]) -> None:
        self.rows = RowState(
            slots=whole.slots[own],
            generations=whole.generations[own],
            live=whole.live[own],
            seq_lens=whole.seq_lens[own],
            slot_mapping=whole.slot_mapping[own],
            control=whole.control,
        )
        width = max(len(row.block_ids) for row in rows)
        tables = [row.block_ids + [0] * (width - len(row.block_ids)) for row in rows]
        self.block_tables = torch.tensor(tables, dtype=torch.int32, device=whole.live.device)


class KernelBatch(TokenBatch):
    """A batch on a device, whose rows the latch can end in the middle of a forward.

    A row obeys its client's token there, and its own mark, which an abort sets from any thread and
    a deadline at the host's next look.

    Args:
        rows: at least one.
        block_size: tokens in a block of the cache.
        device: of the cache.
        step: number that acks are given.

    Attributes:
        state: of all rows.
        singles, longer: of those with one token and of the others; None if there are none.
        query_starts: [num_longer + 1], int32: where the tokens of each of these begin, from the
            first of them.
        max_query_len: of the longest.
        live_slots: [num_tokens], int64: where each token is written, -1 if its row is dead.
    """

    def __init__(
        self,
        rows: Sequence[ScheduledRow],
        *,
        block_size: int,
        device: torch.device,
        step: int,
    ) -> None:
        super().__init__(rows, block_size=block_size, device=device)
        self._step = step

        def words(values: Sequence[object]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        slots, generations = flags_of(self.rows)
        firsts = torch.tensor(self.firsts[:-1], device=device)
        self.state = RowState(
            slots=words(slots),
            generations=words(generations),
            live=words([1] * len(self.rows)),
            seq_lens=words([row.stop for row in self.rows]),
            slot_mapping=self.slots[firsts],
            control=words([0] * len(Control)),
        )
        lengths = torch.tensor([row.num_tokens for row in self.rows], device=device)
        self._row_of = torch.arange(len(self.rows), device=device).repeat_interleave(
            lengths, output_size=self.num_tokens
        )
        num, longer = self.num_singles, self.rows[self.num_singles :]
        self.singles = RowPart(self.state, slice(num), self.rows[:num]) if num else None
        self.longer = RowPart(self.state, slice(num, None), longer) if longer else None
        self.query_starts = words([first - self.firsts[num] for first in self.firsts[num:]])
        self.max_query_len = max((row.num_tokens for row in longer), default=0)
        self.live_slots = self.slots

    def begin_latch(self) -> None:
        """Before the latch: let it acknowledge with the number of this step."""
        self.state.control[Control.STEP].fill_(self._step - 1)

    def end_latch(self) -> None:
        """After the latch: tokens of a row that died are written nowhere."""
        is_live = self.state.live[self._row_of] != 0
        self.live_slots = self.slots.masked_fill(~is_live, -1)


def flags_of(rows: Sequence[ScheduledRow]) -> tuple[list[list[int]], list[list[int]]]:
    """Return slots and generations of all that ends each row, as ``RowState`` has them."""
    slots: list[list[int]] = []
    generations: list[list[int]] = []
    for row in rows:
        flags = row.request.flags
        missing = FLAGS_PER_ROW - len(flags)
        slots.append([flag.slot for flag in flags] + [-1] * missing)
        generations.append([flag.generation for flag in flags] + [0] * missing)
    return slots, generations


def signed(seed: int) -> int:
    """Return the same 64 bits as torch's signed integers have them."""
    return (seed + 2**63) % 2**64 - 2**63
