"""The look at a cancel flag from inside a kernel."""

import triton
import triton.language as tl

from disconnect_watch.kernels.rows import FLAGS_PER_ROW

__all__ = ["FLAGS", "dw_flags", "dw_poll"]

FLAGS = tl.constexpr(FLAGS_PER_ROW)


@triton.jit
def dw_flags(slots, generations, row, NUM_THREADS: tl.constexpr):
    """Slot and generation of each flag of a row, a lane each; -1 in the lanes that have none.

    Args:
        slots, generations: [num_rows, FLAGS].
        NUM_THREADS: 32 times ``num_warps``, so that a look is one instruction.
    """
    lane = tl.arange(0, NUM_THREADS)
    flag = row * FLAGS + lane
    slot = tl.load(slots + flag, mask=lane < FLAGS, other=-1)
    return slot, tl.load(generations + flag, mask=lane < FLAGS, other=0)


@triton.jit
def dw_poll(words, slot, generation):
    """Whether a flag of the row has fired: 1 or 0, the same in every thread of the program.

    A lane a flag loads, all in one instruction, and a reduction tells the others. A volatile load
    by every thread would let each warp branch on what it saw itself, and warps that disagree about
    a loop with a barrier in it hang. An atomic would be a read-modify-write over the bus, which a
    device may not do to memory that a CPU writes.

    Args:
        words: the flag table's.
        slot, generation: of the flags, from ``dw_flags``; a word of another generation is
            somebody else's.
    """
    word = tl.load(words + slot, mask=slot >= 0, other=0, volatile=True)
    fired = (slot >= 0) & (word >> 8 == generation) & (word & 0xFF != 0)
    return tl.max(fired.to(tl.int32), 0)
