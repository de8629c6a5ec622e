"""A real Triton beside ours, from the venv that ``.ci/triton`` makes."""

import http.client
import os
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Triton", "serving_triton", "triton_program"]

REPOSITORY = Path(__file__).parent.parent
#: Seconds that it may take to load its models, and to end.
START_LIMIT = 120.0
END_LIMIT = 30.0


@dataclass(frozen=True, slots=True)
class Triton:
    """One that serves.

    Attributes:
        port: of HTTP.
    """

    port: int
    pid: int


def triton_program() -> Path | None:
    """What ``.ci/triton`` has made; TRITON_VENV may say where."""
    venv = Path(os.environ.get("TRITON_VENV", REPOSITORY / ".venv-triton"))
    program = venv / "bin" / "tritonserver"
    return program if program.exists() else None


@contextmanager
def serving_triton(
    program: Path, models: Path, log: Path, environment: Mapping[str, str]
) -> Iterator[Triton]:
    """Serve a repository until the end of the block.

    Raises:
        RuntimeError: it ended, or was not ready in time; with the last of its log.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    command = [
        str(program),
        f"--model-repository={models}",
        f"--http-port={port}",
        "--http-address=127.0.0.1",
        "--allow-grpc=false",
        "--allow-metrics=false",
        "--exit-timeout-secs=1",
    ]
    with (
        log.open("wb") as output,
        subprocess.Popen(
            command, env={**os.environ, **environment}, stdout=output, stderr=subprocess.STDOUT
        ) as process,
    ):
        try:
            _wait_until_ready(process, port, log)
            yield Triton(port, process.pid)
        finally:
            # Its workers end with it; one that is killed leaves them behind.
            process.terminate()
            try:
                process.wait(END_LIMIT)
            except subprocess.TimeoutExpired:
                process.kill()


def _wait_until_ready(process: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
    deadline = time.monotonic() + START_LIMIT
    while time.monotonic() < deadline and process.poll() is None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", "/v2/health/ready")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        finally:
            connection.close()
        time.sleep(0.2)
    last = log.read_text(errors="replace")[-2000:]
    raise RuntimeError(f"Triton was not ready on port {port} in {START_LIMIT:.0f} s: {last}")
