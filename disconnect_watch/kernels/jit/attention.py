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

from disconnect_watch.kernels.jit.poll import dw_poll

__all__ = ["decode_attention", "prefill_attention"]

#: Instead of -inf, whose difference to itself is no number. What a query adds up in tiles that
#: it may not see at all is forgotten with the first key that it may: there exp2 gives 0.
LOWEST = tl.constexpr(-1.0e30)
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
    NUM_THREADS: tl.constexpr,
):
    """From queries [M, BLOCK_D] at positions [M] to the keys in [start, stop) of their row."""
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
            tl.store(progress, tl.cdiv(stop - start, TILE))
    else:
        chunk = start
        fired = dw_poll(words, flag_slot, flag_generation, NUM_THREADS)
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
            fired = dw_poll(words, flag_slot, flag_generation, NUM_THREADS)
    weighted = accumulated / tl.where(mass > 0, mass, 1.0)[:, None]
    return tl.where(fired == 0, weighted, 0.0)


@triton.jit
def decode_attention(
    query,
    keys,
    values,
    output,
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
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    POLL_EVERY: tl.constexpr,
    HAS_PROGRESS: tl.constexpr,
    NUM_THREADS: tl.constexpr,
):
    """A program a row and key head: the query heads that share it are so many queries to it."""
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    stop = tl.load(seq_lens + row)
    start = 0
    if HAS_WINDOW:
        start = tl.maximum(stop - window, 0) // TILE * TILE

    head = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_D)
    own = (row * num_kv_heads + kv_head) * GROUP * HEAD_DIM
    own = own + head[:, None] * HEAD_DIM + column[None, :]
    is_own = (head < GROUP)[:, None] & (column < HEAD_DIM)[None, :]
    result = _attend(
        tl.load(query + own, mask=is_own, other=0.0),
        keys,
        values,
        block_tables + row * max_blocks,
        start,
        stop,
        tl.zeros_like(head) + stop - 1,
        words,
        tl.load(slots + row),
        tl.load(generations + row),
        progress + row * num_kv_heads + kv_head,
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
        NUM_THREADS,
    )
    tl.store(output + own, result.to(output.dtype.element_ty), mask=is_own)


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
    result = _attend(
        tl.load(query + own, mask=is_own, other=0.0),
        keys,
        values,
        block_tables + row * max_blocks,
        start,
        stop,
        before + index,
        words,
        tl.load(slots + row),
        tl.load(generations + row),
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
        NUM_THREADS,
    )
    tl.store(output + own, result.to(output.dtype.element_ty), mask=is_own)
