"""The switch between implementations, and what a machine is said to lack."""

import subprocess
import sys

import pytest

from disconnect_watch.kernels import Backend, UnavailableError, kernels_for, probe
from disconnect_watch.kernels.backend import SWITCH
from disconnect_watch.kernels.native_kernels import NativeKernels
from disconnect_watch.kernels.rows import RowState
from disconnect_watch.kernels.torch_kernels import TorchKernels


def test_cpu_runs_torch_with_the_latch_in_c_and_no_graph() -> None:
    support = probe("cpu")
    assert (support.device, support.backend, support.has_while_graph) == (
        "cpu",
        Backend.NATIVE,
        False,
    )
    assert support.missing == ("device 'cpu' runs no CUDA graph: the host decides on every step",)
    assert type(kernels_for("cpu")) is NativeKernels


def test_environment_overrides_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "torch")
    assert probe("cpu").backend is Backend.TORCH
    assert type(kernels_for("cpu")) is TorchKernels
    monkeypatch.setenv(SWITCH, "cuda")
    with pytest.raises(ValueError, match="'cuda': must be one of triton, native, torch"):
        probe("cpu")


def test_kernels_of_a_cpu_are_refused_for_a_gpu() -> None:
    with pytest.raises(UnavailableError, match="'native' run on a cpu, not on 'cuda'"):
        kernels_for("cuda", backend=Backend.NATIVE)


def test_latch_in_c_refuses_rows_that_lie_elsewhere() -> None:
    rows = RowState.create(2, device="meta")
    with pytest.raises(ValueError, match="rows are on meta"):
        kernels_for("cpu").latch(None, rows)  # type: ignore[arg-type]


def run_python(script: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.mark.slow
def test_machine_without_triton_and_bindings_runs_and_is_told_what_it_lacks() -> None:
    """Nothing of theirs is imported before it is asked for."""
    script = (
        "import sys; sys.modules['triton'] = None\n"
        "from disconnect_watch.kernels import kernels_for, probe; kernels_for('cpu')\n"
        "sys.modules['cuda.bindings'] = None  # torch had it imported\n"
        "found = probe('cuda'); print(found.backend.value, *found.missing, sep='\\n')"
    )
    assert run_python(script).splitlines() == [
        "torch",
        "triton is not installed: pip install 'disconnect-watch[gpu]'",
        "cuda-bindings is not installed: pip install 'disconnect-watch[gpu]'",
    ]


@pytest.mark.slow
def test_compiled_kernels_are_refused_for_a_cpu() -> None:
    pytest.importorskip("triton")
    script = (
        "from disconnect_watch.kernels import *\n"
        "try: kernels_for('cpu', backend=Backend.TRITON)\n"
        "except UnavailableError as error: print(error)"
    )
    assert "TRITON_INTERPRET=1 is for a cpu" in run_python(script)
