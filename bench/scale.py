"""What a frontend costs: CPU of a request and of a token, memory of itself and of a connection.

One process that has the engine too stands beside several frontends before an engine of its own.
Costs are CPU time of the server's processes, by what they are; the clients' is not in them.
"""

import asyncio
import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from bench._harness import Report, run_command
from bench._process_tree import cpu_ns, pids_of_tree

__all__ = ["Config", "run"]

NUM_TOKENS = 100


@dataclass(frozen=True, slots=True)
class Config:
    """How much is measured.

    Attributes:
        frontends: how many, one after the other.
        num_rounds: one sample each.
        num_requests: in one sample, of one token each.
        num_streams: in one sample, of ``NUM_TOKENS`` each.
        num_connections: that are idle, and of which memory is told.
    """

    frontends: tuple[int, ...]
    num_rounds: int
    num_requests: int
    num_streams: int
    num_connections: int


FULL = Config((1, 2), 20, 100, 10, 2000)
QUICK = Config((1, 2), 3, 20, 2, 200)


@dataclass(frozen=True, slots=True)
class Fleet:
    """A server and its processes by what they are; one that is all is a frontend."""

    port: int
    frontends: list[int]
    engines: list[int]
    others: list[int]


def run(config: Config) -> Report:
    """Measure all of it."""
    report = Report("scale", asdict(config))
    for count in config.frontends:
        with _serving(count) as fleet:
            asyncio.run(_measure(report, config, fleet, _name(count)))
    return report


def _name(count: int) -> str:
    return "one process" if count == 1 else f"{count} frontends"


async def _measure(report: Report, config: Config, fleet: Fleet, name: str) -> None:
    requests: dict[str, list[float]] = {"frontend": [], "engine": []}
    tokens: dict[str, list[float]] = {"frontend": [], "engine": []}
    connections = [await asyncio.open_connection("127.0.0.1", fleet.port) for _ in range(8)]
    for round_ in range(config.num_rounds + 1):
        for samples, count, num_tokens in (
            (requests, config.num_requests, 1),
            (tokens, config.num_streams, NUM_TOKENS),
        ):
            before = cpu_ns(fleet.frontends), cpu_ns(fleet.engines)
            for at in range(0, count, len(connections)):
                await asyncio.gather(
                    *(
                        _ask(reader, writer, num_tokens)
                        for reader, writer in connections[: count - at]
                    )
                )
            after = cpu_ns(fleet.frontends), cpu_ns(fleet.engines)
            if round_:  # the first is the warm-up
                for side, was, now in zip(samples, before, after, strict=True):
                    samples[side].append((now - was) / count / num_tokens / 1000)
    for side in requests if fleet.engines else ["frontend"]:
        report.add(f"a request of one token, {name}, {side}", "us", requests[side])
        report.add(f"a token of a stream, {name}, {side}", "us", tokens[side])
    for what, pids in (
        ("a frontend", fleet.frontends),
        ("the engine", fleet.engines),
        ("the supervisor", fleet.others),
    ):
        if pids:
            report.add(f"memory of {what}, {name}", "MiB", [_private(pid) / 1024 for pid in pids])
    before_kib = sum(map(_private, fleet.frontends))
    idle = [
        await asyncio.open_connection("127.0.0.1", fleet.port)
        for _ in range(config.num_connections)
    ]
    # Each has had an answer, so that all of what a connection needs is there.
    for reader, writer in idle:
        writer.write(b"GET /v2/health/live HTTP/1.1\r\nHost: bench\r\n\r\n")
        await _read_response(reader)
    grown = sum(map(_private, fleet.frontends)) - before_kib
    report.add(f"memory of an idle connection, {name}", "KiB", [grown / config.num_connections])
    for _, writer in (*connections, *idle):
        writer.close()


async def _ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, num_tokens: int) -> None:
    body = json.dumps(
        {"text_input": "The class", "max_tokens": num_tokens, "ignore_eos": True}
    ).encode()
    path = "/v2/models/tiny/generate_stream"
    head = f"POST {path} HTTP/1.1\r\nHost: bench\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await reader.readuntil(b"\r\n0\r\n\r\n")


async def _read_response(reader: asyncio.StreamReader) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    assert b"200 OK" in head
    assert b"content-length: 0" in head.lower()


def _private(pid: int) -> int:
    """KiB that the process has and no other."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))


@contextlib.contextmanager
def _serving(count: int) -> Iterator[Fleet]:
    command = [sys.executable, "-m", "disconnect_watch.cli", "serve"]
    options = ["--http-port", "0", "--metrics-port", "0", "--frontends", str(count)]
    with subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            said = next(line for line in process.stderr if '"event": "serving"' in line)
            # A pipe that nobody reads fills up, and then the server waits.
            drain = threading.Thread(target=process.stderr.read, daemon=True)
            drain.start()
            yield _fleet(process.pid, json.loads(said)["http_port"])
        finally:
            process.terminate()
            process.wait()


def _fleet(pid: int, port: int) -> Fleet:
    kinds: dict[str, list[int]] = {"frontend": [], "engine": [], "": []}
    for each in pids_of_tree(pid):
        command = Path(f"/proc/{each}/cmdline").read_text()
        kind = next((name for name in kinds if name and f".{name}_process" in command), "")
        kinds[kind].append(each)
    if not kinds["frontend"]:
        return Fleet(port, kinds[""], [], [])
    return Fleet(port, kinds["frontend"], kinds["engine"], kinds[""])


def main() -> None:
    run_command("scale", lambda is_quick: run(QUICK if is_quick else FULL))


if __name__ == "__main__":
    main()
