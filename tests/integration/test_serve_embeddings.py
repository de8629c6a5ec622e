"""Vectors through OpenAI's SDK, and clients that leave before they have them."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
import torch

from disconnect_watch.adapters import LEAVES
from disconnect_watch.backends.embedder import EmbedderBackend
from disconnect_watch.engine import Embedder
from disconnect_watch.server.access import RequestRecord
from disconnect_watch.token import Reason
from tests.support.bert import held, random_embedder
from tests.support.net import wait_until
from tests.support.serve import Client, Serving, packaged_engine, serving_engine

TEXTS = ["one two three", "two", "seven six five"]
ASK: dict[str, Any] = {"model": "bert", "input": TEXTS}


@pytest.fixture(scope="module")
def embedder() -> Embedder:
    return random_embedder()


@pytest.fixture
def serving(embedder: Embedder) -> Iterator[Serving]:
    backend = EmbedderBackend(embedder, name="bert", max_queue=3)
    try:
        with serving_engine(packaged_engine(), embedder=backend) as serving:
            yield serving
            wait_until(lambda: serving.frontend.ledger.live() == [])
            assert serving.frontend.stats().num_live == 0
            assert backend._num_waiting == 0
    finally:
        backend.close()


@pytest.fixture
def client(serving: Serving) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"http://127.0.0.1:{serving.port}/v1", api_key="none", max_retries=0, timeout=30
    ) as client:
        yield client


def live(serving: Serving, num: int) -> list[RequestRecord]:
    wait_until(lambda: len(serving.frontend.ledger.live()) == num)
    return serving.frontend.ledger.live()


def ended(serving: Serving, record: RequestRecord) -> RequestRecord:
    wait_until(lambda: not serving.frontend.ledger.is_live(record))
    return record


def test_vectors_are_the_encoders(client: openai.OpenAI, embedder: Embedder) -> None:
    expected = embedder.embed(TEXTS)
    options: tuple[dict[str, Any], ...] = ({"encoding_format": "float"}, {})
    for each_way in options:  # the SDK asks for base64 unless it is told otherwise
        made = client.embeddings.create(**ASK, **each_way)
        got = torch.tensor([each.embedding for each in made.data])
        torch.testing.assert_close(got, expected)
        assert [each.index for each in made.data] == [0, 1, 2]
    num_tokens = sum(map(len, embedder.tokenize(TEXTS)))
    assert (made.usage.prompt_tokens, made.usage.total_tokens) == (num_tokens, num_tokens)
    assert [model.id for model in client.models.list()] == ["tiny", "bert"]


def test_one_text_and_tokens_are_inputs_too(client: openai.OpenAI, embedder: Embedder) -> None:
    ids = embedder.tokenize(["two"])
    for given in ("two", ids[0], ids, ["two"]):
        made = client.embeddings.create(model="bert", input=given, dimensions=embedder.dim)
        torch.testing.assert_close(torch.tensor([made.data[0].embedding]), embedder.embed(["two"]))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"input": []}, "input is empty"),
        ({"input": [["x"]]}, r"input\[0\] is neither"),
        ({"input": [99]}, "token id outside"),
        ({"input": "one " * 30}, "text 0 has 32 tokens, send at most 24"),
        ({"dimensions": 5}, "dimensions is 5, vectors of this model have 32"),
        ({"encoding_format": "hex"}, "it must be float or base64"),
        ({"extra_body": {"timeout": -1}}, "timeout: Expected `float` >= 0"),
    ],
)
def test_what_makes_no_sense_is_named(
    client: openai.OpenAI, change: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=complaint):
        client.embeddings.create(**{**ASK, **change})
    with pytest.raises(openai.NotFoundError, match="'tiny' makes no vectors"):
        client.embeddings.create(model="tiny", input="x")


def test_a_leave_ends_the_work_at_the_next_layer(serving: Serving, embedder: Embedder) -> None:
    with held(embedder) as hold, Client(serving.port) as client:
        client.post("/v1/embeddings", ASK)
        hold.wait()
        (record,) = live(serving, 1)
        client.sock.close()
        wait_until(lambda: record.token.cancelled)
        hold.open()
        ended(serving, record)
        assert hold.layers == [0, 1]
    assert record.outcome is not None
    assert record.outcome.reason in LEAVES
    assert (record.outcome.kind, record.outcome.phase) == ("cancelled", "prefill")
    assert record.status == 499
    assert serving.frontend.outcomes == {("cancelled", "prefill"): 1}


def test_a_leave_while_it_waits_ends_at_once_and_never_runs(
    serving: Serving, embedder: Embedder
) -> None:
    with held(embedder) as hold, Client(serving.port) as first, Client(serving.port) as second:
        first.post("/v1/embeddings", ASK)
        hold.wait()
        second.post("/v1/embeddings", ASK)
        record = live(serving, 2)[1]
        wait_until(lambda: serving.frontend.stats().num_live == 2)
        second.sock.close()
        ended(serving, record)  # while the first is still held
        assert record.outcome is not None
        assert (record.outcome.kind, record.outcome.phase) == ("cancelled", "waiting")
        hold.open()
        assert first.read_response()[0] == 200
        assert hold.layers == [0, 1, 2]
    assert serving.frontend.outcomes == {("cancelled", "waiting"): 1, ("finished", None): 1}


def test_a_cancel_by_id_and_a_deadline_are_heard(serving: Serving, embedder: Embedder) -> None:
    headers: dict[str, Any] = {"Authorization": f"Bearer {serving.gatekeeper.admin_token}"}
    with held(embedder) as hold, Client(serving.port) as client, Client(serving.port) as admin:
        client.post("/v1/embeddings", ASK)
        hold.wait()
        (record,) = live(serving, 1)
        path = f"/v1/requests/{record.request_id}/cancel"
        admin.post(path, {"wait": 0}, **headers)
        assert admin.read_response()[0] == 202
        hold.open()
        status, answer, _ = client.read_response()
        assert (status, answer["x-should-retry"]) == (499, "false")
        ended(serving, record)
        admin.post(path, **headers)
        assert b"already_cancelled" in admin.read_response()[2]
    with held(embedder) as hold, Client(serving.port) as client:
        # Held when its time is over, or not begun yet where the machine is that busy.
        client.post("/v1/embeddings", {**ASK, "timeout": 0.05})
        wait_until(lambda: serving.frontend.ledger.signals[Reason.DEADLINE] == 1)
        hold.open()
        assert client.read_response()[0] == 504


def test_a_queue_that_is_full_is_503(serving: Serving, embedder: Embedder) -> None:
    with held(embedder) as hold:
        clients = [Client(serving.port) for _ in range(4)]
        for client in clients[:3]:
            client.post("/v1/embeddings", ASK)
        wait_until(lambda: serving.frontend.stats().num_live == 3)
        clients[3].post("/v1/embeddings", ASK)
        assert clients[3].read_response()[0] == 503
        hold.open()
        for client in clients[:3]:
            assert client.read_response()[0] == 200
        for client in clients:
            client.sock.close()
