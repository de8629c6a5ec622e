"""The JSON files of a model directory."""

import json
from pathlib import Path
from typing import Any

from disconnect_watch.engine.errors import CheckpointError

__all__ = ["read_object"]


def read_object(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Raises:
        CheckpointError: it is missing, or holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist, give a Hugging Face model dir") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, not an object")
    return value
