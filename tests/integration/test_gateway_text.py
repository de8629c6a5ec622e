"""``/v1/completions`` of text models that a Triton behind the gateway runs."""

from collections.abc import Iterator

import openai
import pytest

from tests.support.net import PATIENCE, wait_until
from tests.support.serve import Client
from tests.support.triton import Gateway, TritonProcess, serving_gateway, shared_triton


@pytest.fixture(scope="module", autouse=True)
def small() -> Iterator[TritonProcess]:
    with shared_triton() as process:
        yield process


@pytest.fixture
def gateway(small: TritonProcess) -> Iterator[Gateway]:
    with serving_gateway(small.port) as gateway:
        yield gateway


@pytest.fixture
def client(gateway: Gateway) -> Iterator[openai.OpenAI]:
    url = f"http://127.0.0.1:{gateway.port}/v1"
    with openai.OpenAI(base_url=url, api_key="none", timeout=PATIENCE, max_retries=0) as client:
        yield client


def test_a_text_model_of_a_triton_completes(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["says"]
    whole = client.completions.create(model="says", prompt="one two")
    assert whole.choices[0].text == "onetwo"
    chunks = list(client.completions.create(model="says", prompt="one two", stream=True))
    assert [chunk.choices[0].text for chunk in chunks] == ["one", "two", ""]
    for name in ("identity", "nowhere"):
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            client.completions.create(model=name, prompt="x")


@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_it_cancels_its_call(
    gateway: Gateway, small: TritonProcess, stream: bool
) -> None:
    with Client(gateway.port) as client:
        client.post("/v1/completions", {"model": "says", "prompt": "please wait", "stream": stream})
        wait_until(lambda: any(each.first_ns for each in gateway.frontend.ledger.live()))
        (record,) = gateway.frontend.ledger.live()
        small.wait_for("begin", id=record.request_id)
    wait_until(lambda: small.of("cancelled", id=record.request_id))
    wait_until(gateway.is_idle)
    assert gateway.frontend.outcomes == {("cancelled", "decode"): 1}
    (upstream,) = gateway.remote.upstreams()
    assert upstream.outcomes == {"cancelled": 1}


def test_a_triton_that_is_gone_is_no_missing_model(client: openai.OpenAI) -> None:
    with (
        serving_gateway(1, ready=0) as gateway,
        client.with_options(base_url=f"http://127.0.0.1:{gateway.port}/v1") as asking,
    ):
        with pytest.raises(openai.InternalServerError) as refused:
            asking.completions.create(model="says", prompt="x")
        assert refused.value.status_code == 503
        assert asking.models.list().data == []
