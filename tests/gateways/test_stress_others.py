"""What the stress tool says of engines of others, which tell more or less of what they do."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from disconnect_watch.stress import (
    Asking,
    Point,
    Report,
    StressOptions,
    Way,
    exchange_with,
    parse_target,
    run_stress,
)
from disconnect_watch.stress.client import Outcome
from tests.support.command import running
from tests.support.real_triton import PROGRAM, real_triton
from tests.support.vllm_server import BEGINS_WITHIN, MODEL, VllmServer, vllm_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(BEGINS_WITHIN + 120)]


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    with vllm_server(tmp_path_factory.mktemp("vllm")) as server:
        yield server


def stress(url: str, asking: Asking, **options: object) -> Report:
    target, exchange = exchange_with(parse_target(url), asking)
    wanted = StressOptions(
        **{  # type: ignore[arg-type]
            "num_stay": 2,
            "num_leave": 3,
            "points": (Point.WAITING,),
            "seed": 1,
            "metrics": target.with_path("/metrics"),
            "measures_effect": None,
            **options,
        }
    )
    return asyncio.run(run_stress(target, exchange, options=wanted))


def asked(server: VllmServer, **options: object) -> Report:
    url = f"http://127.0.0.1:{server.port}/v1/completions"
    return stress(url, Asking(model=MODEL, max_tokens=4, is_stream=False), **options)


def test_vllm_is_seen_to_cancel_who_closes(vllm: VllmServer) -> None:
    report = asked(vllm, ways=(Way.FIN, Way.RST), timeout=60.0, settle=60.0)
    assert report.holds, report.as_text()
    assert report.cancels is True
    assert report.after is not None
    assert report.after.source == "vLLM"
    assert report.num_tokens is not None
    assert report.num_tokens >= 2 * 4


# Behind it the server works on for who left, so it is the last.
def test_vllm_is_seen_to_work_on_for_who_pipelines(vllm: VllmServer) -> None:
    report = asked(
        vllm, ways=(Way.BEHIND_REQUEST,), num_stay=0, num_leave=1, max_delay=4.0, settle=3.0
    )
    assert report.cancels is False, report.as_text()
    (failed,) = (check for check in report.checks if not check.holds)
    assert failed.name == "nothing is left behind in the server"
    assert failed.detail == "running 1, waiting 0"


@pytest.mark.skipif(not PROGRAM.exists(), reason=f"{PROGRAM} is not there: .ci/triton makes it")
def test_triton_is_seen_to_work_on_and_behind_our_gateway_to_cancel(tmp_path: Path) -> None:
    """Its metrics don't tell; one instance serves one after the other, so who left costs others."""
    asking = Asking(body=body_of(0.05), leaver_body=body_of(0.6))
    found = {}
    with real_triton(tmp_path) as triton:
        url = f"grpc://127.0.0.1:{triton.port}"
        with running("--triton", url, command="gateway") as gateway:
            for name, port in (("direct", triton.http_port), ("gateway", gateway.port)):
                url = f"http://127.0.0.1:{port}/v2/models/slow_one/infer"
                found[name] = stress(url, asking, num_leave=0, timeout=60.0)
    for report in found.values():
        assert not report.is_server_checked
        assert report.counts.outcomes[Outcome.ANSWERED] == 2
    assert found["direct"].cancels is False, found["direct"].as_text()
    assert found["gateway"].cancels is True, found["gateway"].as_text()


def body_of(seconds: float) -> str:
    inputs = [
        {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["x"]},
        {"name": "delay", "shape": [1], "datatype": "FP32", "data": [seconds]},
    ]
    return json.dumps({"inputs": inputs})
