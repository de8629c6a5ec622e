"""``disconnect-watch serve`` as its users run it: a process, curl, signals."""

import contextlib
import json
import logging
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from disconnect_watch import cli
from disconnect_watch.backends.engine import EngineBackend
from disconnect_watch.server import bind
from tests.support.command import FREE_PORTS, endless_model, running
from tests.support.net import held_port, vanish, wait_until
from tests.support.serve import Client
from tests.support.tools import path_of
from tests.triton.conformance import copy_models

STREAM = "/v2/models/tiny/generate_stream"
ENDLESS = {"text_input": "The class", "max_tokens": 100_000, "ignore_eos": True}


@pytest.fixture
def endless(tmp_path: Path) -> tuple[str, ...]:
    """Options for the package's model with room for ENDLESS, which no machine ends in a test."""
    return "--model", str(endless_model(tmp_path)), "--max-num-seqs", "1"


def children() -> set[int]:
    """The pids of this process's children, the dead that nobody waited for included."""
    tasks = Path("/proc/self/task").glob("*/children")
    return {int(pid) for task in tasks for pid in task.read_text().split()}


def is_running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_server_that_does_not_come_up_is_not_left_behind() -> None:
    before = children()
    # Symptom: a test that failed while it waited for the server left it running for ever.
    with (
        pytest.raises(AssertionError, match="not within"),
        running("--log-level", "error", within=0.01),
    ):
        pass
    assert children() == before


def test_a_server_does_not_outlive_a_test_run_that_is_killed() -> None:
    script = (
        "import os; from tests.support.command import running\n"
        "with running() as server:\n"
        "    print(server.process.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as killed:
        assert killed.stdout is not None
        pid = int(killed.stdout.readline())
        assert killed.wait(40) == -signal.SIGKILL
    try:
        wait_until(lambda: not is_running(pid))
    finally:
        if is_running(pid):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.skipif(not path_of("curl"), reason="curl is not here: make test-programs")
def test_an_interrupted_curl_shows_in_the_metrics_and_sigterm_ends_in_order(
    endless: tuple[str, ...],
) -> None:
    with running("--grace", "0.3", *endless) as server:
        assert 'dw_requests_total{outcome="cancelled",phase="decode"} 0.0' in server.metrics()
        # The very command that the server's own line suggests.
        (said,) = [line for line in server.lines if line.startswith("serving tiny on")]
        tried = re.search(r"try: (curl .*)$", said)
        assert tried is not None
        with (
            subprocess.Popen(shlex.split(tried[1]), stdout=subprocess.PIPE) as curl,
            contextlib.ExitStack() as at_end,
        ):
            at_end.callback(curl.kill)  # a failure would wait for its end
            assert curl.stdout is not None
            first = curl.stdout.readline()
            assert json.loads(first.removeprefix(b"data: "))["model_name"] == "tiny"
            curl.send_signal(signal.SIGINT)
        wait_until(
            lambda: 'dw_requests_total{outcome="cancelled",phase="decode"} 1.0' in server.metrics()
        )
        text = server.metrics()
        assert 'dw_kv_blocks{state="used"} 0.0' in text
        wasted = re.search(r'dw_tokens_total\{kind="wasted"\} (\d)', text)
        assert wasted is not None
        assert int(wasted[1]) <= 1
        # The engine counts an outcome before the line of its request is written.
        wait_until(lambda: bool(server.events(f"POST {STREAM}")))
        (line,) = server.events(f"POST {STREAM}")
        assert line["outcome"] == "cancelled"
        assert line["phase"] == "decode"
        assert line["reason"] in ("fin", "reset")

        with Client(server.port) as client:
            client.post(STREAM, ENDLESS)
            client.read_until(b"\n\n")
            server.process.send_signal(signal.SIGTERM)
            rest = client.read_rest()
        assert b'data: {"error":"the server is shutting down' in rest
        assert rest.endswith(b"\r\n0\r\n\r\n")
        assert server.wait() == 0
        assert [line["reason"] for line in server.events(f"POST {STREAM}")][1:] == ["shutdown"]
        assert "Traceback" not in "".join(server.lines)


def test_clients_that_vanish_or_leave_behind_a_full_window_are_noticed_if_asked_for(
    endless: tuple[str, ...],
) -> None:
    with (
        running("--vanish-after", "2", "--unblind", "1048576", *endless) as server,
        Client(server.port) as vanishing,
        Client(server.port) as pipelining,
    ):
        for client in (vanishing, pipelining):
            client.post(STREAM, ENDLESS)
        vanishing.read_until(b"\n\n")
        vanish(vanishing.sock)
        pipelining.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        pipelining.post(STREAM, bytes(1 << 19))
        pipelining.sock.close()
        wait_until(lambda: len(server.events(f"POST {STREAM}")) == 2)
        lines = server.events(f"POST {STREAM}")
        assert [line["reason"] for line in lines] == ["fin", "timed_out"]


def test_request_in_the_grace_of_a_client_that_left_ends_with_the_server(
    endless: tuple[str, ...],
) -> None:
    with running("--grace", "0.3", "--disconnect-grace", "1000", *endless) as server:
        with Client(server.port) as client:
            client.post(STREAM, ENDLESS)
            client.read_until(b"\n\n")
        wait_until(lambda: re.search(r'signals_total\{source="(fin|reset)"\} 1', server.metrics()))
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0
        (line,) = server.events(f"POST {STREAM}")
        assert line["reason"] == "shutdown"
        assert "Traceback" not in "".join(server.lines)


def test_ctrl_c_ends_in_order_and_a_second_signal_at_once(endless: tuple[str, ...]) -> None:
    with (
        running("--grace", "1000", *endless) as server,
        Client(server.port) as client,
    ):
        client.post(STREAM, ENDLESS)
        client.read_until(b"\n\n")
        server.process.send_signal(signal.SIGINT)
        wait_until(lambda: server.events("shutting down"))
        # It goes on within the grace time.
        client.read_until(b"\n\n")
        server.process.send_signal(signal.SIGINT)
        assert b'data: {"error":' in client.read_rest()
        assert server.wait() == 0
        assert "Traceback" not in "".join(server.lines)


@pytest.fixture
def root_logger() -> Iterator[logging.Logger]:
    """The command sets up logging for its whole process, which is ours here."""
    root, uvicorn = logging.getLogger(), logging.getLogger("uvicorn")
    before = root.handlers, root.level, uvicorn.level
    yield root
    root.handlers = before[0]
    root.setLevel(before[1])
    uvicorn.setLevel(before[2])


def fails_to_serve(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """Run the command in this process; returns what it complained about, without its log."""
    with pytest.raises(SystemExit) as caught:
        cli.app(["serve", *FREE_PORTS, *options])
    assert caught.value.code == 2
    lines = capsys.readouterr().err.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("{"))


@pytest.mark.usefixtures("root_logger")
def test_several_steps_a_launch_are_refused_of_what_cannot_run_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert fails_to_serve(capsys, "--device-steps", "8") == (
        "disconnect-watch: device_steps is 8, which needs arithmetic 'triton', not 'auto'\n"
    )


@pytest.mark.usefixtures("root_logger")
@pytest.mark.parametrize("option", ["--http-port", "--metrics-port"])
def test_a_port_in_use_is_an_error_that_says_so(
    capsys: pytest.CaptureFixture[str], option: str
) -> None:
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        said = fails_to_serve(capsys, option, str(port))
    assert said == (
        f"disconnect-watch: cannot listen on 127.0.0.1 port {port}: Address already in use\n"
    )


def test_what_a_machine_lacks_for_what_was_asked_for_is_an_error_that_names_it() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    options = [*FREE_PORTS, "--arithmetic", "triton"]
    done = subprocess.run(
        [sys.executable, "-m", "disconnect_watch.cli", "serve", *options],
        capture_output=True,
        text=True,
        env={**environment, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 2
    lack = "disconnect-watch: arithmetic is 'triton', which cannot run here: "
    assert done.stderr.splitlines()[-1].startswith(lack)


def test_a_port_in_use_is_told_before_anything_heavy_is_loaded() -> None:
    # Symptom: some seconds of imports, and then the error.
    script = (
        "import sys; from disconnect_watch import cli\n"
        "try: cli.app(sys.argv[1:])\n"
        "finally: print(*{'torch', 'uvicorn'} & set(sys.modules))"
    )
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        options = ["serve", *FREE_PORTS, "--metrics-port", str(taken.getsockname()[1])]
        done = subprocess.run(
            [sys.executable, "-c", script, *options], capture_output=True, text=True
        )
    assert "Address already in use" in done.stderr
    assert (done.returncode, done.stdout) == (2, "\n")


@pytest.mark.usefixtures("root_logger")
def test_one_port_for_both_is_an_error_that_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    # Symptom: "Bad file descriptor".
    with held_port() as port:
        said = fails_to_serve(capsys, "--http-port", str(port), "--metrics-port", str(port))
    assert said == (
        f"disconnect-watch: cannot listen on 127.0.0.1 port {port}: Address already in use\n"
    )


@pytest.mark.usefixtures("root_logger")
def test_a_model_that_is_a_file_is_an_error_that_names_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    said = fails_to_serve(capsys, "--model", str(tmp_path / "file"))
    assert said.startswith("disconnect-watch: ")
    assert f"{tmp_path}/file" in said


def test_a_model_is_named_as_its_url_spells_it() -> None:
    # Symptom: no client could ask for the model of a directory with a space in its name.
    backend = EngineBackend.from_pretrained(name="my model")
    try:
        assert backend.name == "my%20model"
    finally:
        backend.close()


@pytest.mark.usefixtures("root_logger")
def test_a_missing_model_is_an_error_that_names_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    said = fails_to_serve(capsys, "--model", str(tmp_path / "nowhere"))
    assert said.startswith(f"disconnect-watch: {tmp_path}/nowhere")


@pytest.mark.usefixtures("root_logger")
def test_a_malformed_model_is_an_error_that_says_what_is_wrong(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    said = fails_to_serve(capsys, "--model", str(tmp_path))
    assert said.startswith("disconnect-watch: ")
    assert "architecture" in said


@pytest.mark.usefixtures("root_logger")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--model-repository", "/nowhere/at/all"), "'/nowhere/at/all' is no directory"),
        (("--http-restricted-api", "x"), "cannot restrict 'x': give <category>"),
        (("--http-header-forward-pattern", "("), "is no regular expression"),
    ],
)
def test_an_option_that_makes_no_sense_is_an_error_that_says_why(
    capsys: pytest.CaptureFixture[str], options: tuple[str, ...], said: str
) -> None:
    assert said in fails_to_serve(capsys, *options)


@pytest.mark.slow
@pytest.mark.usefixtures("root_logger")
def test_a_model_of_a_repository_that_cannot_be_loaded_ends_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    said = fails_to_serve(capsys, "--model-repository", str(copy_models(tmp_path, "broken")))
    assert "cannot load 'broken' version 1: " in said
    assert "cannot load me" in said


@pytest.mark.usefixtures("root_logger")
def test_a_store_of_responses_that_cannot_be_used_ends_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "text"
    path.write_text("no database")
    assert "not a database" in fails_to_serve(capsys, "--responses-store", str(path))
    assert path.read_text() == "no database"


def test_a_ctrl_c_before_it_serves_leaves_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(**_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "app", interrupted)
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 130
