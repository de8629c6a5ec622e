"""Keys and values of a step into their blocks."""

import triton
import triton.language as tl

__all__ = ["write_kv"]


@triton.jit
def write_kv(key, value, keys, values, slot_mapping, width, BLOCK: tl.constexpr):
    """A program a token; one of slot -1 is not written.

    Args:
        width: numbers a token, heads by head_dim, no more than ``BLOCK``.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    column = tl.arange(0, BLOCK)
    own = token * width + column
    target = slot * width + column
    is_written = (column < width) & (target >= 0)  # a slot of -1 puts all of it below 0
    tl.store(keys + target, tl.load(key + own, mask=is_written), mask=is_written)
    tl.store(values + target, tl.load(value + own, mask=is_written), mask=is_written)
