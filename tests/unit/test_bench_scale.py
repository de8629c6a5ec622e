"""The benchmark of several frontends runs, and says what the table wants of it."""

import json
from pathlib import Path

import pytest

from bench import scale

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def test_it_runs_and_writes_its_results(tmp_path: Path) -> None:
    path = tmp_path / "scale.json"
    config = scale.Config((1, 2), num_rounds=1, num_requests=2, num_streams=1, num_connections=8)
    scale.run(config).write(path)
    rows = {row["name"]: row for row in json.loads(path.read_text())["rows"]}
    for what in ("a request of one token", "a token of a stream"):
        for side in ("one process, frontend", "2 frontends, frontend", "2 frontends, engine"):
            assert rows[f"{what}, {side}"]["median"] > 0
    assert rows["memory of a frontend, 2 frontends"]["count"] == 2
    assert rows["memory of the engine, 2 frontends"]["count"] == 1
