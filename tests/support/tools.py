"""Programs that tests run; a test is skipped where its own is absent."""

import os
import shutil
from pathlib import Path

__all__ = ["NODE_MODULES", "path_of"]

#: Where ``.ci/programs`` puts what Node has not built in.
NODE_MODULES = Path(__file__).parents[2] / "build" / "node" / "node_modules"

#: Debian keeps servers where only root looks.
_PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/local/sbin:/usr/sbin"
_PACKAGES = ("openai", "undici")
_NAMES = {"chromium": ("chromium-headless-shell", "chromium", "google-chrome")}


def path_of(name: str) -> str:
    """The path of a program, or of a package of Node's; empty where it is absent."""
    if name in _PACKAGES:
        return str(NODE_MODULES / name) if (NODE_MODULES / name).is_dir() else ""
    found = (shutil.which(each, path=_PATH) for each in _NAMES.get(name, (name,)))
    return next((path for path in found if path), "")
