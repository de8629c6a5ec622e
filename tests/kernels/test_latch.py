"""The latch in C, torch and Triton: fired flags become dead rows, and nothing else changes."""

import random

import pytest
import torch

from disconnect_watch import CancelToken, Reason
from disconnect_watch.kernels import Control, FlagSource, FlagView, Kernels, RowState
from disconnect_watch.kernels.native_kernels import NativeKernels
from disconnect_watch.token import flag_table
from tests.kernels.batch import Batch

FIELDS = ("slots", "generations", "live", "seq_lens", "slot_mapping", "control")


def control(rows: RowState, word: Control) -> int:
    return int(rows.control[word])


def test_fired_flag_makes_its_row_dead_and_acks_the_step(kernels: Kernels, flags: FlagView) -> None:
    batch = Batch.of([10, 11, 12])
    batch.rows.begin(9)
    kernels.latch(flags, batch.rows)
    batch.tokens[1].cancel()
    kernels.latch(flags, batch.rows)
    assert batch.rows.live.tolist() == [1, 0, 1]
    assert batch.rows.seq_lens.tolist() == [10, 0, 12]
    assert batch.rows.slot_mapping.tolist() == [0, -1, 2]
    assert [token.acked for token in batch.tokens] == [0, 2, 0]
    assert batch.rows.control.tolist() == [2, 7, 2, 1]


def test_dead_row_is_acked_once(kernels: Kernels, flags: FlagView) -> None:
    batch = Batch.of([10, 11])
    batch.rows.begin(9)
    batch.tokens[0].cancel()
    for _ in range(3):
        kernels.latch(flags, batch.rows)
    assert batch.tokens[0].acked == 1
    assert control(batch.rows, Control.STEP) == 3


def test_either_flag_of_a_row_ends_it_and_is_acknowledged_alone(
    kernels: Kernels, flags: FlagView
) -> None:
    """The client's, which others may share, and the request's own, for an abort or a deadline."""
    batch = Batch.of([10, 11, 12, 13])
    marks = [CancelToken() for _ in batch.tokens]
    for row, (token, mark) in enumerate(zip(batch.tokens, marks, strict=True)):
        batch.rows.put(row, seq_len=10 + row, slot_mapping=row, token=token, mark=mark)
    marks[0].cancel(Reason.DEADLINE)
    batch.tokens[1].cancel()
    for flag in (batch.tokens[2], marks[2]):
        flag.cancel()
    kernels.latch(flags, batch.rows)
    assert batch.rows.live.tolist() == [0, 0, 0, 1]
    assert batch.rows.seq_lens.tolist() == [0, 0, 0, 13]
    assert batch.rows.slot_mapping.tolist() == [-1, -1, -1, 3]
    assert [token.acked for token in batch.tokens] == [0, 1, 1, 0]
    assert [mark.acked for mark in marks] == [1, 0, 1, 0]
    assert control(batch.rows, Control.NUM_LIVE) == 1


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_ends_a_row(kernels: Kernels, flags: FlagView, reason: Reason) -> None:
    batch = Batch.of([10])
    batch.tokens[0].cancel(reason)
    kernels.latch(flags, batch.rows)
    assert batch.rows.live.tolist() == [0]


@pytest.mark.parametrize("off", [-1, 1])
def test_flag_of_another_tenant_of_the_slot_leaves_the_row_alone(
    kernels: Kernels, flags: FlagView, off: int
) -> None:
    batch = Batch.of([10])
    batch.rows.generations[0] += off
    batch.tokens[0].cancel()
    kernels.latch(flags, batch.rows)
    assert batch.rows.live.tolist() == [1]
    assert batch.tokens[0].acked == 0


def test_largest_generation_fires(kernels: Kernels) -> None:
    """Its words are the largest numbers that are positive on a device; one more were negative."""
    if isinstance(kernels, NativeKernels):
        pytest.skip("reads the table itself; tests/c/test_flags.c brings generations to their end")
    largest = 2**23 - 1
    words = torch.tensor([0, largest << 8 | Reason.FIN.code], dtype=torch.int32)
    acks = torch.zeros_like(words)
    rows = RowState.create(1)
    rows.put(0, seq_len=5)
    rows.slots[0], rows.generations[0] = 1, largest
    kernels.latch(FlagView(flag_table(), words, acks, source=FlagSource.SHARED), rows)
    assert rows.live.tolist() == [0]
    assert acks.tolist() == [0, 1]


def test_row_without_a_flag_lives(kernels: Kernels, flags: FlagView) -> None:
    rows = RowState.create(2)
    rows.put(1, seq_len=4)
    kernels.latch(flags, rows)
    assert rows.live.tolist() == [0, 1]


def test_loop_ends_after_its_steps(kernels: Kernels, flags: FlagView) -> None:
    batch = Batch.of([10])
    batch.rows.begin(3)
    num_steps = 0
    kernels.latch(flags, batch.rows)
    while batch.rows.go:
        num_steps += 1
        kernels.latch(flags, batch.rows)
    assert num_steps == 3
    assert batch.rows.control.tolist() == [4, 0, 1, 0]


def test_batch_that_died_before_the_loop_runs_no_step(kernels: Kernels, flags: FlagView) -> None:
    batch = Batch.of([10, 11])
    batch.rows.begin(3)
    for token in batch.tokens:
        token.cancel()
    kernels.latch(flags, batch.rows)
    assert not batch.rows.go
    assert control(batch.rows, Control.STEPS_LEFT) == 3


def test_step_count_that_wraps_passes_over_0(kernels: Kernels, flags: FlagView) -> None:
    batch = Batch.of([10])
    batch.rows.control[Control.STEP] = -1
    batch.tokens[0].cancel()
    kernels.latch(flags, batch.rows)
    assert batch.tokens[0].acked == 1


def test_rows_end_up_as_the_references_whatever_fires(
    kernels: Kernels, reference: Kernels, flags: FlagView
) -> None:
    rng = random.Random(1)
    for num_rows in (1, 2, 31, 33):
        seq_lens = [rng.randrange(1, 99) for _ in range(num_rows)]
        batch, twin = Batch.of(seq_lens), Batch.of(seq_lens)
        flagless, stale = rng.randrange(num_rows), rng.randrange(num_rows)
        for each in (batch, twin):
            each.rows.begin(3)
            each.rows.slots[flagless] = -1
            each.rows.slots[(stale + 1) % num_rows, 1] = each.tokens[stale].slot
            each.rows.generations[stale] += 1
        for _ in range(4):
            fired = rng.randrange(num_rows)
            for each, ran in ((batch, kernels), (twin, reference)):
                each.tokens[fired].cancel()
                ran.latch(flags, each.rows)
            for name in ("live", "seq_lens", "slot_mapping", "control"):
                assert torch.equal(getattr(batch.rows, name), getattr(twin.rows, name)), name
            assert [t.acked for t in batch.tokens] == [t.acked for t in twin.tokens]


def test_rows_whose_memory_a_kernel_would_misread_are_refused() -> None:
    good = RowState.create(4)
    for name in FIELDS:
        fields = {field: getattr(good, field) for field in FIELDS}
        for bad in (
            fields[name].double(),
            fields[name][:-1],
            fields[name].repeat_interleave(2, 0)[::2],
        ):
            with pytest.raises(ValueError, match="must be"):
                RowState(**fields | {name: bad})


def test_new_tenant_of_a_row_is_judged_by_its_own_flag(kernels: Kernels, flags: FlagView) -> None:
    batch = Batch.of([10])
    batch.tokens[0].cancel()
    kernels.latch(flags, batch.rows)
    heir = CancelToken()
    batch.rows.put(0, seq_len=3, slot_mapping=7, token=heir)
    kernels.latch(flags, batch.rows)
    assert (batch.rows.live.tolist(), heir.acked) == ([1], 0)
    heir.cancel()
    kernels.latch(flags, batch.rows)
    assert (batch.rows.live.tolist(), heir.acked) == ([0], 3)
