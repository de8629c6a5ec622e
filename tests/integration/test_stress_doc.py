"""What docs/stress.md shows runs as written."""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from disconnect_watch.stress import Point, Way
from tests.support.documents import blocks_of
from tests.support.net import held_port
from tests.support.serve import Serving, packaged_engine, serving_engine
from tests.support.venvs import environment

PAGE = (Path(__file__).parents[2] / "docs/stress.md").read_text()
COMMANDS = re.findall(r"^disconnect-watch (stress .*)$", PAGE, re.MULTILINE)
FEW = ["--stay", "1", "--leave", "2", "--timeout", "60", "--settle", "60"]


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    with serving_engine(packaged_engine()) as serving:
        yield serving


def run(words: list[str], folder: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "disconnect_watch.cli", *words],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=200,
    )


@pytest.mark.slow
@pytest.mark.parametrize("line", [line for line in COMMANDS if "tiny" in line])
def test_command_for_our_server_finds_nothing_wrong(
    serving: Serving, tmp_path: Path, line: str
) -> None:
    done = run([*shlex.split(line.replace("8000", str(serving.port))), *FEW], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("line", [line for line in COMMANDS if "tiny" not in line])
def test_command_for_another_server_gets_as_far_as_to_its_port(tmp_path: Path, line: str) -> None:
    with held_port() as port:
        line = re.sub(r"127\.0\.0\.1:\d+", f"127.0.0.1:{port}", line)
        done = run([*shlex.split(line), *FEW, "--no-effect"], tmp_path)
    assert "Connection refused" in done.stdout, done.stderr
    assert done.returncode == 1


def test_program_of_the_page_runs(serving: Serving) -> None:
    (source,) = blocks_of("stress.md")
    names = {"url": f"http://127.0.0.1:{serving.port}/v1/completions", "__name__": "page"}
    exec(compile(source, "stress.md", "exec"), names)


def test_page_has_every_way_and_every_point() -> None:
    for word in (*Way, *Point):
        assert f"| `{word.value}` |" in PAGE
