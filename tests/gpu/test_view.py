"""The flag table's pages under the eyes of a device."""

import torch

from bench._device_stop import prefill_times
from disconnect_watch import CancelToken, Reason
from disconnect_watch.kernels import FlagSource, FlagView, probe
from disconnect_watch.kernels import view as view_module
from disconnect_watch.token import flag_table


def test_pages_of_the_table_are_registered_and_seen_without_a_copy(
    flags: FlagView, device: torch.device
) -> None:
    assert flags.source is FlagSource.REGISTERED, flags.missing
    assert flags.words.device == device
    token = CancelToken()
    assert int(flags.words[token.slot]) == token.generation << 8
    token.cancel(Reason.FIN)
    assert int(flags.words[token.slot]) == token.generation << 8 | Reason.FIN.code


def test_ack_that_the_device_stores_is_the_tokens(flags: FlagView) -> None:
    token = CancelToken()
    flags.acks[token.slot] = 7
    torch.cuda.synchronize()
    assert token.acked == 7


def test_mirror_shows_a_cancel_where_registration_is_refused(device: torch.device) -> None:
    words, acks, close = view_module._mirror(flag_table(), device)
    view = FlagView(flag_table(), words, acks, source=FlagSource.MIRRORED, on_close=close)
    with view:
        token = CancelToken()
        token.cancel(Reason.FIN)
        fired = token.generation << 8 | Reason.FIN.code
        while int(words[token.slot]) != fired:  # the test's own time limit ends it
            pass
        acks[token.slot] = 9
        view.collect()
        assert token.acked == 9


def test_nothing_is_missing_here(device: torch.device) -> None:
    support = probe(device)
    assert support.has_while_graph
    assert support.missing == ()


def test_kernel_that_runs_sees_a_flag_fire(flags: FlagView) -> None:
    """Where it did not, the wait after the cancel would last two thirds of the kernel."""
    whole, stopped = prefill_times(
        flags,
        num_queries=1024,
        context=131_072,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        poll_every=16,
        num_trials=5,
        dtype=torch.bfloat16,
    )
    assert min(stopped) < min(whole) / 2
