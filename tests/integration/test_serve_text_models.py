"""Text models of a repository behind ``/v1/completions``, and what becomes of who leaves them."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from disconnect_watch.keys import Caller, KeyRing, Role, digest_of
from tests.support.engine import make_engine
from tests.support.models import TIME_LIMIT, write_model
from tests.support.net import PATIENCE, wait_until
from tests.support.serve import Client, Serving, serving_engine

pytestmark = pytest.mark.timeout(TIME_LIMIT)

#: Says its prompt again, word by word, byte by byte with ``bytes``, and with ``short`` but the last
#: of them; with ``wait`` nothing more until it is cancelled.
MODEL = """
import time
import numpy as np
import triton_python_backend_utils as pb

def text(value):
    return pb.InferenceResponse([pb.Tensor("text_output", np.array([value.encode()], object))])

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            self.answer(request, request.get_response_sender())

    def answer(self, request, sender):
        given = {each.name(): each.as_numpy().reshape(-1) for each in request.inputs()}
        words = given["text_input"][0].decode().split(" ")
        if words[0] in ("bytes", "short"):
            for byte in given["text_input"][0][: -1 if words[0] == "short" else None]:
                piece = np.array([bytes([byte])], object)
                sender.send(pb.InferenceResponse([pb.Tensor("text_output", piece)]))
            words = []
        for word in words[: int(given["max_tokens"][0]) if "max_tokens" in given else None]:
            sender.send(text(word + " "))
        if words[:1] == ["fail"]:
            sender.send(pb.InferenceResponse([], pb.TritonError("it failed")))
        while words[:1] == ["wait"] and not request.is_cancelled():
            time.sleep(0.002)
        if request.is_cancelled():
            error = pb.TritonError("cancelled", pb.TritonError.CANCELLED)
            sender.send(pb.InferenceResponse([], error))
        sender.send(flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
CONFIG = """
backend: "python"
input { name: "text_input" data_type: TYPE_STRING dims: 1 }
input { name: "max_tokens" data_type: TYPE_INT32 dims: 1 optional: true }
output { name: "text_output" data_type: TYPE_STRING dims: 1 }
model_transaction_policy { decoupled: true }
instance_group [ { count: 1 kind: KIND_CPU } ]
"""
OTHER = """
backend: "python"
input { name: "INPUT0" data_type: TYPE_FP32 dims: 1 }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: 1 }
"""
KEYS = KeyRing([(Caller("alice", Role.USER), digest_of("alice-key"))])
WAIT = {"model": "says", "prompt": "wait for me"}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    models = tmp_path_factory.mktemp("models")
    write_model(models, "says", MODEL, CONFIG)
    write_model(models, "other", MODEL, OTHER)
    with serving_engine(make_engine(), repository=models, keys=KEYS) as serving:
        yield serving


@pytest.fixture
def serving(shared: Serving) -> Iterator[Serving]:
    shared.frontend.outcomes.clear()
    yield shared
    wait_until(shared.is_idle)
    wait_until(lambda: shared.frontend.ledger.live() == [])


@pytest.fixture
def client(serving: Serving) -> Iterator[openai.OpenAI]:
    url = f"http://127.0.0.1:{serving.port}/v1"
    with openai.OpenAI(
        base_url=url, api_key="alice-key", timeout=PATIENCE, max_retries=0
    ) as client:
        yield client


def test_a_text_model_completes_whole_and_as_a_stream(
    serving: Serving, client: openai.OpenAI
) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", "says"]
    assert client.models.retrieve("says").id == "says"
    ask: dict[str, Any] = {"model": "says", "prompt": "one two three"}
    whole = client.completions.create(**ask)
    assert whole.choices[0].text == "one two three "
    assert (whole.choices[0].finish_reason, whole.usage) == ("stop", None)
    assert client.completions.create(**ask, max_tokens=2).choices[0].text == "one two "
    echoed = client.completions.create(**ask, max_tokens=1, echo=True)
    assert echoed.choices[0].text == "one two threeone "
    chunks = list(client.completions.create(**ask, stream=True))
    assert [chunk.choices[0].text for chunk in chunks] == ["one ", "two ", "three ", ""]
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, None, "stop"]
    assert serving.frontend.outcomes == {("finished", None): 4}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("bytes \u00e9\u20ac\U0001f600", "bytes \u00e9\u20ac\U0001f600"),
        ("short \u00e9", "short \ufffd"),
    ],
)
def test_a_character_in_several_responses_comes_whole(
    client: openai.OpenAI, serving: Serving, prompt: str, text: str, stream: bool
) -> None:
    answer = client.completions.create(model="says", prompt=prompt, stream=stream)
    pieces = list(answer) if isinstance(answer, openai.Stream) else [answer]
    assert "".join(piece.choices[0].text for piece in pieces) == text


@pytest.mark.parametrize(
    ("change", "param", "complaint"),
    [
        ({"n": 2}, "n", "one text"),
        ({"logprobs": 1}, "logprobs", "one text"),
        ({"prompt": ["a", "b"]}, "prompt", "one text a request"),
        ({"prompt": [1, 2]}, "prompt", "one text a request"),
        ({"stream": True, "stream_options": {"include_usage": True}}, "stream_options", "tokens"),
        ({"model": "other"}, "model", "does not exist"),
    ],
)
def test_what_one_text_cannot_answer_is_refused(
    serving: Serving, change: dict[str, Any], param: str, complaint: str
) -> None:
    with httpx.Client(timeout=PATIENCE, headers={"Authorization": "Bearer alice-key"}) as http:
        body = {"model": "says", "prompt": "a"} | change
        answer = http.post(f"http://127.0.0.1:{serving.port}/v1/completions", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (404 if "model" in change else 400, param)
    assert complaint in error["message"]
    assert not serving.frontend.outcomes


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("who", ["client", "abort"])
def test_who_waits_for_a_text_model_ends_it(serving: Serving, who: str, stream: bool) -> None:
    headers = {"Authorization": "Bearer alice-key", "X_Request_Id": f"{who}-{stream}"}
    with Client(serving.port) as client:
        client.post("/v1/completions", {**WAIT, "stream": stream}, **headers)
        wait_until(lambda: any(each.first_ns for each in serving.frontend.ledger.live()))
        if who == "abort":
            with Client(serving.port) as other:
                path = f"/v1/requests/{headers['X_Request_Id']}/cancel"
                other.post(path, {"wait": 60}, Authorization="Bearer alice-key")
                assert json.loads(other.read_response()[2])["status"] == "cancelled"
        if who == "client":
            pass  # leaves as the block ends
        elif stream:
            rest = client.read_until(b"0\r\n\r\n")
            assert b"[DONE]" not in rest
            assert b'"error"' in rest.split(b"data: ")[-1]
        else:
            status, told, _ = client.read_response()
            assert (status, told["x-should-retry"]) == (499, "false")
    wait_until(lambda: serving.frontend.outcomes)
    assert serving.frontend.outcomes == {("cancelled", "decode"): 1}


@pytest.mark.parametrize("stream", [False, True])
def test_the_time_of_a_text_model_is_over(serving: Serving, stream: bool) -> None:
    # On a busy machine the first piece may take longer than a short time, which then ends it in
    # its queue and in the head's place.
    for seconds in (0.3, 3, 30):
        with httpx.Client(timeout=PATIENCE, headers={"Authorization": "Bearer alice-key"}) as http:
            answer = http.post(
                f"http://127.0.0.1:{serving.port}/v1/completions",
                json={**WAIT, "stream": stream, "timeout": seconds},
            )
        wait_until(lambda: serving.frontend.ledger.live() == [])
        if serving.frontend.outcomes[("cancelled", "decode")] and answer.is_success == stream:
            break
        serving.frontend.outcomes.clear()
    assert serving.frontend.outcomes == {("cancelled", "decode"): 1}
    if stream:
        assert "[DONE]" not in answer.text
        assert '"deadline_exceeded"' in answer.text.split("data: ")[-1]
    else:
        assert (answer.status_code, answer.headers["x-should-retry"]) == (504, "false")


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_of_a_text_model_is_told(
    serving: Serving, client: openai.OpenAI, stream: bool
) -> None:
    with pytest.raises(openai.APIError, match="it failed"):
        answer = client.completions.create(model="says", prompt="fail it", stream=stream)
        list(answer)
    assert serving.frontend.outcomes == {("failed", "decode"): 1}
