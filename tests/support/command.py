"""A command that serves in a process of its own."""

import contextlib
import json
import os
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from disconnect_watch.engine import DEFAULT_MODEL
from tests.support.net import wait_until

#: Runs the command, and has the kernel kill it should this process die before it
#: (PR_SET_PDEATHSIG): a test run that is killed tidies nothing up.
_LAUNCH = """
import ctypes, os, runpy, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() == int(sys.argv.pop(1)):
    runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""

FREE_PORTS = ("--http-port", "0", "--metrics-port", "0")


class Process:
    """The command on free ports. Its standard error is read as it comes.

    Attributes:
        lines: what it said so far.
        port, metrics_port: from ``wait_until_it_serves`` on.
    """

    port: int
    metrics_port: int

    def __init__(
        self,
        *options: str,
        command: str = "serve",
        module: str = "disconnect_watch.cli",
        python: Path | str = sys.executable,
        env: dict[str, str] | None = None,
    ) -> None:
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [
                *(python, "-c", _LAUNCH, str(os.getpid()), module),
                *(command, *FREE_PORTS, *options),
            ],
            stderr=subprocess.PIPE,
            text=True,
            env=env,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def wait_until_it_serves(self, within: float) -> None:
        wait_until(lambda: self.process.poll() is not None or self.events("serving"), within)
        assert self.process.poll() is None, self.lines
        (serving,) = self.events("serving")
        self.port = serving["http_port"]
        self.metrics_port = serving["metrics_port"]

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
        with urllib.request.urlopen(url, timeout=40) as response:
            text: str = response.read().decode()
        return text

    def wait(self) -> int:
        """Wait for its end, and return the exit code."""
        code = self.process.wait(40)
        self._reader.join(40)
        return code

    def close(self) -> None:
        self.process.kill()  # does nothing where it has ended
        self.process.wait(40)
        self._reader.join(40)
        assert self.process.stderr is not None
        self.process.stderr.close()


def endless_model(directory: Path) -> Path:
    """The package's model with room for more tokens than any machine makes in a test."""
    model = directory / "tiny"
    model.mkdir()
    for file in DEFAULT_MODEL.iterdir():
        (model / file.name).symlink_to(file)
    config = json.loads((DEFAULT_MODEL / "config.json").read_text())
    (model / "config.json").unlink()
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1 << 17}))
    return model


@contextlib.contextmanager
def running(
    *options: str, within: float = 170, command: str = "serve", **of_process: Any
) -> Iterator[Process]:
    """The command, ready; killed at the end, whatever happened, so that none is left behind.

    Args:
        of_process: ``python``, ``env``, and ``module``, which has the command, where they are not
            those of the tests.
    """
    process = Process(*options, command=command, **of_process)
    try:
        process.wait_until_it_serves(within)
        yield process
    finally:
        process.close()
