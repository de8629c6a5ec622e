"""What the stress tool asks in each protocol, and how it tells a right answer from a wrong one."""

import json
from typing import Any

import pytest

from disconnect_watch.stress import Asking, Profile, TargetError, exchange_with, parse_target
from disconnect_watch.stress.exchange import Exchange, WrongAnswerError
from disconnect_watch.stress.generate import GenerateExchange
from disconnect_watch.stress.infer import InferExchange
from disconnect_watch.stress.lines import LineExchange
from disconnect_watch.stress.openai import OpenAIExchange

URL = "http://a:8000"


def exchange_of(text: str, profile: Profile | None = None, **asked: Any) -> Exchange:
    return exchange_with(parse_target(text), Asking(**asked), profile)[1]


@pytest.mark.parametrize(
    ("text", "asked", "kind"),
    [
        ("a:9000", {}, LineExchange),
        (f"{URL}/v2/models/m/generate?x=1", {}, GenerateExchange),
        (f"{URL}/v2/models/m/generate_stream", {}, GenerateExchange),
        (f"{URL}/v2/models/m/infer", {"body": "{}"}, InferExchange),
        (f"{URL}/v1/completions", {"model": "m"}, OpenAIExchange),
        (f"{URL}/openai/v1/chat/completions", {"model": "m"}, OpenAIExchange),
    ],
)
def test_path_says_what_is_spoken(text: str, asked: dict[str, Any], kind: type) -> None:
    assert isinstance(exchange_of(text, **asked), kind)


@pytest.mark.parametrize(
    ("profile", "asked", "path"),
    [
        (Profile.TRITON, {"model": "m"}, "/v2/models/m/generate_stream"),
        (Profile.TRITON, {"model": "m", "is_stream": False}, "/v2/models/m/generate"),
        (Profile.OPENAI, {"model": "m"}, "/v1/completions"),
        (Profile.HTTP, {}, "/"),
    ],
)
def test_profile_gives_the_path_that_the_url_lacks(
    profile: Profile, asked: dict[str, Any], path: str
) -> None:
    target, _ = exchange_with(parse_target(URL), Asking(**asked), profile)
    assert target.path == path


@pytest.mark.parametrize(
    ("text", "profile", "why"),
    [
        (f"{URL}/page", None, "cannot tell what to ask of http://a:8000/page"),
        (URL, None, "or a profile"),
        ("a:9000", Profile.HTTP, "cannot speak http to a:9000"),
        (f"{URL}/page", Profile.TCP, "cannot speak tcp"),
        (URL, Profile.OPENAI, "give the model"),
        (URL, Profile.TRITON, "without the name of a model"),
        (f"{URL}/v2/models/m/infer", None, "give the body of a request"),
    ],
)
def test_what_cannot_be_asked_is_refused(text: str, profile: Profile | None, why: str) -> None:
    with pytest.raises(TargetError, match=why):
        exchange_of(text, profile)


def test_page_that_has_no_completions_is_refused() -> None:
    with pytest.raises(TargetError, match="such as http://a:8000/v1/completions"):
        exchange_of(f"{URL}/page", Profile.OPENAI, model="m")


def document_of(request: bytes) -> Any:
    return json.loads(request.partition(b"\r\n\r\n")[2])


def test_who_leaves_asks_openai_for_more_than_who_stays() -> None:
    exchange = exchange_of(
        f"{URL}/v1/chat/completions", model="m", max_tokens=3, leaver_max_tokens=99,
        prompt="hi", headers={"Authorization": "Bearer key"},
    )  # fmt: skip
    request = exchange.request(0, leaves=False)
    assert request.startswith(b"POST /v1/chat/completions HTTP/1.1\r\nHost: a:8000\r\n")
    assert b"Authorization: Bearer key\r\n" in request
    asked = document_of(request)
    assert (asked["model"], asked["max_tokens"], asked["stream"]) == ("m", 3, True)
    assert asked["messages"] == [{"role": "user", "content": "hi"}]
    assert document_of(exchange.request(0, leaves=True))["max_tokens"] == 99
    completions = exchange_of(f"{URL}/v1/completions", model="m", prompt="hi")
    assert document_of(completions.request(0, leaves=True))["prompt"] == "hi"


def response(body: bytes, status: int = 200, *headers: bytes) -> bytes:
    fields = b"".join(header + b"\r\n" for header in headers)
    return b"HTTP/1.1 %d Any\r\n%bContent-Length: %d\r\n\r\n%b" % (status, fields, len(body), body)


DELTA = b'data: {"choices":[{"delta":{"content":"wo"}}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{}}\n\n'
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_openai_stream_is_complete_with_its_mark_however_it_is_cut(newline: bytes) -> None:
    whole = response((DELTA + b": ping\n\n" + DELTA + USAGE + DONE).replace(b"\n", newline))
    answer = exchange_of(f"{URL}/v1/chat/completions", model="m").answer(0)
    for i in range(len(whole)):
        assert not answer.is_complete
        answer.feed(whole[i : i + 1])
    assert answer.is_complete
    assert answer.is_reusable
    assert (answer.text, answer.num_pieces) == ("wowo", 3)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (response(DELTA), r"ends without \[DONE\]"),
        (response(b'data: {"error":{"message":"too long"}}\n\n' + DONE), "too long"),
        (response(b'data: {"choices":[1]}\n\n' + DONE), "a choice is no object"),
        (response(b"data: {}\n\n" + DONE), "no choices"),
        (response(b'{"error":"x"}', 429), "status 429"),
    ],
)
def test_wrong_openai_answer_is_told_from_a_right_one(data: bytes, why: str) -> None:
    with pytest.raises(WrongAnswerError, match=why):
        exchange_of(f"{URL}/v1/completions", model="m").answer(0).feed(data)


@pytest.mark.parametrize(
    "choice", [{"text": "word"}, {"message": {"content": "word"}}, {"delta": {"content": "word"}}]
)
def test_text_of_an_openai_document_is_found(choice: dict[str, Any]) -> None:
    exchange = exchange_of(f"{URL}/v1/completions", model="m", is_stream=False)
    assert exchange.max_pieces == 0
    answer = exchange.answer(0)
    answer.feed(response(json.dumps({"choices": [choice]}).encode()))
    assert (answer.is_complete, answer.text) == (True, "word")


def test_infer_asks_for_what_it_was_given_and_reads_outputs() -> None:
    exchange = exchange_of(f"{URL}/v2/models/m/infer", body='{"inputs":[]}', leaver_body="{}")
    assert exchange.outlasts
    assert document_of(exchange.request(0, leaves=False)) == {"inputs": []}
    assert document_of(exchange.request(0, leaves=True)) == {}
    answer = exchange.answer(0)
    answer.feed(response(b'{"outputs":[{"data":[1]}]}'))
    assert (answer.is_complete, answer.text) == (True, '[{"data": [1]}]')
    with pytest.raises(WrongAnswerError, match="bad input"):
        exchange.answer(1).feed(response(b'{"error":"bad input"}'))
    assert not exchange_of(f"{URL}/v2/models/m/infer", body="{}").outlasts


def test_number_of_the_client_goes_into_every_part_of_a_template() -> None:
    exchange = exchange_of(
        f"{URL}/item/{{index}}", Profile.HTTP, method="PUT", body="n={index}",
        headers={"X-Number": "{index}", "Content-Type": "text/plain"}, expect="is {index}",
    )  # fmt: skip
    request = exchange.request(7, leaves=True)
    assert request.startswith(b"PUT /item/7 HTTP/1.1\r\n")
    assert request.endswith(b"\r\n\r\nn=7")
    assert b"X-Number: 7\r\n" in request
    assert request.count(b"Content-Type") == 1
    answer = exchange.answer(7)
    answer.feed(response(b"it is 7", 200, b"Connection: close"))
    assert (answer.is_complete, answer.is_reusable, answer.text) == (True, False, "it is 7")
    with pytest.raises(WrongAnswerError, match="has not what must be in it"):
        exchange.answer(8).feed(response(b"it is 7"))


def test_status_of_a_template_is_the_one_that_was_asked_for() -> None:
    exchange = exchange_of(f"{URL}/x", Profile.HTTP, status=404)
    answer = exchange.answer(0)
    answer.feed(response(b"", 404))
    assert answer.is_complete
    with pytest.raises(WrongAnswerError, match="status 200"):
        exchange.answer(0).feed(response(b""))
