"""Finding a model's class in its directory, and making the model."""

import importlib
import importlib.util
import inspect
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from disconnect_watch.backends.python_model.worker import utils

__all__ = ["describe", "load_class"]


def load_class(directory: Path, filename: str) -> Any:
    """The class ``TritonPythonModel`` of the version in ``directory``.

    The directories of version and model are on the path meanwhile and after, so that a
    model imports what lies beside it.

    Raises:
        Exception: whatever the file raises; AttributeError where it has no such class.
    """
    sys.modules["triton_python_backend_utils"] = utils
    # A file that is changed twice in a second would be the first's from Python's cache, which
    # knows whole seconds; nor is the repository ours to write to.
    sys.dont_write_bytecode = True
    sys.path += [str(directory), str(directory.parent)]
    module = _module(directory, filename)
    return module.TritonPythonModel


def _module(directory: Path, filename: str) -> ModuleType:
    path = directory / filename
    # A package named by the version, so that the file may import its neighbours relatively.
    name = f"{directory.name}.{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    importlib.import_module(directory.name)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def describe(error: BaseException) -> str:
    """An exception as Triton's Python backend tells of it: what, and where from inside out."""
    what = "".join(traceback.format_exception_only(error)).strip()
    own = inspect.getfile(describe)
    frames = [
        frame
        for frame in reversed(traceback.extract_tb(error.__traceback__))
        if Path(frame.filename).parent != Path(own).parent
    ]
    where = "".join(f"  {frame.filename}({frame.lineno}): {frame.name}\n" for frame in frames)
    return f"{what}\n\nAt:\n{where}"
