"""How one request wants its tokens chosen, and when it has enough of them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from disconnect_watch.errors import shown

__all__ = ["SamplingParams"]

#: Stop strings are looked for in each piece of text, so their number is bounded.
MAX_STOP = 16

#: Each token is compared with all of these, between two steps of everybody.
MAX_STOP_TOKEN_IDS = 1024

#: The greatest that a float32 holds, which is what scores are divided in: more would be infinite,
#: and a score of minus infinity divided by that is no number.
MAX_TEMPERATURE = (2 - 2**-23) * 2.0**127

#: As OpenAI's API has it; a whole vocabulary a token would be a way to read the model out.
MAX_LOGPROBS = 20

#: As OpenAI's API has it.
MAX_N = 128


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are sampled and when generation ends.

    Args:
        max_tokens: tokens to generate at most, in [1, 2**63); the context may end it earlier.
        temperature: 0 takes the likeliest token; above, scores are divided by it first.
        top_p: keep the likeliest tokens whose probabilities add up to this, in (0, 1].
        top_k: keep that many of the likeliest tokens; 0 keeps all.
        seed: the same seed, prompt and parameters give the same tokens, whatever else runs; None
            draws one.
        ignore_eos: go on after an end token.
        stop: strings at which the text ends, at most 16; they are no part of it.
        stop_token_ids: tokens at which generation ends, whatever ``ignore_eos`` says, at most
            1,024; their text is no part of the answer.
        logprobs: tell how likely each token was, and of the likeliest so many, at most 20; None
            tells nothing.
        n: how many answers to give.
        best_of: how many to generate, of which the ``n`` with the greatest probability per token
            are told, all at the end; None generates ``n`` and tells each as it comes.

    Raises:
        ValueError: a field is of the wrong type or out of its range.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    n: int = 1
    best_of: int | None = None

    def __post_init__(self) -> None:
        # Also what no context holds has to go between processes, and into tensors.
        _require(
            "max_tokens",
            self.max_tokens,
            int,
            "at least 1, below 2**63",
            lambda v: 1 <= v < 2**63,
        )
        _require(
            "temperature",
            self.temperature,
            (int, float),
            f"in [0, {MAX_TEMPERATURE:.8g}]",
            lambda v: 0 <= v <= MAX_TEMPERATURE,
        )
        # A float, since torch would make an integer of an integer, which may not hold it.
        object.__setattr__(self, "temperature", float(self.temperature))
        _require("top_p", self.top_p, (int, float), "above 0, at most 1", lambda v: 0 < v <= 1)
        # No vocabulary is larger, and the sampler keeps it in a tensor, on a GPU of int32.
        _require("top_k", self.top_k, int, "in [0, 2**31)", lambda v: 0 <= v < 2**31)
        if self.seed is not None:
            _require("seed", self.seed, int, "in [-2**63, 2**64)", lambda v: -(2**63) <= v < 2**64)
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos is {shown(self.ignore_eos)}, it must be true or false")
        _require(
            "stop",
            self.stop,
            tuple,
            f"a tuple of at most {MAX_STOP} strings, none of them empty",
            lambda v: len(v) <= MAX_STOP and all(isinstance(stop, str) and stop for stop in v),
        )
        _require(
            "stop_token_ids",
            self.stop_token_ids,
            tuple,
            f"a tuple of at most {MAX_STOP_TOKEN_IDS} token ids below 2**63",
            lambda v: (
                len(v) <= MAX_STOP_TOKEN_IDS
                and all(isinstance(token, int) and 0 <= token < 2**63 for token in v)
            ),
        )
        if self.logprobs is not None:
            _require(
                "logprobs",
                self.logprobs,
                int,
                f"in [0, {MAX_LOGPROBS}]",
                lambda v: 0 <= v <= MAX_LOGPROBS,
            )
        _require("n", self.n, int, f"in [1, {MAX_N}]", lambda v: 1 <= v <= MAX_N)
        if self.best_of is not None:
            _require(
                "best_of",
                self.best_of,
                int,
                f"in [n, {MAX_N}]",
                lambda v: self.n <= v <= MAX_N,
            )

    @property
    def num_generations(self) -> int:
        """How many answers are generated."""
        return self.best_of or self.n

    @property
    def is_best_of(self) -> bool:
        """Whether some of them are not told, so that all must have ended before any is."""
        return self.num_generations > self.n


def _require(
    name: str,
    value: object,
    kind: type | tuple[type, ...],
    valid: str,
    is_valid: Callable[[Any], bool],
) -> None:
    # A bool is an int to Python, but not to whoever wrote the request.
    if isinstance(value, bool) or not isinstance(value, kind) or not is_valid(value):
        raise ValueError(f"{name} is {shown(value)}, it must be {valid}")
