"""What ``tests/conftest.py`` does for a run of tests that goes wrong."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

STUCK_THREAD = """
import threading

def test_leaves_a_thread():
    threading.Thread(target=threading.Event().wait, name="stuck").start()
    assert False, "before it was joined"
"""

STUCK_IN_C = """
import ctypes

def test_never_comes_back_to_the_interpreter():
    ctypes.PyDLL(None).pause()
"""


def run_tests(folder: Path, source: str, **settings: float) -> subprocess.CompletedProcess[str]:
    """pytest with our settings and our conftest, but for ``settings``, on one file."""
    path = folder / "test_stuck.py"
    path.write_text(source)
    overrides = [f"-o{name}={value}" for name, value in settings.items()]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "tests.conftest",
        f"-c{ROOT}/pyproject.toml",
    ]
    return subprocess.run(
        [*command, f"--rootdir={ROOT}", *overrides, str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


@pytest.mark.slow
def test_thread_of_a_failed_test_does_not_keep_the_run_from_its_end(tmp_path: Path) -> None:
    # Symptom: the suite of another Python was reported, and never ended.
    done = run_tests(tmp_path, STUCK_THREAD, end_timeout=1)
    assert done.returncode
    assert "1 failed" in done.stdout
    assert "in wait" in done.stderr


@pytest.mark.slow
def test_run_ends_where_a_test_hangs_in_c_code(tmp_path: Path) -> None:
    done = run_tests(tmp_path, STUCK_IN_C, faulthandler_timeout=1)
    assert done.returncode
    assert "test_never_comes_back_to_the_interpreter" in done.stderr
