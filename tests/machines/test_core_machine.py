"""The step loop under every order of submits, leaves, aborts, steps and late acknowledgements.

What is checked is said in ``tests.support.model_engine``.
"""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.support.model_engine import MAX_MODEL_LEN, NAMES, ModelEngine
from tests.support.model_runner import NUM_LAYERS

pytestmark = pytest.mark.slow

names = st.sampled_from(NAMES)


class CoreMachine(RuleBasedStateMachine):
    """Each rule is one operation, which checks itself."""

    @initialize(
        num_blocks=st.integers(MAX_MODEL_LEN // 4, 14),
        max_num_seqs=st.integers(1, 4),
        budget=st.integers(1, 20),
        device_steps=st.sampled_from((1, 1, 2, 5)),
    )
    def make(self, num_blocks: int, max_num_seqs: int, budget: int, device_steps: int) -> None:
        self.engine = ModelEngine(
            num_blocks=num_blocks,
            max_num_seqs=max_num_seqs,
            budget=budget,
            device_steps=device_steps,
        )
        self.engine.runner.poisoned = {3}

    @rule(
        name=names,
        text=st.integers(0, 1),
        num_tokens=st.integers(1, MAX_MODEL_LEN - 1),
        max_tokens=st.integers(1, 12),
        num_answers=st.integers(1, 3),
        seed=st.integers(1, 9),
        priority=st.integers(0, 2),
        time_limit_ns=st.none() | st.integers(0, 12),
        stops_at_every=st.none() | st.integers(2, 6),
        has_left=st.booleans(),
    )
    def submit(
        self,
        name: str,
        text: int,
        num_tokens: int,
        max_tokens: int,
        num_answers: int,
        seed: int,
        priority: int,
        time_limit_ns: int | None,
        stops_at_every: int | None,
        has_left: bool,
    ) -> None:
        self.engine.submit(
            name,
            [text] * num_tokens,
            max_tokens=max_tokens,
            num_answers=num_answers,
            seed=seed,
            priority=priority,
            time_limit_ns=time_limit_ns,
            stops_at_every=stops_at_every,
            has_left=has_left,
        )

    @rule(name=names)
    def leave(self, name: str) -> None:
        self.engine.leave(name)

    @rule()
    def leave_late(self) -> None:
        self.engine.leave_late()

    @rule(name=names)
    def abort(self, name: str) -> None:
        self.engine.abort(name)

    @rule(
        leaves=st.dictionaries(st.integers(0, NUM_LAYERS - 1), names, max_size=2),
        lag=st.integers(0, 3),
        num_steps=st.integers(1, 4),
    )
    def step(self, leaves: dict[int, str], lag: int, num_steps: int) -> None:
        for _ in range(num_steps):
            self.engine.now_ns += 1
            self.engine.step(leaves, lag=lag)
            leaves = {}

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.engine.drain()


TestCoreMachine = CoreMachine.TestCase
TestCoreMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
