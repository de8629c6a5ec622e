"""Cancel flags on a device: kernels that stop when a client leaves, in the middle of a step.

    flags = open_view("cuda")               the flag table, as a tensor that the device reads
    kernels = kernels_for("cuda")           Triton on a GPU, torch and C on a CPU
    rows = RowState.create(64, device="cuda")
    kernels.latch(flags, rows)              once a step: fired flags become dead rows

Needs torch, and on a GPU the ``gpu`` extra; ``probe`` names what a machine lacks.
"""

from disconnect_watch.kernels.backend import Backend, Support, kernels_for, probe, triton_device
from disconnect_watch.kernels.base import AttentionParams, Kernels, PagedKV, Sampling
from disconnect_watch.kernels.driver import DriverError, UnavailableError
from disconnect_watch.kernels.loop import StepLoop, make_loop
from disconnect_watch.kernels.rows import FLAGS_PER_ROW, Control, DecodeState, RowState
from disconnect_watch.kernels.view import FlagSource, FlagView, open_view

__all__ = [
    "FLAGS_PER_ROW",
    "AttentionParams",
    "Backend",
    "Control",
    "DecodeState",
    "DriverError",
    "FlagSource",
    "FlagView",
    "Kernels",
    "PagedKV",
    "RowState",
    "Sampling",
    "StepLoop",
    "Support",
    "UnavailableError",
    "kernels_for",
    "make_loop",
    "open_view",
    "probe",
    "triton_device",
]
