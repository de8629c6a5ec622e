"""Responses whose store fails, or whose chain is too long: the application without a server."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from disconnect_watch.engine import ChatTemplate
from disconnect_watch.keys import ANONYMOUS
from disconnect_watch.server import Frontend, FrontendOptions
from disconnect_watch.server.openai.responses import service
from disconnect_watch.server.openai.responses.sqlite_store import SqliteStore
from disconnect_watch.server.openai.responses.store import Entry, StoreError
from disconnect_watch.token import Reason
from tests.support.backends import ScriptedBackend
from tests.support.net import until
from tests.support.serve import request_app

BODY: dict[str, Any] = {"model": "script", "input": "x"}
Ask = Callable[..., Coroutine[Any, Any, httpx.Response]]


class FailingStore(SqliteStore):
    """A store that cannot do what is named in ``failing``."""

    failing: str = ""

    async def create(self, entry: Entry) -> None:
        self._fail("create")
        await super().create(entry)

    async def finish(self, entry: Entry) -> bool:
        self._fail("finish")
        return await super().finish(entry)

    async def running(self) -> list[str]:
        self._fail("running")
        return await super().running()

    def _fail(self, name: str) -> None:
        if name == self.failing:
            raise StoreError(f"the disk is full: {name}")


@asynccontextmanager
async def asking(
    backend: ScriptedBackend,
    store: SqliteStore | None = None,
    options: FrontendOptions | None = None,
) -> AsyncIterator[tuple[Ask, Frontend]]:
    """A frontend, and how to ask it."""
    backend.chat_template = ChatTemplate(
        {"default": "{% for message in messages %}{{ message.content }}{% endfor %}"}, tokens={}
    )
    frontend = Frontend(backend, store=store, options=options)

    async def ask(method: str, path: str, body: Any = None) -> httpx.Response:
        return await request_app(frontend, method, path, json=body)

    try:
        yield ask, frontend
    finally:
        await frontend.responses.close()


@pytest.mark.parametrize("failing", ["create", "running"])
def test_a_store_that_fails_refuses_until_it_works_again(failing: str) -> None:
    async def main() -> None:
        store = FailingStore()
        backend = ScriptedBackend("a", "b")
        async with asking(backend, store) as (ask, frontend):
            store.failing = failing
            for _ in range(2):
                answer = await ask("POST", "/v1/responses", BODY)
                assert answer.status_code == 503
                assert "the disk is full" in answer.json()["error"]["message"]
            assert backend.calls == []
            # Who wants nothing kept needs no store.
            unstored = await ask("POST", "/v1/responses", BODY | {"store": False})
            assert unstored.status_code == 200
            store.failing = ""
            assert (await ask("POST", "/v1/responses", BODY)).status_code == 200
            await until(lambda: frontend.responses.num_running == 0)

    asyncio.run(main())


def test_an_answer_whose_end_cannot_be_stored_is_given_all_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        store = FailingStore()
        async with asking(ScriptedBackend("a", "b"), store) as (ask, _):
            store.failing = "finish"
            with caplog.at_level(logging.ERROR, "disconnect_watch.responses"):
                made = (await ask("POST", "/v1/responses", BODY)).json()
            assert made["output"][0]["content"][0]["text"] == "ab"
            assert "a response is not stored" in caplog.text
            # It is not in progress for ever.
            store.failing = ""
            found = (await ask("GET", f"/v1/responses/{made['id']}")).json()
            assert found["status"] == "failed"

    asyncio.run(main())


@pytest.mark.parametrize("background", [False, True])
def test_who_is_cancelled_before_his_response_is_queued_cancels_it(background: bool) -> None:
    async def main() -> None:
        begun, go_on = asyncio.Event(), asyncio.Event()

        class WaitingStore(SqliteStore):
            async def create(self, entry: Entry) -> None:
                begun.set()
                await go_on.wait()
                await super().create(entry)

        async with asking(ScriptedBackend("a"), WaitingStore()) as (ask, frontend):
            body = BODY | {"background": background}
            asked = asyncio.create_task(ask("POST", "/v1/responses", body))
            await begun.wait()
            (record,) = frontend.ledger.live()
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked
            assert record.token.reason is (None if background else Reason.OWNER_CLOSED)
            go_on.set()
            await until(lambda: frontend.responses.num_running == 0)

    asyncio.run(main())


def test_a_model_that_fails_is_told_as_what_it_is() -> None:
    async def main() -> None:
        backend = ScriptedBackend("a", error=RuntimeError("a bug of ours"))
        async with asking(backend) as (ask, _):
            answer = await ask("POST", "/v1/responses", BODY)
            assert answer.status_code == 500
            assert "a bug of ours" not in answer.text
            streamed = await ask("POST", "/v1/responses", BODY | {"stream": True})
            assert "event: response.failed" in streamed.text
            assert "a bug of ours" not in streamed.text
            assert backend.num_open == 0

    asyncio.run(main())


def test_a_chain_of_responses_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "MAX_CHAIN", 2)

    async def main() -> None:
        async with asking(ScriptedBackend("a")) as (ask, _):
            last = None
            for _ in range(3):
                body = BODY | {"previous_response_id": last}
                last = (await ask("POST", "/v1/responses", body)).json()["id"]
            answer = await ask("POST", "/v1/responses", BODY | {"previous_response_id": last})
            assert answer.status_code == 400
            assert "more than 2 responses" in answer.json()["error"]["message"]

    asyncio.run(main())


def test_a_chain_brings_no_more_than_a_request_could() -> None:
    async def main() -> None:
        options = FrontendOptions(max_body_bytes=4000)
        async with asking(ScriptedBackend("a"), options=options) as (ask, _):
            body = BODY | {"input": "x" * 1200}
            last = (await ask("POST", "/v1/responses", body)).json()["id"]
            body["previous_response_id"] = last
            last = (await ask("POST", "/v1/responses", body)).json()["id"]
            answer = await ask("POST", "/v1/responses", BODY | {"previous_response_id": last})
            assert answer.status_code == 400
            assert "more than 4000 bytes" in answer.json()["error"]["message"]

    asyncio.run(main())


def test_a_chain_is_not_gone_through_in_one_turn_of_the_loop() -> None:
    async def main() -> None:
        async with asking(ScriptedBackend("a")) as (ask, frontend):
            last = None
            for _ in range(5):
                body = BODY | {"previous_response_id": last}
                last = (await ask("POST", "/v1/responses", body)).json()["id"]
            num_turns = 0

            def turn() -> None:
                nonlocal num_turns
                num_turns += 1
                asyncio.get_running_loop().call_soon(turn)

            turn()
            items = await frontend.responses.history(ANONYMOUS, last)
            assert len(items) == 10
            assert num_turns >= 5

    asyncio.run(main())


def test_a_template_that_refuses_speaks_of_the_input() -> None:
    async def main() -> None:
        backend = ScriptedBackend("a")
        async with asking(backend) as (ask, _):
            backend.chat_template = ChatTemplate(
                {"default": "{{ raise_exception('no') }}"}, tokens={}
            )
            answer = await ask("POST", "/v1/responses", BODY)
            assert answer.json()["error"]["param"] == "input"

    asyncio.run(main())
