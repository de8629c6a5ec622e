"""The assertions for users' tests: of servers that notice, and of those that do not."""

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import disconnect_watch as dw
from disconnect_watch.testing import (
    NotCancelledError,
    Way,
    assert_cancels,
    assert_survives,
    http_request,
)
from tests.support.loops import LoopRunner
from tests.support.raw import WHOLE, Served, serving_raw
from tests.support.tls import server_context

REQUEST = http_request("GET", "/work")
EVERYWHERE = {Way.FIN, Way.HALF_CLOSE, Way.HALF_CLOSE_FIN, Way.KILLED}
BEHIND = {Way.BEHIND_BODY, Way.BEHIND_REQUEST}
WAYS = {
    "tcp": EVERYWHERE | BEHIND | {Way.RST},
    "tls": EVERYWHERE | BEHIND | {Way.RST, Way.CLOSE_NOTIFY},
    "unix": EVERYWHERE | BEHIND,
}


@pytest.fixture
def watched() -> Iterator[Served]:
    with serving_raw(dw.start_server, Served(), "127.0.0.1", 0) as served:
        yield served


@pytest.fixture
def ignoring() -> Iterator[Served]:
    with serving_raw(asyncio.start_server, Served(), "127.0.0.1", 0) as served:
        yield served


@contextlib.contextmanager
def serving_kind(kind: str, directory: Path) -> Iterator[tuple[Served, object]]:
    if kind == "unix":
        path = str(directory / "s")
        with serving_raw(dw.start_unix_server, Served(), path) as served:
            yield served, f"unix:{path}"
        return
    context = server_context() if kind == "tls" else None
    with serving_raw(dw.start_server, Served(), "127.0.0.1", 0, ssl=context) as served:
        port = served.sockets[0].getsockname()[1]
        yield served, f"https://127.0.0.1:{port}" if context else served


@pytest.mark.parametrize("kind", WAYS)
def test_server_that_notices_passes_in_every_way(kind: str, tmp_path: Path) -> None:
    with serving_kind(kind, tmp_path) as (served, server):
        noticed = assert_cancels(
            server,  # type: ignore[arg-type]
            REQUEST,
            started=lambda: served.num_begun,
            cancelled=lambda: served.num_cancelled,
            within=40,
        )
        assert set(noticed) == WAYS[kind]
        assert served.num_cancelled == len(WAYS[kind])


def test_server_that_ignores_leaving_fails_with_each_way_and_what_was_seen(
    ignoring: Served,
) -> None:
    ways = [Way.FIN, Way.BEHIND_REQUEST]
    with pytest.raises(NotCancelledError, match="did not notice 2 of 2 ways") as caught:
        assert_cancels(
            ignoring,
            REQUEST,
            started=lambda: ignoring.num_begun,
            cancelled=lambda: ignoring.num_cancelled,
            within=0.02,
            ways=ways,
        )
    assert list(caught.value.unnoticed) == ways
    assert caught.value.noticed == {}
    text = str(caught.value)
    assert "fin (close, a FIN): 'cancelled' stayed at 0" in text
    assert "behind_request (FIN behind a pipelined request): 'cancelled' stayed at 0" in text


def test_only_the_ways_that_went_unnoticed_are_blamed() -> None:
    served = Served()
    with (
        serving_raw(dw.start_server, served, "127.0.0.1", 0, half_close="ignore"),
        pytest.raises(NotCancelledError) as caught,
    ):
        assert_cancels(
            served,
            REQUEST,
            started=lambda: served.num_begun,
            cancelled=lambda: served.num_cancelled,
            within=2,
            ways=[Way.HALF_CLOSE, Way.RST],
        )
    assert set(caught.value.unnoticed) == {Way.HALF_CLOSE}
    assert set(caught.value.noticed) == {Way.RST}
    assert "noticed: rst after" in str(caught.value)


def test_pipelined_request_is_tried_last_whatever_the_order_given(watched: Served) -> None:
    # A server may begin it, and its cancel would count for the way that comes next.
    noticed = assert_cancels(
        watched,
        REQUEST,
        started=lambda: watched.num_begun,
        cancelled=lambda: watched.num_cancelled,
        within=40,
        ways=["behind_request", "fin", "fin"],
    )
    assert list(noticed) == [Way.FIN, Way.BEHIND_REQUEST]


@pytest.mark.slow
def test_client_that_vanishes_is_noticed_by_who_looks_for_it() -> None:
    served = Served()
    with (
        dw.Watcher(vanish_after=2) as watcher,
        serving_raw(dw.start_server, served, "127.0.0.1", 0, watcher=watcher),
    ):
        noticed = assert_cancels(
            served,
            REQUEST,
            started=lambda: served.num_begun,
            cancelled=lambda: served.num_cancelled,
            within=40,
            ways=["vanish"],
        )
    assert noticed[Way.VANISH] > 1


def test_part_of_the_answer_can_be_awaited_before_the_leave() -> None:
    served = Served(first=b"HTTP/1.1 200 OK\r\n")
    with serving_raw(dw.start_server, served, "127.0.0.1", 0):
        assert_cancels(
            served,
            REQUEST,
            num_bytes=len(served.first),
            cancelled=lambda: served.num_cancelled,
            within=40,
            ways=[Way.FIN],
        )
        with pytest.raises(AssertionError, match=r"sent 17 of 18 bytes .* TimeoutError"):
            assert_cancels(
                served,
                REQUEST,
                num_bytes=len(served.first) + 1,
                cancelled=lambda: served.num_cancelled,
                within=40,
                patience=0.05,
            )


def test_request_that_is_never_begun_is_told_apart(watched: Served) -> None:
    with pytest.raises(AssertionError, match=r"began no request within 0\.02 s: 'started' stayed"):
        assert_cancels(
            watched, REQUEST, started=lambda: 0, cancelled=lambda: 0, within=1, patience=0.02
        )


@pytest.mark.parametrize(
    ("argument", "error", "message"),
    [
        ({"ways": []}, ValueError, "ways: none is given"),
        ({"within": 0}, ValueError, "within 0: give the seconds"),
        ({"request": "GET / HTTP/1.1"}, TypeError, "give bytes, such as http_request"),
    ],
    ids=["no_ways", "no_time", "str"],
)
def test_what_would_try_nothing_or_cannot_be_sent_is_refused(
    ignoring: Served, argument: dict[str, Any], error: type[Exception], message: str
) -> None:
    arguments = {"request": REQUEST, "cancelled": lambda: 0, "within": 1, **argument}
    with pytest.raises(error, match=message):
        assert_cancels(ignoring, **arguments)
    assert ignoring.num_begun == 0


def test_listening_socket_of_an_asyncio_server_says_where_it_is(watched: Served) -> None:
    # It is a TransportSocket, which is no socket.socket.
    assert_cancels(
        watched.sockets[0],
        REQUEST,
        started=lambda: watched.num_begun,
        cancelled=lambda: watched.num_cancelled,
        within=40,
        ways=["fin"],
    )


def test_cancel_before_the_leave_is_no_cancel_by_it(watched: Served) -> None:
    with pytest.raises(AssertionError, match="cancelled a request before its client left by fin"):
        # Who counts what was begun as cancelled cancels without anybody leaving.
        assert_cancels(
            watched,
            REQUEST,
            started=lambda: watched.num_begun,
            cancelled=lambda: watched.num_begun,
            within=1,
        )


def test_request_that_had_ended_is_said_to_be_too_short() -> None:
    served = Served(seconds=0)
    with (
        serving_raw(asyncio.start_server, served, "127.0.0.1", 0),
        pytest.raises(NotCancelledError, match=f"after {len(WHOLE)} bytes: ask for longer work"),
    ):
        assert_cancels(
            served,
            REQUEST,
            started=lambda: served.num_ended,
            cancelled=lambda: 0,
            within=0.02,
            ways=["half_close"],
        )


def test_yes_or_no_serves_one_way_only(watched: Served) -> None:
    def cancelled() -> bool:
        return watched.num_cancelled > 0

    with pytest.raises(ValueError, match="is true already, before a client leaves by rst"):
        assert_cancels(
            watched,
            REQUEST,
            started=lambda: watched.num_begun,
            cancelled=cancelled,
            within=40,
            ways=[Way.RST, Way.FIN],
        )


def test_call_on_the_running_loop_is_hinted_at() -> None:
    async def main() -> None:
        async with await asyncio.start_server(Served(), "127.0.0.1", 0) as server:
            assert_cancels(
                server, REQUEST, started=lambda: 0, cancelled=lambda: 0, within=1, patience=0.02
            )

    with pytest.raises(AssertionError, match=r"await asyncio\.to_thread"):
        asyncio.run(main())


def test_server_on_the_loop_of_the_test_is_asserted_from_a_thread(run: LoopRunner) -> None:
    async def main() -> None:
        served = Served()
        async with await dw.start_server(served, "127.0.0.1", 0) as server:
            noticed = await asyncio.to_thread(
                assert_cancels,
                server,
                REQUEST,
                started=lambda: served.num_begun,
                cancelled=lambda: served.num_cancelled,
                within=40,
                ways=[Way.FIN],
            )
            assert set(noticed) == {Way.FIN}

    run(main)


def test_client_that_stays_gets_its_answer_among_those_that_leave(watched: Served) -> None:
    watched.seconds = 0.2
    answer = assert_survives(
        watched, REQUEST, started=lambda: watched.num_begun, among=[Way.RST, "fin"]
    )
    assert (answer.status, answer.body) == (200, b"done")
    assert watched.num_begun == 3


def test_answer_that_is_cut_short_is_no_answer(watched: Served) -> None:
    watched.seconds = 0
    watched.answer = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\ndone"
    with pytest.raises(AssertionError, match="without its whole answer: IncompleteRead"):
        assert_survives(watched, REQUEST)
    watched.answer = b""
    with pytest.raises(AssertionError, match="without its whole answer: RemoteDisconnected"):
        assert_survives(watched, REQUEST)


def test_answer_must_be_right(watched: Served) -> None:
    watched.seconds = 0
    with pytest.raises(AssertionError, match="answered a client that stays by Answer"):
        assert_survives(watched, REQUEST, is_right=lambda answer: answer.body == b"else")
    watched.answer = b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n"
    with pytest.raises(AssertionError, match="status=500"):
        assert_survives(watched, REQUEST)
    assert assert_survives(watched, REQUEST, is_right=lambda answer: True).status == 500
