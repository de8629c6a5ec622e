"""Which versions of a model there are, and which of them its configuration asks for."""

from pathlib import Path
from typing import Any

__all__ = ["choose_versions", "versions_in"]


def versions_in(directory: Path) -> list[int]:
    """The versions that a model's directory holds: its subdirectories named by a number.

    What starts with a zero is passed over, as Triton does, and so is what is no directory.
    """
    return sorted(
        int(path.name)
        for path in directory.iterdir()
        if path.name.isascii()
        and path.name.isdigit()
        and not path.name.startswith("0")
        and path.is_dir()
    )


def choose_versions(policy: Any, versions: list[int]) -> list[int]:
    """The versions that a ``ModelVersionPolicy`` wants, of those there are.

    Args:
        versions: in ascending order.
    """
    choice = policy.WhichOneof("policy_choice")
    if choice == "all":
        return versions
    if choice == "specific":
        return [version for version in versions if version in policy.specific.versions]
    num = policy.latest.num_versions or 1
    return versions[-num:]
