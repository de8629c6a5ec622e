"""The table of engines: who stands in it, who hears of outcomes, what all have done."""

from dataclasses import replace

from disconnect_watch.backends.engines import EngineTable
from disconnect_watch.engine import EngineStats
from tests.support.backends import ScriptedBackend


class Counting(ScriptedBackend):
    """Has ended so many requests in each way."""

    def __init__(self, name: str, **ended: int) -> None:
        super().__init__(name=name)
        self._ended = ended

    def stats(self) -> EngineStats:
        return replace(
            super().stats(),
            outcomes={(kind, None): n for kind, n in self._ended.items()},
            stale_events={"abort": self._ended["finished"]},
        )


def test_an_engine_takes_the_place_of_the_one_of_its_name() -> None:
    old, new = ScriptedBackend(name="a"), ScriptedBackend(name="a")
    table = EngineTable(old)
    table.add(new)
    table.remove(old)
    assert dict(table) == {"a": new}
    table.remove(new)
    assert dict(table) == {}


def test_counts_are_those_of_all_together() -> None:
    assert EngineTable().stats() is None
    table = EngineTable(Counting("a", finished=2), Counting("b", finished=3, failed=1))
    stats = table.stats()
    assert stats is not None
    assert stats.outcomes == {("finished", None): 5, ("failed", None): 1}
    assert stats.num_stale_events == 5
    assert stats.num_blocks == 16


def test_who_listens_hears_of_those_that_come_later() -> None:
    heard: list[str] = []

    class Listened(ScriptedBackend):
        def listen(self, on_outcome: object) -> None:
            heard.append(self.name)

    table = EngineTable(Listened(name="a"))
    table.listen(lambda request_id, outcome: None)
    table.add(Listened(name="b"))
    assert heard == ["a", "b"]
