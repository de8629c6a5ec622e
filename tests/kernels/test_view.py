"""The flag table as tensors: the table's own memory on a CPU, copies where a device needs them."""

import gc
import os
from functools import partial

import pytest
import torch

from disconnect_watch import CancelToken, Reason
from disconnect_watch._core import Flags
from disconnect_watch.kernels import FlagSource, FlagView, UnavailableError, open_view
from disconnect_watch.kernels import view as view_module
from disconnect_watch.kernels.view import Mirror, device_tensor
from disconnect_watch.token import flag_table
from tests.support.net import wait_until


def test_word_of_a_token_is_seen_as_it_is_set(flags: FlagView) -> None:
    token = CancelToken()
    assert int(flags.words[token.slot]) == token.generation << 8
    token.cancel(Reason.DEADLINE)
    assert int(flags.words[token.slot]) == token.generation << 8 | Reason.DEADLINE.code
    assert flags.words.data_ptr() + 4 * token.slot == token.address


def test_ack_that_is_stored_is_the_tokens(flags: FlagView) -> None:
    token, other = CancelToken(), CancelToken()
    flags.acks[token.slot] = 41
    assert (token.acked, other.acked) == (41, 0)


def test_cpu_shares_the_tables_memory_and_lacks_nothing(flags: FlagView) -> None:
    assert (flags.source, flags.is_live, flags.missing) == (FlagSource.SHARED, True, ())
    assert flags.words.shape == flags.acks.shape == (flags.table.num_slots,)


def test_tensor_keeps_the_table_that_it_shows() -> None:
    table = Flags()
    memfd = table.fileno()
    words = open_view(table=table).words
    del table
    gc.collect()
    os.fstat(memfd)
    assert int(words[0]) == 0
    del words
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(memfd)


def test_device_that_is_neither_is_refused() -> None:
    with pytest.raises(ValueError, match="'meta': flags can be seen by a cpu or a cuda device"):
        open_view("meta")


def test_mirror_follows_every_cancel_until_it_is_closed() -> None:
    words = torch.zeros(flag_table().num_slots, dtype=torch.int32)
    mirror = Mirror(flag_table(), words)
    tokens = [CancelToken() for _ in range(50)]
    for token in tokens:
        token.cancel(Reason.FIN)
        fired = token.generation << 8 | Reason.FIN.code
        wait_until(partial(lambda slot, word: int(words[slot]) == word, token.slot, fired))
    mirror.close()
    late = CancelToken()
    late.cancel()
    assert int(words[late.slot]) & 0xFF == 0


def test_polled_copy_is_as_old_as_its_last_refresh_and_gives_its_acks_back() -> None:
    words, acks = (torch.zeros(flag_table().num_slots, dtype=torch.int32) for _ in range(2))
    view = FlagView(flag_table(), words, acks, source=FlagSource.POLLED)
    assert not view.is_live
    token = CancelToken()
    view.refresh()
    token.cancel(Reason.FIN)
    assert int(view.words[token.slot]) & 0xFF == 0
    view.refresh()
    assert int(view.words[token.slot]) & 0xFF == Reason.FIN.code
    view.acks[token.slot] = 7
    view.collect()
    assert token.acked == 7
    assert not view.acks.any()


def test_cuda_takes_the_best_way_that_is_open_and_names_why_not_the_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The ways themselves need a device; what they raise on machines like this one does not."""
    closed: list[str] = []

    def refuse(table: Flags, device: torch.device) -> view_module.Opened:
        raise UnavailableError("no such pages")

    def take(table: Flags, device: torch.device) -> view_module.Opened:
        words = torch.zeros(4, dtype=torch.int32)
        return words, torch.zeros_like(words), lambda: closed.append("closed")

    monkeypatch.setattr(view_module, "_register", refuse)
    monkeypatch.setattr(view_module, "_mirror", take)
    with open_view("cuda") as view:
        assert view.source is FlagSource.MIRRORED
        assert view.missing == ("registered: no such pages",)
        assert caplog.messages == ["flags on cuda are not registered: no such pages"]
        assert view.is_live
    view.close()
    assert closed == ["closed"]

    monkeypatch.setattr(view_module, "_register", take)
    assert open_view("cuda").source is FlagSource.REGISTERED


def test_copy_where_a_view_was_meant_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch makes one for a device that was not current when the pages were registered."""
    table, device = flag_table(), torch.device("cuda")
    copy = torch.zeros(4, dtype=torch.int32)
    monkeypatch.setattr(torch, "as_tensor", lambda memory, device: copy)
    with pytest.raises(UnavailableError, match="torch copied the flags to 0x"):
        device_tensor(table.words_address, 4, device=device, owner=table)
    seen = device_tensor(copy.data_ptr(), 4, device=device, owner=table)
    assert seen is copy
