"""``--strict``: a client that leaves is counted as Triton does, which does not notice."""

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.support.command import running
from tests.support.http import Client
from tests.support.models import PATIENCE
from tests.support.net import wait_until
from tests.triton.conformance import copy_models
from tests.triton.test_clients import events
from tests.triton.test_field import counts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.mark.parametrize("strict", [True, False])
def test_who_leaves_is_a_success_for_triton_alone(
    strict: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    monkeypatch.setenv("MODEL_LOG", str(log))
    options = ["--strict"] if strict else []
    models = copy_models(tmp_path, "slow_one")
    with running("--model-repository", str(models), *options, within=60) as server:
        with Client(server.port) as client:
            client.post("/v2/models/slow_one/infer", slow("left"))
            wait_until(lambda: events(log, "start", "left"), PATIENCE)
        # The work ends all the same.
        wait_until(lambda: events(log, "cancel_seen", "left"), PATIENCE)
        counted = "success" if strict else "CANCELED"
        wait_until(lambda: counts(server, "slow_one") == Counter({counted: 1}), PATIENCE)
        with Client(server.port) as client:
            client.sock.sendall(b"GET /v2/models/slow_one/stats HTTP/1.1\r\nHost: test\r\n\r\n")
            (told,) = json.loads(client.read_response()[2])["model_stats"]
        by_outcome = told["inference_stats"]
        assert by_outcome["success"]["count"] == by_outcome["queue"]["count"] == strict
        assert by_outcome["fail"]["count"] == (not strict)
        assert told["response_stats"]["0"]["cancel"]["count"] == (not strict)


def slow(text: str) -> dict[str, object]:
    tensors = (("text_input", "BYTES", text), ("delay", "FP32", 100.0))
    return {
        "inputs": [
            {"name": name, "datatype": datatype, "shape": [1], "data": [value]}
            for name, datatype, value in tensors
        ]
    }
