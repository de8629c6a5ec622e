"""The embedded engine, kept full while its clients leave, by different rules for who finds out.

Each client wants so many tokens, and some leave before they have them, at a time that is drawn
beforehand. Whenever a request has ended in the engine the next client comes.
"""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from bench._leavers import Leavers
from disconnect_watch import CancelToken
from disconnect_watch.engine import Engine, Outcome, RequestOutput, SamplingParams

__all__ = ["POLICIES", "Arrival", "Policy", "Served", "make_arrivals", "oracle_of", "serve"]

#: ``off``: nobody finds out. ``steps``: somebody looks before each step, and aborts. ``on``: the
#: engine looks at the flag, in a step as well. ``oracle``: was told beforehand.
Policy = Literal["off", "steps", "on", "oracle"]
POLICIES: tuple[Policy, ...] = ("off", "steps", "on", "oracle")


@dataclass(frozen=True, slots=True)
class Arrival:
    """One client.

    Attributes:
        prompt: token ids.
        num_tokens: it wants.
        leaves_after: seconds from its request to its leave; None if it stays.
        is_served: False if the token that ends it is work alone, and reaches nobody.
    """

    prompt: tuple[int, ...]
    num_tokens: int
    leaves_after: float | None
    is_served: bool = True


@dataclass(slots=True)
class Waste:
    """What was spent on a client that had left: of each step, the part that lay behind that."""

    tokens: float = 0.0
    block_seconds: float = 0.0


@dataclass(slots=True)
class Served:
    """What became of all of them.

    Attributes:
        num_delivered: tokens of each client that it got before it left, in their order.
        num_computed: tokens that each had in the cache before the step in which it ended.
        seconds: from the first request to the last end.
        wastes: of each that left before its end.
    """

    num_delivered: list[int]
    num_computed: list[int]
    seconds: float = 0.0
    wastes: list[Waste] = field(default_factory=list)

    @property
    def throughput(self) -> float:
        """Tokens a second that reached a client."""
        return sum(self.num_delivered) / self.seconds


def make_arrivals(
    num: int, *, share: float, mean_seconds: float, vocab_size: int, seed: int
) -> list[Arrival]:
    """Make clients of which a share leaves, at exponentially distributed times.

    One prompt of ten is long enough to take several steps.
    """
    rng = random.Random(seed)
    arrivals = []
    for _ in range(num):
        length = 2000 if rng.random() < 0.1 else rng.randrange(32, 257)
        prompt = tuple(rng.randrange(1, vocab_size) for _ in range(length))
        leaves_after = rng.expovariate(1 / mean_seconds)
        leaves = leaves_after if rng.random() < share else None
        arrivals.append(Arrival(prompt, rng.randrange(48, 145), leaves))
    return arrivals


def oracle_of(arrivals: Sequence[Arrival], served: Served) -> list[Arrival]:
    """The same clients, each of whom wants exactly what it got before it left.

    Who left while its prompt was read has a prompt as long as what was read of it, and the token
    that ends it counts for nothing; who left before that never comes.
    """
    known = []
    for arrival, num_delivered, num_computed in zip(
        arrivals, served.num_delivered, served.num_computed, strict=True
    ):
        if num_delivered:
            known.append(replace(arrival, num_tokens=num_delivered, leaves_after=None))
        elif num_computed:
            known.append(Arrival(arrival.prompt[:num_computed], 1, None, is_served=False))
    return known


@dataclass(slots=True)
class _Client:
    index: int
    token: CancelToken
    num_computed: int = 0
    waste: Waste = field(default_factory=Waste)

    @property
    def left_at(self) -> float | None:
        """By ``time.monotonic``; None as long as it is there."""
        return self.token.cancelled_at if self.token.cancelled else None


class _Run:
    def __init__(self, engine: Engine, policy: Policy, arrivals: Sequence[Arrival]) -> None:
        self._engine = engine
        self._policy = policy
        self._arrivals = arrivals
        self._clients: dict[str, _Client] = {}
        self.served = Served([0] * len(arrivals), [0] * len(arrivals))

    def submit(self, index: int, leavers: Leavers) -> None:
        arrival = self._arrivals[index]
        client = _Client(index, CancelToken())
        name = str(index)
        self._engine.add_request(
            arrival.prompt,
            SamplingParams(max_tokens=arrival.num_tokens, ignore_eos=True),
            request_id=name,
            cancel=client.token if self._policy == "on" else None,
        )
        self._clients[name] = client
        if arrival.leaves_after is not None:
            leavers.add(time.perf_counter() + arrival.leaves_after, client.token)

    def step(self) -> int:
        """Do one step; returns how many clients' requests ended."""
        if self._policy == "steps":
            for name, client in self._clients.items():
                if client.token.cancelled:
                    self._engine.abort(name)
        start, num_steps = time.monotonic(), self._engine.stats().num_steps
        outputs = self._engine.step()
        stop = time.monotonic()
        has_run = self._engine.stats().num_steps > num_steps
        scheduled = self._engine.step_log[-1].scheduled if has_run else {}
        outcomes = {o.request_id: o.outcome for o in outputs if o.outcome is not None}
        for name, client in self._clients.items():
            self._spend(client, scheduled.get(name, 0), start, stop, outcomes.get(name))
        for output in outputs:
            self._take(output)
        return len(outcomes)

    def _spend(
        self, client: _Client, num_tokens: int, start: float, stop: float, outcome: Outcome | None
    ) -> None:
        """Add what of a step lay behind the client's leave and before the end of its request."""
        request = self._engine.find(str(client.index))
        if request is not None:
            client.num_computed = request.num_computed_tokens
        left_at = client.left_at
        if left_at is None:
            return
        if outcome is not None and outcome.dropped_at_ns:
            stop = min(stop, outcome.dropped_at_ns / 1e9)
        behind = max(stop - max(start, left_at), 0.0)
        if behind:
            num_blocks = -(-client.num_computed // self._engine.config.block_size)
            client.waste.tokens += num_tokens * behind / (stop - start)
            client.waste.block_seconds += num_blocks * behind

    def _take(self, output: RequestOutput) -> None:
        client = self._clients[output.request_id]
        if self._arrivals[client.index].is_served and not client.token.cancelled:
            self.served.num_delivered[client.index] += len(output.token_ids)
        if output.outcome is not None:
            if client.token.cancelled:
                self.served.wastes.append(client.waste)
            self.served.num_computed[client.index] = client.num_computed
            del self._clients[output.request_id]


def serve(
    engine: Engine, policy: Policy, arrivals: Sequence[Arrival], *, num_clients: int
) -> Served:
    """Serve all clients, so many at a time, by one policy.

    Args:
        engine: idle, and without a prefix cache, which would know the prompts of the last run.
        policy: who finds out; ``oracle`` for what ``oracle_of`` made.
        arrivals: in their order.
        num_clients: requests that are in the engine at the same time.
    """
    run = _Run(engine, policy, arrivals)
    begin = time.perf_counter()
    with Leavers(waits_for_ack=False) as leavers:
        num_submitted = 0
        while num_submitted < len(arrivals) and num_submitted < num_clients:
            run.submit(num_submitted, leavers)
            num_submitted += 1
        while engine.has_work:
            for _ in range(run.step()):
                if num_submitted < len(arrivals):
                    run.submit(num_submitted, leavers)
                    num_submitted += 1
    run.served.seconds = time.perf_counter() - begin
    return run.served
