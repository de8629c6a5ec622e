"""A real model in batch-invariant mode, under any order of submits, leaves, aborts and steps.

Whoever is there, leaves or is preempted: each token of each request, and each bit of the scores
that it was drawn from, is what the request gets in an engine of its own.
"""

from dataclasses import dataclass, field
from functools import cache

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from disconnect_watch.engine import Engine, RequestOutput, SamplingParams
from disconnect_watch.token import CancelToken, Reason
from tests.support.engine import make_engine, record_scores, run_to_end, tokens_of

pytestmark = pytest.mark.slow

NAMES = tuple(f"r{index}" for index in range(6))
MAX_TOKENS = 6


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt and how its answer is drawn; prompts of one index begin alike."""

    index: int
    length: int
    is_greedy: bool

    @property
    def prompt(self) -> list[int]:
        return [(self.index * 31 + position * 7) % 256 for position in range(self.length)]

    @property
    def params(self) -> SamplingParams:
        temperature = 0.0 if self.is_greedy else 1.0
        return SamplingParams(
            max_tokens=MAX_TOKENS, ignore_eos=True, temperature=temperature, seed=self.index
        )


@dataclass(slots=True)
class Client:
    """Who waits for an answer, and what came of it."""

    text: Text
    token: CancelToken = field(default_factory=CancelToken)
    outputs: list[RequestOutput] = field(default_factory=list)


def make(**config: int) -> Engine:
    return make_engine(None, batch_invariant=True, **config)


@cache
def alone(text: Text) -> tuple[list[torch.Tensor], list[int]]:
    """Scores and tokens of a request that nobody disturbs."""
    engine = make()
    scores = record_scores(engine)
    engine.add_request(text.prompt, text.params, request_id="a")
    tokens = tokens_of(run_to_end(engine)["a"])
    return scores["a"], tokens


class InvariantMachine(RuleBasedStateMachine):
    """Each rule is one operation; what was heard is checked when a request has ended."""

    @initialize(
        num_blocks=st.sampled_from((34, 40, 64)),
        budget=st.sampled_from((8, 33, 64)),
        max_num_seqs=st.integers(2, 6),
    )
    def begin(self, num_blocks: int, budget: int, max_num_seqs: int) -> None:
        self.engine = make(
            num_blocks=num_blocks, max_num_batched_tokens=budget, max_num_seqs=max_num_seqs
        )
        self.scores = record_scores(self.engine)
        self.live: dict[str, Client] = {}

    @rule(
        name=st.sampled_from(NAMES),
        index=st.integers(0, 2),
        length=st.sampled_from((1, 3, 8, 31, 32, 50, 90)),
        is_greedy=st.booleans(),
    )
    def submit(self, name: str, index: int, length: int, is_greedy: bool) -> None:
        if name in self.live:
            return
        client = self.live[name] = Client(Text(index, length, is_greedy))
        self.engine.add_request(
            client.text.prompt, client.text.params, request_id=name, cancel=client.token
        )

    @rule(name=st.sampled_from(NAMES))
    def abort(self, name: str) -> None:
        result = self.engine.abort(name)
        assert (result.outcome == "cancelled") == (name in self.live)
        self._hear(self.engine.take_outputs())

    @rule(
        leaves=st.dictionaries(st.integers(0, 2), st.sampled_from(NAMES), max_size=2),
        num_steps=st.integers(1, 3),
    )
    def step(self, leaves: dict[int, str], num_steps: int) -> None:
        def hook(_: int, layer: int) -> None:
            if (client := self.live.get(leaves.pop(layer, ""))) is not None:
                client.token.cancel(Reason.FIN)

        self.engine.layer_hook = hook
        for _ in range(num_steps):
            self._hear(self.engine.step())
            self.engine.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.layer_hook = None
        while self.engine.has_work:
            self._hear(self.engine.step())
        assert not self.live
        stats = self.engine.stats()
        assert stats.num_blocks_available == stats.num_blocks

    def _hear(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            client = self.live[output.request_id]
            client.outputs.append(output)
            if output.outcome is not None:
                del self.live[output.request_id]
                self._judge(client, self.scores.pop(output.request_id, []))

    def _judge(self, client: Client, scores: list[torch.Tensor]) -> None:
        outcome = client.outputs[-1].outcome
        assert outcome is not None
        assert outcome.kind == ("cancelled" if outcome.reason else "finished")
        expected, tokens = alone(client.text)
        told = tokens_of(client.outputs)
        assert told == tokens[: len(told)]
        assert outcome.reason is not None or len(told) == MAX_TOKENS
        # One more than was told, if its client left while it was computed.
        assert len(told) <= len(scores) <= len(told) + 1
        for ours, theirs in zip(scores, expected, strict=False):
            assert torch.equal(ours, theirs)


TestInvariantMachine = InvariantMachine.TestCase
TestInvariantMachine.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
