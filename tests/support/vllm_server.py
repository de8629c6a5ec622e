"""A real ``vllm serve`` as a process, from the venv that ``.ci/vllm`` makes."""

import contextlib
import os
import signal
import subprocess
import tomllib
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.command import endless_model
from tests.support.http import Client
from tests.support.net import PATIENCE, held_port, wait_until
from tests.support.venvs import ROOT, environment, python_of

__all__ = ["MODEL", "VllmServer", "plugin_path", "vllm_environment", "vllm_server"]

#: Three processes import torch and vLLM, one behind the other.
BEGINS_WITHIN = 300
MODEL = "tiny"
#: So many tokens no machine makes in a test.
MAX_MODEL_LEN = 1 << 17

#: Has the kernel kill it should the process of the tests die before it (PR_SET_PDEATHSIG).
_LAUNCH = """
import ctypes, os, runpy, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() == int(sys.argv.pop(1)):
    runpy.run_module("vllm.entrypoints.cli.main", run_name="__main__", alter_sys=True)
"""


@dataclass
class VllmServer:
    """One that serves the package's model, with room for answers without an end.

    Attributes:
        log: what all its processes said.
    """

    process: "subprocess.Popen[bytes]"
    port: int
    log: Path

    def gauges(self) -> tuple[float, float, float]:
        """Requests that run, requests that wait, and which part of the KV cache is in use."""
        url = f"http://127.0.0.1:{self.port}/metrics"
        with urllib.request.urlopen(url, timeout=PATIENCE) as response:
            lines = response.read().decode().splitlines()
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        running, waiting, usage = (
            next(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{name}{{"))
            for name in names
        )
        return running, waiting, usage

    def wait_until_idle(self) -> None:
        """Wait until nothing runs or waits, and no block is held."""
        wait_until(lambda: self.gauges() == (0, 0, 0))

    def wait_until_runs(self, num: int, num_waiting: int = 0) -> None:
        """Wait until so many run, and so many wait."""
        wait_until(lambda: self.gauges()[:2] == (num, num_waiting))

    def client(self) -> Client:
        """One that may leave."""
        return Client(self.port)


def plugin_path(directory: Path) -> Path:
    """A folder that tells of our entry points as an installed package would."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [f"[{next(iter(project['entry-points']))}]"]
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    info = directory / f"disconnect_watch-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: disconnect-watch\nVersion: {project['version']}\n"
    )
    (info / "entry_points.txt").write_text("\n".join(lines[1:]) + "\n")
    return directory


def vllm_environment(directory: Path, **variables: str) -> dict[str, str]:
    """What vLLM's processes need to start here, and to find this checkout as if installed."""
    ours = environment()
    return {
        **ours,
        "PYTHONPATH": f"{plugin_path(directory / 'site')}{os.pathsep}{ours['PYTHONPATH']}",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        **variables,
    }


@contextlib.contextmanager
def vllm_server(directory: Path, *options: str, **variables: str) -> Iterator[VllmServer]:
    """Serve until the end of the block.

    Args:
        directory: empty; for the model and the log.
        options: of ``vllm serve``.
        variables: of its environment.
    """
    python = python_of("vllm")
    model = endless_model(directory)
    log = directory / "vllm.log"
    with (
        held_port() as port,
        log.open("wb") as output,
        subprocess.Popen(
            [
                *(str(python), "-c", _LAUNCH, str(os.getpid()), "serve", str(model)),
                *("--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port)),
                *("--dtype", "bfloat16", "--enforce-eager", "--max-num-seqs", "4"),
                *("--max-model-len", str(MAX_MODEL_LEN), *options),
            ],
            cwd=ROOT,
            env=vllm_environment(directory, **variables),
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,  # its own processes are ended with it
        ) as process,
    ):
        try:
            wait_until(
                lambda: process.poll() is not None or b"startup complete" in log.read_bytes(),
                BEGINS_WITHIN,
            )
            assert process.poll() is None, log.read_text()[-4000:]
            yield VllmServer(process, port, log)
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
