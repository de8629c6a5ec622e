"""Responses that outlive their server, and those that it took with it."""

from pathlib import Path
from typing import Any

import openai
import pytest

from disconnect_watch.server.openai.responses.redis_store import RedisStore
from disconnect_watch.server.openai.responses.sqlite_store import SqliteStore
from tests.support.command import Process, endless_model, running
from tests.support.gate import gated
from tests.support.net import wait_until
from tests.support.serve import Serving, packaged_engine, serving_engine
from tests.support.stores import redis_server

ASK: dict[str, Any] = {"model": "tiny", "input": "The class statement", "max_output_tokens": 5}
ENDLESS: dict[str, Any] = {
    **ASK,
    "max_output_tokens": 100_000,
    "extra_body": {"ignore_eos": True},
}


def client_of(server: Process | Serving) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", timeout=40, max_retries=0
    )


def begin(client: openai.OpenAI) -> str:
    """Begin one in the background that will not end; returns its id once it is in progress."""
    made = client.responses.create(**ENDLESS, background=True)
    wait_until(lambda: client.responses.retrieve(made.id).status == "in_progress")
    return str(made.id)


@pytest.mark.slow
def test_a_server_that_is_killed_leaves_nothing_in_progress(tmp_path: Path) -> None:
    model, path = endless_model(tmp_path), tmp_path / "responses.db"
    options = ("--model", str(model), "--responses-store", str(path))
    with running(*options) as server, client_of(server) as client:
        whole = client.responses.create(**ASK)
        events = list(client.responses.retrieve(whole.id, stream=True))
        deleted = client.responses.create(**ASK)
        client.responses.delete(deleted.id)
        in_background = begin(client)
        with client.responses.create(**ENDLESS, stream=True) as stream:
            first = next(iter(stream))
            assert first.type == "response.created"
            in_foreground = first.response.id
            server.process.kill()
            server.wait()
    with running(*options) as server, client_of(server) as client:
        assert client.responses.retrieve(whole.id) == whole
        assert list(client.responses.retrieve(whole.id, stream=True)) == events
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(deleted.id)
        for response_id in (in_background, in_foreground):
            found = client.responses.retrieve(response_id)
            assert found.status == "failed"
            assert found.error is not None
            assert "stopped before its end" in found.error.message
            *_, last = client.responses.retrieve(response_id, stream=True)
            assert last.type == "response.failed"
            # Also for who has heard more than the new server knows of.
            (end,) = client.responses.retrieve(response_id, stream=True, starting_after=1000)
            assert (end.type, end.sequence_number) == ("response.failed", 1001)
        assert client.responses.cancel(in_background).status == "failed"
        # Who goes on from one of before is given what it said.
        more = client.responses.create(**ASK, previous_response_id=whole.id)
        assert more.usage is not None
        assert whole.usage is not None
        assert more.usage.input_tokens > whole.usage.total_tokens


def test_a_shutdown_gives_what_runs_an_end(tmp_path: Path) -> None:
    path = tmp_path / "responses.db"
    with (
        serving_engine(packaged_engine(), grace=0.0, store=SqliteStore(path)) as serving,
        client_of(serving) as client,
    ):
        response_id = begin(client)
        with client.responses.create(**ENDLESS, stream=True) as stream:
            first = next(iter(stream))
            assert first.type == "response.created"
            serving.http.server.should_exit = True
            *_, last = stream
        assert last.type == "response.failed"
    with (
        serving_engine(packaged_engine(), store=SqliteStore(path)) as serving,
        client_of(serving) as client,
    ):
        assert client.responses.retrieve(first.response.id) == last.response
        for each in (response_id, first.response.id):
            found = client.responses.retrieve(each)
            assert found.status == "failed"
            assert found.error is not None
            assert "shutting down" in found.error.message
            assert found.usage is not None
        assert client.responses.retrieve(response_id).output_text


def test_what_ends_within_the_grace_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "responses.db"
    engine = packaged_engine()
    with (
        serving_engine(engine, grace=100.0, store=SqliteStore(path)) as serving,
        gated(engine) as gate,
        client_of(serving) as client,
    ):
        made = client.responses.create(**ASK, background=True)
        gate.wait()
        serving.http.server.should_exit = True
        wait_until(lambda: serving.frontend.stats().is_draining)
        gate.open()
    with (
        serving_engine(packaged_engine(), store=SqliteStore(path)) as serving,
        client_of(serving) as client,
    ):
        assert client.responses.retrieve(made.id).status in ("completed", "incomplete")


def test_servers_that_share_a_redis_find_each_others_responses() -> None:
    with (
        redis_server() as url,
        serving_engine(packaged_engine(), store=RedisStore(url)) as other,
        client_of(other) as elsewhere,
    ):
        with (
            serving_engine(packaged_engine(), grace=0.0, store=RedisStore(url)) as serving,
            client_of(serving) as client,
        ):
            whole = client.responses.create(**ASK)
            assert elsewhere.responses.retrieve(whole.id) == whole
            more = elsewhere.responses.create(**ASK, previous_response_id=whole.id)
            assert client.responses.retrieve(more.id) == more
            made = client.responses.create(**ENDLESS, background=True)
            assert elsewhere.responses.retrieve(made.id).status == "queued"
            for call in (
                lambda: elsewhere.responses.cancel(made.id),
                lambda: elsewhere.responses.delete(made.id),
                lambda: elsewhere.responses.retrieve(made.id, stream=True),
            ):
                with pytest.raises(openai.ConflictError, match="by another server"):
                    call()
            assert client.responses.cancel(made.id).status == "cancelled"
            assert elsewhere.responses.retrieve(made.id).status == "cancelled"
            running = begin(client)
        # It has told its end before it went.
        assert elsewhere.responses.retrieve(running).status == "failed"
