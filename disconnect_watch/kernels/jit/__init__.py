"""The kernels in Triton: what is compiled for a device, or interpreted on a CPU.

Nothing here launches them; ``kernels.triton_kernels`` does.
"""

from triton import JITFunction

from disconnect_watch.kernels.jit.advance import advance
from disconnect_watch.kernels.jit.attention import decode_attention, merge_splits, prefill_attention
from disconnect_watch.kernels.jit.kv_write import write_kv
from disconnect_watch.kernels.jit.latch import latch
from disconnect_watch.kernels.jit.sampling import sample

__all__ = [
    "advance",
    "decode_attention",
    "is_interpreted",
    "latch",
    "merge_splits",
    "prefill_attention",
    "sample",
    "write_kv",
]

#: Decided by TRITON_INTERPRET when triton was first imported.
is_interpreted = not isinstance(latch, JITFunction)
