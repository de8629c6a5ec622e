"""A look at cancel tokens between the layers of any torch model.

    with cancel_between(model.layers, token):
        output = model(inputs)

Python can't stop a forward pass from outside, but a forward pre-hook that raises ends it
before the layer at hand. A kernel that runs on a device is not stopped: what was queued
there before the raise is computed to its end.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Any

from torch import nn

from disconnect_watch.token import CancelToken

__all__ = ["LayerLook", "cancel_between"]

#: What this context works for: groups, from the outermost ``with`` on. Hooks sit on a model,
#: which several threads may run at once; what a pass is for, only its context knows.
_groups: ContextVar[tuple[tuple[CancelToken, ...], ...]] = ContextVar("_groups", default=())


class LayerLook:
    """Has the layers of a model look at the tokens of whoever runs it.

    For a server, which makes one at its start: its requests then change nothing of the
    model, which several threads may run. ``cancel_between`` does for a single user.

    Threads: any may run the model; made and closed while none does.
    """

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        """Register a forward pre-hook with each module of ``layers``."""
        self._hooks = [
            # First, so that a hook that moves weights to the device need not for nothing.
            layer.register_forward_pre_hook(_look, prepend=True)
            for layer in layers
        ]

    @staticmethod
    @contextmanager
    def cancel_with(*tokens: CancelToken) -> Iterator[None]:
        """While in the block, a pass in this context ends once all of ``tokens`` have fired.

        Several tokens are those of a batch: who is still there is served.

        Raises:
            ClientDisconnected: out of the forward pass, before the next of the layers.
        """
        if not tokens:
            raise ValueError("cancel_with(): no token, give one for each request of the batch")
        before = _groups.set((*_groups.get(), tokens))
        try:
            yield
        finally:
            _groups.reset(before)

    def close(self) -> None:
        """Take the hooks off. Idempotent."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def __enter__(self) -> "LayerLook":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


@contextmanager
def cancel_between(layers: Iterable[nn.Module], *tokens: CancelToken) -> Iterator[None]:
    """While in the block, a forward pass ends before the next of ``layers`` once all tokens fired.

    The hooks are there for as long as the block, and are looked at by passes of this context
    alone: other threads may run the model meanwhile, but not enter or leave such a block of
    the same model, see ``LayerLook``.

    Raises:
        ClientDisconnected: out of the forward pass.
    """
    with LayerLook(layers) as look, look.cancel_with(*tokens):
        yield


def _look(module: nn.Module, args: tuple[Any, ...]) -> None:
    for tokens in _groups.get():
        if all(token.cancelled for token in tokens):
            tokens[0].raise_if_cancelled()
