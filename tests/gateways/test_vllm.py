"""A plain ``vllm serve`` with our plugin: clients that leave it in every way.

All requests have answers without an end. What is waited for, vLLM's own metrics tell. Stock vLLM
goes on for those that leave behind a pipelined request (``bench/gateways.py`` measures it).
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from disconnect_watch.testing import Way, http_request
from disconnect_watch.testing.ways import part, parting_bytes
from tests.support.http import request_bytes
from tests.support.vllm_server import BEGINS_WITHIN, MODEL, VllmServer, vllm_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(BEGINS_WITHIN + 120)]

WAYS = [
    Way.FIN,
    Way.RST,
    Way.HALF_CLOSE,
    Way.HALF_CLOSE_FIN,
    Way.KILLED,
    Way.BEHIND_BODY,
    Way.BEHIND_REQUEST,
]
CHAT = {"messages": [{"role": "user", "content": "A class is"}]}
#: Paths, and bodies without an end of their own.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {"prompt": "A class is", "max_tokens": 100_000}),
    "completions of two prompts, twice each": (
        "/v1/completions",
        {"prompt": ["A class is", "A module is"], "n": 2, "temperature": 1, "max_tokens": 50_000},
    ),
    "chat": ("/v1/chat/completions", {**CHAT, "max_tokens": 100_000}),
    "responses": ("/v1/responses", {"input": "A class is", "max_output_tokens": 100_000}),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    directory = tmp_path_factory.mktemp("vllm")
    with vllm_server(
        directory, DISCONNECT_WATCH_VLLM="1", VLLM_ENABLE_RESPONSES_API_STORE="1"
    ) as serving:
        yield serving


def request_of(kind: str, *, stream: bool, **fields: Any) -> bytes:
    path, body = KINDS[kind]
    body = {"model": MODEL, "ignore_eos": True, "stream": stream, **body, **fields}
    return request_bytes(path, body, content_type="application/json")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_runs_for_a_client_that_left(
    server: VllmServer, kind: str, stream: bool, way: Way
) -> None:
    num = 4 if "twice" in kind else 1
    request = request_of(kind, stream=stream)
    with server.client() as client:
        client.sock.sendall(request)
        server.wait_until_runs(num)
        client.sock.sendall(parting_bytes(way, request))
        part(client.sock, way)
        server.wait_until_idle()


@pytest.mark.parametrize("way", [Way.FIN, Way.BEHIND_REQUEST])
def test_a_request_in_the_queue_of_a_client_that_left_is_dropped(
    server: VllmServer, way: Way
) -> None:
    request = request_of("completions", stream=False)
    with server.client() as filling, server.client() as waiting:
        filling.sock.sendall(request_of("completions of two prompts, twice each", stream=True))
        server.wait_until_runs(4)
        waiting.sock.sendall(request)
        server.wait_until_runs(4, num_waiting=1)
        waiting.sock.sendall(parting_bytes(way, request))
        part(waiting.sock, way)
        server.wait_until_runs(4)
    server.wait_until_idle()


def test_who_stays_is_answered_as_without_those_who_leave(server: VllmServer) -> None:
    short = request_of("completions", stream=False, max_tokens=40, temperature=0)
    with server.client() as alone:
        alone.sock.sendall(short)
        status, _, expected = alone.read_response()
        assert status == 200
    with server.client() as staying:
        for way in (Way.FIN, Way.BEHIND_REQUEST):
            request = request_of("chat", stream=True)
            with server.client() as leaving:
                leaving.sock.sendall(request)
                server.wait_until_runs(1)
                staying.sock.sendall(short)
                leaving.sock.sendall(parting_bytes(way, request))
                part(leaving.sock, way)
            _, _, answer = staying.read_response()
            assert text_of(answer) == text_of(expected)
    server.wait_until_idle()


def text_of(body: bytes) -> str:
    text: str = json.loads(body)["choices"][0]["text"]
    assert text
    return text


def test_a_response_in_the_background_runs_on(server: VllmServer) -> None:
    request = request_of("responses", stream=True, background=True, store=True)
    with server.client() as client:
        client.sock.sendall(request)
        created = json.loads(client.read_until(b"\n\n").partition(b"data: ")[2])
        server.wait_until_runs(1)
    # Its client left, as the next one does, which is noticed.
    with server.client() as client:
        client.sock.sendall(request_of("completions", stream=True))
        server.wait_until_runs(2)
    server.wait_until_runs(1)
    path = f"/v1/responses/{created['response']['id']}"
    with server.client() as client:
        # Many turns of the server's loop, in which an abort that came late would have come.
        client.sock.sendall(request_of("completions", stream=False, max_tokens=500))
        assert client.read_response()[0] == 200
        client.sock.sendall(http_request("GET", path))
        assert json.loads(client.read_response()[2])["status"] in ("queued", "in_progress")
        client.post(f"{path}/cancel")
        assert client.read_response()[0] == 200
    server.wait_until_idle()


def test_a_client_cannot_name_the_flag_of_another(server: VllmServer) -> None:
    flag = {"disconnect_watch.flags": [server.process.pid, 0, 0, 0]}
    with server.client() as client:
        client.sock.sendall(request_of("completions", stream=True, vllm_xargs=flag))
        client.read_until(b"data: ")
    server.wait_until_idle()
    assert b"cannot look at the flags" not in server.log.read_bytes()


def test_no_process_of_it_failed_to_load_the_plugin(server: VllmServer) -> None:
    assert "Failed to load plugin" not in server.log.read_text()
