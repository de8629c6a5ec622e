"""``disconnect-watch gateway`` as its users run it, and its page of the documentation."""

import logging
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from disconnect_watch import cli
from tests.support.command import FREE_PORTS, running
from tests.support.documents import run_blocks
from tests.support.net import wait_until
from tests.support.serve import Client
from tests.support.triton import TritonProcess, shared_triton


@pytest.fixture(scope="module", autouse=True)
def small() -> Iterator[TritonProcess]:
    with shared_triton() as process:
        yield process


def test_it_serves_what_the_triton_has_until_it_is_told_to_end(small: TritonProcess) -> None:
    url = f"grpc://127.0.0.1:{small.port}"
    with running("--triton", url, "--grace", "0.3", command="gateway") as server:
        (said,) = [line for line in server.lines if line.startswith("serving ")]
        assert said.startswith("serving fails, identity, says, stream, told, waits on http://127.")
        path = "/v2/models/stream/generate_stream"
        with Client(server.port) as client:
            client.post(path, {"INPUT0": 1, "then": "wait", "id": "left"})
            client.read_until(b"\n\n")
        small.wait_for("cancelled", id="left")
        counted = f'dw_upstream_requests_total{{outcome="cancelled",upstream="{url}"}} 1.0'
        wait_until(lambda: counted in server.metrics())
        with Client(server.port) as client:
            client.post(path, {"INPUT0": 1, "then": "wait", "id": "stays"})
            client.read_until(b"\n\n")
            server.process.send_signal(signal.SIGTERM)
            assert b"the server is shutting down" in client.read_rest()
        assert server.wait() == 0
        assert "Traceback" not in "".join(server.lines)
    small.wait_for("cancelled", id="stays")


@pytest.fixture
def root_logger() -> Iterator[None]:
    """The command sets up logging for its whole process, which is ours here."""
    root, uvicorn = logging.getLogger(), logging.getLogger("uvicorn")
    before = root.handlers, root.level, uvicorn.level
    yield
    root.handlers = before[0]
    root.setLevel(before[1])
    uvicorn.setLevel(before[2])


@pytest.mark.usefixtures("root_logger")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "give one of --triton, --vllm and --http"),
        (["--http", "http://a", "--triton", "grpc://a"], "give one of --triton, --vllm and --http"),
        (["--vllm", "folder", "--triton", "grpc://a"], "give one of --triton, --vllm and --http"),
        (["--vllm", "folder"], "install it with: pip install vllm"),
        (["--http", "grpc://a"], "give http://HOST:PORT"),
        (["--http", "http://a", "--api-keys", "keys"], "--api-keys go with --triton"),
        (["--triton", "http://a:8000"], "give grpc://HOST:PORT"),
        (["--triton", "grpc://a,grpc://a:8001"], "grpc://a:8001 is named twice"),
        (["--triton", "grpc://a", "--triton-header", "key"], "give NAME=VALUE"),
        (["--triton", "grpc://a", "--triton-header", "k\u00e9y=x"], "can't go with a gRPC call"),
        (["--triton", "grpc://a", "--pass-headers", "("], "is no regular expression"),
        (["--triton", "grpc://a", "--triton-ca", "/no/such.pem"], "/no/such.pem"),
    ],
)
def test_what_makes_no_sense_is_said_to_make_none(
    capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.app(["gateway", *FREE_PORTS, *options])
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


def test_a_program_asks_a_triton_as_the_page_says(small: TritonProcess) -> None:
    names = run_blocks("gateways.md")
    assert names["main"](f"grpc://127.0.0.1:{small.port}") == bytes(8)


def test_every_option_of_the_page_is_one_of_the_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        cli.app(["gateway", "--help"])
    known = capsys.readouterr().out
    page = (Path(__file__).parents[2] / "docs/gateways.md").read_text()
    named = set(re.findall(r"(?<![-\w])--[a-z][a-z-]+", page))
    assert len(named) > 8
    assert [option for option in named if option not in known] == []
