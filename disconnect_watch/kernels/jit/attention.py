"""Paged attention that leaves a request behind as soon as its flag fires.

A look at the flag crosses the bus and takes about as long as a tile of keys, and a check around
each tile would cost more than that: the compiler then gives up on loading the next tile while it
works on this one. So the loop is in two: an inner one over a chunk of tiles, with nothing in it
that depends on the flag, and an outer one that looks once a chunk. tests/kernels/test_compiled.py
counts the asynchronous copies with and without.

Nobody returns early: a program that is told to stop has no chunks left, writes zeros, and ends
where all others do.
"""

import triton
import triton.language as tl

from disconnect_watch.kernels.jit.poll import dw_flags, dw_poll

__all__ = ["decode_attention", "merge_splits", "prefill_attention"]

#: Instead of -inf, whose difference to itself is no number. What a query adds up in tiles that
#: it may not see at all is forgotten with the first key that it may: there exp2 gives 0.
LOWEST = tl.constexpr(-1.0e30)
#: The logarithm of the mass of a part that was left: next to it all others count for nothing.
HIGHEST = tl.constexpr(1.0e30)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _attend_tile(
    accumulated,
    mass,
    highest,
    query,
    keys,
    values,
    block_table,
    start,
    stop,
    positions,
    kv_head,
    num_kv_heads,
    scale,
    window,
    softcap,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """One tile of keys, added to what the queries have so far."""
    token = start + tl.arange(0, TILE)
    column = tl.arange(0, BLOCK_D)
    is_token = token < stop
    block = tl.load(block_table + token // BLOCK_SIZE, mask=is_token, other=0).to(tl.int64)
    slot = block * BLOCK_SIZE + token % BLOCK_SIZE
    where = (slot * num_kv_heads + kv_head) * HEAD_DIM
    where = where[:, None] + column[None, :]
    # What lies beyond the row is not read: a NaN there would be one even at weight 0.
    is_read = is_token[:, None] & (column < HEAD_DIM)[None, :]

    key = tl.load(keys + where, mask=is_read, other=0.0)
    scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
    if HAS_SOFTCAP:
        scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
    distance = positions[:, None] - token[None, :]
    is_seen = distance >= 0
    if HAS_WINDOW:
        is_seen = is_seen & (distance < window)
    scores = tl.where(is_seen, scores * LOG2_E, LOWEST)

    new_highest = tl.maximum(highest, tl.max(scores, 1))
    weights = tl.math.exp2(scores - new_highest[:, None])
    faded = tl.math.exp2(highest - new_highest)
    value = tl.load(values + where, mask=is_read, other=0.0)
    accumulated = accumulated * faded[:, None]
    accumulated = tl.dot(weights.to(value.dtype), value, accumulated, input_precision="ieee")
    return accumulated, mass * faded + tl.sum(weights, 1), new_highest


@triton.jit
def _attend(
    query,
    keys,
    values,
    block_table,
    start,
    stop,
    positions,
    words,
    flag_slot,
    flag_generation,
    progress,
    kv_head,
    num_kv_heads,
    scale,
    window,
    softcap,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    POLL_EVERY: tl.constexpr,
    HAS_PROGRESS: tl.constexpr,
):
    """From queries [M, BLOCK_D] at positions [M] to the keys in [start, stop) of their row.

    Returns the weighted values, and the base-2 logarithm of the mass that they are weighted by.
    """
    accumulated = tl.zeros_like(query).to(tl.float32)
    mass = tl.zeros_like(positions).to(tl.float32)
    highest = mass + LOWEST
    fired = 0
    if POLL_EVERY == 0:
        for tile in range(start, stop, TILE):
            accumulated, mass, highest = _attend_tile(
                accumulated,
                mass,
                highest,
                query,
                keys,
                values,
                block_table,
                tile,
                stop,
                positions,
                kv_head,
                num_kv_heads,
                scale,
                window,
                softcap,
                HEAD_DIM,
                BLOCK_SIZE,
                BLOCK_D,
                TILE,
                HAS_WINDOW,
                HAS_SOFTCAP,
            )
        if HAS_PROGRESS:
            tl.store(progress, tl.cdiv(tl.maximum(stop - start, 0), TILE))
    else:
        chunk = start
        fired = dw_poll(words, flag_slot, flag_generation)
        while (chunk < stop) & (fired == 0):
            end = tl.minimum(chunk + POLL_EVERY * TILE, stop)
            for tile in range(chunk, end, TILE):
                accumulated, mass, highest = _attend_tile(
                    accumulated,
                    mass,
                    highest,
                    query,
                    keys,
                    values,
                    block_table,
                    tile,
                    stop,
                    positions,
                    kv_head,
                    num_kv_heads,
                    scale,
                    window,
                    softcap,
                    HEAD_DIM,
                    BLOCK_SIZE,
                    BLOCK_D,
                    TILE,
                    HAS_WINDOW,
                    HAS_SOFTCAP,
                )
            chunk = end
            if HAS_PROGRESS:
                tl.store(progress, tl.cdiv(end - start, TILE))
            fired = dw_poll(words, flag_slot, flag_generation)
    mass = tl.where(mass > 0, mass, 1.0)
    weighted = tl.where(fired == 0, accumulated / mass[:, None], 0.0)
    return weighted, tl.where(fired == 0, highest + tl.log2(mass), HIGHEST)


@triton.jit
def decode_attention(
    query,
    keys,
    values,
    output,
    masses,
    block_tables,
    seq_lens,
    words,
    slots,
    generations,
    progress,
    max_blocks,
    num_kv_heads,
    scale,
    window,
    softcap,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_SPLITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    POLL_EVERY: tl.constexpr,
    HAS_PROGRESS: tl.constexpr,
    NUM_THREADS: tl.constexpr,
):
    """A program a row, key head and ``SPLIT`` tokens; if several, ``merge_splits`` follows.

    The query heads that share the key head are so many queries to it.

    Args:
        output: [num_rows, num_heads, head_dim]; with splits [..., num_splits, head_dim], float32.
        masses: [num_rows, num_heads, num_splits], float32, base-2 logarithms; only with splits.
    """
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    num_splits = tl.num_programs(2)
    seq_len = tl.load(seq_lens + row)
    start = split * SPLIT
    if HAS_WINDOW:
        start = tl.maximum(start, tl.maximum(seq_len - window, 0) // TILE * TILE)
    stop = tl.minimum(seq_len, (split + 1) * SPLIT)
    # A split that has nothing to do looks at no flag, and with others beside it writes nothing.
    has_keys = start < stop
    flag_slot, flag_generation = dw_flags(slots, generations, row, NUM_THREADS)
    flag_slot = tl.where(has_keys, flag_slot, -1)

    head = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_D)
    own = (row * num_kv_heads + kv_head) * GROUP + head
    is_column = (column < HEAD_DIM)[None, :]
    is_head = head < GROUP
    own_query = own[:, None] * HEAD_DIM + column[None, :]
    result, mass = _attend(
        tl.load(query + own_query, mask=is_head[:, None] & is_column, other=0.0),
        keys,
        values,
        block_tables + row * max_blocks,
        start,
        stop,
        tl.zeros_like(head) + seq_len - 1,
        words,
        flag_slot,
        flag_generation,
        progress + (row * num_kv_heads + kv_head) * num_splits + split,
        kv_head,
        num_kv_heads,
        scale,
        window,
        softcap,
        HEAD_DIM,
        BLOCK_SIZE,
        BLOCK_D,
        TILE,
        HAS_WINDOW,
        HAS_SOFTCAP,
        POLL_EVERY,
        HAS_PROGRESS,
    )
    if HAS_SPLITS:
        own = own * num_splits + split
        is_head = is_head & (start + tl.zeros_like(head) < stop)
        own_query = own[:, None] * HEAD_DIM + column[None, :]
        tl.store(masses + own, mass, mask=is_head)
    tl.store(
        output + own_query,
        result.to(output.dtype.element_ty),
        mask=is_head[:, None] & is_column,
    )


@triton.jit
def merge_splits(
    parts,
    masses,
    output,
    seq_lens,
    num_splits,
    window,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """A program a row and head: what its splits found, weighted by their masses, in their order."""
    row = tl.program_id(0).to(tl.int64)
    own = row * tl.num_programs(1) + tl.program_id(1)
    seq_len = tl.load(seq_lens + row)
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(seq_len - window, 0) // TILE * TILE // SPLIT
    last = tl.cdiv(seq_len, SPLIT)

    column = tl.arange(0, BLOCK_D)
    is_column = column < HEAD_DIM
    highest = LOWEST
    for split in range(first, last):
        highest = tl.maximum(highest, tl.load(masses + own * num_splits + split))
    total = 0.0
    merged = tl.zeros((BLOCK_D,), tl.float32)
    for split in range(first, last):
        part = own * num_splits + split
        weight = tl.math.exp2(tl.load(masses + part) - highest)
        total += weight
        merged += weight * tl.load(parts + part * HEAD_DIM + column, mask=is_column, other=0.0)
    merged = merged / tl.where(total > 0, total, 1.0)
    tl.store(output + own * HEAD_DIM + column, merged.to(output.dtype.element_ty), mask=is_column)


@triton.jit
def prefill_attention(
    query,
    keys,
    values,
    output,
    block_tables,
    seq_lens,
    query_starts,
    words,
    slots,
    generations,
    progress,
    max_blocks,
    num_kv_heads,
    scale,
    window,
    softcap,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    POLL_EVERY: tl.constexpr,
    HAS_PROGRESS: tl.constexpr,
    NUM_THREADS: tl.constexpr,
):
    """A program a tile of ``BLOCK_M`` queries, head and row."""
    query_tile = tl.program_id(0)
    num_heads = tl.num_programs(1)
    head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    seq_len = tl.load(seq_lens + row)
    first_query = tl.load(query_starts + row)
    num_queries = tl.load(query_starts + row + 1) - first_query
    begin = query_tile * BLOCK_M
    # A dead row, and a tile behind the row's last query, have no keys to look at.
    is_empty = (seq_len == 0) | (begin >= num_queries)
    before = seq_len - num_queries
    stop = tl.where(is_empty, 0, before + tl.minimum(begin + BLOCK_M, num_queries))
    start = 0
    if HAS_WINDOW:
        start = tl.where(is_empty, 0, tl.maximum(before + begin - window + 1, 0) // TILE * TILE)

    index = begin + tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_D)
    own = ((first_query + index).to(tl.int64) * num_heads + head) * HEAD_DIM
    own = own[:, None] + column[None, :]
    is_own = (index < num_queries)[:, None] & (column < HEAD_DIM)[None, :]
    num_tiles = tl.num_programs(0)
    flag_slot, flag_generation = dw_flags(slots, generations, row, NUM_THREADS)
    result, _ = _attend(
        tl.load(query + own, mask=is_own, other=0.0),
        keys,
        values,
        block_tables + row * max_blocks,
        start,
        stop,
        before + index,
        words,
        flag_slot,
        flag_generation,
        progress + (row * num_heads + head) * num_tiles + query_tile,
        head // GROUP,
        num_kv_heads,
        scale,
        window,
        softcap,
        HEAD_DIM,
        BLOCK_SIZE,
        BLOCK_D,
        TILE,
        HAS_WINDOW,
        HAS_SOFTCAP,
        POLL_EVERY,
        HAS_PROGRESS,
    )
    tl.store(output + own, result.to(output.dtype.element_ty), mask=is_own)
