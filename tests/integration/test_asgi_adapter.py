"""``CancelOnDisconnect`` around bare ASGI applications: what a leave does to a task.

Under uvicorn's own protocols and ours, on a thread of this process, so that each test
writes the application that it needs.
"""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import anyio
import pytest
from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse

import disconnect_watch as dw
import disconnect_watch.watcher
from disconnect_watch.adapters import TOKEN_KEY
from disconnect_watch.adapters.asgi import CancelOnDisconnect, how_found, stats
from disconnect_watch.adapters.uvicorn import HttpTools
from tests.support.http import Client
from tests.support.net import wait_until
from tests.support.serve import serving_app

PROTOCOLS: dict[str, Any] = {"httptools": "httptools", "h11": "h11", "ours": HttpTools}

Body = Callable[[Any, Any, Any], Awaitable[None]]


@pytest.fixture(params=PROTOCOLS)
def protocol(request: pytest.FixtureRequest) -> Any:
    return PROTOCOLS[request.param]


class Seen:
    """What the application under test noted, and where it is."""

    def __init__(self) -> None:
        self.tokens: list[dw.CancelToken] = []
        self.has_started = threading.Event()
        self.has_ended = threading.Event()


@contextmanager
def watched(protocol: Any, body: Body, **options: Any) -> Iterator[tuple[Seen, Client]]:
    """A client of an application that is watched, and what the latter notes."""
    seen = Seen()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.tokens.append(scope["state"][TOKEN_KEY])
        seen.has_started.set()
        try:
            await body(scope, receive, send)
        finally:
            seen.has_ended.set()

    with (
        serving_app(CancelOnDisconnect(app, **options), protocol=protocol) as server,
        Client(server.port) as client,
    ):
        client.post("/")
        assert seen.has_started.wait(40)
        yield seen, client


async def respond(send: Any, body: bytes = b"done") -> None:
    head = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": head})
    await send({"type": "http.response.body", "body": body})


async def forever() -> None:
    await asyncio.Event().wait()


def leave(seen: Seen, client: Client) -> None:
    client.sock.close()
    assert seen.has_ended.wait(40)


def test_a_finally_block_may_wait_and_its_task_group_ends_first(protocol: Any) -> None:
    notes: list[str] = []

    async def child() -> None:
        try:
            await forever()
        finally:
            await asyncio.sleep(0)
            notes.append("child")

    async def body(scope: Any, receive: Any, send: Any) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(child())
        finally:
            await asyncio.sleep(0.001)
            notes.append("finally")

    with watched(protocol, body) as (seen, client):
        leave(seen, client)
    assert notes == ["child", "finally"]


def test_a_shielded_scope_of_anyio_runs_to_its_end(protocol: Any) -> None:
    notes: list[str] = []

    async def body(scope: Any, receive: Any, send: Any) -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(anyio.sleep_forever)
            try:
                await anyio.sleep_forever()
            finally:
                with anyio.CancelScope(shield=True):
                    await anyio.sleep(0.001)
                    notes.append("shielded")

    with watched(protocol, body) as (seen, client):
        leave(seen, client)
    assert notes == ["shielded"]


def test_a_timeout_of_the_handler_that_expires_is_its_own(protocol: Any) -> None:
    async def body(scope: Any, receive: Any, send: Any) -> None:
        try:
            async with asyncio.timeout(0.001):
                await forever()
        except TimeoutError:
            await respond(send, b"late")

    with watched(protocol, body) as (seen, client):
        assert client.read_response()[2] == b"late"
    assert not seen.tokens[0].cancelled


def test_a_handler_that_swallows_the_cancel_goes_on_once(protocol: Any) -> None:
    notes: list[str] = []

    async def body(scope: Any, receive: Any, send: Any) -> None:
        try:
            await forever()
        except asyncio.CancelledError:
            await asyncio.sleep(0.001)  # is not cancelled again
            notes.append("went on")
            await respond(send)

    with watched(protocol, body) as (seen, client):
        leave(seen, client)
    assert notes == ["went on"]


@pytest.mark.parametrize("has_left", [False, True])
def test_a_cancel_from_outside_is_never_disguised(protocol: Any, has_left: bool) -> None:
    """Nor where ours is under way already."""
    outcomes: list[str] = []
    entered = threading.Event()

    async def body(scope: Any, receive: Any, send: Any) -> None:
        entered.set()
        try:
            await forever()
        except asyncio.CancelledError:
            if not has_left:
                raise
            scope["is_cancelled"].set()
            await forever()

    app = CancelOnDisconnect(body)

    async def outer(scope: Any, receive: Any, send: Any) -> None:
        scope["is_cancelled"] = asyncio.Event()
        task = asyncio.create_task(app(scope, receive, send))
        if has_left:
            await scope["is_cancelled"].wait()
        else:
            await asyncio.to_thread(entered.wait, 10)
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            outcomes.append("cancelled")
        else:
            outcomes.append("disguised")
            raise

    with serving_app(outer, protocol=protocol) as server, Client(server.port) as client:
        client.post("/")
        assert entered.wait(40)
        if has_left:
            client.sock.close()
        wait_until(lambda: outcomes)
    assert outcomes == ["cancelled"]


def test_a_failure_while_the_client_leaves_is_the_applications_own(
    protocol: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(scope: Any, receive: Any, send: Any) -> None:
        try:
            await forever()
        finally:
            raise LookupError("of the finally block")

    with watched(protocol, body) as (seen, client):
        leave(seen, client)
        wait_until(lambda: "of the finally block" in caplog.text)


def test_an_application_that_listens_ends_in_its_own_way(protocol: Any) -> None:
    """As Starlette's streams do, whose background tasks then run."""
    notes: list[str] = []

    async def body(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        await asyncio.sleep(0.001)
        notes.append("background")

    with watched(protocol, body) as (seen, client):
        leave(seen, client)
    assert notes == ["background"]


async def look(receive: Any, until_left: Callable[[], None]) -> None:
    with anyio.CancelScope() as scope:
        scope.cancel()
        until_left()
        await receive()


async def give_up(receive: Any, until_left: Callable[[], None]) -> None:
    reader = asyncio.ensure_future(receive())
    await asyncio.sleep(0)
    until_left()
    asyncio.get_running_loop().call_soon(reader.cancel)


@pytest.mark.parametrize("wait_in_vain", [look, give_up])
def test_a_leave_that_comes_while_the_application_only_looks_cancels_it(
    protocol: Any, wait_in_vain: Callable[[Any, Callable[[], None]], Awaitable[None]]
) -> None:
    """Behind ``BaseHTTPMiddleware`` Starlette's ``is_disconnected()`` tells of no leave."""
    cancelled = []
    is_blocked = threading.Event()

    async def body(scope: Any, receive: Any, send: Any) -> None:
        def until_left() -> None:
            is_blocked.set()
            scope["state"][TOKEN_KEY].wait(40)  # and the loop, which does not know after it

        await receive()  # the body, which is empty
        await wait_in_vain(receive, until_left)
        try:
            await asyncio.sleep(40)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    with watched(protocol, body) as (seen, client):
        assert is_blocked.wait(40)
        leave(seen, client)
    assert cancelled


def test_a_flood_that_only_waits_for_its_reader_keeps_no_loop_when_he_leaves(
    protocol: Any,
) -> None:
    """It could be cancelled at no point, once what it sends goes nowhere."""
    is_whole = threading.Event()

    async def flood() -> AsyncIterator[bytes]:
        for _ in range(50_000):
            yield bytes(65536)
        is_whole.set()

    with watched(protocol, StreamingResponse(flood())) as (seen, client):
        client.read_until(b"\r\n\r\n")
        leave(seen, client)
    assert not is_whole.is_set()


def test_an_application_may_raise_that_its_client_left(
    protocol: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(scope: Any, receive: Any, send: Any) -> None:
        token = scope["state"][TOKEN_KEY]
        await asyncio.to_thread(token.wait, 10)
        token.raise_if_cancelled()

    async def shielded(scope: Any, receive: Any, send: Any) -> None:
        try:
            await body(scope, receive, send)
        except asyncio.CancelledError:
            scope["state"][TOKEN_KEY].raise_if_cancelled()

    with watched(protocol, shielded) as (seen, client):
        leave(seen, client)
    assert "Traceback" not in caplog.text


def test_what_starlette_raises_of_a_client_that_left_is_no_failure(
    protocol: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        raise ClientDisconnect  # as from Request.body(), of which half has come

    caplog.set_level(logging.INFO, "disconnect_watch.adapters.asgi")
    with watched(protocol, body) as (seen, client):
        leave(seen, client)
        wait_until(lambda: '"POST /" 499' in caplog.text)
    assert "Traceback" not in caplog.text


def test_a_disconnect_that_was_none_is_a_failure(
    protocol: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(scope: Any, receive: Any, send: Any) -> None:
        raise dw.ClientDisconnected(dw.Reason.FIN, 0.0)

    with watched(protocol, body) as (_, client):
        assert client.read_response()[0] == 500
    assert "Exception in ASGI application" in caplog.text


def test_a_client_gone_before_its_request_begins_is_never_served(protocol: Any) -> None:
    started: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        started.append(scope["path"])
        await respond(send)

    watcher = dw.watcher.default_watcher()
    with (
        serving_app(CancelOnDisconnect(app), protocol=protocol) as server,
        Client(server.port) as client,
    ):
        client.post("/early")
        client.read_response()
        before = watcher.stats().num_signals[dw.Reason.FIN]
        release = server.block_loop()
        client.post("/late")
        client.sock.close()
        wait_until(lambda: watcher.stats().num_signals[dw.Reason.FIN] > before)
        release()
        wait_until(lambda: watcher.stats().num_connections == 0)
    assert started == ["/early"]


def test_what_runs_behind_the_last_byte_is_left_alone(protocol: Any) -> None:
    finish = threading.Event()

    async def body(scope: Any, receive: Any, send: Any) -> None:
        await respond(send)
        await asyncio.to_thread(finish.wait, 20)

    with watched(protocol, body) as (seen, client):
        assert client.read_response()[2] == b"done"
        client.sock.close()
        wait_until(lambda: dw.watcher.default_watcher().stats().num_connections == 0)
        assert not seen.tokens[0].cancelled
        finish.set()
        assert seen.has_ended.wait(40)
    assert not seen.tokens[0].cancelled


def test_a_body_that_is_whole_by_its_length_is_the_last(protocol: Any) -> None:
    """Middleware sends an empty message behind it, when the client may be gone."""
    go_on = threading.Event()

    async def body(scope: Any, receive: Any, send: Any) -> None:
        head = [(b"Content-Length", b"4")]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": b"do", "more_body": True})
        await send({"type": "http.response.body", "body": b"ne", "more_body": True})
        await asyncio.to_thread(go_on.wait, 20)
        await send({"type": "http.response.body", "body": b""})

    before = stats().num_left
    with watched(protocol, body) as (seen, client):
        assert client.read_response()[2] == b"done"
        client.sock.close()
        wait_until(lambda: dw.watcher.default_watcher().stats().num_connections == 0)
        go_on.set()
        assert seen.has_ended.wait(40)
    if protocol is not HttpTools:  # whose own rule is the last message
        assert not seen.tokens[0].cancelled
        assert stats().num_left == before


def test_a_leave_is_logged_as_499(protocol: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def body(scope: Any, receive: Any, send: Any) -> None:
        await forever()

    with (
        caplog.at_level(logging.INFO, "disconnect_watch"),
        watched(protocol, body) as (seen, client),
    ):
        leave(seen, client)
        wait_until(lambda: "499" in caplog.text)
    (record,) = [each for each in caplog.records if each.name == "disconnect_watch.adapters.asgi"]
    assert '"POST /" 499 fin after' in record.getMessage()
    assert vars(record)["request"]["reason"] == "fin"


def test_a_request_may_go_on_for_a_while() -> None:
    go_on = threading.Event()

    async def body(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.to_thread(go_on.wait, 20)

    before = stats().num_left
    with watched("httptools", body, on_disconnect=dw.grace(1000)) as (seen, client):
        client.sock.close()
        wait_until(lambda: dw.watcher.default_watcher().stats().num_connections == 0)
        assert not seen.tokens[0].cancelled
        go_on.set()
        assert seen.has_ended.wait(40)
    assert not seen.tokens[0].cancelled
    assert stats().num_left == before


def test_a_grace_ends() -> None:
    async def body(scope: Any, receive: Any, send: Any) -> None:
        await forever()

    with watched("httptools", body, on_disconnect=dw.grace(0.001)) as (seen, client):
        leave(seen, client)
        assert seen.tokens[0].reason is dw.Reason.FIN


def test_nested_watches_are_one(protocol: Any) -> None:
    async def body(scope: Any, receive: Any, send: Any) -> None:
        await CancelOnDisconnect(inner)(scope, receive, send)

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        await forever()

    before = stats()
    with watched(protocol, body) as (seen, client):
        leave(seen, client)
    assert sum(stats().num_requests.values()) == sum(before.num_requests.values()) + 1
    assert stats().num_left == before.num_left + 1


def test_the_way_is_named(protocol: Any) -> None:
    ways: list[str] = []

    async def body(scope: Any, receive: Any, send: Any) -> None:
        ways.append(how_found(scope, receive, send))
        hidden = {**scope, "state": {}}

        async def wrapped() -> Any:
            return await receive()

        ways.append(how_found(hidden, wrapped, send))
        ways.append(how_found({**hidden, "client": ("10.0.0.1", 0)}, wrapped, send))
        await respond(send)

    with watched(protocol, body) as (_, client):
        client.read_response()
    assert ways[1:] == ["addresses", "none"]


def test_a_client_that_sends_its_body_when_asked_is_asked_by_the_application_alone(
    protocol: Any,
) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        async def wrapped() -> Any:  # hides the connection's transport: so we listen
            return await receive()

        async def inner(scope: Any, receive: Any, send: Any) -> None:
            await asyncio.sleep(0.01)
            await send({"type": "http.response.start", "status": 413, "headers": []})
            await send({"type": "http.response.body", "body": b""})

        await CancelOnDisconnect(inner)({**scope, "state": {}}, wrapped, send)

    with serving_app(app, protocol=protocol) as server, Client(server.port) as client:
        client.sock.sendall(
            b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n"
        )
        assert client.read_until(b"\r\n").startswith(b"HTTP/1.1 413")


def test_other_scopes_pass_untouched() -> None:
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append((dict(scope), receive, send))

    async def main() -> None:
        for kind in ("lifespan", "websocket"):
            scope = {"type": kind}
            await CancelOnDisconnect(app)(scope, respond, respond)  # type: ignore[arg-type]

    asyncio.run(main())
    assert seen == [
        ({"type": "lifespan"}, respond, respond),
        ({"type": "websocket"}, respond, respond),
    ]


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="vanish_after"):
        CancelOnDisconnect(respond, vanish_after=1)  # type: ignore[arg-type]


def growth(num_requests: int) -> None:
    """No task, fd or object more after so many requests on one connection."""
    num_tasks: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        num_tasks.append(len(asyncio.all_tasks()))
        await receive()
        await respond(send)

    watcher = dw.watcher.default_watcher()
    with (
        serving_app(CancelOnDisconnect(app), protocol="httptools") as server,
        Client(server.port) as client,
    ):
        for _ in range(num_requests):
            client.post("/", b"body")
            assert client.read_response()[2] == b"done"
        assert watcher.stats().num_connections == 1
        assert watcher.stats().num_armed == 0
    assert max(num_tasks) <= num_tasks[0] + 1


@pytest.mark.slow
def test_thousands_of_requests_leave_nothing_behind() -> None:
    growth(5_000)


@pytest.mark.exhaustive
def test_a_hundred_thousand_requests_leave_nothing_behind() -> None:
    growth(100_000)
