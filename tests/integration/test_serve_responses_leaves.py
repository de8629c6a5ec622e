"""Clients of ``/v1/responses`` leave: what ends with them, what goes on, and what stays stored."""

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx
import openai
import pytest

from disconnect_watch.adapters import LEAVES
from disconnect_watch.engine import Outcome
from disconnect_watch.server.openai.responses.sqlite_store import SqliteStore
from disconnect_watch.server.openai.responses.store import Entry, StoreStats
from tests.support.gate import gated
from tests.support.net import PATIENCE, wait_until
from tests.support.serve import Client, Serving, packaged_engine, serving_engine

BODY: dict[str, Any] = {"model": "tiny", "input": "The class statement", "ignore_eos": True}
ENDLESS: dict[str, Any] = {**BODY, "max_output_tokens": 100_000}
SHORT: dict[str, Any] = {**BODY, "max_output_tokens": 6}
WAYS = ("whole", "stream")

T = TypeVar("T")


class HeldStore(SqliteStore):
    """A store that waits before it writes, where a test holds it.

    Attributes:
        is_held: set while a write waits; of the kind that is held.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.is_held = threading.Event()
        self._kind = ""
        self._go_on = asyncio.Event()

    def hold(self, kind: str) -> None:
        self._kind = kind

    async def create(self, entry: Entry) -> None:
        await self._wait("create")
        await super().create(entry)

    async def finish(self, entry: Entry) -> bool:
        await self._wait("finish")
        return await super().finish(entry)

    def go_on(self) -> None:
        """Threads: the loop's."""
        self._go_on.set()

    async def _wait(self, kind: str) -> None:
        if kind == self._kind:
            self.is_held.set()
            await asyncio.wait_for(self._go_on.wait(), PATIENCE)


@pytest.fixture
def store(tmp_path: Path) -> HeldStore:
    return HeldStore(tmp_path / "responses.db")


@pytest.fixture
def serving(store: HeldStore) -> Iterator[Serving]:
    with serving_engine(packaged_engine(), store=store) as serving:
        yield serving
        wait_until(serving.is_idle)
        wait_until(lambda: serving.frontend.responses.num_running == 0)
        wait_until(lambda: serving.frontend.ledger.live() == [])
        serving.engine.check_integrity()


def ask(serving: Serving, question: Coroutine[Any, Any, T]) -> T:
    """The answer to what is asked on the server's loop."""
    return asyncio.run_coroutine_threadsafe(question, serving.http.loop).result(PATIENCE)


def num_stored(serving: Serving, store: HeldStore) -> int:
    wait_until(lambda: serving.frontend.responses.num_running == 0)
    stats: StoreStats = ask(serving, store.stats())
    return stats.num_responses


def wait_left(serving: Serving, num_clients: int = 1) -> None:
    """Wait until so many clients were seen to leave."""
    wait_until(lambda: sum(serving.watcher.stats().num_signals.values()) == num_clients)


def outcome_of(serving: Serving) -> Outcome:
    wait_until(lambda: len(serving.outcomes) == 1)
    ((outcome,),) = serving.outcomes.values()
    return outcome


def client_of(serving: Serving) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"http://127.0.0.1:{serving.port}/v1", api_key="none", timeout=40, max_retries=0
    )


def post(client: Client, body: dict[str, Any], way: str) -> None:
    client.post("/v1/responses", body | {"stream": way == "stream"})


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("phase", ["create", "prefill", "decode"])
def test_a_foreground_client_that_leaves_takes_all_of_it_along(
    serving: Serving, store: HeldStore, way: str, phase: str
) -> None:
    with gated(serving.engine, after_steps=2 if phase == "decode" else 0) as gate:
        store.hold(phase)
        with Client(serving.port) as client:
            post(client, ENDLESS, way)
            if phase == "create":
                assert store.is_held.wait(PATIENCE)
            else:
                gate.wait()
                # Its place is kept while it runs.
                assert ask(serving, store.stats()).num_responses == 1
        wait_left(serving)
        serving.http.loop.call_soon_threadsafe(store.go_on)
        gate.open()
        outcome = outcome_of(serving)
    assert (outcome.kind, outcome.reason in LEAVES) == ("cancelled", True)
    assert outcome.phase == ("waiting" if phase == "create" else phase)
    assert num_stored(serving, store) == 0
    (request_id,) = serving.outcomes
    with client_of(serving) as client, pytest.raises(openai.NotFoundError):
        client.responses.retrieve(f"resp_{request_id}")


@pytest.mark.parametrize("way", WAYS)
def test_one_that_waits_is_gone_with_its_client(way: str, store: HeldStore) -> None:
    engine = packaged_engine(max_num_seqs=1)
    with serving_engine(engine, store=store) as serving:
        with gated(engine, after_steps=2) as gate, Client(serving.port) as holder:
            post(holder, ENDLESS, "stream")
            holder.read_until(b"delta")
            with Client(serving.port) as waiting:
                post(waiting, ENDLESS, way)
                wait_until(lambda: serving.watcher.stats().num_armed == 2)
                while serving.backend.stats().num_waiting == 0:
                    gate.pass_steps(1)
                    gate.wait()
            wait_left(serving)
            gate.open()
            wait_until(lambda: len(serving.outcomes) == 1)
            ((outcome,),) = serving.outcomes.values()
            assert (outcome.kind, outcome.phase) == ("cancelled", "waiting")
            wait_until(lambda: serving.frontend.responses.num_running == 1)
            assert ask(serving, store.stats()).num_responses == 1
        wait_until(serving.is_idle)


@pytest.mark.parametrize("way", WAYS)
def test_one_that_is_being_stored_whole_stays(serving: Serving, store: HeldStore, way: str) -> None:
    store.hold("finish")
    with Client(serving.port) as client:
        post(client, SHORT, way)
        assert store.is_held.wait(PATIENCE)
    wait_left(serving)
    serving.http.loop.call_soon_threadsafe(store.go_on)
    assert num_stored(serving, store) == 1
    (request_id,) = serving.outcomes
    with client_of(serving) as client:
        assert client.responses.retrieve(f"resp_{request_id}").status == "incomplete"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("phase", ["create", "prefill", "decode"])
def test_a_client_of_the_background_leaves_and_nothing_is_cancelled(
    serving: Serving, store: HeldStore, way: str, phase: str
) -> None:
    with gated(serving.engine, after_steps=2 if phase == "decode" else 0) as gate:
        store.hold(phase)
        with Client(serving.port) as client:
            post(client, SHORT | {"background": True}, way)
            if phase == "create":
                assert store.is_held.wait(PATIENCE)
            else:
                gate.wait()
        wait_left(serving)
        serving.http.loop.call_soon_threadsafe(store.go_on)
        gate.open()
        assert outcome_of(serving).kind == "finished"
    assert num_stored(serving, store) == 1
    (request_id,) = serving.outcomes
    with client_of(serving) as client:
        found = client.responses.retrieve(f"resp_{request_id}")
    assert found.status == "incomplete"
    assert found.usage is not None
    assert found.usage.output_tokens == 6


def test_a_client_of_the_background_that_leaves_before_it_is_stored_cancels_nothing(
    store: HeldStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving_engine(packaged_engine(), store=store) as serving:
        tokenize = serving.backend.tokenize
        client = Client(serving.port)

        def leaving(text: str, **options: Any) -> list[int]:
            # In a thread: the loop hears of the leave meanwhile.
            client.sock.close()
            wait_left(serving)
            return tokenize(text, **options)

        monkeypatch.setattr(serving.backend, "tokenize", leaving)
        body = SHORT | {"input": "word " * 1000, "background": True}
        post(client, body, "whole")
        assert outcome_of(serving).kind == "finished"
        assert num_stored(serving, store) == 1
        wait_until(serving.is_idle)


@pytest.mark.parametrize("is_background", [False, True])
def test_who_only_follows_leaves_at_once_and_cancels_nothing(
    serving: Serving, store: HeldStore, is_background: bool
) -> None:
    body = SHORT | {"background": is_background, "stream": True}
    with gated(serving.engine) as gate, Client(serving.port) as owner:
        owner.post("/v1/responses", body)
        gate.wait()
        owner.read_until(b"response.created")
        (record,) = serving.frontend.ledger.live()
        url = f"http://127.0.0.1:{serving.port}/v1/responses/resp_{record.request_id}"
        with (
            httpx.Client(timeout=40) as http,
            http.stream("GET", url, params={"stream": "true"}) as response,
        ):
            lines = response.iter_lines()  # which closes the response where it is dropped
            assert next(lines) == "event: response.created"
            wait_until(lambda: len(serving.http.server.server_state.tasks) == 2)
        # Its handler has ended, though nothing has happened that it could have told.
        wait_until(lambda: len(serving.http.server.server_state.tasks) == 1)
        gate.open()
        assert b"response.incomplete" in owner.read_until(b"0\r\n\r\n")
        assert outcome_of(serving).kind == "finished"
    assert num_stored(serving, store) == 1


def test_one_of_the_foreground_that_others_follow_ends_for_them_too(serving: Serving) -> None:
    with client_of(serving) as client, client_of(serving) as other:
        with client.responses.create(
            model="tiny",
            input="x",
            max_output_tokens=100_000,
            stream=True,
            extra_body={"ignore_eos": True},
        ) as stream:
            first = next(iter(stream))
            assert first.type == "response.created"
            following = other.responses.retrieve(first.response.id, stream=True)
            assert next(iter(following)) == first
            assert "response.output_text.delta" in (event.type for event in following)
        assert {event.type for event in following} <= {"response.output_text.delta"}
        with pytest.raises(openai.NotFoundError):
            other.responses.retrieve(first.response.id)


def test_an_async_client_that_is_cancelled_leaves_nothing(
    serving: Serving, store: HeldStore
) -> None:
    async def main() -> None:
        async with openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{serving.port}/v1", api_key="none", max_retries=0
        ) as client:
            call = asyncio.create_task(
                client.responses.create(
                    model="tiny",
                    input="x",
                    max_output_tokens=100_000,
                    extra_body={"ignore_eos": True},
                )
            )
            await asyncio.to_thread(
                wait_until, lambda: serving.backend.stats().num_generated_tokens >= 3
            )
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call

    asyncio.run(main())
    assert outcome_of(serving).reason in LEAVES
    assert num_stored(serving, store) == 0


def test_the_connection_goes_on_after_a_response(serving: Serving, store: HeldStore) -> None:
    with Client(serving.port) as client:
        for way in WAYS:
            post(client, SHORT, way)
            assert client.read_response()[0] == 200
        post(client, SHORT | {"background": True}, "whole")
        assert client.read_response()[0] == 200
        post(client, SHORT, "whole")
        assert client.read_response()[0] == 200
    assert num_stored(serving, store) == 4
    assert {outcome.kind for (outcome,) in serving.outcomes.values()} == {"finished"}
