"""Readiness tells the truth about cancels: it turns while one has no effect, and back."""

import json
from pathlib import Path

import pytest

from disconnect_watch.testing import LeavingClient, Way
from tests.abort.kinds import KINDS
from tests.abort.stages import stage_of, write_held_model
from tests.support.gate import gated
from tests.support.models import TIME_LIMIT, write_model
from tests.support.net import wait_until
from tests.support.serve import Client, Serving, packaged_engine, request_bytes, serving_engine

ENDLESS = {"text_input": "x", "max_tokens": 100_000, "ignore_eos": True}


def look(serving: Serving) -> tuple[int, str, int]:
    """Status and words of ``/health``, and the status of Triton's readiness."""
    with Client(serving.port) as client:
        client.sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        status, _, body = client.read_response()
        client.sock.sendall(b"GET /v2/health/ready HTTP/1.1\r\nHost: x\r\n\r\n")
        return status, json.loads(body)["status"], client.read_response()[0]


def test_a_cancel_without_effect_turns_readiness_until_it_has_it() -> None:
    with (
        serving_engine(packaged_engine(), cancel_bound=0.1) as serving,
        gated(serving.engine) as gate,
        Client(serving.port) as client,
    ):
        client.post("/v2/models/tiny/generate", ENDLESS)
        gate.wait()
        assert look(serving) == (200, "ready", 200)
        client.sock.close()
        wait_until(lambda: look(serving) == (503, "cancels without effect", 400))
        assert b"\ndw_overdue_cancels 1.0\n" in serving.metrics.render()
        gate.open()
        wait_until(lambda: look(serving) == (200, "ready", 200))
        rendered = serving.metrics.render()
        assert b"\ndw_overdue_cancels 0.0\n" in rendered
        assert b"\ndw_late_cancels_total 1.0\n" in rendered


_STUBBORN = """
import os, time
import numpy as np
import triton_python_backend_utils as pb

class TritonPythonModel:
    def execute(self, requests):
        path = pb.get_input_tensor_by_name(requests[0], "PATH").as_numpy().flat[0].decode()
        open(path + ".begun", "w").close()
        while not os.path.exists(path + ".go"):
            time.sleep(0.002)
        return [pb.InferenceResponse([pb.Tensor("DONE", np.array([1], np.int32))])]
"""


@pytest.mark.timeout(TIME_LIMIT)
def test_a_model_that_goes_on_without_its_client_turns_it_too(tmp_path: Path) -> None:
    repository, folder = tmp_path / "models", tmp_path / "requests"
    folder.mkdir()
    write_held_model(repository)
    write_model(repository, "held", _STUBBORN)
    with (
        serving_engine(packaged_engine(), repository=repository, cancel_bound=0.1) as serving,
        stage_of("process", "decode", serving, None, folder, {}) as stage,
        LeavingClient(f"http://127.0.0.1:{serving.port}") as client,
    ):
        client.send(request_bytes(KINDS["infer"].path, stage.body))
        stage.reach()
        client.leave(Way.FIN)
        wait_until(lambda: look(serving) == (503, "cancels without effect", 400))
        (begun,) = folder.glob("*.begun")
        begun.with_suffix(".go").touch()
        wait_until(lambda: look(serving) == (200, "ready", 200))


def test_a_shutdown_says_that_it_is_one() -> None:
    with (
        serving_engine(packaged_engine()) as serving,
        gated(serving.engine) as gate,
        Client(serving.port) as client,
        Client(serving.port) as other,
    ):
        client.post("/v2/models/tiny/generate", {**ENDLESS, "max_tokens": 1})
        gate.wait()
        other.sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert other.read_response()[0] == 200
        serving.frontend.begin_drain()
        other.sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        status, _, body = other.read_response()
        assert (status, json.loads(body)["status"]) == (503, "shutting down")
        gate.open()
        assert client.read_response()[0] == 200
