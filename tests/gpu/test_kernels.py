"""Each kernel, compiled, against the plain reference on the CPU."""

import pytest
import torch
from torch import Tensor

from disconnect_watch import CancelToken
from disconnect_watch.kernels import (
    AttentionParams,
    DecodeState,
    FlagView,
    Kernels,
    PagedKV,
    RowState,
    Sampling,
    open_view,
)
from tests.kernels.batch import Batch, paged

ROW_FIELDS = ("slots", "generations", "live", "seq_lens", "slot_mapping", "control")
PARAMS = {
    "plain": AttentionParams(scale=0.1),
    "unpolled": AttentionParams(scale=0.1, poll_every=0),
    "polled each tile": AttentionParams(scale=0.1, poll_every=1),
    "window": AttentionParams(scale=0.1, window=70),
    "softcap": AttentionParams(scale=1.0, softcap=3.0),
}


def rows_on(device: torch.device, rows: RowState) -> RowState:
    return RowState(*(getattr(rows, name).to(device) for name in ROW_FIELDS))


def kv_on(device: torch.device, kv: PagedKV) -> PagedKV:
    return PagedKV(
        kv.keys.to(device), kv.values.to(device), kv.block_tables.to(device), kv.block_size
    )


def assert_close(given: Tensor, expected: Tensor) -> None:
    atol = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}[given.dtype]
    torch.testing.assert_close(given.cpu().float(), expected.float(), atol=atol, rtol=atol)


def test_latch_ends_the_rows_that_the_reference_ends(
    device: torch.device, kernels: Kernels, reference: Kernels, flags: FlagView
) -> None:
    batch, twin = (Batch.of([5] * 100) for _ in range(2))
    rows = rows_on(device, batch.rows)
    for each in (rows, twin.rows):
        each.begin(9)
    for fired in ([], [3, 4, 70], [99], list(range(100))):
        for index in fired:
            batch.tokens[index].cancel()
            twin.tokens[index].cancel()
        kernels.latch(flags, rows)
        reference.latch(open_view(), twin.rows)
        for name in ("live", "seq_lens", "slot_mapping", "control"):
            assert torch.equal(getattr(rows, name).cpu(), getattr(twin.rows, name)), name
        assert [t.acked for t in batch.tokens] == [t.acked for t in twin.tokens]
    assert not rows.go


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", PARAMS)
def test_attention_agrees_with_the_reference(
    device: torch.device,
    kernels: Kernels,
    reference: Kernels,
    flags: FlagView,
    name: str,
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(0)
    seq_lens, query_lens = [300, 0, 2000, 65, 1], [300, 4, 130, 1, 1]
    batch = Batch.of(seq_lens)
    kv = paged(seq_lens, num_kv_heads=2, head_dim=128, dtype=dtype)
    there = kv_on(device, kv), rows_on(device, batch.rows), flags
    here = kv, batch.rows, open_view()

    query = torch.randn(len(seq_lens), 8, 128, dtype=dtype)
    given = kernels.decode_attention(query.to(device), *there, params=PARAMS[name])
    assert_close(given, reference.decode_attention(query, *here, params=PARAMS[name]))

    query = torch.randn(sum(query_lens), 8, 128, dtype=dtype)
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    given = kernels.prefill_attention(
        query.to(device),
        *there,
        query_starts=starts.to(device),
        max_query_len=300,
        params=PARAMS[name],
    )
    expected = reference.prefill_attention(
        query, *here, query_starts=starts, max_query_len=300, params=PARAMS[name]
    )
    assert_close(given, expected)


def test_row_that_has_left_gets_zeros_and_changes_no_bit_of_a_neighbour(
    device: torch.device, kernels: Kernels, flags: FlagView
) -> None:
    torch.manual_seed(0)
    batch = Batch.of([900, 800, 700])
    kv = kv_on(device, paged([900, 800, 700], head_dim=64, dtype=torch.bfloat16))
    rows = rows_on(device, batch.rows)
    query = torch.randn(3, 8, 64, dtype=torch.bfloat16, device=device)
    before = kernels.decode_attention(query, kv, rows, flags, params=PARAMS["plain"])
    batch.tokens[1].cancel()
    after = kernels.decode_attention(query, kv, rows, flags, params=PARAMS["plain"])
    assert before[1].any()
    assert not after[1].any()
    assert torch.equal(after[[0, 2]], before[[0, 2]])


def test_keys_of_a_dead_row_are_not_written(device: torch.device, kernels: Kernels) -> None:
    key = torch.randn(3, 2, 64, device=device)
    keys, values = torch.zeros(2, 32, 2, 64, device=device).unbind()
    kv = PagedKV(keys, values, torch.zeros(1, 1, dtype=torch.int32, device=device), 16)
    kernels.write_kv(key, -key, kv, torch.tensor([17, -1, 0], device=device))
    assert torch.equal(keys[[17, 0]], key[[0, 2]])
    assert torch.equal(values[[17, 0]], -key[[0, 2]])
    assert int(keys.any(-1).any(-1).sum()) == 2


@pytest.mark.parametrize("is_filtered", [False, True])
def test_tokens_are_those_of_the_reference(
    device: torch.device, kernels: Kernels, reference: Kernels, is_filtered: bool
) -> None:
    """Next to a border between two tokens the device may fall on the other: hardly ever."""
    torch.manual_seed(0)
    num_rows = 4096
    logits = torch.randn(num_rows, 3000) * 3
    logits[7, 5] = torch.nan
    positions = torch.arange(num_rows)

    def sampling(on: torch.device | str) -> Sampling:
        return Sampling(
            temperatures=torch.linspace(0, 2, num_rows).to(on),
            seeds=torch.arange(num_rows).to(on) * 7919,
            top_k=torch.full((num_rows,), 50, dtype=torch.int32).to(on) if is_filtered else None,
        )

    given = kernels.sample(logits.to(device), positions.to(device), sampling(device)).cpu()
    expected = reference.sample(logits, positions, sampling("cpu"))
    assert int(given[7]) == -1
    assert int((given != expected).sum()) <= 2


def test_rows_advance_as_the_references_do(
    device: torch.device, kernels: Kernels, reference: Kernels
) -> None:
    torch.manual_seed(0)
    states = []
    for on in (device, torch.device("cpu")):
        rows = RowState.create(33, device=on)
        for row in range(33):
            rows.put(row, seq_len=1 + row % 7)
        states.append(
            DecodeState.create(rows, max_blocks=8, block_size=4, max_steps=6, max_stops=2)
        )
        states[-1].stop_token_ids[:, 0] = 5
        states[-1].limits.fill_(10)
    for _ in range(6):
        tokens = torch.randint(-1, 40, (33,))
        kernels.advance(tokens.to(device), states[0])
        reference.advance(tokens, states[1])
        for name in ("token_ids", "positions", "drawn", "num_drawn"):
            assert torch.equal(*(getattr(state, name).cpu() for state in states)), name
        for name in ("live", "seq_lens", "slot_mapping"):
            assert torch.equal(*(getattr(state.rows, name).cpu() for state in states)), name


def test_latch_of_stale_flags_ends_nobody(
    device: torch.device, kernels: Kernels, flags: FlagView
) -> None:
    token = CancelToken()
    rows = RowState.create(1, device=device)
    rows.put(0, seq_len=4, token=token)
    rows.generations[0] += 1
    token.cancel()
    kernels.latch(flags, rows)
    assert rows.live.tolist() == [1]
