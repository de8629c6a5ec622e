"""The races of the core, seeded; prints what was counted and fails unless all is zero."""

import argparse
import sys
import time
from functools import partial

from tests.stress.owner_first import race
from tests.stress.reuse import storm


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.stress", description=__doc__)
    parser.add_argument("--trials", type=int, default=100_000, help="of each race")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    races = {
        "owner first, asyncio": partial(race, "asyncio"),
        "owner first, uvloop": partial(race, "uvloop"),
        "fd numbers reused": partial(storm),
    }
    is_clean = True
    for name, run in races.items():
        began = time.monotonic()
        tally = run(arguments.trials, arguments.seed)
        print(f"{name}: {tally} ({time.monotonic() - began:.0f} s)", flush=True)
        is_clean &= tally.is_clean
    return 0 if is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
