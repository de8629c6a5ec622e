"""Every state of the protocol that can be reached, each looked at once.

    python -m tests.disagg.explorer --crash 1 --lose 1 --twice 1 --leave 2 --lapse 1

A state is kept as the steps that lead to it and made anew from them, so that what is explored is
the store itself, whatever its state is made of.
"""

import argparse
from collections import deque
from dataclasses import dataclass, replace

from tests.disagg.protocol import World
from tests.disagg.words import Action, Faults

__all__ = ["Explored", "explore"]


@dataclass(frozen=True, slots=True)
class Explored:
    """What was seen: states, steps between them, and how many steps the longest way has."""

    num_states: int
    num_steps: int
    max_depth: int


def explore(num_requests: int, faults: Faults) -> Explored:
    """Go through all states, the nearest first.

    Raises:
        AssertionError: a rule is broken; its note has the shortest way there.
    """
    seen = {World(num_requests, replace(faults)).key()}
    waiting: deque[tuple[Action, ...]] = deque([()])
    num_steps = max_depth = 0
    while waiting:
        path = waiting.popleft()
        max_depth = max(max_depth, len(path))
        try:
            world = _at(path, num_requests, faults)
            actions = list(world.actions())
            for num_leaving in (0, num_requests) if world.is_clean else ():
                world.calm(num_leaving)
                world = _at(path, num_requests, faults)
            world.silence()
            for action in actions:
                num_steps += 1
                world = _at(path, num_requests, faults)
                world.take(action)
                world.check()
                key = world.key()
                if key not in seen:
                    seen.add(key)
                    waiting.append((*path, action))
        except AssertionError as error:
            error.add_note("after: " + ", ".join(map(str, path)))
            raise
    return Explored(len(seen), num_steps, max_depth)


def _at(path: tuple[Action, ...], num_requests: int, faults: Faults) -> World:
    world = World(num_requests, replace(faults))
    for action in path:
        world.take(action)
    return world


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2)
    for name in ("crash", "lose", "twice", "leave", "lapse"):
        parser.add_argument(f"--{name}", type=int, default=0)
    given = vars(parser.parse_args())
    print(explore(given.pop("requests"), Faults(**given)))


if __name__ == "__main__":
    main()
