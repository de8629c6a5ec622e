"""What computes a forward, chosen once when an engine is made, and what was lacking for another.

    native  the C of ``native.py``: float32, one thread, a CPU
    torch   operations of torch: whatever else
    triton  the kernels of ``disconnect_watch.kernels``, which look at flags while they run: a GPU,
            or a CPU that interprets them (TRITON_INTERPRET=1), which is for tests

``EngineConfig.arithmetic`` is the one switch.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from disconnect_watch.engine.config import EngineConfig
from disconnect_watch.engine.forward import Decoder, TorchDecoder
from disconnect_watch.engine.kernel_decoder import KernelDecoder, flags_on
from disconnect_watch.engine.kv_cache import KVCache
from disconnect_watch.engine.model import LlamaModel
from disconnect_watch.engine.native import INSTRUCTIONS, NativeDecoder
from disconnect_watch.engine.rotary import Rotary
from disconnect_watch.kernels import Backend, UnavailableError, kernels_for, probe, triton_device

__all__ = ["Arithmetic", "choose", "dtype_of"]


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """What was chosen.

    Attributes:
        kind: see the head of ``arithmetic.py``.
        name: the same, and what of this machine it uses.
        device: where weights and cache are.
        missing: a sentence for each thing that is lacking for a better one.
    """

    kind: Literal["native", "torch", "triton"]
    name: str
    device: torch.device
    missing: tuple[str, ...] = ()

    def make_decoder(
        self,
        model: LlamaModel,
        cache: KVCache,
        rotary: Rotary,
        *,
        config: EngineConfig,
        max_model_len: int,
    ) -> Decoder:
        """Return what computes the model, all of which is on ``device``."""
        if self.kind == "native":
            return NativeDecoder(model, cache, rotary, is_invariant=config.batch_invariant)
        if self.kind == "torch":
            return TorchDecoder(model, cache, rotary)
        return KernelDecoder(
            model,
            cache,
            rotary,
            kernels=kernels_for(self.device, backend=Backend.TRITON),
            flags=flags_on(self.device),
            # Room for what a launch draws: no row draws more than the model can read.
            max_steps=min(config.device_steps, max_model_len),
            max_blocks=-(-max_model_len // config.block_size),
        )


def choose(config: EngineConfig, model: LlamaModel) -> Arithmetic:
    """Choose what computes a model.

    Raises:
        ValueError: what was asked for cannot run it here; the message names what is missing.
    """
    if config.arithmetic == "triton":
        device = _triton_device()
        how = "interpreted on a cpu" if device.type == "cpu" else f"on {device}"
        support = probe(device)
        if config.device_steps > 1 and device.type != "cpu" and not support.has_while_graph:
            raise ValueError(
                f"device_steps is {config.device_steps}, which cannot run here: "
                f"{support.missing[-1]}"
            )
        missing = (*support.missing, *flags_on(device).missing)
        return Arithmetic("triton", f"triton, {how}", device, missing)
    cpu = torch.device("cpu")
    no_gpu = f"no GPU is used: {_reason_against_gpu(config)}"
    against = _reason_against_native(config, model)
    if against is None:
        return Arithmetic("native", f"native, {INSTRUCTIONS}", cpu, (no_gpu,))
    return Arithmetic("torch", "torch", cpu, (f"the decoder in C is not used: {against}", no_gpu))


def dtype_of(config: EngineConfig) -> torch.dtype:
    """Return the type of weights and cache.

    Raises:
        ValueError: as ``choose``.
    """
    if config.dtype != "auto":
        dtype: torch.dtype = getattr(torch, config.dtype)
        return dtype
    is_gpu = config.arithmetic == "triton" and _triton_device().type == "cuda"
    return torch.bfloat16 if is_gpu else torch.float32


def _triton_device() -> torch.device:
    try:
        return triton_device()
    except UnavailableError as error:
        raise ValueError(f"arithmetic is 'triton', which cannot run here: {error}") from None


def _reason_against_gpu(config: EngineConfig) -> str:
    # Triton itself is not asked: its import takes long, and decides how it runs.
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    return f"arithmetic is {config.arithmetic!r}, set it to 'triton'"


def _reason_against_native(config: EngineConfig, model: LlamaModel) -> str | None:
    """Return why torch computes this model, None if the C does; raises if it must and cannot."""
    reason = NativeDecoder.reason_against(model)
    if config.batch_invariant or config.arithmetic == "native":
        if reason:
            asked = "batch_invariant is set" if config.batch_invariant else "arithmetic is 'native'"
            raise ValueError(f"{asked}, which cannot run this model: {reason}")
        return None
    if config.arithmetic == "torch":
        return "arithmetic is 'torch'"
    if torch.get_num_threads() > 1:
        return f"torch uses {torch.get_num_threads()} threads, it one"
    return reason
