"""``disconnect-watch gateway --vllm``: our endpoints and aborts, before vLLM's engine."""

import json
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from disconnect_watch.testing import Way
from disconnect_watch.testing.ways import part, parting_bytes
from tests.support.command import Process, endless_model
from tests.support.net import PATIENCE, wait_until
from tests.support.serve import Client, request_bytes
from tests.support.venvs import python_of
from tests.support.vllm_server import BEGINS_WITHIN, MAX_MODEL_LEN, vllm_environment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(BEGINS_WITHIN + 120)]

ENDLESS = {"model": "tiny", "max_tokens": 100_000, "ignore_eos": True}
PROMPT = {"prompt": "A class is"}
CHAT = {"messages": [{"role": "user", "content": "A class is"}]}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {**ENDLESS, **PROMPT}),
    "chat": ("/v1/chat/completions", {**ENDLESS, **CHAT}),
    "generate_stream": (
        "/v2/models/tiny/generate_stream",
        {"text_input": "A class is", "max_tokens": 100_000, "ignore_eos": True},
    ),
}
WAYS = [Way.FIN, Way.RST, Way.HALF_CLOSE, Way.KILLED, Way.BEHIND_BODY, Way.BEHIND_REQUEST]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    process = begin_gateway(python_of("vllm"), tmp_path_factory.mktemp("gateway"))
    try:
        process.wait_until_it_serves(BEGINS_WITHIN)
        yield process
        process.process.send_signal(signal.SIGTERM)
        assert process.wait() == 0
    finally:
        process.close()


def begin_gateway(python: Path, directory: Path) -> Process:
    environment = vllm_environment(directory)
    found = subprocess.run([python, "-c", "import structlog"], env=environment, check=False)
    if found.returncode:
        pytest.skip(f"{python} has no structlog: .ci/vllm installs it")
    options = f"--dtype bfloat16 --enforce-eager --max-num-seqs 4 --max-model-len {MAX_MODEL_LEN}"
    model = str(endless_model(directory))
    return Process(
        *("--vllm", model, "--vllm-args", options),
        command="gateway",
        python=python,
        env=environment,
    )


def gauges(gateway: Process) -> tuple[float, float, float]:
    """Requests that run, requests that wait, and blocks in use, as vLLM's engine says."""
    metrics = gateway.metrics()
    names = ('requests{state="running"}', 'requests{state="waiting"}', 'kv_blocks{state="used"}')
    running, waiting, used = (
        float(
            next(line for line in metrics.splitlines() if line.startswith(f"dw_{name}")).split()[-1]
        )
        for name in names
    )
    return running, waiting, used


def wait_until_runs(gateway: Process, num: int) -> None:
    wait_until(lambda: gauges(gateway)[0] == num)


def wait_until_idle(gateway: Process) -> None:
    wait_until(lambda: gauges(gateway) == (0, 0, 0))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_runs_for_a_client_that_left(
    gateway: Process, kind: str, stream: bool, way: Way
) -> None:
    path, body = KINDS[kind]
    if "/v1/" in path:
        body = {**body, "stream": stream}
    request = request_bytes(path, body)
    with Client(gateway.port) as client:
        client.sock.sendall(request)
        wait_until_runs(gateway, 1)
        client.sock.sendall(parting_bytes(way, request))
        part(client.sock, way)
        wait_until_idle(gateway)


def post(gateway: Process, path: str, body: dict[str, Any], **headers: str) -> tuple[int, Any]:
    with Client(gateway.port) as client:
        client.post(path, body, **headers)
        status, _, content = client.read_response()
        return status, json.loads(content)


def test_a_stream_says_what_the_whole_answer_does(gateway: Process) -> None:
    asked = {**ENDLESS, **PROMPT, "max_tokens": 20, "temperature": 0}
    status, whole = post(gateway, "/v1/completions", asked)
    assert status == 200
    with Client(gateway.port) as client:
        client.post("/v1/completions", {**asked, "stream": True})
        events = client.read_until(b"[DONE]").decode()
    chunks = [json.loads(line[6:]) for line in re.findall(r"data: \{.*", events)]
    text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
    assert text == whole["choices"][0]["text"] != ""
    assert whole["usage"]["completion_tokens"] == 20
    assert whole["choices"][0]["finish_reason"] == "length"


def test_stops_answers_and_logprobs_are_those_that_were_asked_for(gateway: Process) -> None:
    asked = {**ENDLESS, "prompt": ["A class is", "A module is"], "n": 2, "max_tokens": 4}
    _, several = post(gateway, "/v1/completions", {**asked, "seed": 1 << 63, "logprobs": 2})
    assert [choice["index"] for choice in several["choices"]] == [0, 1, 2, 3]
    for choice in several["choices"]:
        assert len(choice["logprobs"]["token_logprobs"]) == 4
        assert all(len(top) == 2 for top in choice["logprobs"]["top_logprobs"])
    stopped = {**ENDLESS, **PROMPT, "temperature": 0, "stop": [" and"]}
    _, answer = post(gateway, "/v1/completions", stopped)
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert " and" not in answer["choices"][0]["text"]


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"best_of": 3}, 400),
        ({"prompt": [1] * (MAX_MODEL_LEN + 1)}, 400),
        ({"model": "none"}, 404),
    ],
)
def test_what_vllm_does_not_do_is_refused(
    gateway: Process, change: dict[str, Any], status: int
) -> None:
    assert post(gateway, "/v1/completions", {**ENDLESS, **PROMPT, **change})[0] == status
    wait_until_idle(gateway)


def test_a_deadline_ends_a_request(gateway: Process) -> None:
    status, _ = post(gateway, "/v1/completions", {**ENDLESS, **PROMPT, "timeout": 0.2})
    assert status == 504
    wait_until_idle(gateway)


def test_a_request_is_cancelled_by_its_id_and_answered_when_it_is_out(gateway: Process) -> None:
    (said,) = [line for line in gateway.lines if line.startswith("admin token: ")]
    token = f"Bearer {said.split()[-1]}"
    with Client(gateway.port) as client:
        client.post("/v1/completions", {**ENDLESS, **PROMPT, "stream": True})
        head = client.read_until(b"\r\n\r\n").decode()
        (request_id,) = re.findall(r"(?i)x-request-id: (\S+)", head)
        wait_until_runs(gateway, 1)
        path = f"/v1/requests/{request_id}/cancel"
        status, answer = post(gateway, path, {}, Authorization=token)
        assert status == 200
        assert answer["status"] == "cancelled", answer
        client.read_until(b"\r\n0\r\n\r\n")
        assert post(gateway, path, {}, Authorization=token)[1]["status"] == "already_cancelled"
    wait_until_idle(gateway)


def descendants(pid: int) -> set[int]:
    """The processes that it began, and those that they did."""
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return set()
    children = set(map(int, text.split()))
    return children.union(*(descendants(child) for child in children))


def is_there(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"  # nobody in a container may reap it


@pytest.mark.parametrize("how", ["terminated as it begins", "killed as it serves"])
def test_no_process_of_vllms_outlives_the_gateway(tmp_path: Path, how: str) -> None:
    python = python_of("vllm")
    process = begin_gateway(python, tmp_path)
    try:
        if how == "killed as it serves":
            process.wait_until_it_serves(BEGINS_WITHIN)
        else:
            wait_until(lambda: descendants(process.process.pid), BEGINS_WITHIN)
        theirs = descendants(process.process.pid)
        assert theirs
        process.process.send_signal(signal.SIGKILL if "killed" in how else signal.SIGTERM)
        process.wait()
        wait_until(lambda: not any(map(is_there, theirs)), 3 * PATIENCE)
    finally:
        process.close()


def test_nothing_went_wrong_in_all_that(gateway: Process) -> None:
    assert "Traceback" not in "".join(gateway.lines)
