"""Kernels that only cross the bus: how long a look at a word in the host's memory takes."""

import triton
import triton.language as tl

__all__ = ["chase", "echo"]


@triton.jit
def chase(words, output, num_loads):
    """Load again and again, each address from the value before, which is always 0."""
    index = 0
    for _ in range(num_loads):
        index = tl.load(words + index, volatile=True)
    tl.store(output, index)


@triton.jit
def echo(words, acks, num_rounds, NUM_THREADS: tl.constexpr):
    """For each round: wait until the first word is the round's number, then store it as an ack."""
    lane = tl.arange(0, NUM_THREADS)
    number = 1
    while number <= num_rounds:
        # One lane looks and a reduction tells the others, as in dw_poll.
        word = tl.load(words + lane * 0, mask=lane == 0, other=0, volatile=True)
        is_there = tl.max(word, 0) >= number
        tl.store(acks, number, mask=is_there, cache_modifier=".wt")
        number += is_there.to(tl.int32)
