"""One server over the models of a real Triton, for all tests here."""

from collections.abc import Iterator
from multiprocessing import resource_tracker
from pathlib import Path

import pytest
import tritonclient.http as triton  # type: ignore[import-untyped]

from tests.support.command import Process
from tests.triton.conformance import serving_repository


@pytest.fixture(scope="package")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the models say what they do."""
    return tmp_path_factory.mktemp("log") / "model.log"


@pytest.fixture(scope="package")
def server(log: Path) -> Iterator[Process]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MODEL_LOG", str(log))
        with serving_repository("--http-header-forward-pattern", "^x-.*") as process:
            # What Triton's client sets up once in a process stays: gevent, and who tidies
            # shared memory up.
            resource_tracker.ensure_running()
            with triton.InferenceServerClient(f"127.0.0.1:{process.port}") as client:
                assert client.is_server_live()
            yield process
