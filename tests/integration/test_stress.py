"""The stress tool against real servers: ours, raw ones, and some that do not do right."""

import asyncio
import contextlib
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

import disconnect_watch as dw
from disconnect_watch import cli
from disconnect_watch.backends.engine import EngineBackend
from disconnect_watch.server import Frontend, create_app
from disconnect_watch.stress import Point, Report, StressOptions, Way, run_stress
from disconnect_watch.stress.client import Ending, Outcome, run_client
from disconnect_watch.stress.connection import Connections
from disconnect_watch.stress.generate import GenerateExchange
from disconnect_watch.stress.ledger import ServerCounts, settled_counts
from disconnect_watch.stress.lines import LineExchange
from disconnect_watch.stress.plan import ClientPlan, Leave
from disconnect_watch.stress.run import usual_ways
from disconnect_watch.stress.target import Target
from tests.support.command import Process, running
from tests.support.engine import make_engine
from tests.support.loops import LoopRunner
from tests.support.net import listener, until
from tests.support.serve import metrics_of, serving_app, serving_engine

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
ECHO = LineExchange(expect="hello {index}")


def stress_lines(
    run: LoopRunner,
    handler: Handler,
    exchange: LineExchange = ECHO,
    *,
    is_settled: Callable[[Report], bool] = lambda report: True,
    **options: Any,
) -> Report:
    """A run against a raw server of ``dw.start_server``, both on one loop.

    Args:
        is_settled: what the server must come to before it is closed.
    """

    async def main() -> Report:
        server = await dw.start_server(handler, "127.0.0.1", 0)
        async with server:
            target = Target(*server.sockets[0].getsockname())
            report = await run_stress(
                target, exchange, options=StressOptions(**{"seed": 11, **options})
            )
            await until(lambda: is_settled(report))
            return report

    return run(main)


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        writer.write(await reader.readline())
        await writer.drain()
        await reader.read()
        writer.close()


def test_raw_server_that_serves_who_stays_holds(run: LoopRunner) -> None:
    report = stress_lines(run, echo, num_stay=30, num_leave=60)
    assert report.holds, report.as_text()
    counts = report.counts
    # Some of those that leave have their answer first, or get it after a half-close.
    assert counts.outcomes[Outcome.ANSWERED] >= 30
    assert counts.outcomes[Outcome.FAILED] == counts.num_open == 0
    assert counts.num_sent == 90
    assert set(counts.ways) == set(usual_ways(Target("a", 1), ECHO))
    assert 0 < counts.num_left_incomplete < counts.outcomes[Outcome.LEFT]


def test_handler_is_cancelled_for_each_that_left_in_mid_answer(run: LoopRunner) -> None:
    num_cancelled = 0

    async def count_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_cancelled
        with contextlib.suppress(ConnectionError):
            if not (await reader.readline()).endswith(b"\n"):
                writer.close()
                return
        try:
            for _ in range(3):
                writer.write(b"word\n")
            # Its client has three lines and leaves in the middle, or it stays for the rest.
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            num_cancelled += 1
            raise

    report = stress_lines(
        run,
        count_on,
        LineExchange(num_lines=4),
        is_settled=lambda report: num_cancelled >= report.counts.num_left_reading,
        num_stay=0,
        num_leave=20,
        max_delay=0.01,
    )
    assert report.holds, report.as_text()
    assert report.counts.outcomes[Outcome.LEFT] == 20
    assert report.counts.num_left_reading > 0
    assert num_cancelled <= 20 - report.counts.num_left_incomplete


def one_client(
    run: LoopRunner, leave: Leave, serve: Callable[[socket.socket], bytes]
) -> tuple[Ending, bytes]:
    """How a client ended whose server is a plain socket, and what ``serve`` saw of it."""

    async def main() -> tuple[Ending, bytes]:
        with listener("tcp") as listening:
            listening.settimeout(40)
            target = Target(*listening.getsockname())
            plan = ClientPlan(0, leave)
            with Connections(await target.resolve(), target) as connections:
                client = asyncio.create_task(run_client(connections, ECHO, plan=plan, within=40))
                accepted, _ = await asyncio.to_thread(listening.accept)
                with accepted:
                    seen = await asyncio.to_thread(serve, accepted)
                    return await client, seen

    return run(main)


def read_to_end(accepted: socket.socket) -> bytes:
    accepted.settimeout(40)
    return b"".join(iter(lambda: accepted.recv(100), b""))


def leave_by(way: Way, point: Point = Point.AT_ONCE) -> Leave:
    return Leave(way, point, fraction=0.5, delay=0.01, num_pieces=1)


@pytest.mark.parametrize("point", [Point.AT_ONCE, Point.WAITING])
@pytest.mark.parametrize(
    ("way", "seen"),
    [(Way.FIN, b"hello 0\n"), (Way.BEHIND_REQUEST, b"hello 0\nhello 0\n")],
)
def test_close_comes_behind_all_that_was_sent(
    run: LoopRunner, way: Way, point: Point, seen: bytes
) -> None:
    left = Ending(Outcome.LEFT, is_request_complete=True)
    assert one_client(run, leave_by(way, point), read_to_end) == (left, seen)


def test_client_that_leaves_in_its_request_has_sent_a_part_of_it(run: LoopRunner) -> None:
    leave = leave_by(Way.FIN, Point.IN_REQUEST)
    assert one_client(run, leave, read_to_end) == (Ending(Outcome.LEFT), b"hell")


def test_reset_is_one(run: LoopRunner) -> None:
    def serve(accepted: socket.socket) -> bytes:
        with pytest.raises(ConnectionResetError):
            read_to_end(accepted)
        return b""

    ending, _ = one_client(run, leave_by(Way.RST), serve)
    assert ending.outcome is Outcome.LEFT


def test_half_closed_client_that_is_answered_has_not_left(run: LoopRunner) -> None:
    def serve(accepted: socket.socket) -> bytes:
        seen = read_to_end(accepted)
        accepted.sendall(b"hello 0\n")
        return seen

    ending, seen = one_client(run, leave_by(Way.HALF_CLOSE), serve)
    assert (ending.outcome, seen) == (Outcome.ANSWERED, b"hello 0\n")


@pytest.mark.parametrize("answer", [b"", b"hel", b"not this\n"])
def test_half_closed_client_that_is_turned_away_has_left(run: LoopRunner, answer: bytes) -> None:
    def serve(accepted: socket.socket) -> bytes:
        seen = read_to_end(accepted)
        accepted.sendall(answer)
        accepted.shutdown(socket.SHUT_WR)
        return seen

    ending, _ = one_client(run, leave_by(Way.HALF_CLOSE), serve)
    assert ending.outcome is Outcome.LEFT


def page(num_running: int) -> bytes:
    """A page of metrics with so many requests in the engine."""
    samples = {
        'dw_requests_total{outcome="finished",phase="decode"}': 3,
        'dw_requests_total{outcome="cancelled",phase="prefill"}': 1,
        'dw_requests_total{outcome="cancelled",phase="decode"}': 1,
        'dw_requests_total{outcome="failed",phase="decode"}': 0,
        'dw_requests{state="waiting"}': 0,
        'dw_requests{state="running"}': num_running,
        'dw_kv_blocks{state="used"}': 0,
        'dw_kv_blocks{state="retained"}': 0,
        "dw_unacked_cancels": 0,
    }
    body = "".join(f"{name} {value}.0\n" for name, value in samples.items())
    return f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()


def test_server_is_settled_when_two_readings_in_a_row_say_so(run: LoopRunner) -> None:
    pages = [page(num_running) for num_running in (1, 0, 2, 0, 0, 9)]

    async def scrape(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(pages.pop(0))
        writer.close()

    async def main() -> ServerCounts | None:
        server = await dw.start_server(scrape, "127.0.0.1", 0)
        async with server:
            target = Target(*server.sockets[0].getsockname()).with_path("/metrics")
            return await settled_counts(target, is_settled=lambda read: read.is_idle, within=40)

    assert run(main) == ServerCounts(3, 2, 0, 0, 0, 0, 0)
    assert pages == [page(9)]


def test_server_that_counts_nothing_is_settled_when_it_stays_so(run: LoopRunner) -> None:
    num_read = 0

    async def scrape(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_read
        num_read += 1
        await reader.readuntil(b"\r\n\r\n")
        # What was sent arrives behind three readings, and is done behind two more.
        body = f"tgi_batch_current_size {int(3 < num_read <= 5)}\ntgi_queue_size 0\n"
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        writer.close()

    async def main() -> ServerCounts | None:
        server = await dw.start_server(scrape, "127.0.0.1", 0)
        async with server:
            target = Target(*server.sockets[0].getsockname()).with_path("/metrics")
            return await settled_counts(target, is_settled=lambda read: read.is_idle, within=40)

    assert run(main) == ServerCounts(num_running=0, num_waiting=0, source="TGI")
    assert num_read == 15


def lossy(num_good: int) -> Handler:
    """Echoes to so many, and closes on the next without a word."""
    num_served = 0

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_served
        num_served += 1
        if num_served % (num_good + 1):
            await echo(reader, writer)
        else:
            await reader.readline()
            writer.close()

    return handler


def test_server_that_loses_answers_fails(run: LoopRunner) -> None:
    report = stress_lines(run, lossy(3), num_stay=12, num_leave=0)
    assert not report.holds
    assert report.counts.outcomes[Outcome.FAILED] == 3
    assert report.counts.errors == {"closed by the server before the answer was complete": 3}


def test_server_that_answers_one_with_the_words_of_another_fails(run: LoopRunner) -> None:
    async def always_the_first(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b"hello 0\n")
        writer.close()

    report = stress_lines(run, always_the_first, num_stay=4, num_leave=0)
    assert report.counts.errors == {"a line is not what it must be": 3}
    assert not report.holds


def test_server_that_never_answers_fails_within_the_timeout(run: LoopRunner) -> None:
    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    report = stress_lines(run, mute, num_stay=2, num_leave=0, timeout=0.05)
    assert report.counts.errors == {"not answered within 0.05 s": 2}
    assert not report.holds


def test_no_client_begins_once_the_time_is_up(run: LoopRunner) -> None:
    report = stress_lines(run, echo, num_stay=50, num_leave=0, concurrency=2, max_seconds=0)
    assert report.counts.num_sent == report.counts.outcomes[Outcome.ANSWERED] == 2
    assert report.holds


def test_server_that_refuses_is_a_failure_of_every_client(run: LoopRunner) -> None:
    with listener("tcp") as listening:
        target = Target(*listening.getsockname())

    async def main() -> Report:
        options = StressOptions(num_stay=2, num_leave=1, seed=1, metrics=target.with_path("/"))
        return await run_stress(target, ECHO, options=options)

    report = run(main)
    assert report.counts.errors == {"Connection refused": 3}
    assert not report.is_server_checked
    assert not report.holds


def stress_generate(port: int, route: str, **options: Any) -> Report:
    target = Target("127.0.0.1", port, f"/v2/models/tiny/{route}")
    exchange = GenerateExchange(target, max_tokens=4, leaver_max_tokens=100)
    wanted = StressOptions(**{"seed": 3, "metrics": target.with_path("/metrics"), **options})
    return asyncio.run(run_stress(target, exchange, options=wanted))


def test_server_that_works_on_for_who_left_fails() -> None:
    with contextlib.closing(EngineBackend(make_engine(), name="tiny")) as backend:
        frontend = Frontend(backend)
        # uvicorn's own protocol: nothing sets the token of a request.
        app = create_app(frontend, metrics_of(frontend))
        with serving_app(app, protocol="httptools", loop_name="asyncio") as server:
            report = stress_generate(
                server.port, "generate_stream", num_stay=2, num_leave=12, settle=0.5
            )
    holds = {check.name: check.holds for check in report.checks}
    assert holds["every answer is right"]
    assert not holds["the server finished what was answered, and nothing else"]
    assert not report.holds


def test_server_that_dies_under_the_clients_fails() -> None:
    with serving_engine(make_engine()) as serving:
        target = Target("127.0.0.1", serving.port, "/v2/models/tiny/generate")
        options = StressOptions(
            num_stay=1, num_leave=0, settle=0.1, metrics=target.with_path("/metrics")
        )
        report = asyncio.run(
            run_stress(
                target,
                GenerateExchange(target, max_tokens=4),
                options=options,
                on_progress=lambda _: serving.http.stop(),
            )
        )
    assert report.counts.outcomes[Outcome.ANSWERED] == 1
    assert [check.name for check in report.checks if not check.holds] == [
        "the server is still there"
    ]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "disconnect_watch.cli", "stress", *arguments]


@pytest.mark.slow
@pytest.mark.parametrize("route", ["generate", "generate_stream"])
def test_command_finds_nothing_wrong_with_our_server(serve: Process, route: str) -> None:
    url = f"http://127.0.0.1:{serve.port}/v2/models/tiny/{route}"
    done = subprocess.run(
        command(url, "--stay", "8", "--leave", "24", "--seed", "7", "--json"),
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["holds"]
    assert report["server_checked"]
    assert len(report["checks"]) == 5
    assert report["sent"] == report["answered"] + report["left"] == 32
    assert set(report["ways"]) == set(report["options"]["ways"])
    assert report["left_reading"] > 0 or route == "generate"
    assert "sent 32 = answered 8 + left 24 + failed 0" in done.stderr


@pytest.fixture(scope="module")
def serve() -> Iterator[Process]:
    with running() as process:
        yield process


def test_command_that_is_interrupted_reports_what_there_was() -> None:
    with listener("tcp") as listening:
        listening.settimeout(40)
        host, port = listening.getsockname()
        with subprocess.Popen(
            command(f"{host}:{port}", "--concurrency", "3", "--leave", "0"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            held = [listening.accept()[0] for _ in range(3)]
            process.send_signal(signal.SIGINT)
            text, progress = process.communicate(timeout=40)
            for sock in held:
                sock.close()
    assert process.returncode == 130
    assert "3 of 50 clients" in text
    assert "(interrupted)" in text
    assert "sent 3 = answered 0 + left 0 + failed 0 + open 3" in text
    assert "Traceback" not in progress


def test_command_fails_by_its_exit_code_where_answers_are_lost() -> None:
    with listener("tcp") as listening:
        listening.settimeout(40)
        host, port = listening.getsockname()
        with subprocess.Popen(
            command(f"{host}:{port}", "--stay", "1", "--leave", "0"),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as process:
            listening.accept()[0].close()
            text, _ = process.communicate(timeout=40)
    assert process.returncode == 1
    assert "FAIL every answer is right: 0 right, 1 wrong or missing" in text


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("nowhere", "cannot go to 'nowhere': give host:port, or an http:// URL"),
        (
            "http://127.0.0.1:1/v2",
            "give the URL of a generate, generate_stream, infer or completions",
        ),
        ("no-such-host.invalid:80", "cannot go to 'no-such-host.invalid:80': "),
    ],
)
def test_command_says_why_it_cannot_begin(
    capsys: pytest.CaptureFixture[str], target: str, said: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.app(["stress", target])
    assert caught.value.code == 2
    assert said in capsys.readouterr().err
