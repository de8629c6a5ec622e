"""Decode for many steps without the host: who leaves stops at once, who stays is not touched.

The body is what a graph on a device runs: attention over the paged cache, a token drawn, the
row advanced, the latch. The model is one layer with random weights.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from disconnect_watch.kernels import (
    AttentionParams,
    DecodeState,
    FlagView,
    Kernels,
    PagedKV,
    Sampling,
)
from tests.kernels.batch import Batch

NUM_ROWS, VOCAB_SIZE, HEADS, HEAD_DIM, BLOCK_SIZE, MAX_STEPS = 3, 20, 1, 16, 4, 6
PARAMS = AttentionParams(scale=HEAD_DIM**-0.5)


class Loop:
    """A batch in the middle of decode, and everything that its steps use."""

    def __init__(self, kernels: Kernels, flags: FlagView) -> None:
        self.kernels, self.flags = kernels, flags
        self.batch = Batch.of([1] * NUM_ROWS)
        self.rows = self.batch.rows
        self.state = DecodeState.create(
            self.rows, max_blocks=4, block_size=BLOCK_SIZE, max_steps=MAX_STEPS
        )
        self.state.block_tables.copy_(torch.randperm(12).view(NUM_ROWS, 4))
        self.state.limits.fill_(16)
        self.rows.slot_mapping.copy_(self.state.block_tables[:, 0] * BLOCK_SIZE)
        memory = torch.zeros(2, 12 * BLOCK_SIZE, HEADS, HEAD_DIM)
        self.kv = PagedKV(memory[0], memory[1], self.state.block_tables, BLOCK_SIZE)
        self.embedding = torch.randn(VOCAB_SIZE, HEADS, HEAD_DIM)
        self.sampling = Sampling(torch.ones(NUM_ROWS), torch.arange(NUM_ROWS))
        #: [num_rows, vocab_size] a step.
        self.logits: list[Tensor] = []

    def step(self) -> None:
        heads = self.embedding[self.state.token_ids]
        self.kernels.write_kv(heads, heads.roll(1, 2), self.kv, self.rows.slot_mapping)
        attended = self.kernels.decode_attention(
            heads, self.kv, self.rows, self.flags, params=PARAMS
        )
        # Row by row, since a product with another number of rows may differ in its last bit.
        weight = self.embedding.flatten(1).T.contiguous()
        logits = torch.stack([row @ weight for row in (heads + attended).flatten(1)])
        self.logits.append(logits)
        tokens = self.kernels.sample(logits, self.state.positions + 1, self.sampling)
        self.kernels.advance(tokens, self.state)
        self.kernels.latch(self.flags, self.rows)

    def run(self, before_step: Callable[[int], None] = lambda step: None) -> int:
        """Run to the end; returns the number of steps."""
        self.rows.begin(MAX_STEPS)
        self.kernels.latch(self.flags, self.rows)
        while self.rows.go:
            before_step(len(self.logits))
            self.step()
        return len(self.logits)


@pytest.fixture
def make_loop(kernels: Kernels, flags: FlagView) -> Callable[[], Loop]:
    def make() -> Loop:
        torch.manual_seed(0)
        return Loop(kernels, flags)

    return make


@pytest.mark.slow
def test_who_leaves_is_out_after_the_running_step_and_who_stays_is_unchanged_by_a_bit(
    make_loop: Callable[[], Loop],
) -> None:
    calm = make_loop()
    assert calm.run() == MAX_STEPS
    leaving = {2: [1], 4: [0]}
    loop = make_loop()

    def leave(step: int) -> None:
        for row in leaving.get(step, []):
            loop.batch.tokens[row].cancel()

    assert loop.run(leave) == MAX_STEPS
    for step, (given, expected) in enumerate(zip(loop.logits, calm.logits, strict=True)):
        for row in range(NUM_ROWS):
            left_at = next((at for at, rows in leaving.items() if row in rows), MAX_STEPS)
            if step < left_at:
                assert torch.equal(given[row], expected[row]), (step, row)
    assert loop.state.num_drawn.tolist() == [5, 3, MAX_STEPS]
    assert torch.equal(loop.state.drawn[2], calm.state.drawn[2])
    # The latch before the first step was the first: step s ends with latch s + 2.
    assert [token.acked for token in loop.batch.tokens] == [6, 4, 0]


@pytest.mark.slow
def test_loop_ends_with_the_step_in_which_the_last_one_leaves(
    make_loop: Callable[[], Loop],
) -> None:
    loop = make_loop()

    def leave(step: int) -> None:
        if step == 2:
            for token in loop.batch.tokens:
                token.cancel()

    assert loop.run(leave) == 3


@pytest.mark.slow
def test_dead_row_writes_no_key_after_its_ack(make_loop: Callable[[], Loop]) -> None:
    """Its blocks may be another's by then: what lies there stays as it is."""
    loop = make_loop()
    loop.rows.begin(MAX_STEPS)
    loop.kernels.latch(loop.flags, loop.rows)
    loop.step()
    loop.batch.tokens[2].cancel()
    loop.step()
    assert loop.batch.tokens[2].acked
    slots = (loop.state.block_tables[2][:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten()
    loop.kv.keys[slots], loop.kv.values[slots] = torch.nan, torch.nan
    while loop.rows.go:
        loop.step()
    assert loop.kv.keys[slots].isnan().all()
    assert loop.kv.values[slots].isnan().all()
    assert torch.stack(loop.logits)[:, [0, 1]].isfinite().all()
    assert loop.logits[-1].isfinite().all()
