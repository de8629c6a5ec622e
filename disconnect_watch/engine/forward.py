"""One pass of a batch through the model, a layer at a time, so that the caller may look between.

There are two ways to compute it, which differ in rounding and in speed: operations of torch, here,
and the C of ``native.py``.
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from disconnect_watch.engine.batch import PackedBatch
from disconnect_watch.engine.model import LlamaModel
from disconnect_watch.engine.rotary import Rotary

__all__ = ["Decoder", "Forward", "TorchDecoder"]


class Forward(Protocol):
    """The hidden states of one batch on their way through the layers."""

    def layer(self, index: int) -> bool:
        """Compute one layer; they come in order, each once.

        Returns:
            False if it was left in its middle, as nobody wants the rows any more: then this ends.
        """

    def logits(self, indices: Sequence[int]) -> Tensor:
        """Return the scores of what follows the tokens at those indices, after the last layer.

        Returns:
            [num_indices, vocab_size], in the model's dtype.
        """


class Decoder(Protocol):
    """A model, ready to run batches."""

    @property
    def is_native(self) -> bool:
        """Whether batches are to be packed for the C of ``native.py``."""

    def begin(self, batch: PackedBatch) -> Forward:
        """Look up the tokens of a batch; nothing else is computed yet."""


class TorchDecoder:
    """A model by operations of torch: any dtype, any number of threads.

    Args:
        model: weights, in eval mode.
        rotary: of the positions that can occur.
    """

    is_native = False

    def __init__(self, model: LlamaModel, rotary: Rotary) -> None:
        self._model = model
        self._rotary = rotary

    def begin(self, batch: PackedBatch) -> Forward:
        """See ``Decoder``."""
        return _TorchForward(self._model, self._rotary, batch)


class _TorchForward:
    def __init__(self, model: LlamaModel, rotary: Rotary, batch: PackedBatch) -> None:
        self._model = model
        self._rotary = rotary
        self._batch = batch
        self._hidden: Tensor = model.embed_tokens(batch.token_ids)
        self._rope = rotary(batch.positions)

    def layer(self, index: int) -> bool:
        self._hidden = self._model.layers[index](self._hidden, self._rope, self._batch.attention)
        return True

    def logits(self, indices: Sequence[int]) -> Tensor:
        return self._model.logits(self._hidden[list(indices)])
