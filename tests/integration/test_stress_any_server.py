"""The stress tool against servers that are not ours, over TLS, kept connections and at a rate."""

import asyncio
import contextlib
import json
import os
import pty
import re
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar
from xml.etree import ElementTree

import pytest

import disconnect_watch as dw
from disconnect_watch import cli
from disconnect_watch.stress import (
    Asking,
    Point,
    Profile,
    Report,
    StressOptions,
    Way,
    exchange_with,
    parse_target,
    run_stress,
)
from disconnect_watch.stress.client import Ending, Outcome, run_client
from disconnect_watch.stress.connection import Connections
from disconnect_watch.stress.effect import Effect, measure_effect
from disconnect_watch.stress.plan import ClientPlan, Leave
from disconnect_watch.testing import serving
from tests.support.command import Process, running
from tests.support.loops import LoopRunner
from tests.support.tls import PEM

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def stress(url: str, *, asking: Asking | None = None, **options: Any) -> Report:
    """A run on a loop of its own."""
    target, exchange = exchange_with(
        parse_target(url), asking or Asking(expect="is {index}"), Profile.HTTP
    )
    wanted = StressOptions(**{"seed": 4, "max_delay": 0.01, **options})
    return asyncio.run(run_stress(target, exchange, options=wanted))


class App:
    """Tells each client its number; counts connections by the ports that clients have."""

    def __init__(self) -> None:
        self.ports: set[int] = set()
        self.num_requests = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.ports.add(scope["client"][1])
        self.num_requests += 1
        number = scope["path"].rpartition("/")[2]
        body = f"it is {number}".encode()
        length = str(len(body)).encode()
        headers = [(b"content-length", length)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


@contextlib.contextmanager
def uvicorn_of(app: Any, **config: Any) -> Iterator[str]:
    """uvicorn without us."""
    config |= {"lifespan": "off", "timeout_keep_alive": 120}
    with serving(app, protocol="httptools", **config) as server:
        yield f"{server.url}/item/{{index}}"


@contextlib.asynccontextmanager
async def raw_server(handler: Handler) -> AsyncIterator[str]:
    """asyncio's own; its handlers are over when the block is. Gives the URL."""
    tasks: set[asyncio.Task[Any]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        with contextlib.suppress(asyncio.CancelledError):
            try:
                await handler(reader, writer)
            except (asyncio.IncompleteReadError, ConnectionError):
                pass
            finally:
                writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def test_uvicorn_answers_each_its_own_while_others_leave_in_every_way() -> None:
    with uvicorn_of(App()) as url:
        report = stress(url, num_stay=40, num_leave=80, points=tuple(Point))
    assert report.holds, report.as_text()
    assert report.counts.outcomes[Outcome.ANSWERED] >= 40
    assert len(report.counts.latencies.whole) == 40
    assert not report.is_server_checked


def test_kept_connections_are_used_again() -> None:
    app = App()
    with uvicorn_of(app) as url:
        report = stress(url, num_stay=50, num_leave=0, kept=1.0, concurrency=2)
    assert report.holds, report.as_text()
    assert app.num_requests == 50
    assert len(app.ports) == 2


def test_fresh_connections_are_not() -> None:
    app = App()
    with uvicorn_of(app) as url:
        report = stress(url, num_stay=20, num_leave=0, kept=0.0)
    assert report.holds, report.as_text()
    assert len(app.ports) == 20


def test_client_over_a_kept_connection_that_the_server_closed_asks_over_a_new_one() -> None:
    """The server closes it as the request comes, so that no look beforehand can tell."""
    num_connections = 0

    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        num_connections += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx")
        await reader.readuntil(b"\r\n\r\n")

    async def main() -> list[Ending]:
        async with raw_server(once) as url:
            target, exchange = exchange_with(parse_target(url), Asking(), Profile.HTTP)
            with Connections(await target.resolve(), target) as connections:
                plans = [ClientPlan(0, None), ClientPlan(1, None, is_kept=True)]
                return [
                    await run_client(connections, exchange, plan=plan, within=40) for plan in plans
                ]

    assert [ending.outcome for ending in asyncio.run(main())] == [Outcome.ANSWERED] * 2
    assert num_connections == 2


def test_tls_server_is_left_in_every_way_and_answers_who_stays() -> None:
    with uvicorn_of(App(), ssl_certfile=str(PEM)) as url:
        assert url.startswith("https")
        report = stress(url, num_stay=20, num_leave=80, kept=0.3)
    assert report.holds, report.as_text()
    assert Way.CLOSE_NOTIFY in report.counts.ways
    assert report.counts.outcomes[Outcome.ANSWERED] >= 20


def test_server_that_speaks_no_tls_fails_by_name() -> None:
    async def plain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"220 ready\r\n")
        writer.close()

    async def main() -> Report:
        async with raw_server(plain) as url:
            tls = url.replace("http", "https")
            target, exchange = exchange_with(parse_target(tls), Asking(), Profile.HTTP)
            options = StressOptions(num_stay=2, num_leave=0, concurrency=1)
            return await run_stress(target, exchange, options=options)

    (error,) = asyncio.run(main()).counts.errors
    assert error.startswith("TLS: ")


def test_slow_reader_is_answered_whole() -> None:
    body = b"x" * 40_000

    async def big(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    with serving(big, protocol="httptools", lifespan="off") as server:
        report = stress(
            f"{server.url}/", asking=Asking(expect="x" * 40_000), num_stay=1, num_leave=0, slow=1.0
        )
    assert report.holds, report.as_text()


def test_open_loop_counts_what_a_client_waited_for_its_turn() -> None:
    """The second is due while the first, with which it shares the one place, is served."""

    async def main() -> Report:
        num_begun = 0

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal num_begun
            num_begun += 1
            await reader.readuntil(b"\r\n\r\n")
            if num_begun == 1:
                await asyncio.sleep(0.2)  # the work of this server
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx")
            writer.close()

        async with raw_server(answer) as url:
            target, exchange = exchange_with(parse_target(url), Asking(), Profile.HTTP)
            options = StressOptions(num_stay=2, num_leave=0, concurrency=1, rate=1000.0, seed=1)
            return await run_stress(target, exchange, options=options)

    report = asyncio.run(main())
    assert report.holds, report.as_text()
    first, second = report.counts.latencies.whole
    assert first >= 0.1
    assert second >= 0.1  # it itself was answered at once


def test_open_loop_ends_when_its_time_is_over() -> None:
    with uvicorn_of(App()) as url:
        report = stress(url, num_stay=100_000, num_leave=0, rate=100.0, max_seconds=0.1)
    assert report.holds, report.as_text()
    assert 0 < report.counts.num_sent < 100


async def one_left(
    handler: Handler, leave: Leave, told: "asyncio.Queue[str]"
) -> tuple[Ending, str]:
    """How a client ended, and what the handler has told then."""
    async with raw_server(handler) as url:
        target, exchange = exchange_with(parse_target(url), Asking(), Profile.HTTP)
        with Connections(await target.resolve(), target) as connections:
            plan = ClientPlan(0, leave)
            ending = await run_client(connections, exchange, plan=plan, within=40)
            return ending, await asyncio.wait_for(told.get(), 40)


def test_client_that_leaves_before_its_first_byte_has_sent_none() -> None:
    told = asyncio.Queue[str]()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        told.put_nowait((await reader.read()).decode())

    leave = Leave(Way.FIN, Point.CONNECTED, 0.5, 0, 1)
    assert asyncio.run(one_left(handler, leave, told)) == (Ending(Outcome.LEFT), "")


def test_stalled_client_leaves_with_the_answer_unread_which_resets() -> None:
    told = asyncio.Queue[str]()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n")
        try:
            while True:
                writer.write(b"400\r\n" + b"x" * 1024 + b"\r\n")
                await writer.drain()
        except ConnectionError:
            told.put_nowait("reset")

    ending, seen = asyncio.run(one_left(handler, Leave(Way.FIN, Point.STALLED, 0, 0.05, 1), told))
    assert (ending.outcome, seen) == (Outcome.LEFT, "reset")
    assert ending.num_pieces > 0


def test_client_that_leaves_around_the_end_asks_as_one_that_stays() -> None:
    report_of = []
    for fraction, outcome in ((0.0, Outcome.LEFT), (0.999, Outcome.ANSWERED)):

        async def main(fraction: float = fraction) -> Ending:
            async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                request = await reader.readuntil(b"\r\n\r\n")
                request += await reader.read(4)
                if fraction:
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n" + request[-4:])
                await reader.read()
                writer.close()

            async with raw_server(handler) as url:
                asking = Asking(method="POST", body="stay", leaver_body="long", expect="stay")
                target, exchange = exchange_with(parse_target(url), asking, Profile.HTTP)
                leave = Leave(Way.FIN, Point.AROUND, fraction, 0, 1)
                with Connections(await target.resolve(), target) as connections:
                    return await run_client(
                        connections, exchange, plan=ClientPlan(0, leave), within=60, usual=20
                    )

        report_of.append((asyncio.run(main()).outcome, outcome))
    assert all(found is expected for found, expected in report_of), report_of


def test_vanished_client_is_silent_until_the_run_is_over() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(40)
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/"
        target, exchange = exchange_with(parse_target(url), Asking(), Profile.HTTP)

        async def main() -> bytes | None:
            with Connections(await target.resolve(), target) as connections:
                leave = Leave(Way.VANISH, Point.AT_ONCE, 0, 0, 1)
                ending = await run_client(
                    connections, exchange, plan=ClientPlan(0, leave), within=40
                )
                assert ending.outcome is Outcome.LEFT
                accepted, _ = listening.accept()
                with accepted:
                    accepted.settimeout(40)
                    while not accepted.recv(4096).endswith(b"\r\n\r\n"):
                        pass
                    assert dw.is_gone(accepted) is None
                    accepted.setblocking(False)
                    with pytest.raises(BlockingIOError):
                        accepted.recv(1)
            return None

        asyncio.run(main())


class Turns:
    """A server whose requests take turns, a unit of work each, as on one processor.

    Args:
        cancels: whether it looks for its client before each unit.

    Attributes:
        num_units: of work done, the clock of this world.
    """

    UNITS: ClassVar = {b"short": 20, b"long!": 1_000_000}

    def __init__(self, *, cancels: bool) -> None:
        self.num_units = 0
        self._cancels = cancels

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        num_units = self.UNITS[await reader.readexactly(5)]
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n")
        sock = writer.get_extra_info("socket")
        for _ in range(num_units):
            if self._cancels and (sock.fileno() < 0 or dw.is_gone(sock.fileno())):
                return
            self.num_units += 1
            await asyncio.sleep(0)
        writer.write(b"0\r\n\r\n")


def effect_on(run: LoopRunner, turns: Turns) -> Effect | None:
    async def main() -> Effect | None:
        asking = Asking(method="POST", body="short", leaver_body="long!")
        async with raw_server(turns.handle) as url:
            target, exchange = exchange_with(parse_target(url), asking, Profile.HTTP)
            with Connections(await target.resolve(), target) as connections:
                return await measure_effect(
                    connections, exchange, num_others=6, clock=lambda: turns.num_units
                )

    return run(main)


@pytest.mark.parametrize("cancels", [True, False])
def test_server_that_tells_nothing_is_seen_to_cancel_or_not(run: LoopRunner, cancels: bool) -> None:
    effect = effect_on(run, Turns(cancels=cancels))
    assert effect is not None
    assert effect.alone == Turns.UNITS[b"short"]
    assert effect.cancels is cancels, effect


@pytest.mark.parametrize("cancels", [True, False])
def test_server_that_serves_one_after_the_other_is_seen_to_cancel_or_not(cancels: bool) -> None:
    """Who waits behind others has seen them end: those whose leaving costs come after it."""
    num_units = 0
    turn = asyncio.Lock()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_units
        await reader.readuntil(b"\r\n\r\n")
        wanted = {b"short": 20, b"long!": 200}[await reader.readexactly(5)]
        sock = writer.get_extra_info("socket")
        async with turn:
            for _ in range(wanted):
                if cancels and (sock.fileno() < 0 or dw.is_gone(sock.fileno())):
                    return
                num_units += 1
                await asyncio.sleep(0)
        writer.write(b'HTTP/1.1 200 OK\r\nContent-Length: 14\r\n\r\n{"outputs":[]}')

    async def main() -> Effect | None:
        asking = Asking(body="short", leaver_body="long!")
        async with raw_server(handle) as url:
            target, exchange = exchange_with(parse_target(f"{url}v2/models/m/infer"), asking)
            with Connections(await target.resolve(), target) as connections:
                return await measure_effect(
                    connections, exchange, num_others=6, clock=lambda: num_units
                )

    effect = asyncio.run(main())
    assert effect is not None
    assert effect.cancels is cancels, effect


def test_effect_of_a_server_that_does_not_answer_is_not_known() -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async def main() -> Report:
        async with raw_server(refuse) as url:
            target, exchange = exchange_with(parse_target(url), Asking(), Profile.HTTP)
            options = StressOptions(num_stay=1, num_leave=0, measures_effect=None)
            return await run_stress(target, exchange, options=options)

    report = asyncio.run(main())
    assert (report.effect, report.cancels) == (None, None)


def test_effect_is_measured_where_no_metrics_tell() -> None:
    with uvicorn_of(App()) as url:
        target = parse_target(url).with_path("/metrics")
        report = stress(url, num_stay=4, num_leave=4, measures_effect=None, metrics=target)
    assert report.effect is not None
    judged = [check for check in report.checks if check.name == "the server stops for who leaves"]
    assert len(judged) == (report.effect.cancels is not None)
    assert report.cancels is report.effect.cancels


def command(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "disconnect_watch.cli", "stress", *arguments],
        capture_output=True,
        text=True,
        timeout=150,
    )


@pytest.fixture(scope="module")
def serve() -> Iterator[Process]:
    with running() as process:
        yield process


@pytest.mark.slow
@pytest.mark.parametrize("page", ["completions", "chat/completions"])
def test_command_finds_nothing_wrong_with_our_openai_endpoints(
    serve: Process, tmp_path: Path, page: str
) -> None:
    done = command(
        f"http://127.0.0.1:{serve.port}/v1/{page}", "--model", "tiny", "--stay", "8", "--leave",
        "24", "--seed", "3", "--timeout", "60", "--settle", "60", "--keep-alive", "0.5", "--same",
        "--json-file", str(tmp_path / "report.json"), "--html", str(tmp_path / "report.html"),
        "--junit",
        str(tmp_path / "report.xml"),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["server"] == "disconnect_watch"
    assert report["cancels"] is True
    assert report["tokens"] >= 8 * 32
    assert report["sent"] == report["answered"] + report["left"] == 32
    assert "every answer is the same" in {check["name"] for check in report["checks"]}
    assert "the server cancels" in (tmp_path / "report.html").read_text()
    assert ElementTree.parse(tmp_path / "report.xml").getroot().get("failures") == "0"
    compared = command("--compare", *[str(tmp_path / "report.json")] * 2)
    assert compared.returncode == 0, compared.stderr
    assert "1.00" in compared.stdout


@pytest.mark.slow
def test_server_that_finishes_for_who_left_around_the_end_does_no_wrong(serve: Process) -> None:
    done = command(
        f"http://127.0.0.1:{serve.port}/v2/models/tiny/generate_stream", "--point", "around",
        "--stay", "10", "--leave", "30", "--seed", "5", "--json",
        "--timeout", "60", "--settle", "60",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["left_around"] == report["left"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "cannot stress nothing"),
        (["http://a/v1/completions"], "give the model"),
        (["http://a/x", "--profile", "http", "--header", "novalue"], "give 'Name: value'"),
        (["a:1", "--way", "behind_body", "--point", "connected"], "nobody can leave by behind"),
        (["--compare", "no-such-file", "nor-this"], "no-such-file: No such file"),
    ],
)
def test_command_says_what_it_lacks(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.app(["stress", *arguments])
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


def test_report_that_cannot_be_written_fails_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with uvicorn_of(App()) as url, pytest.raises(SystemExit) as caught:
        cli.app(
            ["stress", url, "--profile", "http", "--stay", "1", "--leave", "0", "--no-effect",
             "--html", "/no/such/folder/x.html"]
        )  # fmt: skip
    assert caught.value.code == 2
    assert "cannot write the report to '/no/such/folder/x.html'" in capsys.readouterr().err


def test_second_of_two_reports_that_lost_a_check_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = []
    for index, expect in enumerate(("is {index}", "never")):
        with uvicorn_of(App()) as url:
            report = stress(url, asking=Asking(expect=expect), num_stay=2, num_leave=0)
        paths.append(tmp_path / f"{index}.json")
        paths[-1].write_text(json.dumps(report.as_dict()))
    with pytest.raises(SystemExit) as caught:
        cli.app(["stress", "--compare", *map(str, paths), "--json"])
    assert caught.value.code == 1
    assert json.loads(capsys.readouterr().out)["lost"] == ["every answer is right"]


def test_on_a_terminal_there_is_a_table_that_ends_with_the_last_client() -> None:
    with uvicorn_of(App()) as url:
        ours, theirs = pty.openpty()
        with subprocess.Popen(
            [
                *(sys.executable, "-m", "disconnect_watch.cli", "stress", url, "--no-effect"),
                *("--profile", "http", "--stay", "7", "--leave", "0"),
            ],
            stdout=subprocess.PIPE,
            stderr=theirs,
            text=True,
            env=os.environ | {"TERM": "xterm", "COLUMNS": "120"},
        ) as process:
            os.close(theirs)
            drawn = b""
            with contextlib.suppress(OSError):  # EIO: nobody has the other end open any more
                while data := os.read(ours, 4096):
                    drawn += data
            os.close(ours)
            assert process.stdout is not None
            report = process.stdout.read()
            assert process.wait(40) == 0
    assert "7 of 7 clients" in report
    *_, last = re.sub(rb"\x1b\[[0-9;?]*[a-zA-Z]", b"", drawn).split(b"begun")
    names, numbers = last.decode().splitlines()[:2]
    assert names.split()[:4] == ["answered", "left", "failed", "open"]
    assert numbers.split()[:5] == ["7", "7", "0", "0", "0"]
