"""Random numbers without a state: a function of seed and position.

A generator with a state would tie a request's tokens to how often it was drawn from, and so to
neighbours, chunking and preemption. Here the number for a position is the same whenever, and in
whatever company, it is asked for.
"""

__all__ = ["uniform"]

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


def uniform(seed: int, position: int) -> float:
    """Return a number in [0, 1) with 53 random bits.

    Source: SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators",
    OOPSLA 2014), whose ``n``-th output is the mix of ``seed + n * GOLDEN``. The seed is mixed
    once before: else seeds that differ by a multiple of GOLDEN would share one sequence, shifted.
    """
    return (_mix(_mix(seed + GOLDEN) + (position + 1) * GOLDEN) >> 11) / 2**53


def _mix(value: int) -> int:
    value &= MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)
