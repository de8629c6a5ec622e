"""Each kernel as the compiler makes it, on a machine without a GPU: see ``compiled.py``."""

import json
import os
import subprocess
import sys

import pytest

from tests.kernels.compiled import ARCHITECTURES, Facts

pytest.importorskip("triton")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

KERNELS = {"latch", "advance", "write_kv", "sample", "decode", "merge", "prefill"}
#: Bytes that a thread of a prefill may keep in memory for want of registers; others need none.
MAX_SPILL_BYTES = {80: 128, 90: 0, 100: 0}


#: Hopper every day, the others in `make test-all`: a third of a minute each.
CHOSEN = [
    pytest.param(number, id=f"sm_{number}", marks=[pytest.mark.exhaustive] * (number != 90))
    for number in ARCHITECTURES
]


@pytest.fixture(scope="module", params=CHOSEN)
def compiled(request: pytest.FixtureRequest) -> tuple[int, dict[str, Facts]]:
    """Compiled once; what did not change since is taken from pytest's cache."""
    environment = {key: text for key, text in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(request.config.cache.mkdir("triton"))
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compiled", str(request.param)],
        cwd=request.config.rootpath,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    facts = {name: Facts(**each) for name, each in json.loads(done.stdout).items()}
    return request.param, facts


def test_every_kernel_compiles_with_no_more_than_the_stated_spills(
    compiled: tuple[int, dict[str, Facts]],
) -> None:
    architecture, facts = compiled
    assert set(facts) >= KERNELS
    spills = {name: facts[name].spill_bytes for name in KERNELS}
    assert spills.pop("prefill") <= MAX_SPILL_BYTES[architecture]
    assert set(spills.values()) == {0}, spills


def test_no_kernel_does_read_modify_write_on_memory(
    compiled: tuple[int, dict[str, Facts]],
) -> None:
    assert {name: each.num_atomics for name, each in compiled[1].items() if each.num_atomics} == {}


def test_flags_are_loaded_where_they_are_looked_at_and_nowhere_else(
    compiled: tuple[int, dict[str, Facts]],
) -> None:
    """A load that is not volatile is made once, before the loop, and sees no flag fire."""
    counts = {name: each.num_volatile_loads for name, each in compiled[1].items()}
    assert counts == {
        "latch": 4,  # of 64 rows with two flags, by 32 lanes
        "decode": 2,  # at the entry, and once a chunk
        "prefill": 2,
        "decode unpolled": 0,
        "prefill unpolled": 0,
        "merge": 0,
        "advance": 0,
        "write_kv": 0,
        "sample": 0,
    }


def test_acks_go_through_the_cache_to_the_host(compiled: tuple[int, dict[str, Facts]]) -> None:
    assert compiled[1]["latch"].num_stores_through == 4


@pytest.mark.parametrize("name", ["decode", "prefill"])
def test_looking_at_the_flag_costs_no_asynchronous_copy(
    compiled: tuple[int, dict[str, Facts]], name: str
) -> None:
    polled, unpolled = compiled[1][name], compiled[1][f"{name} unpolled"]
    assert polled.num_async_copies == unpolled.num_async_copies > 0
    assert polled.num_matrix_products == unpolled.num_matrix_products > 0
