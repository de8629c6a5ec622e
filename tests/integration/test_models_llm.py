"""``serve --model-repository`` with a model that our own engine runs, beside one that asks it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from disconnect_watch.backends.infer import InferError
from disconnect_watch.engine import DEFAULT_MODEL
from tests.integration.test_models_engine import ASKS, CONFIG
from tests.support.command import Process, running
from tests.support.http import Client
from tests.support.models import PATIENCE, TIME_LIMIT, ModelHost, write_model
from tests.support.net import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(TIME_LIMIT)]

ENGINE = f"""
backend: "disconnect_watch_engine"
parameters {{ key: "model" value {{ string_value: "{DEFAULT_MODEL}" }} }}
parameters {{ key: "max_model_len" value {{ string_value: "512" }} }}
"""
GREEDY = {"max_tokens": 8, "ignore_eos": True}


def write_engine(repository: Path, more: str = "", *versions: int) -> None:
    for version in versions or (1,):
        (repository / "llm" / str(version)).mkdir(parents=True)
    (repository / "llm" / "config.pbtxt").write_text(ENGINE + more)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    models = tmp_path_factory.mktemp("models")
    write_engine(models)
    write_model(models, "asks", ASKS, CONFIG)
    options = ("--model-control-mode", "explicit", "--load-model", "*")
    with running("--model-repository", str(models), *options) as server:
        yield server


def ask(server: Process, path: str, body: dict[str, Any] | None = None) -> Any:
    url = f"http://127.0.0.1:{server.port}{path}"
    with httpx.Client(timeout=PATIENCE, trust_env=False) as client:
        answer = client.get(url) if body is None else client.post(url, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json() if answer.content else None


def running_requests(server: Process) -> float:
    (line,) = (
        line for line in server.metrics().splitlines() if line.startswith('dw_requests{state="run')
    )
    return float(line.split()[-1])


def test_an_engine_of_a_repository_answers_each_api(server: Process) -> None:
    text = ask(server, "/v2/models/llm/generate", {"text_input": "A cat", **GREEDY})["text_output"]
    assert text
    assert [each["id"] for each in ask(server, "/v1/models")["data"]] == ["llm", "asks"]
    body = {"model": "llm", "prompt": "A cat", "temperature": 0, **GREEDY}
    assert ask(server, "/v1/completions", body)["choices"][0]["text"] == text
    body = {"model": "llm", "messages": [{"role": "user", "content": "A cat"}], **GREEDY}
    assert ask(server, "/v1/chat/completions", body)["choices"][0]["message"]["content"]
    # The Python model asks it as it asks others.
    with Client(server.port) as client:
        client.post("/v2/models/asks/generate_stream", {"text_input": "A cat", **GREEDY})
        events = client.read_response()[2].decode().split("\n\n")[:-1]
    pieces = [json.loads(event.removeprefix("data: "))["text_output"] for event in events]
    assert "".join(pieces) == text


def test_it_is_one_model_among_the_others(server: Process) -> None:
    index = ask(server, "/v2/repository/index", {})
    assert sorted((each["name"], each["state"]) for each in index) == [
        ("asks", "READY"),
        ("llm", "READY"),
    ]
    assert ask(server, "/v2/models/llm")["platform"] == "disconnect_watch_engine"
    config = ask(server, "/v2/models/llm/config")
    assert config["model_transaction_policy"] == {"decoupled": True}
    assert config["parameters"]["arithmetic"]["string_value"]
    names = [each["name"] for each in ask(server, "/v2/models/stats")["model_stats"]]
    assert sorted(names) == ["asks", "llm"]


def test_a_client_that_leaves_ends_the_engines_work(server: Process) -> None:
    before = ask(server, "/v2/models/llm/stats")["model_stats"][0]["inference_stats"]["fail"]
    for path in ("/v2/models/llm/generate_stream", "/v2/models/asks/generate_stream"):
        with Client(server.port) as client:
            client.post(path, {"text_input": "A cat", "max_tokens": 450, "ignore_eos": True})
            client.read_until(b"data:")
        wait_until(lambda: running_requests(server) == 0, PATIENCE)
    after = ask(server, "/v2/models/llm/stats")["model_stats"][0]["inference_stats"]["fail"]
    assert after["count"] == before["count"] + 2
    wait_until(lambda: "dw_cancel_to_free_seconds_count 2.0" in server.metrics(), PATIENCE)


def test_it_is_loaded_and_unloaded_by_request(server: Process) -> None:
    ask(server, "/v2/repository/models/llm/unload", {})
    assert [each["id"] for each in ask(server, "/v1/models")["data"]] == ["asks"]
    with Client(server.port) as client:
        client.post("/v2/models/llm/generate", {"text_input": "A cat"})
        assert client.read_response()[0] == 404
    ask(server, "/v2/repository/models/llm/load", {})
    assert ask(server, "/v2/models/llm/generate", {"text_input": "A cat", **GREEDY})


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ('input { name: "x" data_type: TYPE_FP32 dims: 1 }', "leave out input"),
        ('parameters { key: "max_num_seqs" value { string_value: "many" } }', "parameters of"),
        ('parameters { key: "colour" value { string_value: "red" } }', "there is no colour"),
        ("version_policy { all {} }", "served in one version"),
        (
            'parameters { key: "model" value { string_value: "/nowhere" } }',
            "model 'llm': .*/nowhere",
        ),
    ],
)
def test_a_configuration_that_makes_no_sense_is_refused(
    more: str, message: str, tmp_path: Path
) -> None:
    write_engine(tmp_path, more, 1, 2)
    with (
        ModelHost(tmp_path, mode="explicit") as host,
        pytest.raises(InferError, match=message),
    ):
        host.run(host.repository.load("llm"))
