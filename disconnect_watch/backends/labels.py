"""The names of an output's classes."""

from pathlib import Path
from typing import Any

from disconnect_watch.backends.model_config import ConfigError

__all__ = ["read_labels"]


def read_labels(config: Any, directory: Path) -> dict[str, tuple[str, ...]]:
    """The labels of each output that has a ``label_filename``: one a line, by index.

    Raises:
        ConfigError: the file can't be read.
    """
    labels = {}
    for output in config.output:
        if output.label_filename:
            path = directory / output.label_filename
            try:
                labels[output.name] = tuple(path.read_text().splitlines())
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(
                    f"failed to read the labels of '{output.name}': {error}"
                ) from error
    return labels
