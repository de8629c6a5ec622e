"""Which links to the engine may still have work of a frontend that is gone."""

__all__ = ["Links"]


class Links:
    """The links that the engine has, and those of them whose frontends have ended.

    Flags are taken back when no step can touch them: when the engine has said of each link of a
    dead frontend that nothing of it is left, or is gone itself. The news of both, that a frontend
    has ended and that its link is drained, comes in either order.
    """

    def __init__(self) -> None:
        self._of_engine: set[int] = set()
        self._orphaned: set[int] = set()

    def made(self, link_id: int) -> None:
        """The engine is handed a link."""
        self._of_engine.add(link_id)

    def drained(self, link_id: int) -> None:
        """The engine has nothing more of it."""
        self._of_engine.discard(link_id)

    def orphaned(self, link_id: int) -> None:
        """Its frontend has ended."""
        self._orphaned.add(link_id)

    def engine_ended(self) -> None:
        """And its links with it."""
        self._of_engine.clear()

    def are_quiet(self) -> bool:
        """Whether the engine has nothing of any frontend that has ended."""
        self._orphaned &= self._of_engine
        return not self._orphaned
