"""The examples of docs/kernels.md run as written."""

import re
from pathlib import Path

import pytest

from disconnect_watch.kernels import Kernels

DOCUMENT = Path(__file__).parents[2] / "docs" / "kernels.md"
LATCH, ENGINE = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)


def test_example_acknowledges_in_the_step_after_the_cancel(
    capsys: pytest.CaptureFixture[str],
) -> None:
    exec(compile(LATCH, str(DOCUMENT), "exec"), {})
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1] == "acknowledged in step 2"
    assert "without device 'cpu' runs no CUDA graph: the host decides on every step" in printed


def test_example_says_what_the_engine_computes_by(
    capsys: pytest.CaptureFixture[str], interpreted: Kernels
) -> None:
    exec(compile(ENGINE, str(DOCUMENT), "exec"), {})
    assert capsys.readouterr().out.startswith("triton, interpreted on a cpu")
