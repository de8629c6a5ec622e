"""The kernels of a CPU: torch's, and the latch in C, where no row costs Python anything."""

from disconnect_watch.kernels.rows import FLAGS_PER_ROW, RowState
from disconnect_watch.kernels.torch_kernels import TorchKernels
from disconnect_watch.kernels.view import FlagView

__all__ = ["NativeKernels"]


class NativeKernels(TorchKernels):
    """See ``Kernels``; for rows in this machine's memory."""

    def latch(self, flags: FlagView, rows: RowState) -> None:
        """See ``Kernels.latch``."""
        if not rows.live.is_cpu:
            raise ValueError(f"rows are on {rows.live.device}: the latch in C needs them on a cpu")
        flags.table.latch(
            rows.num_rows,
            rows.slots.data_ptr(),
            rows.generations.data_ptr(),
            rows.live.data_ptr(),
            rows.seq_lens.data_ptr(),
            rows.slot_mapping.data_ptr(),
            rows.control.data_ptr(),
            FLAGS_PER_ROW,
        )
