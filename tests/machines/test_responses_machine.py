"""Responses under random use: clients that leave at every point, a store that waits, restarts.

The application, the engine and the SQLite file are real; the clients call the application on the
machine's own loop, and leave as the watcher has them leave, by their tokens. What the model says
follows from the engine's outcomes alone: who is kept, as what, and who is forgotten.
"""

import asyncio
import json
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from disconnect_watch.adapters import LEAVES, TOKEN_KEY
from disconnect_watch.server import Frontend, create_app
from disconnect_watch.server.guard import Gatekeeper
from disconnect_watch.server.openai.responses import service
from disconnect_watch.server.openai.responses.sqlite_store import SqliteStore
from disconnect_watch.server.openai.responses.store import Entry
from disconnect_watch.token import CancelToken, Reason
from tests.support.engine import make_engine
from tests.support.net import until
from tests.support.serve import metrics_of
from tests.support.stepped import SteppedBackend

pytestmark = pytest.mark.slow

#: Turns of the loop in which all that can happen does.
TURNS = 60


class PausedStore(SqliteStore):
    """A file whose writes come at once, or wait for as long as the machine says."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        assert self._thread is not None
        self._thread.shutdown()
        self._thread = None
        self.held: set[str] = set()
        self._go_on = asyncio.Event()

    async def create(self, entry: Entry) -> None:
        await self._wait("create")
        await super().create(entry)

    async def finish(self, entry: Entry) -> bool:
        await self._wait("finish")
        return await super().finish(entry)

    def release(self) -> None:
        self.held.clear()
        self._go_on.set()
        self._go_on = asyncio.Event()

    def rows(self) -> dict[str, bool]:
        """By id, whether it has ended."""
        return dict(self._database.execute("SELECT id, ended_at IS NOT NULL FROM responses"))

    async def _wait(self, kind: str) -> None:
        if kind in self.held:
            await self._go_on.wait()


@dataclass
class Call:
    """One request to the application."""

    token: CancelToken = field(default_factory=CancelToken)
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    is_whole: bool = False
    task: "asyncio.Task[None] | None" = None

    @property
    def is_done(self) -> bool:
        return self.task is None or self.task.done()

    def events(self) -> list[dict[str, Any]]:
        return [
            json.loads(line.removeprefix("data: "))
            for line in self.body.decode().split("\n")
            if line.startswith("data: ")
        ]

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
            return
        if self.token.reason in LEAVES:
            assert b"output_text.delta" not in message.get("body", b""), "a word to who is gone"
        self.body += message.get("body", b"")
        self.is_whole |= not message.get("more_body", False)


@dataclass
class Made:
    """One response, as the model sees it.

    Attributes:
        stage: of ``create`` its entry is still to be written, of ``finish`` its end.
        status: once it has ended; empty where nothing is kept.
        is_cut: whether its server was killed with what it had said.
    """

    call: Call
    response_id: str
    is_background: bool
    is_streamed: bool
    is_stored: bool
    stage: str = "running"
    status: str = ""
    is_deleted: bool = False
    is_cut: bool = False

    @property
    def request_id(self) -> str:
        return self.response_id.removeprefix("resp_")

    @property
    def is_visible(self) -> bool:
        return (
            self.is_stored and not self.is_deleted and (self.stage != "over" or bool(self.status))
        )


class ResponsesMachine(RuleBasedStateMachine):
    """Each ends once; who leaves takes the foreground along; a replay is the stream again."""

    @initialize()
    def begin(self) -> None:
        self.last_words, service.LAST_WORDS = service.LAST_WORDS, 0.0
        self.directory = Path(tempfile.mkdtemp())
        self.loop = asyncio.new_event_loop()
        self.made: list[Made] = []
        self.followers: list[tuple[Made, int, Call]] = []
        self.open()

    def open(self) -> None:
        async def make() -> None:
            self.store = PausedStore(self.directory / "responses.db")
            self.backend = SteppedBackend(make_engine(max_model_len=250, num_blocks=256))
            self.frontend = Frontend(self.backend, store=self.store)
            self.gatekeeper = Gatekeeper()
            self.app = create_app(
                self.frontend, metrics_of(self.frontend), gatekeeper=self.gatekeeper
            )

        self.loop.run_until_complete(make())

    def call(self, method: str, path: str, body: Any = None, *, is_admin: bool = False) -> Call:
        """Begin a request, and let all happen that can."""
        call = Call()
        path, _, query = path.partition("?")
        content = b"" if body is None else json.dumps(body).encode()
        headers = [(b"content-length", str(len(content)).encode())]
        if is_admin:
            headers.append((b"authorization", f"Bearer {self.gatekeeper.admin_token}".encode()))
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "headers": headers,
            "state": {TOKEN_KEY: call.token},
        }

        async def receive() -> Any:
            return {"type": "http.request", "body": content}

        call.task = self.loop.create_task(self.app(scope, receive, call.send))
        self.settle()
        return call

    def answer(self, method: str, path: str, body: Any = None, **options: Any) -> tuple[int, Any]:
        """A request that is answered at once."""
        call = self.call(method, path, body, **options)
        assert call.is_done
        return call.status, json.loads(call.body)

    def settle(self) -> None:
        """Let all happen that can, and have the model draw its conclusions."""

        async def turn() -> None:
            for _ in range(TURNS):
                await asyncio.sleep(0)

        self.loop.run_until_complete(turn())
        for made in self.made:
            if made.stage == "running" and made.request_id in self.backend.outcomes:
                self.conclude(made)

    def conclude(self, made: Made) -> None:
        outcome = self.backend.outcomes[made.request_id]
        if outcome.kind == "finished":
            status = "completed" if outcome.finish_reason == "stop" else "incomplete"
        else:
            assert outcome.kind == "cancelled"
            status = "failed" if outcome.reason is Reason.SHUTDOWN else "cancelled"
            is_leave = outcome.reason in LEAVES
            assert not is_leave or (made.call.token.reason in LEAVES and not made.is_background)
        is_unknown = not made.is_background and (
            made.call.token.reason in LEAVES
            or (outcome.kind != "finished" and not made.is_streamed)
        )
        is_kept = made.is_stored and not is_unknown and not made.is_deleted
        made.status = status if is_kept else ""
        made.stage = "finish" if is_kept and "finish" in self.store.held else "over"

    @rule(
        is_background=st.booleans(),
        is_streamed=st.booleans(),
        is_stored=st.booleans(),
        max_tokens=st.integers(1, 4),
        seed=st.integers(0, 5),
        data=st.data(),
    )
    def create(
        self,
        is_background: bool,
        is_streamed: bool,
        is_stored: bool,
        max_tokens: int,
        seed: int,
        data: st.DataObject,
    ) -> None:
        is_stored |= is_background
        body = {
            "model": "tiny",
            "input": "x",
            "max_output_tokens": max_tokens,
            "background": is_background,
            "stream": is_streamed,
            "store": is_stored,
            "seed": seed,
        }
        previous = data.draw(st.sampled_from([None, *self.made]))
        if previous is not None:
            body["previous_response_id"] = previous.response_id
        known = {record.request_id for record in self.frontend.ledger.live()}
        call = self.call("POST", "/v1/responses", body)
        new = {record.request_id for record in self.frontend.ledger.live()} - known
        if previous is not None and not (previous.is_visible and previous.stage == "over"):
            assert (call.status, new) == (400, set())
            return
        (request_id,) = new
        is_held = is_stored and "create" in self.store.held
        self.made.append(
            Made(
                call,
                f"resp_{request_id}",
                is_background,
                is_streamed,
                is_stored,
                stage="create" if is_held else "running",
            )
        )
        if is_background and not is_held:
            assert call.status == 200
            if not is_streamed:
                assert json.loads(call.body)["status"] == "queued"

    def pick(self, data: st.DataObject) -> Made:
        """One of them, rather one that has not ended."""
        running = [made for made in self.made if made.stage != "over"]
        return data.draw(st.sampled_from(running * 4 + self.made))

    @rule()
    def step(self) -> None:
        self.backend.step()
        self.settle()

    @precondition(lambda self: self.made)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.pick(data).call.token.cancel(Reason.FIN)
        self.settle()

    @precondition(lambda self: self.made)
    @rule(data=st.data())
    def lose_the_handler(self, data: st.DataObject) -> None:
        """As of a server that has no more time for it: for the foreground the same as a leave."""
        made = self.pick(data)
        assert made.call.task is not None
        if made.call.task.cancel() and not made.is_background:
            self.settle()
            assert made.call.token.cancelled  # by this, or by its id before

    @precondition(lambda self: self.made)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        made = self.pick(data)
        status, told = self.answer("POST", f"/v1/responses/{made.response_id}/cancel?wait=0")
        if not made.is_visible and status != 200:
            # It may have gone with this very cancel, which is answered all the same.
            assert status == 404
        elif not made.is_background:
            assert (status, told["error"]["code"]) == (400, "response_not_background")
        elif status == 200:
            assert told["status"] == made.status
        else:
            assert status == 202

    @precondition(lambda self: self.made)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        made = self.pick(data)
        path = f"/v1/requests/{made.response_id}/cancel"
        had_ended = made.stage == "over"
        status, told = self.answer("POST", path, {"wait": 0}, is_admin=True)
        assert status in ((200, 404) if had_ended else (200, 202))
        if had_ended:
            assert told.get("status", "not_found") != "cancelled"

    @precondition(lambda self: self.made)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        made = self.pick(data)
        was_visible, was_over = made.is_visible, made.stage == "over"
        if was_visible and (made.is_background or was_over):
            made.is_deleted = True
        status, _ = self.answer("DELETE", f"/v1/responses/{made.response_id}")
        assert status == (404 if not was_visible else 200 if made.is_deleted else 400)

    @precondition(lambda self: self.made)
    @rule(data=st.data(), number=st.integers(-1, 8))
    def follow(self, data: st.DataObject, number: int) -> None:
        made = self.pick(data)
        after = "" if number < 0 else f"&starting_after={number}"
        call = self.call("GET", f"/v1/responses/{made.response_id}?stream=true{after}")
        assert call.status == (200 if made.is_visible else 404)
        if made.is_visible:
            self.followers.append((made, number + 1, call))

    @precondition(lambda self: self.followers)
    @rule(data=st.data())
    def stop_following(self, data: st.DataObject) -> None:
        _, _, call = data.draw(st.sampled_from(self.followers))
        was_done = call.is_done
        call.token.cancel(Reason.RESET)
        # The news comes by the thread of callbacks.
        self.loop.run_until_complete(until(lambda: call.is_done))
        self.settle()
        assert was_done or not call.is_whole

    @rule(kind=st.sampled_from(["create", "finish"]))
    def hold(self, kind: str) -> None:
        self.store.held.add(kind)

    @rule()
    def release(self) -> None:
        self.store.release()
        for made in self.made:
            if made.stage == "create":
                made.stage = "over" if made.is_deleted else "running"
            elif made.stage == "finish":
                made.stage = "over"
        self.settle()

    @rule(is_killed=st.booleans())
    def restart(self, is_killed: bool) -> None:
        if is_killed:
            # Nothing more is written, as of a process that is not there any more.
            self.store.held |= {"create", "finish"}
        else:
            self.release()
            self.frontend.begin_drain()
            self.backend.cancel_all()
            self.settle()

        async def end() -> None:
            rows = self.store.rows()
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            if is_killed:
                self.store._database.close()
                self.store._is_closed = True
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            await self.frontend.responses.close()
            self.rows_before = rows

        self.loop.run_until_complete(end())
        for made in self.made:
            if made.stage != "over":
                assert is_killed
                has_row = made.response_id in self.rows_before
                made.stage, made.status = "over", "failed" if has_row else ""
                made.is_cut = True
        self.followers.clear()
        self.open()

    @invariant()
    def each_is_what_the_model_says(self) -> None:
        if not hasattr(self, "made"):
            return
        for made in self.made:
            status, told = self.answer("GET", f"/v1/responses/{made.response_id}")
            if not made.is_visible:
                assert status == 404, made
            elif made.stage == "over":
                assert told["status"] == made.status
            else:
                assert told["status"] in ("queued", "in_progress")

    @invariant()
    def the_store_has_what_is_kept_and_what_runs(self) -> None:
        if not hasattr(self, "made"):
            return
        expected = {
            made.response_id: made.stage == "over"
            for made in self.made
            if made.is_visible and made.stage != "create"
        }
        assert self.store.rows() == expected

    @invariant()
    def nothing_is_left_of_what_is_over(self) -> None:
        if not hasattr(self, "made"):
            return
        running = [made for made in self.made if made.stage != "over"]
        assert self.frontend.responses.num_running == len(running)
        live = {record.request_id for record in self.frontend.ledger.live()}
        # A handler that was lost is over at once, its generation with the next step.
        assert live == {
            made.request_id for made in running if made.is_background or not made.call.is_done
        }
        self.backend.engine.check_integrity()
        for made in self.made:
            if made.stage == "over" and not made.is_background:
                assert made.call.is_done
        for made, _, call in self.followers:
            assert call.is_done == (made.stage == "over" or call.token.cancelled)

    @invariant()
    def a_replay_is_the_stream_again(self) -> None:
        if not hasattr(self, "made"):
            return
        whole: dict[str, list[dict[str, Any]]] = {}
        for made in self.made:
            if made.is_visible and made.stage == "over":
                call = self.call("GET", f"/v1/responses/{made.response_id}?stream=true")
                assert call.is_whole
                events = whole[made.response_id] = call.events()
                assert [each["sequence_number"] for each in events] == list(range(len(events)))
                kinds = [each["type"] for each in events]
                has_end = made.status != "cancelled"
                assert (f"response.{made.status}" in kinds) is has_end
                assert kinds.count("response.created") == 1
        streams = [
            (made, 0, made.call) for made in self.made if made.is_streamed and not made.is_cut
        ]
        for made, number, call in (*streams, *self.followers):
            if made.response_id in whole and call.status == 200:
                told = [event for event in call.events() if "sequence_number" in event]
                expected = whole[made.response_id][number:]
                if made.is_cut and not expected:
                    expected = [whole[made.response_id][-1] | {"sequence_number": number}]
                is_cut = call.token.cancelled or not call.is_whole
                assert told == (expected[: len(told)] if is_cut else expected)

    def teardown(self) -> None:
        if not hasattr(self, "made"):
            return
        service.LAST_WORDS = self.last_words
        self.release()
        for _ in range(400):
            if not self.backend.engine.has_work:
                break
            self.step()
        for _, _, call in self.followers:
            assert call.is_done
        assert all(made.stage == "over" for made in self.made)
        self.nothing_is_left_of_what_is_over()
        self.loop.run_until_complete(self.frontend.responses.close())
        self.loop.close()
        shutil.rmtree(self.directory)


TestResponsesMachine = ResponsesMachine.TestCase
TestResponsesMachine.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
