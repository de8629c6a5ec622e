"""Triton's perf_analyzer against our server, where ``.ci/perf-analyzer`` has fetched it."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.command import Process
from tests.support.models import PATIENCE

VENV = Path(os.environ.get("PERF_ANALYZER_VENV", Path(__file__).parents[2] / ".venv-perf-analyzer"))
PROGRAM = VENV / "bin" / "perf-analyzer"

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        not PROGRAM.exists(), reason=f"{PROGRAM} is not there: run .ci/perf-analyzer"
    ),
]

#: Three windows of 20 requests are enough, however much they differ.
BOUNDED = ("--measurement-mode=count_windows", "--measurement-request-count=20", "-s", "100000")


@pytest.mark.parametrize(
    "options",
    [
        ("-m", "simple"),
        ("-m", "simple", "--concurrency-range", "4", "-a"),
        ("-m", "simple", "-b", "8"),
        ("-m", "identity_bytes", "--shape", "INPUT0:16", "--string-length", "8"),
        ("-m", "simple", "--shared-memory", "system"),
        ("-m", "simple", "--output-tensor-format", "json", "--input-tensor-format", "json"),
    ],
    ids=lambda options: " ".join(options[1:]),
)
def test_perf_analyzer_measures(server: Process, options: tuple[str, ...]) -> None:
    address = ("-i", "http", "-u", f"127.0.0.1:{server.port}")
    ran = subprocess.run(
        [PROGRAM, *address, *BOUNDED, *options],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    # Of the server's own statistics, which it reads before and after.
    assert "Successful request count: " in ran.stdout
    assert "Failed request count" not in ran.stdout
