"""curl and Node, each in a process of its own."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.clients.visit import ENDED, PATIENCE, Visit, case
from tests.support.tools import NODE_MODULES, path_of

SCRIPT = Path(__file__).with_name("node.cjs")


@contextlib.contextmanager
def running(*command: str) -> Iterator[subprocess.Popen[str]]:
    """A process that is talked to in lines; killed at the end, where it has not ended."""
    with subprocess.Popen(
        [path_of(command[0]), *command[1:]],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "NODE_PATH": str(NODE_MODULES)},
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@contextlib.contextmanager
def node(way: str, visit: Visit) -> Iterator[subprocess.Popen[str]]:
    with running("node", str(SCRIPT), way, visit.url) as process:
        yield process


def says(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == f"{line}\n"


def go_on(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


@case("curl", "`-m`", needs=("curl",))
def curl_max_time(visit: Visit) -> None:
    with running("curl", "-sN", "-m", str(PATIENCE), visit.url) as curl:
        assert curl.wait(40) == 28
        visit.is_noticed()


@case("curl", "`-m`", answer="stream", needs=("curl",))
def curl_max_time_of_a_stream(visit: Visit) -> None:
    with running("curl", "-sN", "-m", str(PATIENCE), "-o", "/dev/null", visit.url) as curl:
        assert curl.wait(40) == 28
        visit.is_noticed(*ENDED)


@case("curl", "`-m`", scheme="https", needs=("curl",))
def curl_max_time_over_tls(visit: Visit) -> None:
    with running("curl", "-skN", "-m", str(PATIENCE), visit.url) as curl:
        assert curl.wait(40) == 28
        # As of httpx over TLS.
        visit.is_noticed("FIN", "OWNER_CLOSED")


@case("curl", "Ctrl-C (SIGINT)", needs=("curl",))
def curl_interrupted(visit: Visit) -> None:
    with running("curl", "-sN", visit.url) as curl:
        visit.call()
        curl.send_signal(signal.SIGINT)
        visit.is_noticed()


@case("curl", "SIGKILL", needs=("curl",))
def curl_killed(visit: Visit) -> None:
    with running("curl", "-sN", visit.url) as curl:
        visit.call()
        curl.kill()
        visit.is_noticed()


@case("curl", "the reader of its output leaves", answer="stream", needs=("curl",))
def curl_without_reader(visit: Visit) -> None:
    with running("curl", "-sN", visit.url) as curl:
        assert curl.stdout is not None
        assert curl.stdout.readline()
        curl.stdout.close()
        assert curl.wait(40) == 23
        visit.is_noticed(*ENDED)


@case("Node, fetch", "`controller.abort()`", needs=("node",))
def fetch_abort(visit: Visit) -> None:
    with node("fetchAbort", visit) as process:
        says(process, "asked")
        visit.call()
        go_on(process)
        says(process, "left")
        visit.is_noticed()


@case("Node, fetch", "`AbortSignal.timeout()`", needs=("node",))
def fetch_timeout(visit: Visit) -> None:
    with node("fetchTimeout", visit) as process:
        says(process, "left")
        visit.is_noticed()


@case(
    "Node, fetch", "`break` in `for await (… of response.body)`", answer="stream", needs=("node",)
)
def fetch_break(visit: Visit) -> None:
    with node("fetchBreak", visit) as process:
        says(process, "left")
        visit.is_noticed(*ENDED)


@case("Node, fetch", "`reader.cancel()`", answer="stream", needs=("node",))
def fetch_cancel(visit: Visit) -> None:
    with node("fetchCancel", visit) as process:
        says(process, "left")
        visit.is_noticed(*ENDED)


@case("Node, fetch", "the reader kept, read no further", answer="stream", needs=("node",))
def fetch_keep(visit: Visit) -> None:
    with node("fetchKeep", visit) as process:
        says(process, "kept")
        visit.is_unnoticed("nobody told fetch")
        visit.then("`controller.abort()`")
        go_on(process)
        says(process, "left")
        visit.is_noticed(*ENDED)


@case("Node, http", "`request.destroy()`", answer="stream", needs=("node",))
def http_destroy(visit: Visit) -> None:
    with node("httpDestroy", visit) as process:
        says(process, "left")
        visit.is_noticed(*ENDED)


@case("Node, http", "SIGKILL", answer="stream", needs=("node",))
def node_killed(visit: Visit) -> None:
    with node("stay", visit) as process:
        says(process, "left")
        process.kill()
        visit.is_noticed(*ENDED)


@case("undici", "`controller.abort()`", needs=("node", "undici"))
def undici_abort(visit: Visit) -> None:
    with node("undiciAbort", visit) as process:
        says(process, "asked")
        visit.call()
        go_on(process)
        says(process, "left")
        visit.is_noticed()


@case("undici", "`headersTimeout`", needs=("node", "undici"))
def undici_timeout(visit: Visit) -> None:
    with node("undiciTimeout", visit) as process:
        says(process, "left")
        visit.is_noticed()


@case("undici", "`body.destroy()`", answer="stream", needs=("node", "undici"))
def undici_destroy(visit: Visit) -> None:
    with node("undiciDestroy", visit) as process:
        says(process, "left")
        visit.is_noticed(*ENDED)
