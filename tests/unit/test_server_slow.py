"""Requests that do not come to an end lose their connection, and nobody else's."""

import pytest

from disconnect_watch.server import Frontend
from tests.integration.test_serve_models import infer_body, wait
from tests.support.backends import ScriptedBackend
from tests.support.function_models import FunctionModel, ModelTable, tensor_config
from tests.support.net import wait_until
from tests.support.serve import Client, request_bytes, serving_frontend

SHORT = 0.3


def is_closed(client: Client) -> bool:
    try:
        return client.read_rest() == b""
    except ConnectionError:
        return True


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"POST /v2/models/script/generate HTTP/1.1\r\nHost: x\r\n",
        b"POST /v2/models/script/generate HTTP/1.1\r\nContent-Length: 100\r\n\r\n{",
        b"POST /v2/models/script/generate HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab",
    ],
    ids=["nothing", "half a head", "half a body", "half a chunk"],
)
def test_what_does_not_come_to_its_end_is_closed(sent: bytes) -> None:
    backend = ScriptedBackend("a")
    frontend = Frontend(backend)
    with serving_frontend(frontend, read_timeout=SHORT) as server, Client(server.port) as client:
        client.sock.sendall(sent)
        assert is_closed(client)
    assert backend.calls == []


def test_a_byte_now_and_then_does_not_keep_it() -> None:
    with (
        serving_frontend(Frontend(ScriptedBackend()), read_timeout=SHORT) as server,
        Client(server.port) as client,
    ):
        client.sock.sendall(b"GET /v2 HTTP/1.1\r\nX: ")
        client.sock.settimeout(0.01)

        def is_sent_for_nothing() -> bool:
            try:
                client.sock.sendall(b"y")
                return client.sock.recv(1) == b""
            except TimeoutError:
                return False
            except ConnectionError:
                return True

        wait_until(is_sent_for_nothing, 30)


@pytest.mark.parametrize("num_missing", [5, 120], ids=["its body", "its head"])
def test_what_waits_behind_one_that_runs_is_not_late(num_missing: int) -> None:
    model = FunctionModel(tensor_config("waiting", "FP32"), wait)
    frontend = Frontend(models=ModelTable(model))
    path = "/v2/models/waiting/infer"
    with (
        serving_frontend(frontend, read_timeout=SHORT, grace=0.2) as server,
        Client(server.port) as client,
    ):
        request = request_bytes(path, infer_body())
        client.sock.sendall(request + request[:-num_missing])
        wait_until(lambda: model.num_open == 1)
        # Twice the time of who has nothing before it.
        for _ in range(2):
            with Client(server.port) as late:
                assert is_closed(late)
        assert model.num_open == 1
        assert not model.requests[0].cancel.cancelled


def test_an_answered_connection_that_rests_is_not_late() -> None:
    with (
        serving_frontend(Frontend(ScriptedBackend()), read_timeout=SHORT) as server,
        Client(server.port) as client,
    ):
        for _ in range(2):
            client.sock.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n")
            assert client.read_response()[0] == 200
            with Client(server.port) as late:
                assert is_closed(late)
