"""A server that is killed leaves no process of its models behind, however busy it is."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.models import PATIENCE, TIME_LIMIT, EventLog, write_model
from tests.support.net import wait_until

pytestmark = pytest.mark.timeout(TIME_LIMIT)

CONFIG = 'input { name: "text_input" data_type: TYPE_STRING dims: 1 }'

#: Looks at its flag, and so ends by itself, with all that finalize does.
POLITE = """
import json, os, time
class TritonPythonModel:
    def say(self, what):
        with open(os.environ["MODEL_LOG"], "a") as log:
            log.write(json.dumps({"ev": what}) + "\\n")
    def execute(self, requests):
        self.say("start")
        while not requests[0].is_cancelled():
            time.sleep(0.01)
        return []
    def finalize(self):
        self.say("finalize")
"""

#: Holds the interpreter's lock most of the time, and looks at nothing.
RUDE = """
import json, os
class TritonPythonModel:
    def execute(self, requests):
        with open(os.environ["MODEL_LOG"], "a") as log:
            log.write(json.dumps({"ev": "start"}) + "\\n")
        while True:
            pass
"""


def has_ended(pid: int) -> bool:
    """Whether the process is gone, or waits for init alone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.parametrize("code", [POLITE, RUDE], ids=["polite", "rude"])
def test_worker_ends_with_its_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    log = EventLog(tmp_path / "log")
    monkeypatch.setenv("MODEL_LOG", str(log.path))
    models = tmp_path / "models"
    write_model(models, "busy", code, CONFIG)
    with subprocess.Popen(
        [sys.executable, "-m", "tests.support.model_server", models], stdout=subprocess.PIPE
    ) as server:
        assert server.stdout is not None
        pids = [int(pid) for pid in server.stdout.readline().split()]
        try:
            assert pids
            wait_until(lambda: log.events("start"), PATIENCE)
            server.send_signal(signal.SIGKILL)
            wait_until(lambda: all(map(has_ended, pids)), PATIENCE)
        finally:
            server.kill()
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    if code is POLITE:
        assert log.events("finalize")
