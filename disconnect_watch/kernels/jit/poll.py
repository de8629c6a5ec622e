"""The look at a cancel flag from inside a kernel."""

import triton
import triton.language as tl

__all__ = ["dw_poll"]


@triton.jit
def dw_poll(words, slot, generation, NUM_THREADS: tl.constexpr):
    """Whether the flag has fired: 1 or 0, the same in every thread of the program.

    One lane loads, and a reduction tells the others. A volatile load by every thread would let
    each warp branch on what it saw itself, and warps that disagree about a loop with a barrier in
    it hang. An atomic would be a read-modify-write over the bus, which a device may not do to
    memory that a CPU writes.

    Args:
        words: the flag table's.
        slot: of the flag; negative for none.
        generation: of the flag; a word of another generation is somebody else's.
        NUM_THREADS: 32 times ``num_warps``, so that one load makes one instruction.
    """
    lane = tl.arange(0, NUM_THREADS)
    slot = slot + lane * 0  # one a lane, of which the mask can pick the one that loads
    word = tl.load(words + slot, mask=(lane == 0) & (slot >= 0), other=0, volatile=True)
    fired = (word >> 8 == generation) & (word & 0xFF != 0)
    return tl.max(fired.to(tl.int32), 0)
