"""From the store of a flag to the device's ack: how long what runs goes on."""

import asyncio
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

import disconnect_watch as dw
from bench._device_loop import DeviceLoop, make_loop
from bench._device_work import SpinWork
from disconnect_watch import CancelToken
from disconnect_watch.kernels import AttentionParams, FlagView, PagedKV, RowState, kernels_for

__all__ = ["prefill_times", "stop_after_leave", "stop_after_store"]

#: A loop that ends by a cancel alone.
MANY_STEPS = 1_000_000
GIVE_UP = 10.0


def spin_until_acked(token: CancelToken) -> int:
    """Returns when it was, ``time.monotonic_ns``.

    Raises:
        TimeoutError: it was not.
    """
    give_up = time.monotonic() + GIVE_UP
    while not token.acked:
        if time.monotonic() > give_up:
            raise TimeoutError(f"no ack within {GIVE_UP:g} seconds: does the device see the flags?")
    return time.monotonic_ns()


def stop_after_store(
    flags: FlagView, *, step_seconds: float, num_trials: int, seed: int = 0
) -> tuple[list[float], float]:
    """Cancel at a random time of a running loop, as often as asked for.

    Args:
        step_seconds: length of a step; 0 for a body that is empty but for the latch.

    Returns:
        Seconds from the store to the ack, and the length of a step. Both on the CPU's clock.
    """
    rng = random.Random(seed)
    work = SpinWork(flags.words.device, num_rows=1, step_seconds=step_seconds)
    loop = make_loop(work.step if step_seconds else None, work.rows, flags)
    samples = []
    try:
        for _ in range(num_trials):
            token = CancelToken()
            work.rows.put(0, seq_len=1, token=token)
            loop.launch(MANY_STEPS)
            time.sleep(rng.uniform(1, 3) * max(work.step_seconds, 2e-4))
            begin = time.monotonic_ns()
            token.cancel()
            samples.append((spin_until_acked(token) - begin) / 1e9)
            loop.wait()
    finally:
        loop.close()
    return samples, work.step_seconds


def stop_after_leave(
    flags: FlagView,
    *,
    step_seconds: float,
    num_trials: int,
    num_hogs: int,
    by: str,
) -> list[float]:
    """Have a TCP client reset its connection while a loop runs, with threads that hog the GIL.

    Args:
        by: ``watcher``, which sets the flag that the latch reads; or ``asyncio``, whose loop
            hears of it, tells the host, and the host ends the loop between two steps.

    Returns:
        Seconds from the client's close until no further step can begin.
    """
    work = SpinWork(flags.words.device, num_rows=1, step_seconds=step_seconds)
    loop = make_loop(work.step, work.rows, flags)
    trial = _leave_watched if by == "watcher" else _leave_heard
    try:
        with _hogs(num_hogs):
            return [trial(work, loop) for _ in range(num_trials)]
    finally:
        loop.close()


def _leave_watched(work: SpinWork, loop: DeviceLoop) -> float:
    client, server = _connect()
    token = CancelToken()
    work.rows.put(0, seq_len=1, token=token)
    connection = dw.attach(server)
    try:
        connection.arm(token)
        loop.launch(MANY_STEPS)
        time.sleep(2 * work.step_seconds)
        begin = time.monotonic_ns()
        client.close()
        end = spin_until_acked(token)
        loop.wait()
    finally:
        connection.detach()
        server.close()
    return (end - begin) / 1e9


def _leave_heard(work: SpinWork, loop: DeviceLoop) -> float:
    client, server = _connect()
    token = CancelToken()
    work.rows.put(0, seq_len=1)
    events = asyncio.new_event_loop()

    class Connection(asyncio.Protocol):
        def connection_lost(self, error: Exception | None) -> None:
            token.cancel()
            events.stop()

    async def serve() -> None:
        await events.connect_accepted_socket(Connection, server)

    def run() -> None:
        events.run_until_complete(serve())
        events.run_forever()
        events.close()

    thread = threading.Thread(target=run)
    thread.start()
    begin = 0
    num_steps = 0
    while not token.cancelled:
        loop.launch(1)
        if num_steps == 2:
            begin = time.monotonic_ns()
            client.close()
        loop.wait()
        num_steps += 1
    end = time.monotonic_ns()
    thread.join()
    return (end - begin) / 1e9


def _connect() -> tuple[socket.socket, socket.socket]:
    """A client whose close is a reset, and the server's end."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        server, _ = listener.accept()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    server.setblocking(False)
    return client, server


@contextmanager
def _hogs(num: int) -> Iterator[None]:
    """Threads that never wait and never let go of the GIL of their own accord."""
    is_over = False

    def hog() -> None:
        while not is_over:
            pass

    threads = [threading.Thread(target=hog) for _ in range(num)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over = True
        for thread in threads:
            thread.join()


def prefill_times(
    flags: FlagView,
    *,
    num_queries: int,
    context: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    poll_every: int,
    num_trials: int,
    dtype: torch.dtype,
) -> tuple[list[float], list[float]]:
    """Time a prefill's attention whole, and from a cancel in its middle to its end.

    Args:
        poll_every: tiles of keys between two looks; 0 for none.

    Returns:
        Seconds of whole runs, and seconds from the cancel to the end of the kernel.
    """
    device = flags.words.device
    num_blocks = -(-context // 16)
    shape = (num_blocks * 16, num_kv_heads, head_dim)
    kv = PagedKV(
        torch.randn(shape, dtype=dtype, device=device),
        torch.randn(shape, dtype=dtype, device=device),
        torch.arange(num_blocks, dtype=torch.int32, device=device)[None],
        16,
    )
    query = torch.randn(num_queries, num_heads, head_dim, dtype=dtype, device=device)
    starts = torch.tensor([0, num_queries], dtype=torch.int32, device=device)
    rows = RowState.create(1, device=device)
    kernels = kernels_for(device)
    params = AttentionParams(scale=head_dim**-0.5, poll_every=poll_every)
    wait: Callable[[], None] = torch.cuda.synchronize if device.type == "cuda" else lambda: None

    def run() -> None:
        kernels.prefill_attention(
            query,
            kv,
            rows,
            flags,
            query_starts=starts,
            max_query_len=num_queries,
            params=params,
        )

    whole, stopped = [], []
    for trial in range(num_trials + 1):
        token = CancelToken()
        rows.put(0, seq_len=context, token=token)
        wait()
        begin = time.perf_counter()
        run()
        wait()
        if trial:  # the first compiles
            whole.append(time.perf_counter() - begin)
    for _ in range(num_trials):
        token = CancelToken()
        rows.put(0, seq_len=context, token=token)
        wait()
        run()
        time.sleep(min(whole) / 3)
        begin = time.perf_counter()
        token.cancel()
        wait()
        stopped.append(time.perf_counter() - begin)
    return whole, stopped
