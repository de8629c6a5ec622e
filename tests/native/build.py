"""Compiles the native examples as a user of the public header would."""

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import pytest

from disconnect_watch import get_include

HERE = Path(__file__).parent
WARNINGS = ("-Wall", "-Wextra", "-Wshadow", "-Wconversion", "-Werror")
_SUFFIX = str(sysconfig.get_config_var("EXT_SUFFIX"))


def compile_to(target: Path, source: Path, *flags: str, include: str = get_include()) -> None:
    """Run the compiler of the source's language; AssertionError with what it said."""
    is_cpp = source.suffix == ".cpp"
    compiler = os.environ.get("CXX", "c++") if is_cpp else os.environ.get("CC", "cc")
    command = [compiler, "-std=c++17" if is_cpp else "-std=c11", "-O1", "-pthread"]
    # Libraries, which are among the flags, come after what needs them.
    command += [f"-I{include}", str(source), *flags, "-o", str(target)]
    if is_cpp and shutil.which(compiler.split()[0]) is None:
        pytest.skip(f"no C++ compiler ({compiler}): apt-get install g++")
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def build_module(
    name: str,
    folder: Path,
    *flags: str,
    source: Path | None = None,
    include: str = get_include(),
) -> ModuleType:
    """Compile and import one example as an extension module.

    Args:
        name: of the module, and of its source in this directory.
        folder: where the shared object goes.
        flags: more for the compiler; libraries too.
        source: where the source is, if not in this directory.
        include: the directory of the public header.
    """
    if source is None:
        (source,) = [path for path in HERE.glob(f"{name}.*") if path.suffix in (".c", ".cpp")]
    target = folder / f"{name}{_SUFFIX}"
    python = f"-I{sysconfig.get_path('include')}"
    compile_to(target, source, "-shared", "-fPIC", python, *flags, include=include)
    spec = importlib.util.spec_from_file_location(name, target)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[name] = module
    return module
