"""The latch kernel: once a step, flags become row state that other kernels read from the device."""

import triton
import triton.language as tl

from disconnect_watch.kernels.jit.poll import FLAGS

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
    flag = row[:, None] * FLAGS + tl.arange(0, FLAGS)[None, :]
    is_asked = (is_row & (was_live != 0))[:, None]
    slot = tl.load(slots + flag, mask=is_asked, other=-1)
    generation = tl.load(generations + flag, mask=is_asked, other=0)
    word = tl.load(words + slot, mask=slot >= 0, other=0, volatile=True)
    flag_fired = (slot >= 0) & (word >> 8 == generation) & (word & 0xFF != 0)
    fired = tl.max(flag_fired.to(tl.int32), 1) != 0

    step = tl.load(control) + 1
    step = tl.where(step == 0, 1, step)  # the ack of 0 would read as none
    steps_left = tl.load(control + 1)
    tl.store(live + row, 0, mask=fired)
    tl.store(seq_lens + row, 0, mask=fired)
    tl.store(slot_mapping + row, -1, mask=fired)
    # Through the device's cache: the host reads it while later kernels still run.
    tl.store(acks + slot, step, mask=flag_fired, cache_modifier=".wt")

    num_live = tl.sum(tl.where(fired, 0, (was_live != 0).to(tl.int32)), 0)
    go = ((num_live > 0) & (steps_left > 0)).to(tl.int32)
    tl.store(control, step)
    tl.store(control + 1, steps_left - go)
    tl.store(control + 2, num_live)
    tl.store(control + 3, go)
