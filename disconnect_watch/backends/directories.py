"""What is in the directories of a repository: names, paths, and whether something changed."""

from contextlib import suppress
from pathlib import Path
from stat import S_ISREG

from disconnect_watch.backends.model_config import ConfigError, read_config

__all__ = ["ModelDirectories", "Stamp", "stamp_of"]

#: What the files of a model are: path, time of the last change, size.
Stamp = frozenset[tuple[str, int, int]]


class ModelDirectories:
    """The directories, as they are at each look.

    Args:
        directories: the first that holds a model of a name has it.

    Raises:
        ValueError: one is no directory.
    """

    def __init__(self, *directories: Path) -> None:
        for directory in directories:
            if not directory.is_dir():
                raise ValueError(f"model repository '{directory}' is no directory")
        self._directories = tuple(directory.resolve() for directory in directories)
        self._placed: dict[str, Path] = {}

    def place(self, name: str, path: Path) -> None:
        """Have a model that lies elsewhere, before any of that name in the directories."""
        self._placed[name] = path

    def forget(self, name: str) -> None:
        """Take back what ``place`` said."""
        self._placed.pop(name, None)

    def names(self) -> set[str]:
        """Of all models that are there."""
        return self._placed.keys() | {
            path.name
            for directory in self._directories
            for path in directory.iterdir()
            if path.is_dir() and not path.name.startswith(".")
        }

    def path_of(self, name: str) -> Path:
        """Where a model lies.

        Raises:
            ConfigError: there is none of that name.
        """
        if name in self._placed:
            return self._placed[name]
        for directory in self._directories:
            # A name is one of those in the directory, and so no path that leads out of it.
            if name in self.names() and (directory / name).is_dir():
                return directory / name
        raise ConfigError(f"model '{name}' is not in the repository")

    def is_ensemble(self, name: str) -> bool:
        """Whether a model is made of others, as far as its configuration can be read."""
        with suppress(ConfigError):
            config = read_config(self.path_of(name))
            return bool(config.platform == "ensemble" or config.HasField("ensemble_scheduling"))
        return False

    def stamp(self, name: str) -> Stamp | None:
        """What the files of a model are now; None where they can't be read."""
        with suppress(OSError, ConfigError):
            return stamp_of(self.path_of(name))
        return None


def stamp_of(directory: Path) -> Stamp:
    """What the files of a model are now: a change of any makes another.

    Directories do not count: Python's cache in one of them, which the model's own process
    makes, would be a change.
    """
    found = ((path, path.stat()) for path in directory.rglob("*"))
    return frozenset(
        (str(path), stat.st_mtime_ns, stat.st_size)
        for path, stat in found
        if S_ISREG(stat.st_mode) and "__pycache__" not in path.parts
    )
