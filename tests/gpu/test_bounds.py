"""B0 to B8: how fast a device lets go of a request, what that costs, and that it is never wrong.

Times are judged here and nowhere else in this suite: these bounds are what the design promises of
a GPU, on one that does nothing else meanwhile.
"""

import statistics

import pytest
import torch

from bench import gpu
from bench._device_loop import make_loop
from bench._device_neighbour import neighbour
from bench._device_serving import POLICIES, Served, make_arrivals, serve
from bench._device_soak import soak, soak_together
from bench._device_stop import prefill_times, stop_after_leave, stop_after_store
from bench._device_work import DecodeWork, ModelShape
from bench._harness import Report
from disconnect_watch import CancelToken
from disconnect_watch.kernels import FlagView

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

#: Of the host's spin and of launching the latch.
SLACK = 50e-6
SHAPE = ModelShape(4, 2048, 8192, 16, 4, 128, 32000)


def make_work(flags: FlagView, *, num_rows: int = 64, max_new_tokens: int = 66) -> DecodeWork:
    torch.manual_seed(0)
    return DecodeWork(
        SHAPE,
        flags,
        num_rows=num_rows,
        context=512,
        max_new_tokens=max_new_tokens,
        dtype=torch.bfloat16,
    )


def test_b0_look_over_the_bus_takes_microseconds(flags: FlagView) -> None:
    report = Report("b0", {})
    gpu._bus(report, flags, gpu.QUICK)
    medians = {row.name: row.median for row in report.rows}
    assert 0.1 <= medians["B0 load of a mapped word"] <= 5
    assert medians["B0 load of a device word"] < medians["B0 load of a mapped word"]


def test_b1_empty_loop_stops_at_once(flags: FlagView) -> None:
    samples, _ = stop_after_store(flags, step_seconds=0, num_trials=300)
    assert statistics.median(samples) <= SLACK


@pytest.mark.parametrize("step_ms", [0.1, 1, 5, 20])
def test_b1_row_is_dead_when_the_step_ends_in_which_its_flag_fired(
    flags: FlagView, step_ms: float
) -> None:
    samples, step = stop_after_store(flags, step_seconds=step_ms / 1e3, num_trials=300)
    assert statistics.median(samples) <= 0.55 * step + SLACK
    assert max(samples) <= 1.05 * step + SLACK


def test_b2_latch_and_loop_add_next_to_nothing_to_a_step(flags: FlagView) -> None:
    report = Report("b2", {})
    gpu._overhead(report, flags, gpu.QUICK)
    for ratio in report.ratios:
        assert ratio.low <= 1.002, str(ratio)


def test_b3_looks_cost_little_and_end_a_prefill_within_two_chunks(flags: FlagView) -> None:
    def times(poll_every: int) -> tuple[list[float], list[float]]:
        return prefill_times(
            flags,
            num_queries=1024,
            context=131_072,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            poll_every=poll_every,
            num_trials=20,
            dtype=torch.bfloat16,
        )

    (unpolled, _), (polled, stopped) = times(0), times(16)
    assert statistics.median(polled) <= 1.02 * statistics.median(unpolled)
    # Programs run in waves; each wave looks at its own entry, so what is left is one's chunks.
    num_chunks = 131_072 / (16 * 64)
    assert statistics.median(stopped) <= 2 * statistics.median(polled) / num_chunks + SLACK


def serve_by(flags: FlagView, name: str, share: float) -> tuple[Served, float]:
    """Serve by one policy; returns also the length of a step."""
    work = make_work(flags, max_new_tokens=258)
    loop = make_loop(work.step, work.rows, flags)
    try:
        samples = []
        loop.run_bare(10)
        for _ in range(5):
            start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            start.record()
            loop.run_bare(10)
            end.record()
            torch.cuda.synchronize()
            samples.append(start.elapsed_time(end) / 1e4)
        step = statistics.median(samples)
        for row in range(work.rows.num_rows):
            work.retire(row)
        policy = next(policy for policy in POLICIES if policy.name == name)
        arrivals = make_arrivals(256, share=share, num_tokens=256, mean_seconds=80 * step)
        return serve(work, loop, policy, arrivals), step
    finally:
        loop.close()


def test_b4_row_is_free_within_a_step_however_long_the_launch(flags: FlagView) -> None:
    served, step = serve_by(flags, "device, every 32 steps", 0.5)
    # The median: who leaves between two launches waits for the host; the longest is B1's.
    assert statistics.median(served.reusable_ms) / 1e3 <= step + 1e-3
    host, _ = serve_by(flags, "host, every 32 steps", 0.5)
    assert statistics.median(served.reusable_ms) < statistics.median(host.reusable_ms)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_b5_clients_that_stay_get_what_an_oracle_would_give_them(
    flags: FlagView, share: float
) -> None:
    ours, _ = serve_by(flags, "device, every 8 steps", share)
    oracle, _ = serve_by(flags, "oracle", share)
    assert ours.num_tokens / ours.seconds >= 0.95 * oracle.num_tokens / oracle.seconds


def test_b6_who_stays_is_unchanged_by_a_bit(flags: FlagView) -> None:
    drawn, logits = [], []
    for leaving in ((), range(0, 64, 2)):
        work = make_work(flags)
        loop = make_loop(work.step, work.rows, flags)
        tokens = [CancelToken() for _ in range(64)]
        for row, token in enumerate(tokens):
            work.put(row, num_tokens=64, token=token)
        for part in range(4):
            for row in list(leaving)[part::4]:
                tokens[row].cancel()
            loop.launch(8)
            loop.wait()
        drawn.append(work.state.drawn[1::2].cpu())
        logits.append(work.logits[1::2].cpu())
        loop.close()
    assert torch.equal(*drawn)
    assert torch.equal(*logits)


@pytest.mark.parametrize(
    "num_cancels", [20_000, pytest.param(1_000_000, marks=pytest.mark.exhaustive)]
)
def test_b7_no_cancel_is_lost_none_strikes_another_and_nobody_writes_after_his_ack(
    flags: FlagView, num_cancels: int
) -> None:
    work = make_work(flags, max_new_tokens=12)
    soaked = soak(work, num_cancels=num_cancels, steps_per_launch=6)
    assert soaked.num_cancels >= num_cancels
    assert (soaked.num_wrong, soaked.num_late_writes) == (0, 0)


def test_b7_holds_beside_a_neighbour_that_keeps_the_device_busy(
    flags: FlagView, device: torch.device
) -> None:
    work = make_work(flags, max_new_tokens=12)
    with neighbour(device):
        soaked = soak(work, num_cancels=5_000, steps_per_launch=6)
    assert (soaked.num_wrong, soaked.num_late_writes) == (0, 0)


def test_b7_holds_for_two_batches_on_streams_of_their_own(flags: FlagView) -> None:
    works = [make_work(flags, max_new_tokens=12) for _ in range(2)]
    for soaked in soak_together(works, num_cancels=5_000, steps_per_launch=6):
        assert soaked.num_cancels >= 5_000
        assert (soaked.num_wrong, soaked.num_late_writes) == (0, 0)


def test_b8_reset_stops_the_device_whatever_keeps_the_gil(flags: FlagView) -> None:
    def stops(by: str) -> list[float]:
        return stop_after_leave(flags, step_seconds=5e-3, num_trials=100, num_hogs=2, by=by)

    ours, theirs = stops("watcher"), stops("asyncio")
    assert statistics.median(ours) < statistics.median(theirs)
