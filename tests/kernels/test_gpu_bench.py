"""The GPU's benchmark where there is none: every line but the bus's runs, and no time is judged."""

import pytest
import torch

from bench import gpu
from bench._device_neighbour import neighbour
from bench._device_serving import POLICIES
from bench._device_soak import soak, soak_together
from bench._device_work import TINY, DecodeWork
from disconnect_watch import CancelToken
from disconnect_watch.kernels import FlagView

pytestmark = pytest.mark.slow


@pytest.mark.filterwarnings("error")
@pytest.mark.usefixtures("interpreted")
def test_benchmark_runs_on_a_cpu_and_says_that_this_was_none() -> None:
    report = gpu.run(gpu.DRY, device="cpu")
    assert "device: no GPU: no results; flags: shared; kernels: native" in report.notes
    names = [row.name for row in report.rows]
    for section in ("B1", "B2", "B3", "B4", "B5", "B8"):
        assert [name for name in names if name.startswith(section)], section
    for policy in POLICIES:
        assert f"B5 {policy.name}, 50% leave, context 16, 2 rows" in names
        assert f"B5 between two tokens: {policy.name}, 50% leave, context 16, 2 rows" in names
        assert f"B5 {policy.name}, 50% leave, context 16, 2 rows, no refill" in names
    for steps in gpu.DRY.device_steps:
        assert f"engine, {steps} steps a launch" in names
        assert f"engine, {steps} steps a launch, wasted a leave" in names
    assert "B1 store to ack, an empty body" in names
    assert [name for name in names if name.startswith("B4 time beyond the oracle's, a leave: ")]


def test_a_long_context_gets_as_many_rows_as_fit() -> None:
    assert [gpu.rows_for(gpu.FULL, context) for context in gpu.FULL.contexts] == [64, 64, 19]
    assert gpu.rows_for(gpu.FULL, 10**9) == 1


def test_command_refuses_a_machine_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="no CUDA device here"):
        gpu.main()


def make_work(flags: FlagView) -> DecodeWork:
    return DecodeWork(TINY, flags, num_rows=4, context=17, max_new_tokens=10)


def test_soak_finds_nothing_wrong_with_the_latch_in_c(flags: FlagView) -> None:
    soaked = soak(make_work(flags), num_cancels=200, steps_per_launch=4)
    assert soaked.num_cancels >= 200
    assert (soaked.num_wrong, soaked.num_late_writes) == (0, 0)


def test_soak_finds_nothing_wrong_beside_a_neighbour_that_keeps_the_device_busy(
    flags: FlagView,
) -> None:
    with neighbour(torch.device("cpu")):
        soaked = soak(make_work(flags), num_cancels=40, steps_per_launch=4)
    assert (soaked.num_wrong, soaked.num_late_writes) == (0, 0)


def test_a_neighbour_that_does_not_begin_is_told() -> None:
    with (
        pytest.raises(RuntimeError, match="no neighbour on meta: it ended with 1"),
        neighbour(torch.device("meta")),
    ):
        pass


def test_soak_finds_nothing_wrong_with_two_batches_at_once(flags: FlagView) -> None:
    works = [make_work(flags), make_work(flags)]
    for soaked in soak_together(works, num_cancels=40, steps_per_launch=4):
        assert soaked.num_cancels >= 40
        assert (soaked.num_wrong, soaked.num_late_writes) == (0, 0)


def test_soak_sees_a_cancel_that_strikes_nobody_and_a_late_write(
    flags: FlagView, monkeypatch: pytest.MonkeyPatch
) -> None:
    deaf = make_work(flags)
    whole = deaf.put

    def put(row: int, *, num_tokens: int, token: CancelToken | None) -> None:
        whole(row, num_tokens=num_tokens, token=None if row == 2 else token)

    monkeypatch.setattr(deaf, "put", put)
    soaked = soak(deaf, num_cancels=40, steps_per_launch=4)
    assert soaked.num_wrong > 0
    assert soaked.num_late_writes > 0
