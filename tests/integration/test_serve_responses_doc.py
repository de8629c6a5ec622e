"""What docs/responses.md shows runs as written."""

import re
from pathlib import Path

import pytest

from disconnect_watch.server.openai.responses.store import StoreLimits
from tests.support.serve import packaged_engine, serving_engine

PAGE = (Path(__file__).parents[2] / "docs/responses.md").read_text()
PORT = "8000"


def test_the_example_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (source,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert source.count(PORT) == 1
    with serving_engine(packaged_engine()) as serving:
        names: dict[str, object] = {}
        exec(source.replace(PORT, str(serving.port)), names)
        names["client"].close()  # type: ignore[attr-defined]
    text, statuses = capsys.readouterr().out.rstrip("\n").rsplit("\n", 1)
    assert text
    first, second = statuses.split()
    assert first == second
    assert first in ("completed", "incomplete")


def test_the_page_has_the_limits_as_they_are() -> None:
    limits = StoreLimits()
    assert f"| `--responses-max-count` | {limits.max_count} |" in PAGE
    assert f"| `--responses-max-bytes` | {limits.max_bytes >> 20} MiB |" in PAGE
    assert f"| `--responses-max-age` | {limits.max_age / 86_400:.0f} days |" in PAGE
