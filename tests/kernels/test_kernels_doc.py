"""The example of docs/kernels.md runs as written."""

import re
from pathlib import Path

import pytest

DOCUMENT = Path(__file__).parents[2] / "docs" / "kernels.md"


def test_example_acknowledges_in_the_step_after_the_cancel(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (source,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    exec(compile(source, str(DOCUMENT), "exec"), {})
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1] == "acknowledged in step 2"
    assert "without device 'cpu' runs no CUDA graph: the host decides on every step" in printed
