"""What all tests share: the parameters of a watched connection, and the leak guard."""

import contextlib
import faulthandler
import gc
import resource
import sys
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import uvloop
from hypothesis import HealthCheck, settings

from disconnect_watch import Watcher
from disconnect_watch.watcher import default_watcher
from tests.support.loops import LOOP_KINDS, LoopRunner
from tests.support.net import KINDS, LEAVES, POLLERS, Pair, connected, open_fds, wait_until

faulthandler.enable()
uvloop.new_event_loop().close()  # libuv's signal pipe is the process's for ever

# The same examples in each run, however slow the machine: what failed once fails again.
# `make test-all` draws new ones.
for profile, derandomize in (("steady", True), ("new-examples", False)):
    settings.register_profile(
        profile,
        deadline=None,
        derandomize=derandomize,
        suppress_health_check=[HealthCheck.too_slow],
    )
settings.load_profile("steady")

#: What needs the engine, the frontend or a framework. All else is the core suite, which
#: runs on every Python and against an installed wheel, without torch; a test that does not
#: belong there fails to import.
BEYOND_THE_CORE = [
    "abort",
    "clients",
    "disagg",
    "gateways",
    "gpu",
    "integration/test_*_adapter*",
    "integration/test_doctor.py",
    "integration/test_gateway_*",
    "integration/test_hooks_*",
    "integration/test_live_page.py",
    "integration/test_models_*",
    "integration/test_ray*",
    "integration/test_readme_servers.py",
    "integration/test_serve_*",
    "integration/test_stress*",
    "integration/test_testing_*",
    "kernels",
    "machines/test_core_machine.py",
    "machines/test_engine_machine.py",
    "machines/test_invariant_machine.py",
    "machines/test_pool_machine.py",
    "machines/test_responses_machine.py",
    "machines/test_scheduler_machine.py",
    "monitoring",
    "proxies",
    "servers",
    "stress/test_soak.py",
    "stress/test_stopped.py",
    "stress/test_stress_engine.py",
    "triton",
    "unit/test_asgi_route.py",
    "unit/test_backends_*",
    "unit/test_bench*",
    "unit/test_block_pool.py",
    "unit/test_engine_*",
    "unit/test_prefix_cache.py",
    "unit/test_reference.py",
    "unit/test_scheduler.py",
    "unit/test_server_*",
    "unit/test_stress*",
    "unit/test_tiny_model.py",
    "unit/test_v2_*",
]
collect_ignore_glob = [] if find_spec("torch") else BEYOND_THE_CORE


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("end_timeout", "Seconds that the run may take to end.", default="120")
    parser.addoption("--screenshots", help="Folder for the pictures that browser tests take.")


def pytest_unconfigure(config: pytest.Config) -> None:
    # The interpreter looks through all that is left, again and again, to free it.
    gc.freeze()
    # It waits for each thread, and one that a failed test left may never end.
    limit = float(config.getini("end_timeout"))
    faulthandler.dump_traceback_later(limit, exit=True, file=sys.__stderr__ or 2)


@pytest.fixture(params=POLLERS)
def poller(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=LEAVES)
def leave(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=LOOP_KINDS)
def loop_kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def run(loop_kind: str) -> Iterator[LoopRunner]:
    """``run(main)`` runs the coroutine function on the loop kind of this test."""
    runner = LoopRunner(loop_kind)
    yield runner
    runner.reports.clear()  # they hold tracebacks, and so all that the test held


@pytest.fixture(params=["thread", "loop"])
def driver(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def watcher(poller: str) -> Iterator[Watcher]:
    with Watcher(poller=poller) as watcher:
        yield watcher


@pytest.fixture
def pair(kind: str) -> Iterator[Pair]:
    with connected(kind) as pair:
        yield pair


@pytest.fixture
def tcp() -> Iterator[Pair]:
    """A pair for what has nothing to do with the kind of socket."""
    with connected("tcp") as pair:
        yield pair


@pytest.fixture(autouse=True, scope="module")
def sweep() -> Iterator[None]:
    """Frees a file's engines, which lie in cycles, KV caches and all.

    What the leak guard froze once, the collector does not look at again by itself, and to
    look at everything after each file would take a minute in all.
    """
    before = _resident_bytes()
    yield
    if _resident_bytes() - before > 1 << 27:
        gc.collect()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.fixture(autouse=True)
def leak_guard() -> Iterator[None]:
    """No thread, no fd and nothing in the default watcher is left behind by a test."""
    default_watcher()  # lives as long as the process, and so do its fds
    before = _holdings()
    # A collection inside the test looks at its own objects only, as does the first one here:
    # all that the whole run has in memory takes a second to look at, and more under load.
    gc.freeze()
    yield
    try:
        if _is_more(_holdings(), before):
            gc.collect()
            with contextlib.suppress(AssertionError):
                wait_until(lambda: not _is_more(_holdings(), before), 5)
    finally:
        gc.unfreeze()
    if _is_more(_holdings(), before):
        gc.collect()
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not _is_more(_holdings(), before))
        if _is_more(_holdings(), before):
            pytest.fail(f"left behind: before {before}, after {_holdings()}; {open_fds()}")


Holdings = tuple[set[threading.Thread], int, int, int]


def _holdings() -> Holdings:
    stats = default_watcher().stats()
    # tqdm's thread, which a progress bar of transformers starts, ends with the process.
    threads = {thread for thread in threading.enumerate() if thread.name != "tqdm_monitor"}
    return threads, len(open_fds()), stats.num_connections, stats.num_armed


def _is_more(after: Holdings, before: Holdings) -> bool:
    """Whether something is there that was not before; what a wider fixture dropped is none."""
    return bool(after[0] - before[0]) or any(
        now > then for now, then in zip(after[1:], before[1:], strict=True)
    )
