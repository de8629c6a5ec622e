"""Paged attention in Triton against the plain reference, and the reference against torch's own."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from disconnect_watch.kernels import AttentionParams, FlagView, Kernels, PagedKV
from disconnect_watch.kernels.base import DECODE_SPLIT
from tests.kernels.batch import Batch, paged, slots_of

PARAMS = {
    "plain": AttentionParams(scale=0.2),
    "unpolled": AttentionParams(scale=0.2, poll_every=0),
    "polled each tile": AttentionParams(scale=0.2, poll_every=1),
    "window": AttentionParams(scale=0.2, window=70, poll_every=1),
    "window of one": AttentionParams(scale=0.2, window=1),
    "softcap": AttentionParams(scale=2.0, softcap=3.0),
}
#: Heads, key heads, head_dim, block_size: grouped, alone, odd sizes that are padded.
SHAPES = [(4, 2, 32, 16), (1, 1, 16, 1), (6, 2, 24, 8), (3, 1, 80, 128)]
#: All params on one shape, and all shapes with one.
CASES = [(name, SHAPES[0]) for name in PARAMS] + [("polled each tile", s) for s in SHAPES[1:]]
#: An empty row, one token, a tile less and more than full, several chunks.
SEQ_LENS = [0, 1, 63, 64, 65, 200]


def starts_of(query_lens: list[int]) -> Tensor:
    return F.pad(torch.tensor(query_lens).cumsum(0), (1, 0)).int()


def test_reference_agrees_with_torchs_own_attention(reference: Kernels, flags: FlagView) -> None:
    torch.manual_seed(0)
    seq_lens, query_lens = [40, 130, 7], [3, 130, 1]
    batch, kv = Batch.of(seq_lens), paged(seq_lens)
    query = torch.randn(sum(query_lens), 6, 32)
    starts = starts_of(query_lens)
    output = reference.prefill_attention(
        query, kv, batch.rows, flags, query_starts=starts, max_query_len=130, params=PARAMS["plain"]
    )
    for row, (first, last) in enumerate(pairwise(starts.tolist())):
        seen = slots_of(kv.block_tables[row], torch.arange(seq_lens[row]), kv.block_size)
        before = seq_lens[row] - (last - first)
        expected = F.scaled_dot_product_attention(
            query[first:last].transpose(0, 1),
            kv.keys[seen].transpose(0, 1),
            kv.values[seen].transpose(0, 1),
            attn_mask=torch.ones(last - first, seq_lens[row], dtype=torch.bool).tril(before),
            scale=0.2,
            enable_gqa=True,
        )
        torch.testing.assert_close(output[first:last], expected.transpose(0, 1))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "shape"), CASES)
def test_decode_agrees_with_the_reference(
    interpreted: Kernels,
    reference: Kernels,
    flags: FlagView,
    name: str,
    shape: tuple[int, int, int, int],
) -> None:
    torch.manual_seed(0)
    num_heads, num_kv_heads, head_dim, block_size = shape
    batch = Batch.of(SEQ_LENS)
    kv = paged(SEQ_LENS, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size)
    query = torch.randn(len(SEQ_LENS), num_heads, head_dim)
    outputs, tiles = [], []
    for kernels in (interpreted, reference):
        progress = torch.zeros(len(SEQ_LENS), num_kv_heads, 1, dtype=torch.int32)
        outputs.append(
            kernels.decode_attention(
                query, kv, batch.rows, flags, params=PARAMS[name], progress=progress
            )
        )
        tiles.append(progress)
    torch.testing.assert_close(*outputs)
    assert torch.equal(*tiles)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "shape"), CASES)
def test_prefill_agrees_with_the_reference(
    interpreted: Kernels,
    reference: Kernels,
    flags: FlagView,
    name: str,
    shape: tuple[int, int, int, int],
) -> None:
    """Rows from their beginning, later chunks, a single token, and a row that is empty."""
    torch.manual_seed(0)
    num_heads, num_kv_heads, head_dim, block_size = shape
    seq_lens, query_lens = [140, 0, 90], [140, 5, 3]
    batch = Batch.of(seq_lens)
    kv = paged(seq_lens, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size)
    query = torch.randn(sum(query_lens), num_heads, head_dim)
    outputs, tiles = [], []
    for kernels in (interpreted, reference):
        progress = torch.zeros(len(seq_lens), num_heads, 2, dtype=torch.int32)
        outputs.append(
            kernels.prefill_attention(
                query,
                kv,
                batch.rows,
                flags,
                query_starts=starts_of(query_lens),
                max_query_len=140,
                params=PARAMS[name],
                progress=progress,
            )
        )
        tiles.append(progress)
    torch.testing.assert_close(*outputs)
    assert torch.equal(*tiles)


LONG = {
    "plain": AttentionParams(scale=0.2),
    "unpolled": AttentionParams(scale=0.2, poll_every=0),
    "window into the split before": AttentionParams(scale=0.2, window=1100, poll_every=4),
    "window within the last split": AttentionParams(scale=0.2, window=60),
}


@pytest.mark.slow
@pytest.mark.parametrize("params", LONG.values(), ids=LONG)
def test_long_contexts_are_split_and_merged_as_if_they_were_not(
    interpreted: Kernels, reference: Kernels, flags: FlagView, params: AttentionParams
) -> None:
    """Rows of no, one and several splits, one of them exact; and one that has left."""
    torch.manual_seed(0)
    seq_lens = [0, 7, DECODE_SPLIT, 2 * DECODE_SPLIT + 70, 1500]
    kv = paged(seq_lens, num_kv_heads=1, head_dim=16)
    batch = Batch.of(seq_lens)
    batch.tokens[4].cancel()
    query = torch.randn(len(seq_lens), 2, 16)
    outputs, tiles = [], []
    for kernels in (interpreted, reference):
        progress = torch.zeros(len(seq_lens), 1, 3, dtype=torch.int32)
        outputs.append(
            kernels.decode_attention(query, kv, batch.rows, flags, params=params, progress=progress)
        )
        tiles.append(progress)
    torch.testing.assert_close(*outputs)
    assert torch.equal(*tiles)
    assert outputs[0][4].any() == (params.poll_every == 0)


def test_row_is_summed_up_alike_whatever_room_its_neighbours_need(
    interpreted: Kernels, flags: FlagView
) -> None:
    """Bit for bit: alone, where one split is all there is room for, and beside a long row."""
    torch.manual_seed(0)
    seq_lens = [300, DECODE_SPLIT + 1]
    kv = paged(seq_lens, num_kv_heads=1, head_dim=16)
    query = torch.randn(2, 2, 16)
    batch = Batch.of(seq_lens)
    together = interpreted.decode_attention(query, kv, batch.rows, flags, params=PARAMS["plain"])
    narrow = PagedKV(kv.keys, kv.values, kv.block_tables[:1, :19].contiguous(), kv.block_size)
    single = Batch.of(seq_lens[:1])
    alone = interpreted.decode_attention(
        query[:1], narrow, single.rows, flags, params=PARAMS["plain"]
    )
    assert torch.equal(alone[0], together[0])


def test_half_precision_stays_close_to_float32(
    interpreted: Kernels, reference: Kernels, flags: FlagView
) -> None:
    """In float16 alone: the interpreter takes a bfloat16 in a product for an integer."""
    torch.manual_seed(0)
    batch, kv = Batch.of([100, 30]), paged([100, 30], dtype=torch.float16)
    query = torch.randn(2, 4, 32, dtype=torch.float16)
    given = interpreted.decode_attention(query, kv, batch.rows, flags, params=PARAMS["plain"])
    wide = PagedKV(kv.keys.float(), kv.values.float(), kv.block_tables, kv.block_size)
    expected = reference.decode_attention(
        query.float(), wide, batch.rows, flags, params=PARAMS["plain"]
    )
    assert given.dtype is torch.float16
    torch.testing.assert_close(given.float(), expected, atol=5e-3, rtol=5e-3)


@pytest.mark.parametrize("name", ["decode_attention", "prefill_attention"])
def test_row_that_has_left_gets_zeros_and_no_work_and_changes_no_neighbour(
    interpreted: Kernels, reference: Kernels, flags: FlagView, name: str
) -> None:
    torch.manual_seed(0)
    seq_lens = [90, 80, 70]
    kv, query = paged(seq_lens), torch.randn(3, 4, 32)
    extra: dict[str, object] = {}
    shape: tuple[int, ...] = (3, 2, 1)
    if name == "prefill_attention":
        extra, shape = {"query_starts": starts_of([1, 1, 1]), "max_query_len": 1}, (3, 4, 1)
    for kernels in (interpreted, reference):
        batch = Batch.of(seq_lens)
        attend = getattr(kernels, name)
        before = attend(query, kv, batch.rows, flags, params=PARAMS["plain"], **extra)
        batch.tokens[1].cancel()
        progress = torch.zeros(shape, dtype=torch.int32)
        after = attend(
            query, kv, batch.rows, flags, params=PARAMS["plain"], progress=progress, **extra
        )
        assert before[1].any()
        assert not after[1].any()
        assert not progress[1].any()
        assert torch.equal(after[[0, 2]], before[[0, 2]])

        heir = Batch.of(seq_lens)
        heir.rows.generations[1] += 1
        heir.tokens[1].cancel()  # of the slot's tenant before: none of this row's business
        again = attend(query, kv, heir.rows, flags, params=PARAMS["plain"], **extra)
        assert torch.equal(again, before)
