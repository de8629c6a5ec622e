"""How the engine runs a model, from the user."""

from dataclasses import dataclass
from typing import Literal

__all__ = ["EngineConfig"]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How one engine runs its model. Every limit is checked when the engine is made.

    Args:
        block_size: tokens in one block of the KV cache.
        num_blocks: blocks in the cache; None takes what ``kv_cache_bytes`` allows, and no more
            than ``max_num_seqs`` requests of full length could fill.
        kv_cache_bytes: memory budget of the cache when ``num_blocks`` is None.
        max_num_seqs: requests that run at the same time.
        max_num_batched_tokens: tokens in one step, which is also the longest prefill chunk; at
            least ``max_num_seqs``, so that every running request advances in each step.
        max_queue: requests that may wait.
        enable_prefix_caching: keep full blocks of what was computed, cancelled requests
            included, until the space is needed, and share them between requests that begin alike.
        max_model_len: tokens of prompt and answer together; None takes the model's own limit, or
            less where the cache is smaller than that.
        dtype: of weights and cache: ``"auto"`` is float32, the fastest on a CPU whatever the
            checkpoint has, and bfloat16 on a GPU.
        num_threads: of torch within one operation; None takes one for a model of fewer than
            ``SMALL_MODEL`` parameters and leaves torch's setting alone for others. The setting is
            the process's, not the engine's.
        arithmetic: what computes a forward: ``"native"``, the C of this package, for float32 and
            one thread on a CPU; ``"torch"``, on a CPU; ``"auto"`` takes the first of the two where
            it fits; ``"triton"``, the kernels of ``disconnect_watch.kernels`` on a GPU, or on a CPU
            with ``TRITON_INTERPRET=1``, for tests.
        batch_invariant: let the bits of a token's scores depend on the text before it alone, not on
            who else is in the batch, how the prompt was cut into chunks, or what of it was cached.
            Needs ``"native"`` arithmetic; long prompts take longer.
        device_steps: tokens that a step may draw for each request without the host, where all that
            run decode: a GPU loops over that many by itself, and looks at the flags between any
            two; they are told together. Needs ``"triton"`` arithmetic.
        step_log_size: how many of the last steps ``Engine.step_log`` remembers.
    """

    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_bytes: int = 256 << 20
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_queue: int = 1024
    enable_prefix_caching: bool = True
    max_model_len: int | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    num_threads: int | None = None
    arithmetic: Literal["auto", "native", "torch", "triton"] = "auto"
    batch_invariant: bool = False
    device_steps: int = 1
    step_log_size: int = 4096

    def __post_init__(self) -> None:
        for name in (
            "block_size",
            "num_blocks",
            "kv_cache_bytes",
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_queue",
            "num_threads",
            "device_steps",
            "step_log_size",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}, it must be at least 1")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ValueError(f"max_model_len is {self.max_model_len}, it must be at least 2")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, it must be at least "
                f"max_num_seqs ({self.max_num_seqs})"
            )
        if self.dtype not in ("auto", "float32", "bfloat16", "float16"):
            raise ValueError(
                f"dtype is {self.dtype!r}, it must be auto, float32, bfloat16 or float16"
            )
        if self.arithmetic not in ("auto", "native", "torch", "triton"):
            raise ValueError(
                f"arithmetic is {self.arithmetic!r}, it must be auto, native, torch or triton"
            )
        if self.device_steps > 1 and self.arithmetic != "triton":
            raise ValueError(
                f"device_steps is {self.device_steps}, which needs arithmetic 'triton', not "
                f"{self.arithmetic!r}"
            )
        if self.batch_invariant and self.arithmetic not in ("auto", "native"):
            raise ValueError(
                f"batch_invariant needs arithmetic 'native' or 'auto', not {self.arithmetic!r}"
            )
