"""How a layer's attention is asked of the kernels of ``disconnect_watch.kernels``."""

from disconnect_watch.engine.attend import AttentionRule
from disconnect_watch.kernels import AttentionParams

__all__ = ["POLL_EVERY", "attention_params"]

#: Tiles of keys between two looks of attention at a flag; see ``docs/kernels.md``.
POLL_EVERY = 16


def attention_params(rule: AttentionRule, head_dim: int) -> AttentionParams:
    """Return a layer's rule in the words of the kernels."""
    return AttentionParams(
        scale=head_dim**-0.5 if rule.scale is None else rule.scale,
        window=rule.window,
        softcap=rule.softcap,
        poll_every=POLL_EVERY,
    )
