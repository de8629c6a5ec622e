"""A client leaves while its long prompt is read: how soon that ends, and what the next one waits.

The shipped model has fewer positions than the prompt; it gets more here, which changes nothing
about the work.
"""

import dataclasses
import random
import time

import torch

from bench._leavers import Leavers
from disconnect_watch import CancelToken
from disconnect_watch.engine import DEFAULT_MODEL, Engine, EngineConfig, ModelConfig, SamplingParams
from disconnect_watch.engine.checkpoint import load_model
from disconnect_watch.engine.tokenizer import Tokenizer

__all__ = ["PrefillBench"]

#: Of the next prompt.
NUM_NEXT = 256


class PrefillBench:
    """An engine for prompts of ``num_tokens``, and what is measured with it."""

    def __init__(self, num_tokens: int, *, seed: int) -> None:
        config = ModelConfig.from_pretrained(DEFAULT_MODEL)
        room = num_tokens + NUM_NEXT
        config = dataclasses.replace(
            config, max_position_embeddings=max(config.max_position_embeddings, room)
        )
        self.engine = Engine(
            load_model(DEFAULT_MODEL, config, dtype=torch.float32),
            Tokenizer.from_pretrained(DEFAULT_MODEL),
            config=EngineConfig(num_threads=1, max_model_len=room, enable_prefix_caching=False),
        )
        self._num_tokens = num_tokens
        self._random = random.Random(seed)
        self._prefill_seconds = self._whole_prefill()

    def idle(self) -> float:
        """Milliseconds to the first token of a prompt on an idle engine."""
        return self._first_token()

    def after_cancel(self) -> tuple[float, float, float]:
        """Let a client leave at some time within its prefill, and let another come.

        Returns:
            Milliseconds from the flag to the end of the work for the first; to the first token of
            the second, from the end of the first; and the same from the flag, for a client who
            came when the other left.
        """
        token = CancelToken()
        at = self._random.uniform(0.1, 0.8) * self._prefill_seconds
        with Leavers(waits_for_ack=False) as leavers:
            self._submit("long", self._prompt(self._num_tokens), token)
            leavers.add(time.perf_counter() + at, token)
            outcome = None
            while outcome is None:
                for output in self.engine.step():
                    outcome = output.outcome
        if outcome.kind != "cancelled":
            raise RuntimeError(f"the prefill was over before its client left: {outcome}")
        first = self._first_token()
        now_ns = time.monotonic_ns()
        stopped = (outcome.dropped_at_ns - outcome.flag_at_ns) / 1e6
        return stopped, first, (now_ns - outcome.flag_at_ns) / 1e6

    def _whole_prefill(self) -> float:
        self._submit("long", self._prompt(self._num_tokens), None)
        start = time.perf_counter()
        while self.engine.has_work:
            self.engine.step()
        return time.perf_counter() - start

    def _first_token(self) -> float:
        start = time.perf_counter()
        self._submit("next", self._prompt(NUM_NEXT), None)
        while self.engine.has_work:
            self.engine.step()
        return (time.perf_counter() - start) * 1e3

    def _submit(self, name: str, prompt: list[int], cancel: CancelToken | None) -> None:
        params = SamplingParams(max_tokens=1, ignore_eos=True)
        self.engine.add_request(prompt, params, request_id=name, cancel=cancel)

    def _prompt(self, length: int) -> list[int]:
        return [self._random.randrange(1, 2048) for _ in range(length)]
