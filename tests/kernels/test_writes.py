"""What kernels write of a step: keys and values into their blocks, and each row's next input."""

import pytest
import torch

from disconnect_watch.kernels import DecodeState, Kernels, PagedKV, RowState

STATE = ("token_ids", "positions", "drawn", "num_drawn")
ROWS = ("live", "seq_lens", "slot_mapping")


def test_keys_and_values_go_to_their_slots_and_those_of_dead_rows_nowhere(kernels: Kernels) -> None:
    torch.manual_seed(0)
    key, value = torch.randn(2, 4, 3, 10).unbind()
    keys, values = torch.zeros(2, 32, 3, 10).unbind()
    kv = PagedKV(keys, values, torch.zeros(1, 1, dtype=torch.int32), 16)
    kernels.write_kv(key, value, kv, torch.tensor([17, -1, 0, 31]))
    for slot, token in ((17, 0), (0, 2), (31, 3)):
        assert torch.equal(keys[slot], key[token])
        assert torch.equal(values[slot], value[token])
        keys[slot], values[slot] = 0, 0
    assert not keys.any()
    assert not values.any()


def make_state(
    seq_lens: list[int], *, limits: list[int], eos: tuple[int, ...] = (), max_steps: int = 4
) -> DecodeState:
    rows = RowState.create(len(seq_lens))
    for row, seq_len in enumerate(seq_lens):
        rows.put(row, seq_len=seq_len, slot_mapping=99)
    state = DecodeState.create(
        rows, max_blocks=8, block_size=4, max_steps=max_steps, max_stops=len(eos) + 1
    )
    state.stop_token_ids[:, : len(eos)] = torch.tensor(eos, dtype=torch.int64)
    state.block_tables.copy_(torch.arange(len(seq_lens) * 8).view(-1, 8) + 10)
    state.limits.copy_(torch.tensor(limits))
    return state


def test_token_becomes_the_rows_next_input(kernels: Kernels) -> None:
    state = make_state([3, 8], limits=[30, 30])
    kernels.advance(torch.tensor([70, 71]), state)
    assert state.token_ids.tolist() == [70, 71]
    assert state.positions.tolist() == [3, 8]
    assert state.rows.seq_lens.tolist() == [4, 9]
    # Position 3 is the last of its row's first block, 8 the first of the other row's third.
    assert state.rows.slot_mapping.tolist() == [10 * 4 + 3, (18 + 2) * 4]
    assert state.drawn[:, 0].tolist() == [70, 71]
    assert state.num_drawn.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("token", "limit", "eos"),
    [(70, 4, ()), (70, 30, (1, 70)), (-1, 30, ())],
    ids=["at its limit", "end token", "scores that were no numbers"],
)
def test_row_that_is_done_stops_and_keeps_what_was_drawn(
    kernels: Kernels, token: int, limit: int, eos: tuple[int, ...]
) -> None:
    state = make_state([3, 3], limits=[limit, 30], eos=eos)
    kernels.advance(torch.tensor([token, 71]), state)
    kernels.advance(torch.tensor([60, 61]), state)
    assert state.rows.live.tolist() == [0, 1]
    assert state.rows.seq_lens.tolist() == [0, 5]
    assert state.rows.slot_mapping.tolist() == [-1, 18 * 4 + 4]
    assert state.drawn[1, :2].tolist() == [71, 61]
    num_drawn = int(token >= 0)
    assert state.num_drawn.tolist() == [num_drawn, 2]
    assert state.drawn[0, :num_drawn].tolist() == [token] * num_drawn


def test_more_steps_than_there_is_room_for_write_into_no_other_row(kernels: Kernels) -> None:
    state = make_state([3, 3], limits=[30, 30], max_steps=2)
    for step in range(4):
        kernels.advance(torch.tensor([70 + step, 80 + step]), state)
    assert state.drawn.tolist() == [[70, 71], [80, 81]]
    assert state.num_drawn.tolist() == [2, 2]


def test_rows_advance_as_the_references_do(kernels: Kernels, reference: Kernels) -> None:
    torch.manual_seed(0)
    seq_lens = torch.randint(1, 20, (33,)).tolist()
    limits = torch.randint(18, 30, (33,)).tolist()
    states = [make_state(seq_lens, limits=limits, eos=(5, 6), max_steps=6) for _ in range(2)]
    for _ in range(6):
        tokens = torch.randint(-1, 40, (33,))
        for each, state in zip((kernels, reference), states, strict=True):
            each.advance(tokens, state)
        for name in STATE:
            assert torch.equal(*(getattr(state, name) for state in states)), name
        for name in ROWS:
            assert torch.equal(*(getattr(state.rows, name) for state in states)), name
    assert 0 < int(states[0].rows.live.sum()) < 33
