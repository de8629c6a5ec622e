"""Triton's kernels are interpreted in these tests, on tensors of the CPU.

What is compiled for a device (test_compiled.py) is compiled by a process of its own.
"""

from collections.abc import Iterator

import pytest
import torch

from disconnect_watch.kernels import Backend, FlagView, Kernels, kernels_for, open_view
from tests.support.interpreted import lack


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def flags() -> Iterator[FlagView]:
    with open_view() as view:
        yield view


@pytest.fixture
def reference() -> Kernels:
    return kernels_for(backend=Backend.TORCH)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """Triton's, in the interpreter."""
    if lack:
        pytest.skip(lack)
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # asked for again by what a launch imports
    return kernels_for(backend=Backend.TRITON)


@pytest.fixture(params=Backend)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """Each implementation."""
    if request.param is Backend.TRITON:
        interpreted: Kernels = request.getfixturevalue("interpreted")
        return interpreted
    return kernels_for(backend=request.param)
