"""Venvs of what is too big for ours: made by scripts in ``.ci``, where they are not, skipped."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def has_python_of(name: str) -> bool:
    """Whether ``python_of`` finds one."""
    return _python_path(name).exists()


def python_of(name: str) -> Path:
    """The Python of ``.venv-NAME``, or of the directory that NAME_VENV says; else skips."""
    python = _python_path(name)
    if not python.exists():
        pytest.skip(f"{python} is not there: .ci/{name} makes it")
    return python


def _python_path(name: str) -> Path:
    variable = f"{name.upper().replace('-', '_')}_VENV"
    return Path(os.environ.get(variable, ROOT / f".venv-{name}")) / "bin" / "python"


def environment() -> dict[str, str]:
    """What lets a Python of another venv import this checkout."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}


def run_module(python: Path, module: str, *args: object, timeout: float) -> str:
    """What ``python -m MODULE`` prints. A failure shows what it wrote to stderr."""
    done = subprocess.run(
        [python, "-m", module, *map(str, args)],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
