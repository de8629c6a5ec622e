"""A ``vllm serve`` that has our middleware and not our plugin."""

from collections.abc import Iterator

import pytest

from disconnect_watch.testing import Way
from disconnect_watch.testing.ways import part, parting_bytes
from tests.support.http import request_bytes
from tests.support.vllm_server import BEGINS_WITHIN, MODEL, VllmServer, vllm_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(BEGINS_WITHIN + 120)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    directory = tmp_path_factory.mktemp("vllm")
    with vllm_server(
        directory,
        *("--middleware", "tests.support.vllm_middleware.Deaf"),
        *("--middleware", "disconnect_watch.adapters.vllm.CancelOnDisconnect"),
        DISCONNECT_WATCH_VLLM="0",
    ) as serving:
        yield serving


@pytest.mark.parametrize("header", [{}, {"x_deaf": "1"}], ids=["heard", "kept by a middleware"])
@pytest.mark.parametrize("way", [Way.FIN, Way.RST, Way.HALF_CLOSE, Way.BEHIND_REQUEST])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_nothing_runs_for_a_client_that_left(
    server: VllmServer, stream: bool, way: Way, header: dict[str, str]
) -> None:
    body = {
        "model": MODEL,
        "prompt": ["A class is", "A module is"],
        "max_tokens": 50_000,
        "ignore_eos": True,
        "stream": stream,
    }
    request = request_bytes("/v1/completions", body, content_type="application/json", **header)
    with server.client() as client:
        client.sock.sendall(request)
        server.wait_until_runs(2)
        client.sock.sendall(parting_bytes(way, request))
        part(client.sock, way)
        server.wait_until_idle()
