"""Random clients on a model engine, seeded: a million operations leave nothing behind.

python -m tests.stress.engine --operations 1000000
"""

import argparse
import random
import sys
import time
from collections import Counter

from tests.support.model_engine import MAX_MODEL_LEN, NAMES, ModelEngine
from tests.support.model_runner import NUM_LAYERS

__all__ = ["crowd"]

#: Operations on one engine; then another one, of another size, takes over.
EPOCH = 5_000

TEXTS = [[text] * MAX_MODEL_LEN for text in (0, 0, 1, 2)]


def crowd(num_operations: int, seed: int) -> Counter[str]:
    """Let random clients come, leave and be aborted; returns what they came to.

    Raises:
        AssertionError: the engine did not do what the model says.
    """
    rng = random.Random(seed)
    told: Counter[str] = Counter()
    for begin in range(0, num_operations, EPOCH):
        engine = ModelEngine(
            num_blocks=rng.randint(MAX_MODEL_LEN // 4, 20),
            max_num_seqs=rng.randint(1, 6),
            budget=rng.randint(1, 24),
            device_steps=rng.choice((1, 1, 4)),
        )
        engine.runner.poisoned = {13}
        for _ in range(min(EPOCH, num_operations - begin)):
            _operate(engine, rng)
        engine.drain()
        stats = engine.core.stats()
        told += engine.outcomes
        told["preemptions"] += stats.num_preemptions
        told["cached tokens"] += stats.num_cached_tokens
        told["stale events"] += stats.num_stale_events
        told["wasted tokens"] += stats.num_wasted_tokens
    return told


def _operate(engine: ModelEngine, rng: random.Random) -> None:
    choice, name = rng.random(), rng.choice(NAMES)
    if choice < 0.3:
        prompt = rng.choice(TEXTS)[: rng.randint(1, MAX_MODEL_LEN - 1)]
        if rng.random() < 0.5:
            prompt[-1] = rng.randint(0, 9)
        engine.submit(
            name,
            prompt,
            max_tokens=rng.randint(1, 14),
            num_answers=rng.choice((1, 1, 1, 2, 3)),
            seed=rng.randint(1, 40),
            priority=rng.choice((0, 0, 0, 1, 2)),
            # The long ones are outlived: so many deadlines of the ended are thrown away at times.
            time_limit_ns=rng.choice((None, None, rng.randint(0, 30), 5_000)),
            stops_at_every=rng.choice((None, None, 5)),
            has_left=rng.random() < 0.05,
        )
    elif choice < 0.36:
        engine.leave(name)
    elif choice < 0.41:
        engine.abort(name)
    elif choice < 0.43:
        engine.leave_late()
    else:
        engine.now_ns += 1
        leaves = {rng.randrange(NUM_LAYERS): name} if rng.random() < 0.15 else {}
        engine.step(leaves, lag=rng.choice((0, 0, 0, 1, 3)))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.stress.engine", description=__doc__)
    parser.add_argument("--operations", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    began = time.monotonic()
    told = crowd(arguments.operations, arguments.seed)
    print(f"{arguments.operations} operations ({time.monotonic() - began:.0f} s): {dict(told)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
