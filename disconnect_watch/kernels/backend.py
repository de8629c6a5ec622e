"""The one switch: which implementation of the kernels runs on a device, and what is lacking there.

    triton  on a GPU; on a CPU in Triton's interpreter alone (TRITON_INTERPRET=1)
    native  on a CPU: torch, and the latch in C
    torch   anywhere: the reference

``DISCONNECT_WATCH_KERNELS`` names one of them against the default.
"""

import os
from dataclasses import dataclass
from enum import StrEnum

import torch

from disconnect_watch.kernels.base import Kernels
from disconnect_watch.kernels.driver import UnavailableError, load_driver
from disconnect_watch.kernels.native_kernels import NativeKernels
from disconnect_watch.kernels.torch_kernels import TorchKernels

__all__ = ["Backend", "Support", "kernels_for", "probe", "triton_device"]

SWITCH = "DISCONNECT_WATCH_KERNELS"
#: Of the driver API: conditional nodes in graphs came with CUDA 12.4.
MIN_DRIVER_VERSION = 12040
NO_TRITON = "triton is not installed: pip install 'disconnect-watch[gpu]'"


class Backend(StrEnum):
    """An implementation of the kernels; see the head of ``backend.py``."""

    TRITON = "triton"
    NATIVE = "native"
    TORCH = "torch"


@dataclass(frozen=True, slots=True)
class Support:
    """What a device has for cancelling inside a step.

    Attributes:
        device: asked about.
        backend: that ``kernels_for`` takes there.
        has_while_graph: whether several steps can run without the host.
        missing: a sentence for each thing that is lacking; for the log, at start.
    """

    device: str
    backend: Backend
    has_while_graph: bool
    missing: tuple[str, ...]


def kernels_for(device: torch.device | str = "cpu", *, backend: Backend | None = None) -> Kernels:
    """Return the implementation that runs on a device.

    Args:
        device: where the tensors are.
        backend: None takes what ``probe`` names.

    Raises:
        UnavailableError: the backend that was asked for cannot run there.
        ValueError: the environment names no backend.
    """
    device = torch.device(device)
    chosen = _choose(device)[0] if backend is None else backend
    if chosen is Backend.NATIVE and device.type != "cpu":
        raise UnavailableError(f"kernels {chosen.value!r} run on a cpu, not on {str(device)!r}")
    if chosen is Backend.TORCH:
        return TorchKernels()
    if chosen is Backend.NATIVE:
        return NativeKernels()
    if lack := _lack_of_triton(device):
        raise UnavailableError(lack)
    from disconnect_watch.kernels.triton_kernels import TritonKernels

    return TritonKernels()


def triton_device() -> torch.device:
    """Return where Triton's kernels run in this process: a GPU; a CPU if they are interpreted.

    Imports triton, which decides between the two.

    Raises:
        UnavailableError: triton is not installed, or it compiles and there is no GPU.
    """
    try:
        from disconnect_watch.kernels.jit import is_interpreted
    except ImportError:
        raise UnavailableError(NO_TRITON) from None
    if is_interpreted:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UnavailableError(
            "torch finds no CUDA device, and without TRITON_INTERPRET=1, which is for tests, "
            "triton's kernels run on nothing else"
        )
    return torch.device("cuda", torch.cuda.current_device())


def probe(device: torch.device | str = "cpu") -> Support:
    """Find out what a device has; nothing is registered or compiled.

    Raises:
        ValueError: the environment names no backend.
    """
    device = torch.device(device)
    backend, missing = _choose(device)
    lack_of_graph = _lack_of_graph(device)
    return Support(
        device=str(device),
        backend=backend,
        has_while_graph=lack_of_graph is None,
        missing=missing if lack_of_graph is None else (*missing, lack_of_graph),
    )


def _choose(device: torch.device) -> tuple[Backend, tuple[str, ...]]:
    if asked := os.environ.get(SWITCH):
        try:
            return Backend(asked), ()
        except ValueError:
            names = ", ".join(Backend)
            raise ValueError(f"{SWITCH}={asked!r}: must be one of {names}") from None
    if device.type == "cpu":
        return Backend.NATIVE, ()
    if lack := _lack_of_triton(device):
        return Backend.TORCH, (lack,)
    return Backend.TRITON, ()


def _lack_of_triton(device: torch.device) -> str | None:
    try:
        from disconnect_watch.kernels.jit import is_interpreted
    except ImportError:
        return NO_TRITON
    if is_interpreted != (device.type == "cpu"):
        return (
            f"triton {'interprets' if is_interpreted else 'compiles'} in this process, "
            f"so its kernels do not run on {str(device)!r}: TRITON_INTERPRET=1 is for a cpu"
        )
    return None


def _lack_of_graph(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"device {str(device)!r} runs no CUDA graph: the host decides on every step"
    try:
        driver = load_driver()
    except UnavailableError as error:
        return str(error)
    _, version = driver.cuDriverGetVersion()
    if version < MIN_DRIVER_VERSION:
        return f"the CUDA driver is of {version}, and loops in graphs need {MIN_DRIVER_VERSION}"
    return None
