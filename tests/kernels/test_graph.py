"""The loop on the device, as far as a machine without a driver runs it.

The PTX is assembled by the real assembler, for every architecture that it knows. The graph is built
through the real bindings on a FAKE driver (``fake_cuda.c``), which keeps the API's rules and runs
what it is given on the CPU; what a device makes of it is for tests/gpu.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from disconnect_watch.kernels.ptx import SET_CONDITION_NAME, SET_CONDITION_PTX
from tests.kernels.compiled import assemble

triton = pytest.importorskip("triton")

#: In the order of the file.
SCENARIOS = [
    line.removeprefix("def ").split("(")[0]
    for before, line in zip(
        *(
            Path(__file__).with_name("on_fake_driver.py").read_text().splitlines()[i:]
            for i in (0, 1)
        ),
        strict=False,
    )
    if before == "@scenario"
]


@pytest.mark.parametrize("architecture", [75, 80, 86, 89, 90, 100, 120])
def test_ptx_that_sets_the_condition_is_assembled_for_each_architecture(architecture: int) -> None:
    report = assemble(SET_CONDITION_PTX, architecture)
    assert SET_CONDITION_NAME in report
    assert "0 bytes spill" in report


def test_assembler_refuses_a_function_that_the_driver_does_not_bind() -> None:
    unknown = SET_CONDITION_PTX.replace("cudaGraphSetConditional", "cudaGraphSetAnything")
    with pytest.raises(subprocess.CalledProcessError) as refusal:
        assemble(unknown, 90)
    assert "cudaGraphSetAnything" in refusal.value.stderr


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What became of each scenario on the fake driver."""
    if find_spec("cuda") is None:
        pytest.skip("cuda-bindings is not installed")
    folder = tmp_path_factory.mktemp("fake")
    headers = Path(triton.__file__).parent / "backends/nvidia/include"
    source = Path(__file__).with_name("fake_cuda.c")
    library = folder / "libcuda.so.1"
    options = ["-shared", "-fPIC", "-fvisibility=hidden", "-O1", "-Wall", "-Wextra", "-Werror"]
    named = ["-I", str(headers), str(source), "-Wl,-soname,libcuda.so.1", "-o", str(library)]
    subprocess.run(["gcc", *options, *named, "-ldl"], check=True)
    environment = os.environ | {"LD_LIBRARY_PATH": str(folder), "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.on_fake_driver"],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_on_the_fake_driver(results: dict[str, str], name: str) -> None:
    assert results[name] == "passed", results[name]


@pytest.mark.slow
def test_every_scenario_was_asked_for(results: dict[str, str]) -> None:
    assert list(results) == SCENARIOS != []
