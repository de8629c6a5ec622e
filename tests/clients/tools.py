"""Programs that clients are or run in; a test is skipped where one is absent."""

import os
import shutil
from pathlib import Path

__all__ = ["NODE_MODULES", "is_here", "path_of"]

#: Where ``.ci/programs`` puts what Node has not built in.
NODE_MODULES = Path(__file__).parents[2] / "build" / "node" / "node_modules"

_NAMES = {"chromium": ("chromium-headless-shell", "chromium", "google-chrome")}


def path_of(name: str) -> str:
    """The path of a program, or of a package of Node's; empty where it is absent."""
    if name == "undici":
        return str(NODE_MODULES / name) if (NODE_MODULES / name).is_dir() else ""
    found = map(shutil.which, _NAMES.get(name, (name,)))
    return next((path for path in found if path), "")


def is_here(name: str) -> bool:
    return bool(path_of(name)) and os.access(path_of(name), os.R_OK)
