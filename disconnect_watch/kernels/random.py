"""Random numbers without a state: a function of seed and position, on any device.

The same numbers as the engine's on the host, bit for bit, so that a token does not depend on where
it was drawn. In a loop on the device a generator with a state would draw the same number at
every step, since its state is set by the host.
"""

import torch
from torch import Tensor

__all__ = ["uniform"]


def _signed(value: int) -> int:
    """The same 64 bits as torch's signed integers have them."""
    return value - 2**64 if value >= 2**63 else value


GOLDEN = _signed(0x9E3779B97F4A7C15)
MIX_1 = _signed(0xBF58476D1CE4E5B9)
MIX_2 = _signed(0x94D049BB133111EB)


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """Return numbers in [0, 1) with 53 random bits, float64.

    Args:
        seeds, positions: int64, of one shape.

    Source: SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators",
    OOPSLA 2014), the seed mixed once before.
    """
    mixed = _mix(_mix(seeds + GOLDEN) + (positions + 1) * GOLDEN)
    return _shift(mixed, 11).double() / 2**53


def _mix(value: Tensor) -> Tensor:
    value = (value ^ _shift(value, 30)) * MIX_1
    value = (value ^ _shift(value, 27)) * MIX_2
    return value ^ _shift(value, 31)


def _shift(value: Tensor, bits: int) -> Tensor:
    """Shift to the right as unsigned numbers are; torch's own shift drags the sign along."""
    return torch.bitwise_and(value >> bits, (1 << (64 - bits)) - 1)
