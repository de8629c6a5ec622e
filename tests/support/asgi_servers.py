"""ASGI servers in processes of their own, on loopback, with what their applications say."""

import contextlib
import ctypes
import json
import os
import signal
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from disconnect_watch.ports import bind
from tests.support.http import Client
from tests.support.net import wait_until

__all__ = ["SERVERS", "Served", "launched", "running", "serving", "tls_context"]

REPOSITORY = Path(__file__).parents[2]
TLS = Path(__file__).parent / "tls"

#: By name: the command, with "{app}", and "{fd}" of a listening socket or "{port}". uvicorn
#: takes a socket that is handed to it for a Unix one, and leaves Nagle's algorithm on.
SERVERS: dict[str, str] = {
    "uvicorn": "uvicorn {app} --port {port} --http httptools --loop uvloop",
    "uvicorn-asyncio": "uvicorn {app} --port {port} --http httptools --loop asyncio",
    "uvicorn-h11": "uvicorn {app} --port {port} --http h11 --loop uvloop",
    "uvicorn-zttp": "uvicorn {app} --port {port} --http zttp --http2",
    "ours": "uvicorn {app} --port {port} --http disconnect_watch.adapters.uvicorn:HttpTools",
    "ours-h11": "uvicorn {app} --port {port} --http disconnect_watch.adapters.uvicorn:H11",
    "ours-unblind": "uvicorn {app} --port {port} --http tests.servers.unblind:HttpTools",
    "hypercorn": "hypercorn {app} --bind fd://{fd} --worker-class asyncio --access-logfile -",
    "hypercorn-uvloop": "hypercorn {app} --bind fd://{fd} --worker-class uvloop",
    "granian": "granian {app} --interface asgi --host 127.0.0.1 --port {port} --no-ws",
    "gunicorn": "gunicorn {app} --bind fd://{fd} --worker-class asgi --no-control-socket",
    "gunicorn-uvicorn": "gunicorn {app} --bind fd://{fd} --no-control-socket "
    "--worker-class uvicorn_worker.UvicornWorker",
    "gunicorn-ours": "gunicorn {app} --bind fd://{fd} --no-control-socket "
    "--worker-class disconnect_watch.adapters.uvicorn_worker.UvicornWorker",
}

#: What to add for TLS.
TLS_OPTIONS: dict[str, str] = {
    "uvicorn": "--ssl-certfile {cert} --ssl-keyfile {key}",
    "hypercorn": "--certfile {cert} --keyfile {key}",
    "granian": "--ssl-certificate {cert} --ssl-keyfile {key}",
    "gunicorn": "--certfile {cert} --keyfile {key}",
}


class Served:
    """A server that runs.

    Attributes:
        port: it listens on, at 127.0.0.1.
        log: what it said itself, so far.
    """

    def __init__(self, port: int, events: Path, log: Path, *, is_tls: bool) -> None:
        self.port = port
        self.is_tls = is_tls
        self._events = events
        self._log = log

    @property
    def log(self) -> str:
        return self._log.read_text()

    def events(self, event: str | None = None) -> list[dict[str, Any]]:
        """What the application said so far, of one kind of event or of all."""
        # Up to the last newline: the rest of a line may not be written yet.
        lines = self._events.read_text().rpartition("\n")[0].splitlines()
        said: list[dict[str, Any]] = [json.loads(line) for line in lines]
        return [each for each in said if event in (None, each["event"])]

    def names(self, event: str) -> list[str]:
        """The requests of which it said that."""
        return [each["name"] for each in self.events(event)]

    def wait_for(self, event: str, name: str) -> dict[str, Any]:
        """Wait until the application says that of a request, and return it."""
        wait_until(lambda: name in self.names(event))
        return next(each for each in self.events(event) if each["name"] == name)

    def open(self, name: str) -> None:
        """Let a request go on that waits for it."""
        self._order(f"open/{name}")

    def collect_garbage(self) -> None:
        """Close what is in reference cycles only."""
        self._order("collect")

    def stats(self) -> dict[str, Any]:
        """What ``adapters.asgi.stats`` says there."""
        stats: dict[str, Any] = self._order("stats")
        return stats

    def _order(self, what: str) -> Any:
        with self.client() as client:
            client.post(f"/bare/{what}")
            status, _, body = client.read_response()
        assert status == 200, what
        return json.loads(body)

    def client(self) -> Client:
        """A client of it."""
        return Client(self.port, "localhost", tls=tls_context() if self.is_tls else None)


@contextlib.contextmanager
def serving(name: str, app: str, *, is_tls: bool = False) -> Iterator[Served]:
    """A server of ``SERVERS`` with an application of ``tests.support``."""
    with tempfile.TemporaryDirectory() as folder:
        events, log = Path(folder) / "events", Path(folder) / "log"
        events.touch()
        with launched(name, f"tests.support.{app}", is_tls=is_tls, events=events, log=log) as (
            port,
            process,
        ):
            served = Served(port, events, log, is_tls=is_tls)
            wait_until(lambda: _answers(served) or process.poll() is not None)
            assert process.poll() is None, served.log
            yield served


@contextlib.contextmanager
def launched(
    name: str, app: str, *, is_tls: bool, events: Path, log: Path
) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """The process of a server of ``SERVERS`` with any application, and its port.

    It may not listen yet. Where it is given a socket, it is that which listens.
    """
    family = name.partition("-")[0].replace("ours", "uvicorn")
    template = SERVERS[name] + (f" {TLS_OPTIONS[family]}" if is_tls else "")
    with bind("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        fds = []
        if "{fd}" in template:
            sock.listen(128)
            fds.append(sock.fileno())
        words = template.format(
            app=app,
            fd=sock.fileno(),
            port=port,
            cert=TLS / "cert.pem",
            key=TLS / "key.pem",
        ).split()
        with running(words, fds=fds, events=events, log=log) as process:
            yield port, process


@contextlib.contextmanager
def running(
    words: Sequence[str], *, fds: Sequence[int], events: Path, log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """``python -m`` with these words, where ``fds`` are open, too.

    Ends by SIGTERM, or by SIGKILL of its process group where that is not enough.
    """
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", *words],
            cwd=REPOSITORY,
            env=os.environ | {"DW_EVENTS": str(events), "PYTHONPATH": str(REPOSITORY)},
            pass_fds=fds,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
    try:
        yield process
    finally:
        _end(process)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def tls_context() -> ssl.SSLContext:
    """For clients that trust the servers here."""
    return ssl.create_default_context(cafile=str(TLS / "cert.pem"))


def _answers(served: Served) -> bool:
    try:
        served.stats()
    except (OSError, EOFError):
        return False
    return True


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(40)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(40)
