"""Performs an experiment of ``docs/kernel-notes.md`` and prints what the kernel did.

    python -m tests.kernel.facts                  all of them
    python -m tests.kernel.facts NAME [NAME ...]  some

Ends with status 1 where this kernel behaves otherwise than the code relies on.
"""

import argparse
import platform
import sys
import textwrap

from tests.kernel import ends, owner, silence
from tests.kernel.fact import FACTS, Fact

__all__ = ["FACTS", "main"]

#: Whose import made the facts.
EXPERIMENTS = (ends, owner, silence)


def show(fact: Fact) -> bool:
    """Print what happens; returns whether it is what the code relies on."""
    print(f"\n{fact.name}\n{textwrap.fill(fact.says, 78)}")
    if not fact.is_known_here:
        print("    needs Linux {}.{}; the code does without here".format(*fact.since))
        return True
    seen = fact.observe()
    width = max(map(len, fact.expected))
    for done, did in seen.items():
        expected = fact.expected.get(done, "nothing of the kind")
        print(
            f"    {done:{width}}  {did}" + (f"  <- EXPECTED {expected}" * (did != expected)),
            flush=True,
        )
    return seen == fact.expected


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.kernel.facts")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(FACTS))
    names = parser.parse_args(arguments).names or list(FACTS)
    unknown = [name for name in names if name not in FACTS]
    if unknown:
        parser.error(f"no fact {unknown[0]!r}: must be one of {', '.join(FACTS)}")
    print(f"{platform.system()} {platform.release()}")
    is_as_expected = [show(FACTS[name]) for name in names]
    return 0 if all(is_as_expected) else 1


if __name__ == "__main__":
    sys.exit(main())
