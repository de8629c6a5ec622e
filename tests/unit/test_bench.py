"""The benchmarks' arithmetic and form, and that each of them runs. No time is judged here."""

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bench import _build, flag_check, invariant, latency, watch_cost, worker
from bench._bare_loop import BareLoop
from bench._conditions import Condition, Conditions
from bench._harness import CURVE, Report, Row, median_of_ratios, ratio_of_medians, run_command
from bench._http_server import VARIANTS
from bench._leaver import Leaver
from bench._requests import read_counts
from bench._syscalls import MARK_BEGIN, MARK_END, count_syscalls

ROW_KEYS = {"name", "unit", "count", "median", "low", "high", "p25", "p75"}
RATIO_KEYS = {"name", "baseline", "ratio", "low", "high"}
RESULTS_DIR = Path(latency.__file__).parent / "results"


def assert_schema(results: dict[str, Any]) -> None:
    assert set(results) == {"bench", "date", "machine", "config", "notes", "rows", "ratios"}
    assert {"cpu", "num_cpus", "kernel", "python", "commit", "load_average"} <= set(
        results["machine"]
    )
    assert results["rows"]
    names = [row["name"] for row in results["rows"]]
    assert len(names) == len(set(names))
    for row in results["rows"]:
        assert set(row) >= ROW_KEYS
        assert row["p25"] <= row["median"] <= row["p75"]
        assert row["low"] <= row["median"] <= row["high"]
    for ratio in results["ratios"]:
        assert set(ratio) == RATIO_KEYS
        assert {ratio["name"], ratio["baseline"]} <= set(names)
        assert ratio["low"] <= ratio["ratio"] <= ratio["high"]


def test_row_has_median_and_quartiles() -> None:
    row = Row.of("row", "us", [5.0, 1.0, 4.0, 2.0, 3.0])
    assert (row.count, row.p25, row.median, row.p75) == (5, 2.0, 3.0, 4.0)
    assert 1.0 <= row.low <= row.median <= row.high <= 5.0


def test_percentile_is_given_only_where_a_sample_lies_beyond_it() -> None:
    assert set(Row.of("row", "us", range(9)).tail) == set()
    assert set(Row.of("row", "us", range(10)).tail) == {"p90"}
    assert set(Row.of("row", "us", range(999)).tail) == {"p90", "p99"}
    assert set(Row.of("row", "us", range(1000)).tail) == {"p90", "p99", "p99.9"}


def test_curve_of_a_row_goes_from_its_least_to_its_largest_sample() -> None:
    assert "curve" not in Row.of("row", "us", [1.0, 2.0]).to_json()
    curve = Row.of("row", "us", range(101), has_curve=True).to_json()["curve"]
    assert curve == pytest.approx(CURVE)


def test_row_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="row 'arm'"):
        Row.of("arm", "ns", [])


def test_interval_of_a_median_gets_narrower_with_more_samples() -> None:
    few = Row.of("few", "us", range(20))
    many = Row.of("many", "us", [sample / 100 for sample in range(2000)])
    assert many.high - many.low < few.high - few.low


def test_same_samples_give_the_same_interval() -> None:
    samples = [(i * 0.618) % 1 for i in range(500)]
    assert Row.of("a", "us", samples) == Row.of("a", "us", samples)


@pytest.mark.parametrize("compare", [ratio_of_medians, median_of_ratios])
def test_pairs_are_drawn_together(compare: Any) -> None:
    # The machine's speed changes a hundredfold in this run, and both sides meet it.
    baseline = [1.0 + i for i in range(100)]
    ratio = compare("ours", "theirs", measured=[3 * b for b in baseline], baseline=baseline)
    assert (ratio.ratio, ratio.low, ratio.high) == pytest.approx((3, 3, 3))


def test_ratio_of_medians_compares_medians_and_median_of_ratios_compares_partners() -> None:
    measured, baseline = [1.0, 20.0, 300.0], [10.0, 2.0, 3.0]
    assert ratio_of_medians("a", "b", measured=measured, baseline=baseline).ratio == 20 / 3
    assert median_of_ratios("a", "b", measured=measured, baseline=baseline).ratio == 10


def test_ratio_without_partners_is_refused() -> None:
    with pytest.raises(ValueError, match="ratio 'ours': 2 samples against 1"):
        median_of_ratios("ours", "theirs", measured=[1, 2], baseline=[1])
    with pytest.raises(ValueError, match="0 samples against 0"):
        ratio_of_medians("ours", "theirs", measured=[], baseline=[])


def make_report(quick: bool = True) -> Report:
    report = Report("fake", {"is_quick": quick})
    report.add("theirs", "us", [1.0] * 10)
    report.add("ours", "us", [1.04] * 10)
    report.ratios.append(
        median_of_ratios("ours", "theirs", measured=[1.04] * 10, baseline=[1.0] * 10)
    )
    return report


def test_command_writes_the_schema_and_prints_rows_and_ratios(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "deep" / "fake.json"
    run_command("fake", make_report, ["--quick", "--out", str(path)])
    results = json.loads(path.read_text())
    assert_schema(results)
    assert results["config"] == {"is_quick": True}
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["theirs", "us", "10", "1.00", "1.00", "1.00", "1.00"]
    assert lines[3] == "ours: 1.040 x theirs [1.040, 1.040]"


def test_results_name_neither_host_nor_path(tmp_path: Path) -> None:
    make_report().write(tmp_path / "fake.json")
    text = (tmp_path / "fake.json").read_text()
    assert socket.gethostname() not in json.loads(text)["machine"].values()
    assert str(Path.cwd()) not in text
    assert sys.prefix not in text


#: A soak has no rows: it tells what was there before and after.
RESULTS = sorted(RESULTS_DIR.glob("*.json"))


@pytest.mark.parametrize("bench", [path.stem for path in RESULTS if path.stem != "soak"])
def test_committed_results_have_the_schema(bench: str) -> None:
    results = json.loads((RESULTS_DIR / f"{bench}.json").read_text())
    assert_schema(results)
    assert results["bench"] == bench


@pytest.mark.parametrize(
    ("bench", "measured"), [("latency", "close to flag"), ("watch_cost", "CPU a request")]
)
def test_readme_quotes_the_ratios_of_the_committed_results(bench: str, measured: str) -> None:
    readme = (RESULTS_DIR.parent / "README.md").read_text()
    ratios = json.loads((RESULTS_DIR / f"{bench}.json").read_text())["ratios"]
    # Those to the bare loop or server; a condition beside its own idle case is not quoted.
    quotable = [
        ratio
        for ratio in ratios
        if ratio["name"].startswith(measured) and not ratio["baseline"].startswith("close to flag")
    ]
    assert len(quotable) == 4
    for ratio in quotable:
        assert "{ratio:.2f} x [{low:.2f}, {high:.2f}]".format(**ratio) in readme


def test_c_parts_are_compiled_when_a_source_is_newer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "c" / "answer.c"
    source.parent.mkdir()
    source.write_text("int main(void) { return 1; }\n")
    os.utime(source, (1000, 1000))
    monkeypatch.setattr(_build, "BENCH_DIR", tmp_path)
    monkeypatch.setattr(_build, "BUILD_DIR", tmp_path / "build")
    program = _build.build_program("answer")
    built_at = program.stat().st_mtime_ns
    assert _build.build_program("answer").stat().st_mtime_ns == built_at
    source.write_text("int main(void) { return 2; }\n")
    os.utime(source, (built_at / 1e9 + 10, built_at / 1e9 + 10))
    assert subprocess.run([_build.build_program("answer")]).returncode == 2
    assert [path.name for path in (tmp_path / "build").iterdir()] == ["answer"]


def test_c_parts_with_the_core_are_compiled_when_a_header_of_it_is_newer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = {
        "c/answer.c": '#include "dw.h"\nint main(void) { return ANSWER; }\n',
        "csrc/dw.c": "int dw_unused;\n",
        "csrc/dw.h": "#define ANSWER 1\n",
    }
    for name, text in sources.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        os.utime(tmp_path / name, (1000, 1000))
    monkeypatch.setattr(_build, "BENCH_DIR", tmp_path)
    monkeypatch.setattr(_build, "CSRC_DIR", tmp_path / "csrc")
    monkeypatch.setattr(_build, "BUILD_DIR", tmp_path / "build")
    program = _build.build_program("answer", with_core=True)
    assert subprocess.run([program]).returncode == 1
    header = tmp_path / "csrc" / "dw.h"
    header.write_text("#define ANSWER 2\n")
    later = program.stat().st_mtime + 10
    os.utime(header, (later, later))
    assert subprocess.run([_build.build_program("answer", with_core=True)]).returncode == 2


def test_compiler_that_refuses_or_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "c" / "answer.c"
    source.parent.mkdir()
    source.write_text("int main(void) { return answer; }\n")
    monkeypatch.setattr(_build, "BENCH_DIR", tmp_path)
    monkeypatch.setattr(_build, "BUILD_DIR", tmp_path / "build")
    with pytest.raises(_build.CompileError, match=r"(?s)answer\.c: .*undeclared"):
        _build.build_program("answer")
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(_build.CompileError, match="no compiler 'no-such-compiler'; install gcc"):
        _build.build_program("answer")


def test_leaver_closes_on_command_and_says_when() -> None:
    with Leaver() as leaver, leaver.connect() as sock:
        sock.setblocking(False)
        with pytest.raises(BlockingIOError):
            sock.recv(1)
        before_ns = time.monotonic_ns()
        leaver.order_close(delay=0, settle=0)
        closed_ns = leaver.closed_ns()
        assert before_ns < closed_ns < time.monotonic_ns()
        assert sock.recv(1) == b""


def test_leaver_sends_requests_on_its_newest_connections() -> None:
    with Leaver() as leaver, leaver.connect() as first, leaver.connect() as second:
        leaver.request()
        assert second.recv(100) == b"GET / HTTP/1.1\r\nHost: bench\r\n\r\n"
        first.setblocking(False)
        with pytest.raises(BlockingIOError):
            first.recv(1)
        leaver.request(2)
        assert first.recv(100) == second.recv(100)
        leaver.order_close(delay=0, settle=0)
        leaver.closed_ns()
        assert second.recv(1) == b""
        with pytest.raises(BlockingIOError):
            first.recv(1)


def test_leaver_refuses_what_it_has_no_connection_for(capfd: pytest.CaptureFixture[str]) -> None:
    leaver = Leaver()
    leaver.order_close(delay=0, settle=0)
    with pytest.raises(RuntimeError, match="the leaving client ended with status 1"):
        leaver.closed_ns()
    assert "order x 0 with 0 connections: Invalid argument" in capfd.readouterr().err
    leaver.close()


def test_leaver_that_died_is_reported() -> None:
    leaver = Leaver()
    leaver.process.kill()
    with pytest.raises(RuntimeError, match="the leaving client ended with status -9"):
        leaver.closed_ns()
    leaver.close()


def test_bare_loop_says_when_it_woke_for_a_peer_that_left_behind_unread_bytes() -> None:
    async def watch(bare: BareLoop) -> tuple[int, int]:
        ours, theirs = socket.socketpair()
        with ours:
            bare.add(ours.fileno())
            theirs.send(b"x")
            sent_ns = time.monotonic_ns()
            theirs.close()
            woken_ns = await bare.woken_ns()
            bare.remove(ours.fileno())
        return sent_ns, woken_ns

    with BareLoop() as bare:
        sent_ns, woken_ns = asyncio.run(watch(bare))
    assert sent_ns < woken_ns < time.monotonic_ns()


@pytest.mark.parametrize("condition", Condition)
def test_client_leaves_under_every_condition(condition: Condition) -> None:
    async def leave(conditions: Conditions) -> int:
        return await conditions.leave_under(condition)

    with Leaver() as leaver, Conditions(leaver) as conditions, leaver.connect() as sock:
        before_ns = time.monotonic_ns()
        closed_ns = asyncio.run(leave(conditions))
        assert before_ns < closed_ns < time.monotonic_ns()
        assert sock.recv(1) == b""


def test_callgrind_counts_are_read_by_label(tmp_path: Path) -> None:
    head = "events: Ir\n"
    (tmp_path / "out.1").write_text(
        f"desc: Trigger: Client Request: bare/100\n{head}summary: 5000\n"
    )
    (tmp_path / "out.2").write_text(f"desc: Trigger: Program termination\n{head}summary: 7\n")
    assert read_counts(tmp_path) == {"bare/100": 5000}


@pytest.mark.skipif(not shutil.which("strace"), reason="counts with strace")
def test_system_calls_are_counted_between_the_marks() -> None:
    program = "import os; os.getppid(); os.access({!r}, 0); {}; os.access({!r}, 0); os.getppid()"
    one, three = (
        count_syscalls([sys.executable, "-c", program.format(MARK_BEGIN, body, MARK_END)])
        for body in ("os.getppid()", "os.getppid(), os.getppid(), os.getppid()")
    )
    assert (one, three) == (1, 3)
    with pytest.raises(RuntimeError, match="shows no marks"):
        count_syscalls(["true"])


@pytest.mark.slow
def test_latency_runs_and_writes_its_results(tmp_path: Path) -> None:
    config = latency.Config(num_rounds=2, num_engine_rounds=1)
    path = tmp_path / "latency.json"
    latency.run(config).write(path)
    results = json.loads(path.read_text())
    assert_schema(results)
    names = {row["name"] for row in results["rows"]}
    for condition in Condition:
        assert {
            f"close to {who}, {condition}" for who in ("flag", "callback", "bare loop")
        } <= names
        assert f"engine at work: close to blocks free, {condition}" in names
    assert {ratio["name"] for ratio in results["ratios"]} >= {
        f"close to flag, {condition}" for condition in Condition
    }


@pytest.mark.slow
def test_flag_check_runs_and_writes_its_results(tmp_path: Path) -> None:
    config = flag_check.Config(
        num_rows=(2,),
        num_waiting=3,
        num_rounds=2,
        num_steps=2,
        num_calls=10,
        has_instructions=False,
    )
    path = tmp_path / "flag_check.json"
    flag_check.run(config).write(path)
    results = json.loads(path.read_text())
    assert_schema(results)
    medians = {row["name"]: row["median"] for row in results["rows"]}
    of = "2 that decode, 3 that wait"
    assert medians[f"a look at all flags, {of}"] > 0
    assert medians[f"a read of one request's flags, {of}"] > 0
    assert medians[f"flag checks of a step, {of}"] > 0


@pytest.mark.slow
def test_invariant_runs_and_writes_its_results(tmp_path: Path) -> None:
    config = invariant.Config(num_rows=(2,), prompt_lens=(40,), num_rounds=2, num_steps=1)
    path = tmp_path / "invariant.json"
    invariant.run(config).write(path)
    results = json.loads(path.read_text())
    assert_schema(results)
    assert [ratio["name"] for ratio in results["ratios"]] == [
        "a step of 2, batch-invariant",
        "a prompt of 40, batch-invariant",
    ]


@pytest.mark.slow
def test_watch_cost_runs_and_writes_its_results(tmp_path: Path) -> None:
    config = watch_cost.Config(
        num_rounds=2,
        num_calls=50,
        num_blocks=10,
        num_load_rounds=1,
        load_duration=0.02,
        num_connections=50,
        num_counted=20,
        has_instructions=False,
    )
    path = tmp_path / "watch_cost.json"
    watch_cost.run(config).write(path)
    results = json.loads(path.read_text())
    assert_schema(results)
    rows = {row["name"]: row for row in results["rows"]}
    assert {"arm+disarm", "arm+disarm in C", "memory of a connection in C"} <= set(rows)
    assert {"watch, uvloop: more than empty", "watch, asyncio: more than empty"} <= set(rows)
    assert {f"requests a second, {variant}" for variant in VARIANTS} <= set(rows)
    for where in ("through Python", "in C"):
        counted = rows.get(f"system calls of 20 arm+disarm {where}")
        assert counted is None or counted["median"] == 0


def test_worker_runs_and_writes_its_results(tmp_path: Path) -> None:
    path = tmp_path / "worker.json"
    worker.run(worker.Config(num_rounds=2, num_small=2, num_streams=1, num_large=1)).write(path)
    rows = {row["name"]: row for row in json.loads(path.read_text())["rows"]}
    for kind in ("a request of FP32[1,16]", "a chunk of a stream of 20", "a request of 16 MiB"):
        assert rows[f"{kind}, both"]["median"] > 0
    assert rows["a copy of 16 MiB"]["count"] == 2
