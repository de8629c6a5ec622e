"""The best of several generations: nothing is told before all of them have ended."""

from dataclasses import replace

from disconnect_watch.engine.outcome import RequestOutput, Sampled

__all__ = ["BestOf"]


class BestOf:
    """What the generations of one request would have told, until the best are known.

    The best are those with the greatest logarithm of probability per token, so that a short
    answer is not better for being short.

    Args:
        num_told: how many of them to keep.
    """

    def __init__(self, num_told: int) -> None:
        self._num_told = num_told
        self._outputs: dict[int, list[RequestOutput]] = {}
        self._logprobs: dict[int, float] = {}

    def hold(self, output: RequestOutput, sampled: Sampled) -> None:
        """Take what one generation adds."""
        assert sampled.logprobs is not None, "the runner has to tell how likely each token was"
        self._outputs.setdefault(output.index, []).append(output)
        total = self._logprobs.get(output.index, 0.0)
        self._logprobs[output.index] = total + sampled.logprobs.logprob

    def best(self) -> list[RequestOutput]:
        """Return one output a kept generation, the best first and numbered in that order."""
        ranked = sorted(
            self._outputs, key=lambda index: -self._logprobs[index] / len(self._outputs[index])
        )
        return [
            _joined(self._outputs[index], rank)
            for rank, index in enumerate(ranked[: self._num_told])
        ]


def _joined(outputs: list[RequestOutput], index: int) -> RequestOutput:
    return replace(
        outputs[-1],
        index=index,
        text_delta="".join(output.text_delta for output in outputs),
        token_ids=tuple(token for output in outputs for token in output.token_ids),
        logprobs=tuple(logprobs for output in outputs for logprobs in output.logprobs),
    )
