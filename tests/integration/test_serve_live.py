"""The page that shows what runs: its events, who may see them, and that they end."""

import asyncio
import json
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import pairwise
from typing import Any
from unittest.mock import Mock

import httpx
import pytest

from disconnect_watch.keys import Caller, KeyRing, Role, digest_of
from disconnect_watch.server import Frontend
from disconnect_watch.server.documents import encode
from disconnect_watch.server.live import hub
from disconnect_watch.server.options import FrontendOptions
from tests.support.backends import ScriptedBackend
from tests.support.gate import gated, slowed
from tests.support.net import PATIENCE, wait_until
from tests.support.serve import Serving, packaged_engine, request_app, serving_engine

KEYS = KeyRing(
    [
        (Caller("boss", Role.ADMIN), digest_of("boss-key")),
        (Caller("anna", Role.USER), digest_of("anna-key")),
    ]
)
LONG = {"text_input": "The class", "max_tokens": 500, "ignore_eos": True}


@pytest.fixture
def serving() -> Iterator[Serving]:
    with serving_engine(packaged_engine()) as serving:
        yield serving
        wait_until(serving.is_idle)


@contextmanager
def watching(serving: Serving, **options: Any) -> Iterator[Iterator[dict[str, Any]]]:
    """The frames of a viewer, as they come."""
    url = f"http://127.0.0.1:{serving.port}/live"
    with httpx.stream("GET", url, timeout=PATIENCE, **options) as response:
        assert response.status_code == 200
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        lines = response.iter_lines()
        yield (json.loads(line[6:]) for line in lines if line.startswith("data: "))


def first_where(frames: Iterator[dict[str, Any]], predicate: Any) -> dict[str, Any]:
    return next(frame["models"][0] | frame for frame in frames if predicate(frame))


@contextmanager
def asking(serving: Serving, **body: Any) -> Iterator[socket.socket]:
    """A client that asked for a long answer and reads none of it."""
    content = json.dumps({**LONG, **body}).encode()
    head = b"POST /v2/models/tiny/generate_stream HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
    with closing(socket.create_connection(("127.0.0.1", serving.port))) as client:
        client.sendall(head % len(content) + content)
        yield client


def test_a_frame_shows_who_runs_where_and_what_each_block_is(serving: Serving) -> None:
    with slowed(serving.engine), asking(serving, max_tokens=4000), watching(serving) as frames:
        seen = first_where(
            frames,
            lambda frame: any(r["phase"] == "decode" for r in frame["models"][0]["requests"]),
        )
    (request,) = seen["requests"]
    assert (seen["name"], seen["num_running"], seen["num_waiting"]) == ("tiny", 1, 0)
    assert request["phase"] == "decode"
    assert request["max_tokens"] == 4000
    assert request["num_generated_tokens"] >= 1
    assert sum(count for _, count in seen["blocks"]) == serving.engine.stats().num_blocks
    assert sum(count for place, count in seen["blocks"] if place == 3) == request["num_blocks"]


def test_a_cancel_is_shown_with_its_latency_and_what_it_spared(serving: Serving) -> None:
    with (
        watching(serving) as frames,
        gated(serving.engine, after_steps=4) as gate,
        asking(serving) as client,
    ):
        gate.wait()
        client.close()
        wait_until(lambda: sum(serving.watcher.stats().num_signals.values()))
        gate.open()
        seen = first_where(frames, lambda frame: frame["cancels"])
    (cancel,) = seen["cancels"]
    ((request_id, (outcome,)),) = serving.outcomes.items()
    assert (cancel["request_id"], cancel["number"]) == (request_id, 1)
    assert cancel["reason"] == str(outcome.reason) in ("fin", "reset")
    assert cancel["milliseconds"] == round((outcome.freed_at_ns - outcome.flag_at_ns) / 1e6, 3)
    assert cancel["num_tokens"] == outcome.num_generated_tokens
    stats = serving.backend.stats()
    assert stats.num_spared_tokens == 500 - outcome.num_generated_tokens
    assert stats.busy_seconds > 0


def test_frames_that_say_nothing_new_are_not_sent(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Mock(wraps=encode)
    monkeypatch.setattr(hub, "encode", made)
    monkeypatch.setattr(hub, "TICK", 0.001)
    monkeypatch.setattr(hub, "MAX_UNCHANGED", 1_000_000)
    with watching(serving) as frames:
        seen = [next(frames)]
        num_made = made.call_count
        wait_until(lambda: made.call_count > num_made + 3)
        with asking(serving, max_tokens=1) as client:
            assert client.recv(1)
            while not seen[-1]["models"][0]["num_finished"]:
                seen.append(next(frames))
    assert all(one != other for one, other in pairwise(seen))


def test_a_quiet_stream_says_so_now_and_then(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "TICK", 0.001)
    monkeypatch.setattr(hub, "MAX_UNCHANGED", 3)
    with watching(serving) as frames:
        assert next(frames) == next(frames)


def test_who_watches_and_leaves_is_forgotten(serving: Serving) -> None:
    with watching(serving) as frames:
        next(frames)
        assert serving.frontend.live.num_viewers == 1
    wait_until(lambda: serving.frontend.live.num_viewers == 0)


def test_there_is_room_for_so_many(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "MAX_VIEWERS", 1)
    with watching(serving) as frames:
        next(frames)
        answer = httpx.get(f"http://127.0.0.1:{serving.port}/live")
    assert (answer.status_code, answer.json()["error"]) == (
        503,
        "1 watch already, which is as many as may",
    )


def test_a_shutdown_does_not_wait_for_those_who_watch() -> None:
    with serving_engine(packaged_engine(), grace=1e6) as serving, watching(serving) as frames:
        next(frames)
        serving.http.stop()
        # To its end; httpx complains of a stream that was cut.
        for _ in frames:
            pass


def test_with_keys_the_admin_alone_sees_what_runs() -> None:
    with serving_engine(packaged_engine(), keys=KEYS) as serving:
        base = f"http://127.0.0.1:{serving.port}"
        assert httpx.get(base + "/").status_code == 200
        assert httpx.get(base + "/live").status_code == 401
        headers = {"authorization": "Bearer anna-key"}
        assert httpx.get(base + "/live", headers=headers).status_code == 403
        with watching(serving, headers={"authorization": "Bearer boss-key"}) as frames:
            assert next(frames)["models"][0]["name"] == "tiny"


def get(target: Frontend | ScriptedBackend, path: str) -> httpx.Response:
    return asyncio.run(request_app(target, "GET", path))


def test_the_page_is_whole_and_talks_to_its_own_server_alone() -> None:
    backend = ScriptedBackend()
    page = get(backend, "/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    policy = page.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self';")
    for name, kind in (("live.js", "text/javascript"), ("live.css", "text/css")):
        assert f'"{name}"' in page.text
        part = get(backend, f"/{name}")
        assert part.headers["content-type"] == f"{kind}; charset=utf-8"
        assert part.headers["x-content-type-options"] == "nosniff"
    assert "http://" not in page.text
    assert "https://" not in page.text


@pytest.mark.parametrize(
    "options", [FrontendOptions(live_page=False), FrontendOptions(strict=True)]
)
def test_the_page_can_be_turned_off(options: FrontendOptions) -> None:
    frontend = Frontend(ScriptedBackend(), options=options)
    for path in ("/", "/live", "/live.js"):
        assert get(frontend, path).status_code == 404
