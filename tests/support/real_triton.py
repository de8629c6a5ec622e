"""A real Triton as a process, from the venv that ``.ci/triton`` makes."""

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc  # type: ignore[import-untyped]

from tests.support.net import PATIENCE, held_port, wait_until
from tests.triton.conformance import copy_models

__all__ = ["PROGRAM", "RealTriton", "real_triton"]

_REPOSITORY = Path(__file__).parents[2]
PROGRAM = (
    Path(os.environ.get("TRITON_VENV", _REPOSITORY / ".venv-triton")).absolute()
    / "bin"
    / "tritonserver"
)


@dataclass
class RealTriton:
    """One that serves.

    Attributes:
        port, http_port: of gRPC, of its own HTTP frontend.
        log: what its models say that they do.
    """

    process: subprocess.Popen[bytes]
    port: int
    http_port: int
    log: Path

    def events(self, event: str, text: str) -> list[dict[str, Any]]:
        """What a model said of the request with this text; times are seconds since the epoch."""
        text_ = self.log.read_text() if self.log.exists() else ""
        # The last line may be half there.
        found = map(json.loads, text_.split("\n")[:-1])
        return [each for each in found if (each["ev"], each.get("text")) == (event, text)]


@contextlib.contextmanager
def real_triton(directory: Path, *options: str) -> Iterator[RealTriton]:
    """Serve all models of ``tests/triton`` until the end of the block.

    Args:
        directory: empty; for the models, their log and what the server says.
    """
    models, log = directory / "models", directory / "model.log"
    models.mkdir()
    copy_models(models)
    with (
        held_port() as port,
        held_port() as http_port,
        (directory / "triton.log").open("wb") as output,
        subprocess.Popen(
            [
                str(PROGRAM),
                f"--model-repository={models}",
                f"--grpc-port={port}",
                f"--http-port={http_port}",
                "--grpc-address=127.0.0.1",
                "--http-address=127.0.0.1",
                "--allow-metrics=false",
                "--exit-on-error=false",
                "--exit-timeout-secs=1",
                *options,
            ],
            env=os.environ | {"MODEL_LOG": str(log)},
            stdout=output,
            stderr=subprocess.STDOUT,
        ) as process,
    ):
        try:
            _wait_until_it_serves(process, port)
            yield RealTriton(process, port, http_port, log)
        finally:
            # Its workers end with it; one that is killed leaves them behind.
            process.terminate()
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()


def _wait_until_it_serves(process: "subprocess.Popen[bytes]", port: int) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)

        def is_serving() -> bool:
            assert process.poll() is None, "the Triton ended, its triton.log says why"
            try:
                # Not ready, since one of the models can't be loaded.
                return bool(stub.ServerLive(service_pb2.ServerLiveRequest()).live)
            except grpc.RpcError:
                time.sleep(0.1)
                return False

        wait_until(is_serving, 3 * PATIENCE)
