"""A real Triton and the gateway before it, for all tests here."""

from collections.abc import Iterator

import pytest

from tests.support.command import Process, running
from tests.support.real_triton import PROGRAM, RealTriton, real_triton


@pytest.fixture(scope="package")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealTriton]:
    if not PROGRAM.exists():
        pytest.skip(f"{PROGRAM} is not here: .ci/triton")
    with real_triton(tmp_path_factory.mktemp("triton")) as serving:
        yield serving


@pytest.fixture(scope="package")
def gateway(triton: RealTriton) -> Iterator[Process]:
    url = f"grpc://127.0.0.1:{triton.port}"
    with running("--triton", url, "--allow-client-shm", "true", command="gateway") as process:
        yield process
