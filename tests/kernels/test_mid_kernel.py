"""A flag that fires while a kernel runs, set by another thread: the kernel stops in the middle."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from disconnect_watch import CancelToken
from disconnect_watch.kernels import AttentionParams, FlagView, Kernels
from disconnect_watch.kernels.base import DECODE_SPLIT, KEY_TILE
from tests.kernels.batch import Batch, paged
from tests.support.net import wait_until

#: So many keys that the interpreter would be at it for seconds.
NUM_TILES = 1000
PARAMS = AttentionParams(scale=0.2, poll_every=4)


@contextmanager
def cancelled_after(progress: Tensor, num_tiles: int, token: CancelToken) -> Iterator[None]:
    """A thread that cancels as soon as a kernel has worked on so many tiles of keys."""
    is_over = threading.Event()

    def run() -> None:
        wait_until(lambda: bool(progress.sum() >= num_tiles) or is_over.is_set())
        token.cancel()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@pytest.fixture(params=["decode", "prefill"])
def attend(
    request: pytest.FixtureRequest, interpreted: Kernels, flags: FlagView
) -> tuple[Batch, Tensor, Callable[[], Tensor]]:
    torch.manual_seed(0)
    seq_len = NUM_TILES * KEY_TILE
    batch = Batch.of([seq_len])
    kv = paged([seq_len], num_kv_heads=1, head_dim=16, block_size=64)
    query = torch.randn(1, 1, 16)
    if request.param == "decode":
        progress = torch.zeros(1, 1, NUM_TILES * KEY_TILE // DECODE_SPLIT + 1, dtype=torch.int32)
        return (
            batch,
            progress,
            lambda: interpreted.decode_attention(
                query, kv, batch.rows, flags, params=PARAMS, progress=progress
            ),
        )
    progress = torch.zeros(1, 1, 1, dtype=torch.int32)
    return (
        batch,
        progress,
        lambda: interpreted.prefill_attention(
            query,
            kv,
            batch.rows,
            flags,
            query_starts=torch.tensor([0, 1], dtype=torch.int32),
            max_query_len=1,
            params=PARAMS,
            progress=progress,
        ),
    )


@pytest.mark.slow
@pytest.mark.parametrize("own", [False, True], ids=["the client's", "the request's own"])
def test_flag_stops_a_kernel_that_runs(
    attend: tuple[Batch, Tensor, Callable[[], Tensor]], own: bool
) -> None:
    batch, progress, run = attend
    flag = batch.tokens[0]
    if own:
        flag = CancelToken()
        seq_len = NUM_TILES * KEY_TILE
        batch.rows.put(0, seq_len=seq_len, token=batch.tokens[0], mark=flag)
    # By then the first splits of a decode are through, and must count for nothing.
    with cancelled_after(progress, 40, flag):
        output = run()
    num_tiles = int(progress.sum())
    assert 40 <= num_tiles < NUM_TILES
    assert num_tiles % PARAMS.poll_every == 0, "it stopped between two looks"
    assert not output.any()
