"""What a batch's rows are to the kernels: tensors that stay where they are from step to step.

A captured graph has their addresses built in, so a row changes its tenant by a write into them,
never by new tensors.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Self

import torch
from torch import Tensor

from disconnect_watch.token import CancelToken

__all__ = ["FLAGS_PER_ROW", "Control", "DecodeState", "RowState"]

#: A client's token, which others may share, and the request's own mark, for what ends it alone.
FLAGS_PER_ROW = 2


class Control(IntEnum):
    """The words of ``RowState.control``: ``enum dw_control`` in ``dw_latch.h``."""

    STEP = 0
    """Latches so far, unsigned; 0 is passed over at a wrap."""
    STEPS_LEFT = 1
    """Steps that the loop may still run."""
    NUM_LIVE = 2
    """Rows that are neither dead nor done."""
    GO = 3
    """1: run one more step."""


@dataclass(frozen=True, slots=True)
class RowState:
    """The rows of a batch, as the latch reads and writes them.

    A dead row keeps its place: with ``seq_lens`` 0 it attends to nothing, with ``slot_mapping``
    -1 it writes nothing, and the shapes that its neighbours are computed with stay as they are.

    Attributes:
        slots: [num_rows, FLAGS_PER_ROW], int32; of the cancel flags, each of which ends the row;
            -1 for none.
        generations: like ``slots``; of these flags.
        live: [num_rows], int32; 1, and 0 once the row is dead or done.
        seq_lens: [num_rows], int32; tokens that the row attends to.
        slot_mapping: [num_rows], int64; where its next key and value go, -1 for nowhere.
        control: [4], int32; see ``Control``.
    """

    slots: Tensor
    generations: Tensor
    live: Tensor
    seq_lens: Tensor
    slot_mapping: Tensor
    control: Tensor

    def __post_init__(self) -> None:
        # The latch in C and the kernels believe what they are told of memory.
        for name in ("slots", "generations", "live", "seq_lens", "slot_mapping", "control"):
            tensor: Tensor = getattr(self, name)
            shape = {
                "control": [len(Control)],
                "slots": [self.num_rows, FLAGS_PER_ROW],
                "generations": [self.num_rows, FLAGS_PER_ROW],
            }.get(name, [self.num_rows])
            dtype = torch.int64 if name == "slot_mapping" else torch.int32
            if (
                list(tensor.shape) != shape
                or tensor.dtype != dtype
                or tensor.device != self.live.device
                or not tensor.is_contiguous()
            ):
                raise ValueError(
                    f"{name} is {tensor.dtype}, {list(tensor.shape)} on {tensor.device}: must be "
                    f"{dtype}, {shape} on {self.live.device}, contiguous"
                )

    @classmethod
    def create(cls, num_rows: int, *, device: torch.device | str = "cpu") -> Self:
        """Make rows that are all empty, in tensors that nothing else shares."""
        slots = torch.full((num_rows, FLAGS_PER_ROW), -1, dtype=torch.int32, device=device)
        return cls(
            slots=slots,
            generations=torch.zeros_like(slots),
            live=torch.zeros(num_rows, dtype=torch.int32, device=device),
            seq_lens=torch.zeros(num_rows, dtype=torch.int32, device=device),
            slot_mapping=torch.full((num_rows,), -1, dtype=torch.int64, device=device),
            control=torch.zeros(len(Control), dtype=torch.int32, device=device),
        )

    @property
    def num_rows(self) -> int:
        return self.live.shape[0]

    def put(
        self,
        row: int,
        *,
        seq_len: int,
        slot_mapping: int = -1,
        token: CancelToken | None = None,
        mark: CancelToken | None = None,
    ) -> None:
        """Give a row to a new tenant.

        Args:
            row: index; nothing may run on it meanwhile.
            seq_len: tokens that it attends to.
            slot_mapping: where its next key and value go.
            token, mark: whose flags end it; the caller keeps both until the row has ended, since
                the latch acknowledges into their slots without asking whose they are.
        """
        for index, flag in enumerate((token, mark)):
            self.slots[row, index] = -1 if flag is None else flag.slot
            self.generations[row, index] = 0 if flag is None else flag.generation
        self.seq_lens[row] = seq_len
        self.slot_mapping[row] = slot_mapping
        self.live[row] = 1

    def begin(self, num_steps: int) -> None:
        """Let a loop of latches run that many steps."""
        self.control[Control.STEPS_LEFT] = num_steps

    @property
    def go(self) -> bool:
        """Whether the last latch wants another step; waits for the device."""
        return bool(self.control[Control.GO])


@dataclass(frozen=True, slots=True)
class DecodeState:
    """What decode rows need besides, to go on for several steps without the host.

    Attributes:
        rows: shared with the latch.
        block_tables: [num_rows, max_blocks], int32; blocks for all tokens up to the limit.
        block_size: tokens a block.
        limits: [num_rows], int32; the row is done when it has that many tokens.
        stop_token_ids: [num_rows, max_stops], int64; a row that draws one of its own is done; -1
            where it has fewer.
        token_ids: [num_rows], int64; what the next step computes.
        positions: [num_rows], int64; of those tokens.
        drawn: [num_rows, max_steps], int32; the tokens of this loop, in order.
        num_drawn: [num_rows], int32; how many of them each row has.
    """

    rows: RowState
    block_tables: Tensor
    block_size: int
    limits: Tensor
    stop_token_ids: Tensor
    token_ids: Tensor
    positions: Tensor
    drawn: Tensor
    num_drawn: Tensor

    @classmethod
    def create(
        cls,
        rows: RowState,
        *,
        max_blocks: int,
        block_size: int,
        max_steps: int,
        max_stops: int = 1,
    ) -> Self:
        """Make the state of empty rows, on their device."""
        num_rows, device = rows.num_rows, rows.live.device
        return cls(
            rows=rows,
            block_tables=torch.zeros(num_rows, max_blocks, dtype=torch.int32, device=device),
            block_size=block_size,
            limits=torch.zeros(num_rows, dtype=torch.int32, device=device),
            stop_token_ids=torch.full((num_rows, max_stops), -1, dtype=torch.int64, device=device),
            token_ids=torch.zeros(num_rows, dtype=torch.int64, device=device),
            positions=torch.zeros(num_rows, dtype=torch.int64, device=device),
            drawn=torch.zeros(num_rows, max_steps, dtype=torch.int32, device=device),
            num_drawn=torch.zeros(num_rows, dtype=torch.int32, device=device),
        )
