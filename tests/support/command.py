"""The serve command in a process of its own."""

import contextlib
import json
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from typing import Any

from tests.support.net import wait_until

FREE_PORTS = ("--http-port", "0", "--metrics-port", "0")


class Process:
    """The command on free ports. Its standard error is read as it comes.

    Attributes:
        lines: what it said so far.
    """

    def __init__(self, *options: str) -> None:
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "disconnect_watch.cli", "serve", *FREE_PORTS, *options],
            stderr=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        wait_until(lambda: self.process.poll() is not None or self.events("serving"), 50)
        (serving,) = self.events("serving")
        self.port: int = serving["http_port"]
        self.metrics_port: int = serving["metrics_port"]

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)

    def events(self, name: str) -> list[dict[str, Any]]:
        """The log lines of one event."""
        logged = (json.loads(line) for line in self.lines if line.startswith("{"))
        return [line for line in logged if line["event"] == name]

    def metrics(self) -> str:
        url = f"http://127.0.0.1:{self.metrics_port}/metrics"
        with urllib.request.urlopen(url, timeout=10) as response:
            text: str = response.read().decode()
        return text

    def wait(self) -> int:
        """Wait for its end, and return the exit code."""
        code = self.process.wait(30)
        self._reader.join(10)
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        self._reader.join(10)
        assert self.process.stderr is not None
        self.process.stderr.close()


@contextlib.contextmanager
def running(*options: str) -> Iterator[Process]:
    process = Process(*options)
    try:
        yield process
    finally:
        process.close()
