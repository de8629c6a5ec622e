"""The whole engine under random submits, leaves (between and inside steps), aborts and reuse."""

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from disconnect_watch.engine import Outcome, RequestOutput, SamplingParams
from disconnect_watch.token import CancelToken, Reason
from tests.support.engine import is_greedy, make_engine, tiny_model

NAMES = [f"r{index}" for index in range(8)]
MAX_MODEL_LEN = 20


pytestmark = pytest.mark.slow


@dataclass(slots=True)
class Client:
    """One request as the model sees it."""

    prompt: list[int]
    max_tokens: int
    token: CancelToken = field(default_factory=CancelToken)
    tokens: list[int] = field(default_factory=list)


class EngineMachine(RuleBasedStateMachine):
    """One outcome each, silence after it, out within a step, the ledger balanced, right tokens."""

    @initialize(num_blocks=st.integers(5, 12), budget=st.integers(3, 16))
    def make(self, num_blocks: int, budget: int) -> None:
        self.engine = make_engine(
            num_blocks=num_blocks,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=3,
            max_num_batched_tokens=budget,
        )
        self.engine.on_outcome = lambda name, outcome: self.told.append((name, outcome))
        self.engine.layer_hook = self.between_layers
        self.told: list[tuple[str, Outcome]] = []
        self.live: dict[str, Client] = {}
        #: Ended by an abort; their outcome comes out of the next step, though the id is free.
        self.aborted: dict[str, list[Client]] = {}
        self.leaves: dict[int, str] = {}
        self.num_accepted = 0

    @rule(
        name=st.sampled_from(NAMES),
        prompt=st.lists(st.integers(0, 255), min_size=1, max_size=MAX_MODEL_LEN - 1),
        max_tokens=st.integers(1, 12),
    )
    def submit(self, name: str, prompt: list[int], max_tokens: int) -> None:
        if name in self.live:
            with pytest.raises(ValueError, match="in use"):
                self.engine.add_request(prompt, request_id=name)
            return
        client = Client(prompt, max_tokens)
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        self.engine.add_request(prompt, params, request_id=name, cancel=client.token)
        self.live[name] = client
        self.num_accepted += 1

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.live[data.draw(st.sampled_from(sorted(self.live)))].token.cancel(Reason.FIN)

    @rule(name=st.sampled_from(NAMES))
    def abort(self, name: str) -> None:
        num_told = len(self.told)
        result = self.engine.abort(name)
        assert name not in self.engine.block_owners
        client = self.live.pop(name, None)
        if client is None:
            assert result.outcome in ("already_finished", "already_cancelled", "not_found")
            return
        assert result.outcome == ("already_cancelled" if client.token.cancelled else "cancelled")
        assert len(self.told) == num_told + 1
        self.aborted.setdefault(name, []).append(client)

    @rule(leaves=st.dictionaries(st.integers(0, 2), st.sampled_from(NAMES)))
    def step(self, leaves: dict[int, str]) -> None:
        self.leaves = leaves
        had_left = {name for name, client in self.live.items() if client.token.cancelled}
        num_steps = self.engine.stats().num_steps
        for output in self.engine.step():
            self.hear(output)
        if self.engine.stats().num_steps > num_steps:
            scheduled = set(self.engine.step_log[-1].scheduled)
            assert not had_left & scheduled
            # Who left in the middle of the step is out if it was in; out of the queue it is next.
            still_here = {name for name, client in self.live.items() if client.token.cancelled}
            assert not still_here & (scheduled | had_left)
        assert not self.aborted

    def hear(self, output: RequestOutput) -> None:
        name = output.request_id
        if name in self.aborted:
            client = self.aborted[name].pop(0)
            if not self.aborted[name]:
                del self.aborted[name]
            assert output.outcome is not None
        else:
            client = self.live[name]
        if output.outcome is None:
            assert not client.token.cancelled
            client.tokens += output.token_ids
            return
        if output.outcome.kind == "cancelled":
            assert output.token_ids == ()
            assert output.outcome.num_wasted_tokens <= 1
        else:
            assert output.outcome.kind == "finished"
            client.tokens += output.token_ids
            room = MAX_MODEL_LEN - len(client.prompt)
            assert len(client.tokens) == min(client.max_tokens, room)
        if self.live.get(name) is client:
            del self.live[name]
        assert output.outcome.num_generated_tokens == len(client.tokens)
        assert is_greedy(tiny_model(), client.prompt, client.tokens)

    def between_layers(self, _: int, layer: int) -> None:
        name = self.leaves.pop(layer, None)
        if name in self.live:
            self.live[name].token.cancel(Reason.FIN)

    @invariant()
    def adds_up(self) -> None:
        self.engine.check_integrity()
        stats = self.engine.stats()
        assert stats.num_blocks == (
            stats.num_blocks_free
            + stats.num_blocks_used
            + stats.num_blocks_cached
            + stats.num_blocks_retained
        )
        assert stats.num_blocks_retained == 0
        assert sum(stats.outcomes.values()) == len(self.told)
        assert stats.num_requests == self.num_accepted
        assert stats.num_waiting + stats.num_running == self.num_accepted - len(self.told)

    def teardown(self) -> None:
        if not hasattr(self, "live"):
            return
        for _ in range(400):
            if not self.engine.has_work:
                break
            self.step({})
        assert not self.live
        assert self.engine.stats().num_blocks_used == 0
        assert len(self.told) == self.num_accepted


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
