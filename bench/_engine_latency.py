"""How long after a client's close() the engine has let go of its request.

The request decodes alone in the engine, so a step is as short as it gets, and
everything on the machine competes: the engine's thread computes, and needs the
GIL between two steps.
"""

import random
import time
from collections import defaultdict

from bench._bare_loop import BareLoop
from bench._conditions import Condition, Conditions
from bench._leaver import Leaver
from disconnect_watch import CancelToken, Watcher
from disconnect_watch.engine import (
    DEFAULT_MODEL,
    Engine,
    EngineConfig,
    EngineThread,
    Outcome,
    RequestStream,
    SamplingParams,
)

__all__ = ["measure_engine"]

PROMPT = "Return the"
NUM_STEPS = 16


class EngineBench:
    """Trials of a client that leaves while its answer is being generated."""

    def __init__(
        self,
        engine: Engine,
        thread: EngineThread,
        conditions: Conditions,
        leaver: Leaver,
        *,
        bare: BareLoop,
        watcher: Watcher,
    ) -> None:
        self._thread = thread
        self._conditions = conditions
        self._leaver = leaver
        self._bare = bare
        self._watcher = watcher
        # As long as the model can go on, so that only the client ends it.
        self._params = SamplingParams(max_tokens=engine.max_model_len, ignore_eos=True)
        self._num_trials = 0
        self.samples: dict[str, list[float]] = defaultdict(list)

    async def watched(self, condition: Condition) -> None:
        """One client leaves; note when each of those who act on it has."""
        token = CancelToken()
        with self._leaver.connect() as sock, self._watcher.attach(sock) as connection:
            connection.arm(token)
            async with await self._submit(token) as stream:
                await anext(stream)
                closed_ns = await self._conditions.leave_under(condition)
                outcome = await _outcome(stream)
        _, stored_ns = token.times()
        stages = {
            "flag": stored_ns,
            "dropped": outcome.dropped_at_ns,
            "blocks free": outcome.freed_at_ns,
        }
        for stage, at_ns in stages.items():
            self._note(f"close to {stage}, {condition}", at_ns - closed_ns)

    async def bare(self, condition: Condition) -> None:
        """The same with the bare loop watching; the request is cancelled afterwards."""
        token = CancelToken()
        with self._leaver.connect() as sock:
            self._bare.add(sock.fileno())
            async with await self._submit(token) as stream:
                await anext(stream)
                closed_ns = await self._conditions.leave_under(condition)
                woken_ns = await self._bare.woken_ns()
                token.cancel()
                await _outcome(stream)
            self._bare.remove(sock.fileno())
        self._note(f"close to bare loop, {condition}", woken_ns - closed_ns)

    async def undisturbed(self) -> None:
        """Note how long a step takes when nobody leaves: what a drop has to wait for."""
        async with await self._submit(CancelToken()) as stream:
            await anext(stream)
            start_ns = time.monotonic_ns()
            for _ in range(NUM_STEPS):
                await anext(stream)
            self._note("one step", (time.monotonic_ns() - start_ns) / NUM_STEPS)

    async def _submit(self, token: CancelToken) -> RequestStream:
        self._num_trials += 1
        return await self._thread.submit(
            f"trial-{self._num_trials}", PROMPT, self._params, cancel=token
        )

    def _note(self, name: str, duration_ns: float) -> None:
        self.samples[f"engine at work: {name}"].append(duration_ns / 1000)


async def _outcome(stream: RequestStream) -> Outcome:
    async for output in stream:
        if output.outcome is not None:
            if output.outcome.kind != "cancelled":
                raise RuntimeError(f"the request ended by itself: {output.outcome}")
            return output.outcome
    raise RuntimeError("the engine's stream ended without an outcome")


async def measure_engine(num_rounds: int, seed: int) -> dict[str, list[float]]:
    """Let clients leave a decoding request; microseconds by row name."""
    engine = Engine.from_pretrained(DEFAULT_MODEL, EngineConfig(num_threads=1))
    thread = EngineThread(engine)
    order = random.Random(seed)
    thread.start()
    try:
        with (
            Leaver() as leaver,
            Conditions(leaver, seed=seed) as conditions,
            BareLoop() as bare,
            Watcher() as watcher,
        ):
            bench = EngineBench(engine, thread, conditions, leaver, bare=bare, watcher=watcher)
            trials = [(side, c) for c in Condition for side in (bench.bare, bench.watched)]
            for side, condition in trials:
                await side(condition)
            await bench.undisturbed()
            # The warm-up leaves the names behind, in the order in which they are reported.
            for values in bench.samples.values():
                values.clear()
            for _ in range(num_rounds):
                await bench.undisturbed()
                for side, condition in order.sample(trials, len(trials)):
                    await side(condition)
            return bench.samples
    finally:
        thread.close()
