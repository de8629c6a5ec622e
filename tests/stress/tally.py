"""What a stress run counts."""

from dataclasses import dataclass

__all__ = ["Tally"]


@dataclass(slots=True)
class Tally:
    """Counts of one run, to be added to.

    Attributes:
        trials: connections tried.
        left: of them, whose client left.
        lost: whose client left, and nobody was told.
        false: who was told although the client was there.
    """

    trials: int = 0
    left: int = 0
    lost: int = 0
    false: int = 0

    def count(self, *, has_left: bool, was_told: bool) -> None:
        """Add one connection."""
        self.trials += 1
        self.left += has_left
        self.lost += has_left and not was_told
        self.false += was_told and not has_left

    @property
    def is_clean(self) -> bool:
        """Whether nothing was lost and nothing was told in vain."""
        return not self.lost and not self.false

    def __str__(self) -> str:
        return f"{self.trials} trials, {self.left} left, {self.lost} lost, {self.false} false"
