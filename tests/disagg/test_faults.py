"""Each node and the proxy as processes of their own: whoever dies, all others are as before."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import pd
from tests.disagg.faults import FAULTS, Injector, Observed, table
from tests.support.command import endless_model
from tests.support.http import Client
from tests.support.net import wait_until
from tests.support.pd import Cluster, cluster

#: No model of a test comes to its end.
ENDLESS = {"text_input": "The class of", "max_tokens": 100_000, "ignore_eos": True}
STREAM = "/v2/models/tiny/generate_stream"


@pytest.fixture(params=["shm", pytest.param("tcp", marks=pytest.mark.slow)])
def processes(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    model = endless_model(tmp_path)
    # A lease that no test waits for: whatever is free again was released.
    with cluster(tmp_path, model=model, transfer=request.param, lease=3600) as found:
        yield found


def test_whoever_dies_leaves_nothing_behind_in_the_others(processes: Cluster) -> None:
    """One after the other, so that the processes are started once."""
    prefill, decode = processes.prefills[0], processes.decodes[0]
    # A client that leaves.
    with Client(processes.port) as client:
        client.post(STREAM, ENDLESS)
        client.read_until(b"text_output")
        # The first token may come before the copy: who leaves then has it released as an abort.
        wait_until(lambda: prefill.released()["in_band"] == 1)
    processes.wait_until_idle()
    assert prefill.released() == {"in_band": 1, "abort": 0, "lease": 0}
    # The prefill node, whose part is over: who decodes does not need it.
    with Client(processes.port) as client:
        client.post(STREAM, ENDLESS)
        client.read_until(b"text_output")
        wait_until(lambda: prefill.released()["in_band"] == 2)
        os.kill(prefill.process.process.pid, signal.SIGKILL)
        wait_until(lambda: prefill.process.process.poll() is not None)
        client.read_until(b"text_output")
    wait_until(decode.is_idle)
    # Without it, the decode node does all.
    with Client(processes.port) as client:
        client.post(STREAM, ENDLESS)
        client.read_until(b"text_output")
        # The proxy, which takes its connections along.
        assert processes.proxy is not None
        os.kill(processes.proxy.process.pid, signal.SIGKILL)
        wait_until(decode.is_idle)


def test_a_decode_node_that_dies_frees_what_was_kept_for_it(processes: Cluster) -> None:
    prefill, decode = processes.prefills[0], processes.decodes[0]
    # Stopped, it takes the connection, and never the request.
    os.kill(decode.process.process.pid, signal.SIGSTOP)
    with Client(processes.port) as client:
        client.post(STREAM, ENDLESS)
        wait_until(lambda: prefill.gauges()["dw_kv_transfers"] > 0 or prefill.released()["abort"])
        os.kill(decode.process.process.pid, signal.SIGKILL)
        wait_until(prefill.is_idle)
        status, _, _ = client.read_response()
    assert status == 502
    assert prefill.released()["in_band"] == 0


def test_a_table_has_a_row_for_each_fault_and_phase() -> None:
    text = table(
        [
            Observed("client leaves", 0.1, "decode", 0.002, ("in_band",)),
            Observed("client leaves", 0.2, "decode", 0.004, ()),
            Observed("proxy SIGSTOP", 0.1, "ended", 1.0, ("lease",)),
        ]
    )
    assert text.splitlines()[2:] == [
        "| client leaves | decode | 2 | in_band 1, nothing was kept 1 | 3 ms, 4 ms, 4 ms |",
        "| proxy SIGSTOP | ended | 1 | lease 1 | 1000 ms, 1000 ms, 1000 ms |",
    ]


@pytest.mark.slow
def test_the_benchmark_measures_each_way() -> None:
    report = pd.run(pd.Config(1, 1, 0.2))
    names = {row.name for row in report.rows}
    assert {f"stranded, {way}" for way in pd.WAYS} <= names


@pytest.mark.slow
def test_faults_at_random_instants_leave_all_pools_as_they_were(tmp_path: Path) -> None:
    with cluster(tmp_path, lease=1.0) as found:
        injector = Injector(found, seed=3)
        # Those after which no process has to be started again.
        for fault in ("client leaves", "decode SIGSTOP"):
            assert fault in FAULTS
            observed = injector.inject(fault)
            assert observed.phase
