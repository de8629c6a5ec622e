"""Between two steps that the host does not see: each row's token becomes its next input."""

import triton
import triton.language as tl

__all__ = ["advance"]


@triton.jit
def advance(
    tokens,
    live,
    seq_lens,
    slot_mapping,
    block_tables,
    limits,
    stop_token_ids,
    token_ids,
    positions,
    drawn,
    num_drawn,
    num_rows,
    max_blocks,
    max_drawn,
    max_stops,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program; ``BLOCK`` is a power of two that covers the rows."""
    row = tl.arange(0, BLOCK)
    is_row = row < num_rows
    is_live = is_row & (tl.load(live + row, mask=is_row, other=0) != 0)
    token = tl.load(tokens + row, mask=is_row, other=-1)
    position = tl.load(seq_lens + row, mask=is_row, other=0)
    has_token = is_live & (token >= 0)
    goes_on = has_token & (position + 1 < tl.load(limits + row, mask=is_row, other=0))
    for index in range(max_stops):
        stop = tl.load(stop_token_ids + row * max_stops + index, mask=is_row, other=-1)
        goes_on = goes_on & (token != stop)

    count = tl.load(num_drawn + row, mask=is_row, other=0)
    is_kept = has_token & (count < max_drawn)
    tl.store(drawn + row * max_drawn + count, token.to(tl.int32), mask=is_kept)
    tl.store(num_drawn + row, count + 1, mask=is_kept)

    block = tl.load(block_tables + row * max_blocks + position // BLOCK_SIZE, mask=goes_on, other=0)
    slot = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
    tl.store(token_ids + row, token, mask=goes_on)
    tl.store(positions + row, position.to(tl.int64), mask=goes_on)
    tl.store(slot_mapping + row, tl.where(goes_on, slot, -1), mask=is_row)
    tl.store(seq_lens + row, tl.where(goes_on, position + 1, 0), mask=is_row)
    tl.store(live + row, goes_on.to(tl.int32), mask=is_row)
