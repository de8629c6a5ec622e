"""Answers that go out whole, in one write, and what must hold for them as for all others."""

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from disconnect_watch.adapters import WHOLE_KEY
from disconnect_watch.adapters._fast import Exchange
from disconnect_watch.server import Frontend
from tests.support.function_models import ModelTable, identity
from tests.support.serve import Client, request_bytes, serving_frontend

PATH = "/v2/models/identity/infer"
SMALL = json.dumps(
    {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [3], "data": [1, 2, 3]}]}
).encode()
HEAD_LENGTH = "Inference-Header-Content-Length"


def large_request() -> bytes:
    data = np.zeros(4 << 20, "<f4").tobytes()
    tensor = {
        "name": "INPUT0",
        "datatype": "FP32",
        "shape": [4 << 20],
        "parameters": {"binary_data_size": len(data)},
    }
    document = {"inputs": [tensor], "parameters": {"binary_data_output": True}}
    head = json.dumps(document).encode()
    return request_bytes(PATH, head + data, **{HEAD_LENGTH: str(len(head))})


@pytest.fixture
def frontend() -> Frontend:
    return Frontend(models=ModelTable(identity()))


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The messages that went through uvicorn's own ``send``, each of which is a write."""
    sent: list[str] = []
    send = RequestResponseCycle.send

    async def spy(self: RequestResponseCycle, message: Any) -> None:
        sent.append(message["type"])
        await send(self, message)

    monkeypatch.setattr(RequestResponseCycle, "send", spy)
    return sent


def test_a_small_answer_goes_out_in_one_write(frontend: Frontend, pieces: list[str]) -> None:
    with serving_frontend(frontend) as server, Client(server.port) as client:
        for _ in range(3):
            client.post(PATH, SMALL)
            status, headers, body = client.read_response()
            assert status == 200
            assert len(headers["x-request-id"]) == 32
            assert json.loads(body)["outputs"][0]["data"] == [1, 2, 3]
    assert pieces == []


def test_a_large_answer_is_not_copied_for_it(frontend: Frontend, pieces: list[str]) -> None:
    with serving_frontend(frontend) as server, Client(server.port) as client:
        client.sock.sendall(large_request())
        status, _, body = client.read_response()
        assert (status, len(body) > 16 << 20) == (200, True)
    assert pieces == ["http.response.start", "http.response.body", "http.response.body"]


def test_who_does_not_read_yet_gets_the_next_answer_in_its_turn(
    frontend: Frontend, pieces: list[str]
) -> None:
    with serving_frontend(frontend) as server, Client(server.port) as client:
        # The first answer fills the socket and the transport's buffer: writing is paused.
        client.sock.sendall(large_request())
        client.post(PATH, SMALL)
        assert client.read_response()[0] == 200
        assert json.loads(client.read_response()[2])["outputs"][0]["data"] == [1, 2, 3]
        client.post(PATH, SMALL)
        assert client.read_response()[0] == 200
    assert frontend.stats().num_live == 0


@pytest.mark.parametrize("connection", ["close", "keep-alive"])
def test_the_connection_ends_if_the_client_wants_it(frontend: Frontend, connection: str) -> None:
    with serving_frontend(frontend) as server, Client(server.port) as client:
        client.post(PATH, SMALL, Connection=connection)
        _, headers, _ = client.read_response()
        assert headers.get("connection") == ("close" if connection == "close" else None)
        if connection == "close":
            assert client.read_rest() == b""
        else:
            client.post(PATH, SMALL)
            assert client.read_response()[0] == 200


def exchange_of(**cycle: Any) -> tuple[Exchange, list[bytes]]:
    written: list[bytes] = []
    fields: dict[str, Any] = {
        "flow": SimpleNamespace(write_paused=False),
        "access_log": False,
        "disconnected": False,
        "scope": {"method": "POST"},
        "keep_alive": True,
        "default_headers": [],
        "transport": SimpleNamespace(write=written.append, close=lambda: written.append(b"closed")),
        "message_event": SimpleNamespace(set=lambda: None),
        "on_response": lambda: None,
    }
    return Exchange(None, SimpleNamespace(**{**fields, **cycle})), written  # type: ignore[arg-type]


def whole(**fields: Any) -> dict[str, Any]:
    head = {"type": "http.response.start", "status": 200, "headers": [], WHOLE_KEY: b"{}"}
    return {**head, **fields}


def test_a_header_cannot_begin_another() -> None:
    exchange, written = exchange_of()
    with pytest.raises(RuntimeError, match="Invalid HTTP header value"):
        exchange.send(whole(headers=[(b"x", b"1\r\ny: 2")]))
    assert written == []


def test_the_answer_to_head_has_no_body() -> None:
    exchange, written = exchange_of(scope={"method": "HEAD"})
    exchange.send(whole(headers=[(b"content-length", b"2")]))
    assert written == [b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n"]


def test_nothing_is_written_for_who_is_gone() -> None:
    exchange, written = exchange_of(disconnected=True)
    exchange.send(whole())
    assert written == []


def test_a_server_that_closes_says_so() -> None:
    exchange, written = exchange_of()
    exchange.send(whole(headers=[(b"connection", b"close")]))
    assert written == [b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n{}", b"closed"]
    assert exchange.cycle.response_complete
