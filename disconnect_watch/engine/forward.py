"""One pass of a batch through the model, a layer at a time, so that the caller may look between.

There are three ways to compute it, which differ in rounding and in speed: operations of torch,
here; the C of ``native.py``; and the kernels of ``kernels``, in ``kernel_decoder.py``.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from disconnect_watch.engine.batch import PackedBatch, TokenBatch
from disconnect_watch.engine.kv_cache import KVCache
from disconnect_watch.engine.model import DecoderLayer, LlamaModel
from disconnect_watch.engine.outcome import Drawn
from disconnect_watch.engine.request import Request
from disconnect_watch.engine.rotary import Rotary
from disconnect_watch.engine.sampler import sample
from disconnect_watch.engine.schedule import ScheduledRow

__all__ = ["Decoder", "Forward", "LoopDecoder", "TorchDecoder"]


class Forward(Protocol):
    """The hidden states of one batch on their way through the layers."""

    @property
    def batch(self) -> TokenBatch:
        """What is computed."""

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
    """A model and its cache, ready to run batches.

    Attributes:
        model: weights, in eval mode.
        cache: where keys and values lie.
    """

    model: LlamaModel
    cache: KVCache

    def begin(self, rows: Sequence[ScheduledRow], *, step: int) -> Forward:
        """Pack rows and look up their tokens; nothing else is computed yet.

        Args:
            rows: at least one.
            step: number of the step that they belong to.
        """

    def sample(self, logits: Tensor, requests: Sequence[Request]) -> list[int | None]:
        """Choose the next token of each request; see ``sampler.sample``."""

    def wait(self) -> None:
        """Return when nothing runs any more of what was begun."""


@runtime_checkable
class LoopDecoder(Decoder, Protocol):
    """One that computes several steps without the host between them."""

    def decode(
        self, rows: Sequence[ScheduledRow], *, step: int, look: Callable[[], None]
    ) -> list[Drawn]:
        """Compute rows of one token each, and go on as far as ``num_draws`` allows.

        Args:
            rows: at least one; each is sampled.
            step: number of the step that they belong to.
            look: called from time to time until all of it is done, for what the host must see.

        Returns:
            What each row drew; of one that was cancelled meanwhile also what nobody may hear.
        """


class TorchDecoder:
    """A model by operations of torch: any dtype, any number of threads.

    Args:
        model: weights, in eval mode.
        cache: where keys and values lie.
        rotary: of the positions that can occur.
    """

    def __init__(self, model: LlamaModel, cache: KVCache, rotary: Rotary) -> None:
        self.model = model
        self.cache = cache
        self._rotary = rotary

    def begin(self, rows: Sequence[ScheduledRow], *, step: int) -> Forward:
        """See ``Decoder``."""
        return _TorchForward(self.model, self._rotary, PackedBatch(rows, cache=self.cache))

    def sample(self, logits: Tensor, requests: Sequence[Request]) -> list[int | None]:
        """See ``Decoder``."""
        return sample(logits, requests)

    def wait(self) -> None:
        """See ``Decoder``: what has returned is done."""


class _TorchForward:
    def __init__(self, model: LlamaModel, rotary: Rotary, batch: PackedBatch) -> None:
        self.batch = batch
        self._model = model
        self._hidden: Tensor = model.embed_tokens(batch.token_ids)
        self._rope = rotary(batch.positions)

    def layer(self, index: int) -> bool:
        layer = self._model.layers[index]
        assert isinstance(layer, DecoderLayer)
        heads = layer.heads(self._hidden, self._rope)
        attended = self.batch.attention(index, *heads, rule=layer.rule)
        if self.batch.has_longer and self.batch.is_left:
            return False
        self._hidden = layer.close(self._hidden, attended)
        return True

    def logits(self, indices: Sequence[int]) -> Tensor:
        return self._model.logits(self._hidden[list(indices)])
