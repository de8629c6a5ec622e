"""How a step's rows are packed, and what is left when some of them are taken out."""

import torch

from disconnect_watch.engine.batch import PackedBatch
from disconnect_watch.engine.kv_cache import KVCache
from disconnect_watch.engine.params import SamplingParams
from disconnect_watch.engine.request import Request
from disconnect_watch.engine.schedule import ScheduledRow
from tests.support.engine import tiny_model

CACHE = KVCache(tiny_model().config, num_blocks=64, block_size=4, dtype=torch.float32)


def make_row(name: str, start: int, stop: int, *, first_block: int = 0) -> ScheduledRow:
    request = Request(name, list(range(stop)), params=SamplingParams(), seed=0)
    blocks = list(range(first_block, first_block - (-stop // 4)))
    return ScheduledRow(request, start, stop, "decode" if stop - start == 1 else "prefill", blocks)


def test_tokens_positions_and_slots_lie_behind_each_other() -> None:
    rows = [make_row("long", 3, 6, first_block=5), make_row("single", 4, 5, first_block=9)]
    batch = PackedBatch(rows, cache=CACHE)
    assert [row.request.request_id for row in batch.rows] == ["single", "long"]
    assert batch.firsts == [0, 1, 4]
    assert batch.token_ids.tolist() == batch.positions.tolist() == [4, 3, 4, 5]
    assert batch.attention._slot_mapping.tolist() == [10 * 4, 5 * 4 + 3, 6 * 4, 6 * 4 + 1]


def test_no_row_is_padded_to_more_than_twice_its_length() -> None:
    contexts = [1, 2, 3, 4, 9, 10, 40, 100]
    batch = PackedBatch([make_row(str(n), n - 1, n) for n in contexts], cache=CACHE)
    groups = batch.attention._decodes
    assert [(group.first, group.last) for group in groups] == [
        (0, 2),
        (2, 4),
        (4, 6),
        (6, 7),
        (7, 8),
    ]
    assert [group.slots.numel() for group in groups] == [2 * 2, 2 * 4, 2 * 10, 40, 100]
    # Rows of one length need no mask.
    assert [group.mask is None for group in groups] == [False, False, False, True, True]


def test_padding_reads_the_null_block_and_weighs_nothing() -> None:
    batch = PackedBatch([make_row("a", 2, 3, first_block=7), make_row("b", 4, 5)], cache=CACHE)
    [group] = batch.attention._decodes
    null = CACHE.null_block * 4
    assert group.slots.tolist() == [28, 29, 30, null, null, 0, 1, 2, 3, 4]
    assert group.mask is not None
    assert group.mask[0, 0, 0].tolist() == [0, 0, 0, -torch.inf, -torch.inf]
    assert group.mask[1, 0, 0].tolist() == [0] * 5
