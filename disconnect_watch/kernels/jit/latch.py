"""The latch kernel: once a step, flags become row state that other kernels read from the device."""

import triton
import triton.language as tl

__all__ = ["latch"]


@triton.jit
def latch(
    words,
    acks,
    slots,
    generations,
    live,
    seq_lens,
    slot_mapping,
    control,
    num_rows,
    BLOCK: tl.constexpr,
):
    """One program of one warp; ``BLOCK`` is a power of two that covers the rows.

    The load of the words is volatile and each lane's own: what it decides is data, no branch.
    More warps would have to wait for each other before the first may write the control words.

    Source: ``dw_latch.h``.
    """
    row = tl.arange(0, BLOCK)
    is_row = row < num_rows
    was_live = tl.load(live + row, mask=is_row, other=0)
    slot = tl.load(slots + row, mask=is_row, other=-1)
    generation = tl.load(generations + row, mask=is_row, other=0)
    has_flag = is_row & (was_live != 0) & (slot >= 0)
    word = tl.load(words + slot, mask=has_flag, other=0, volatile=True)
    fired = has_flag & (word >> 8 == generation) & (word & 0xFF != 0)

    step = tl.load(control) + 1
    step = tl.where(step == 0, 1, step)  # the ack of 0 would read as none
    steps_left = tl.load(control + 1)
    tl.store(live + row, 0, mask=fired)
    tl.store(seq_lens + row, 0, mask=fired)
    tl.store(slot_mapping + row, -1, mask=fired)
    # Through the device's cache: the host reads it while later kernels still run.
    tl.store(acks + slot, step, mask=fired, cache_modifier=".wt")

    num_live = tl.sum(tl.where(fired, 0, (was_live != 0).to(tl.int32)), 0)
    go = ((num_live > 0) & (steps_left > 0)).to(tl.int32)
    tl.store(control, step)
    tl.store(control + 1, steps_left - go)
    tl.store(control + 2, num_live)
    tl.store(control + 3, go)
