"""Ports, and the protocol and signals of the server."""

import asyncio
import signal
import socket
from typing import Any, cast

import pytest

from disconnect_watch.server import Frontend, FrontendOptions, ServeOptions, bind
from disconnect_watch.server.run import MAX_CHUNKS, MAX_HEAD_BYTES, make_server
from tests.support.backends import ScriptedBackend
from tests.support.net import listener, wait_until
from tests.support.serve import Client, metrics_of, serving_frontend


def test_a_port_in_use_is_named_in_the_error() -> None:
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1 port {port}: Address"):
            bind("127.0.0.1", port)


def test_an_address_that_is_none_is_named_in_the_error() -> None:
    with pytest.raises(OSError, match=r"cannot listen on 203\.0\.113\.1 port 0"):
        bind("203.0.113.1", 0)


def test_an_ipv6_address_is_taken() -> None:
    with listener("tcp6"):
        pass
    with bind("::1", 0) as sock:
        assert sock.family is socket.AF_INET6


def test_nobody_is_let_in_before_the_server_listens() -> None:
    with bind("127.0.0.1", 0) as sock, pytest.raises(ConnectionRefusedError):
        socket.create_connection(sock.getsockname(), timeout=5)


def test_what_is_no_http_is_closed_without_a_word() -> None:
    with serving_frontend(Frontend(ScriptedBackend())) as server, Client(server.port) as client:
        client.sock.sendall(b"\x16\x03\x01 this is no HTTP\r\n\r\n")
        assert client.read_rest() == b""


def test_a_head_without_end_is_closed_without_a_word() -> None:
    with (
        serving_frontend(Frontend(ScriptedBackend())) as server,
        Client(server.port) as client,
    ):
        client.sock.sendall(b"GET / HTTP/1.1\r\nX-Endless: ")
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            client.sock.sendall(b"x" * 50_000_000)


def test_many_small_heads_on_a_connection_are_fine() -> None:
    with serving_frontend(Frontend(ScriptedBackend())) as server, Client(server.port) as client:
        for _ in range(100):
            client.sock.sendall(b"GET /v2/health/live HTTP/1.1\r\nX: %b\r\n\r\n" % (b"x" * 1000))
            assert client.read_response()[0] == 200


@pytest.mark.parametrize("model", ["generate", "generate_stream"])
def test_a_client_of_http_1_0_is_sent_no_chunks(model: str) -> None:
    # Symptom: "Transfer-Encoding: chunked", and the sizes of the chunks in the text.
    with (
        serving_frontend(Frontend(ScriptedBackend("one", " two"))) as server,
        Client(server.port) as client,
    ):
        body = b'{"text_input":"x"}'
        client.sock.sendall(
            b"POST /v2/models/script/%b HTTP/1.0\r\nConnection: keep-alive\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (model.encode(), len(body), body)
        )
        head = client.read_until(b"\r\n\r\n").lower()
        answer = client.read_rest()
    assert b"transfer-encoding" not in head
    assert b"\r\nconnection: close\r\n" in head
    start = b'{"model_name":"script","model_version":"1","text_output":"'
    if model == "generate":
        assert answer == start + b'one two"}'
        assert b"\r\ncontent-length: %d\r\n" % len(answer) in head
    else:
        assert answer == b"".join(b'data: %b%b"}\n\n' % (start, t) for t in (b"one", b" two"))
        assert b"content-length" not in head


def test_an_upgrade_is_passed_over_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    # Symptom: two warnings for each, with advice to install a WebSocket library.
    with serving_frontend(Frontend(ScriptedBackend())) as server, Client(server.port) as client:
        client.sock.sendall(
            b"GET /v2/health/live HTTP/1.1\r\nHost: t\r\n"
            b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
        )
        assert client.read_response()[0] == 200
    assert [line for line in caplog.messages if "upgrade" in line or "WebSocket" in line] == []


def test_a_large_body_counts_for_no_head_behind_it() -> None:
    # Symptom: a client that pipelines was cancelled with reason owner_closed.
    async def main() -> None:
        frontend = Frontend(ScriptedBackend("a"))
        server = make_server(frontend, metrics_of(frontend), ServeOptions())
        server.config.load()
        loop = asyncio.get_running_loop()
        protocol_class = cast("Any", server.config.http_protocol_class)
        ours, theirs = socket.socketpair()
        transport, protocol = await loop.create_connection(
            lambda: protocol_class(server.config, server.server_state, {}), sock=ours
        )
        body = b'{"text_input": "%b"}' % (b"x" * 2 * MAX_HEAD_BYTES)
        request = b"POST /v2/models/script/generate HTTP/1.1\r\nContent-Length: %d\r\n\r\n%b"
        protocol.data_received(request % (len(body), body) + b"GET /v2 HTTP/1.1\r\nX: y")
        assert not transport.is_closing()
        protocol.data_received(b"y" * (MAX_HEAD_BYTES + 1))
        assert transport.is_closing()
        await asyncio.gather(*server.server_state.tasks)
        theirs.close()

    asyncio.run(main())


def test_a_refused_body_leaves_the_connection_usable() -> None:
    frontend = Frontend(ScriptedBackend("a"), options=FrontendOptions(max_body_bytes=1000))
    with serving_frontend(frontend) as server, Client(server.port) as client:
        client.post("/v2/models/script/generate", b"x" * 300_000)
        assert client.read_response()[0] == 400
        client.post("/v2/models/script/generate", {"text_input": "x"})
        assert client.read_response()[0] == 200


@pytest.mark.slow
@pytest.mark.parametrize("is_too_many", [False, True])
def test_a_body_in_too_many_chunks_is_refused(is_too_many: bool) -> None:
    start, pad, end = b'{"text_input": "x"', b" ", b"}"
    pieces = [start, *[pad] * (MAX_CHUNKS - 2 + is_too_many), end]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    frontend = Frontend(ScriptedBackend("a"))
    with serving_frontend(frontend) as server, Client(server.port) as client:
        client.sock.sendall(
            b"POST /v2/models/script/generate HTTP/1.1\r\nHost: t\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"
        )
        status, headers, body = client.read_response()
        if is_too_many:
            assert (status, headers["connection"]) == (400, "close")
            assert b"exceeds maximum of 65536 non-empty chunks" in body
        else:
            assert status == 200
            client.post("/v2/models/script/generate", {"text_input": "x"})
            assert client.read_response()[0] == 200


def test_a_leave_in_mid_upload_ends_without_a_request() -> None:
    backend = ScriptedBackend("a")
    with serving_frontend(Frontend(backend)) as server:
        with Client(server.port) as client:
            client.sock.sendall(
                b"POST /v2/models/script/generate HTTP/1.1\r\nHost: t\r\n"
                b'Content-Length: 1000\r\n\r\n{"text_input"'
            )
        wait_until(lambda: not server.server.server_state.tasks)
        wait_until(lambda: not server.server.server_state.connections)
    assert backend.calls == []


def test_a_client_that_does_not_read_holds_no_shutdown_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    backend = ScriptedBackend(*["x" * 1_000_000] * 50)
    with serving_frontend(Frontend(backend), grace=0.1) as server, Client(server.port) as client:
        client.post("/v2/models/script/generate_stream", {"text_input": "x"})
        client.read_until(b"\r\n\r\n")
        server.stop()
        assert backend.num_open == 0
    # uvicorn's own last resort is to cancel the tasks, with a traceback each.
    assert "Cancel 1 running task" not in caplog.text
    assert "Traceback" not in caplog.text


def test_a_second_signal_ends_the_grace_time() -> None:
    server = make_server(
        frontend := Frontend(ScriptedBackend()), metrics_of(frontend), ServeOptions()
    )
    server.handle_exit(signal.SIGTERM, None)
    assert server.should_exit
    assert not server._is_hurried
    server.handle_exit(signal.SIGTERM, None)
    assert server._is_hurried


def test_a_head_that_is_too_large_is_closed_though_it_comes_in_one_read() -> None:
    frontend = Frontend(ScriptedBackend("a"))
    with serving_frontend(frontend) as server, Client(server.port) as client:
        client.sock.sendall(b"GET /v2 HTTP/1.1\r\nX: %b\r\n\r\n" % (b"x" * 2 * MAX_HEAD_BYTES))
        with pytest.raises((EOFError, ConnectionError)):
            client.read_response()
