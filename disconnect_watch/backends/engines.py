"""The engines that are served, by name.

Those of the start stay; those of a model repository come and go.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING

from disconnect_watch.backends.base import Backend

if TYPE_CHECKING:
    from disconnect_watch.engine import EngineStats, Outcome

__all__ = ["EngineTable"]


class EngineTable(Mapping[str, Backend]):
    """Engines by name. It closes none of them.

    Threads: the loop's only, but ``stats`` on any.
    """

    def __init__(self, *backends: Backend) -> None:
        # Replaced as a whole, so that any thread may read it at any time.
        self._backends: dict[str, Backend] = {}
        self._listeners: tuple[Callable[[str, Outcome], None], ...] = ()
        for backend in backends:
            self.add(backend)

    def __getitem__(self, name: str) -> Backend:
        return self._backends[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._backends)

    def __len__(self) -> int:
        return len(self._backends)

    def add(self, backend: Backend) -> None:
        """Serve one, in the place of the one of its name, if there is one."""
        for listener in self._listeners:
            backend.listen(listener)
        self._backends = {**self._backends, backend.name: backend}

    def remove(self, backend: Backend) -> None:
        """Serve it no more; does nothing where another has taken its place."""
        if self._backends.get(backend.name) is backend:
            self._backends = {
                name: other for name, other in self._backends.items() if other is not backend
            }

    def listen(self, on_outcome: "Callable[[str, Outcome], None]") -> None:
        """Have ``Backend.listen`` called on all, and on those that are yet to come."""
        self._listeners = (*self._listeners, on_outcome)
        for backend in self._backends.values():
            backend.listen(on_outcome)

    def stats(self) -> "EngineStats | None":
        """Of all of them together; None where there are none."""
        all_stats = [backend.stats() for backend in self._backends.values()]
        if len(all_stats) < 2:
            return all_stats[0] if all_stats else None
        first = all_stats[0]
        sums = {
            field.name: sum(getattr(each, field.name) for each in all_stats)
            for field in fields(first)
            if isinstance(getattr(first, field.name), int)
        }
        outcomes = Counter(first.outcomes)
        stale_events = Counter(first.stale_events)
        for each in all_stats[1:]:
            outcomes.update(each.outcomes)
            stale_events.update(each.stale_events)
        return replace(first, outcomes=outcomes, stale_events=stale_events, **sums)
