"""Random cancels by the million: nothing hangs, nobody dies of another's flag, no late write."""

import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from bench._device_loop import DeviceLoop, make_loop
from bench._device_work import BLOCK_SIZE, DecodeWork
from disconnect_watch import CancelToken

__all__ = ["Soaked", "soak", "soak_together"]


@dataclass(slots=True)
class Soaked:
    """What was seen.

    Attributes:
        num_cancels: made, before, during and after loops.
        num_wrong: rows that died though nobody cancelled them, or lived on.
        num_late_writes: rows whose memory changed after their ack.
    """

    num_cancels: int = 0
    num_wrong: int = 0
    num_late_writes: int = 0


def soak(work: DecodeWork, *, num_cancels: int, steps_per_launch: int, seed: int = 0) -> Soaked:
    """Give rows to new requests over and over, and cancel them whenever.

    Half of the rows of each round are cancelled: before the launch, while it runs, or so late
    that it may be over. A token of each slot's tenant before is cancelled as well, which must
    touch nobody. Behind each ack a canary is laid into the row's next slot.
    """
    loop = make_loop(work.step, work.rows, work.flags)
    try:
        return _soak(work, loop, num_cancels, steps_per_launch, random.Random(seed))
    finally:
        loop.close()


def soak_together(
    works: list[DecodeWork], *, num_cancels: int, steps_per_launch: int, seed: int = 0
) -> list[Soaked]:
    """Soak several batches at once, each on a stream and a thread of its own."""
    # Captured first, one by one: nothing else may use the device meanwhile.
    loops = [make_loop(work.step, work.rows, work.flags) for work in works]

    def run(index: int) -> Soaked:
        with _stream(works[index]):
            return _soak(
                works[index],
                loops[index],
                num_cancels,
                steps_per_launch,
                random.Random(seed + index),
            )

    try:
        with ThreadPoolExecutor(len(works)) as pool:
            return list(pool.map(run, range(len(works))))
    finally:
        for loop in loops:
            loop.close()


def _stream(work: DecodeWork) -> AbstractContextManager[object]:
    if not work.rows.live.is_cuda:
        return nullcontext()
    return torch.cuda.stream(torch.cuda.Stream())  # type: ignore[no-untyped-call]


def _soak(
    work: DecodeWork, loop: DeviceLoop, num_cancels: int, steps_per_launch: int, rng: random.Random
) -> Soaked:
    num_rows = work.rows.num_rows
    soaked = Soaked()
    while soaked.num_cancels < num_cancels:
        tokens = [CancelToken() for _ in range(num_rows)]
        for row, token in enumerate(tokens):
            work.put(row, num_tokens=work.max_new_tokens, token=token)
        doomed = [row for row in range(num_rows) if rng.random() < 0.5]
        early = doomed[: len(doomed) // 3]
        for row in early:
            tokens[row].cancel()
        loop.launch(steps_per_launch)
        for row in doomed[len(early) :]:
            tokens[row].cancel()
        loop.wait()
        soaked.num_cancels += len(doomed)

        # What was too late for this launch is seen by the next one's first latch.
        loop.launch(0)
        loop.wait()
        alive = work.rows.live.tolist()
        for row, token in enumerate(tokens):
            is_dead = row in doomed
            soaked.num_wrong += bool(alive[row]) == is_dead or bool(token.acked) != is_dead
        soaked.num_late_writes += _late_writes(work, loop, doomed)
    return soaked


def _late_writes(work: DecodeWork, loop: DeviceLoop, doomed: list[int]) -> int:
    """Lay canaries into all memory of dead rows, run a step, and count those that are gone."""
    keys = work.kv.keys
    blocks = work.state.block_tables[doomed].long()
    slots = (
        blocks[:, :, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE, device=keys.device)
    ).flatten()
    kept = keys[slots]
    keys[slots] = torch.nan
    loop.launch(1)
    loop.wait()
    num_gone = int((~keys[slots].isnan()).flatten(1).any(-1).sum())
    keys[slots] = kept
    return num_gone
