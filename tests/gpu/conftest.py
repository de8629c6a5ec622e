"""Tests that only a GPU can run: `python -m pytest tests/gpu`, by itself.

What was shown before on a CPU (the same kernels interpreted, the graph on a fake driver) is shown
here of the device; and the bounds B0 to B8 are measured and held.
"""

from collections.abc import Iterator

import pytest
import torch

from disconnect_watch.kernels import Backend, FlagView, Kernels, kernels_for, open_view


@pytest.fixture(autouse=True)
def leak_guard() -> None:
    """None here: a driver opens files and starts threads when it likes, and keeps them."""


@pytest.fixture(scope="session")
def device() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    jit = pytest.importorskip("disconnect_watch.kernels.jit", reason="triton is not installed")
    if jit.is_interpreted:
        pytest.skip("kernels are interpreted in this process: run tests/gpu by itself")
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(scope="session")
def flags(device: torch.device) -> Iterator[FlagView]:
    """One view for all: pages are registered once."""
    with open_view(device) as view:
        yield view


@pytest.fixture(scope="session")
def kernels(device: torch.device) -> Kernels:
    return kernels_for(device)


@pytest.fixture
def reference() -> Kernels:
    return kernels_for("cpu", backend=Backend.TORCH)
