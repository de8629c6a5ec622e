"""What docs/testing.md shows runs as written, and fails as written without our protocol."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/testing.md").read_text()


def blocks(language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    return [text for name, text in found if name == language]


@pytest.fixture
def example(tmp_path: Path) -> Path:
    """A directory with the page's two files."""
    application, tests = blocks("python")
    (tmp_path / "app.py").write_text(application)
    (tmp_path / "test_app.py").write_text(tests)
    return tmp_path


def run_pytest(directory: Path, *options: str) -> subprocess.CompletedProcess[str]:
    plugin = ("-p", "pytest_disconnect_watch", "-p", "no:cacheprovider", "-p", "no:asyncio")
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--rootdir", str(directory), *plugin, *options],
        cwd=directory,
        env={"PYTHONPATH": f"{ROOT}:{directory}", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=150,
    )


@pytest.mark.slow
def test_example_passes_with_our_protocol(example: Path) -> None:
    test = example / "test_app.py"
    test.write_text(test.read_text().replace("within=1", "within=20"))  # of a slow machine
    done = run_pytest(example, "-W", "error")
    assert "2 passed" in done.stdout, done.stdout


@pytest.mark.slow
def test_example_fails_in_the_words_of_the_page_without_it(example: Path) -> None:
    test = example / "test_app.py"
    text = test.read_text()
    alone = text.replace("dw_serve(app.app)", 'dw_serve(app.app, protocol="auto")', 1)
    test.write_text(alone.replace("within=1", "within=0.05"))
    done = run_pytest(example, "-k", "leaves", "--tb=short")
    assert "1 failed" in done.stdout, done.stdout
    (shown,) = (block for block in blocks("") if block.startswith("NotCancelledError"))
    _, *lines = shown.splitlines()
    assert "did not notice 7 of 7 ways to leave within 0.05 s" in done.stdout
    for line in lines:
        assert line in done.stdout, line


def test_page_names_every_way_and_every_fixture() -> None:
    import pytest_disconnect_watch
    from disconnect_watch.testing import Way

    for name in [*Way, *pytest_disconnect_watch.__all__]:
        assert f"| `{name}` |" in PAGE, name
