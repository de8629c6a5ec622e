"""What a fact about the kernel is: an experiment, and what it must show."""

import inspect
import platform
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["FACTS", "Fact", "Seen", "fact"]

#: What was done, in order, and what the kernel did then.
Seen = dict[str, str]


@dataclass(frozen=True, slots=True)
class Fact:
    """One thing that the code relies on.

    Attributes:
        name: as in ``docs/kernel-notes.md`` and on the command line.
        says: the fact in a sentence.
        observe: performs the experiment on this kernel.
        expected: what it has to show.
        since: the first Linux that knows it; the code does without on an older one.
    """

    name: str
    says: str
    observe: Callable[[], Seen]
    expected: Seen
    since: tuple[int, int]

    @property
    def is_known_here(self) -> bool:
        """Whether the running kernel is new enough."""
        major, minor = platform.release().split(".")[:2]
        return (int(major), int(minor)) >= self.since


#: By name, in the order of the notes.
FACTS: dict[str, Fact] = {}


def fact(
    expected: Seen, *, since: tuple[int, int] = (4, 12)
) -> Callable[[Callable[[], Seen]], Callable[[], Seen]]:
    """Make an experiment a fact, named and worded by the function and its docstring."""

    def add(observe: Callable[[], Seen]) -> Callable[[], Seen]:
        name = observe.__name__.replace("_", "-")
        says = inspect.getdoc(observe)
        assert says, f"fact {name}: say in a docstring what it is"
        FACTS[name] = Fact(name, " ".join(says.split()), observe, expected, since)
        return observe

    return add
