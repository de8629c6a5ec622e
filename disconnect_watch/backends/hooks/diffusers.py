"""A cancel token for the pipelines of diffusers.

    pipeline(prompt, callback_on_step_end=on_step_end(token))

A pipeline's own way to stop, ``pipeline._interrupt``, skips the steps that are left and
still decodes the latents, and returns an image that nobody asked for. This raises.
"""

from collections.abc import Callable
from typing import Any

from disconnect_watch.token import CancelToken

__all__ = ["on_step_end"]

_OnStepEnd = Callable[[Any, int, Any, dict[str, Any]], dict[str, Any]]


def on_step_end(token: CancelToken, after: _OnStepEnd | None = None) -> _OnStepEnd:
    """A ``callback_on_step_end`` that ends the pipeline after the step in which the token fired.

    Args:
        after: another callback, called where the token has not fired.

    Raises:
        ClientDisconnected: out of the pipeline, whose offloaded models are off the device
            again as after any call.
    """

    def look(pipeline: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if token.cancelled:
            pipeline.maybe_free_model_hooks()
            token.raise_if_cancelled()
        return tensors if after is None else after(pipeline, step, timestep, tensors)

    return look
