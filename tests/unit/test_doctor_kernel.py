"""What the doctor tries on the running kernel, and what it says where that is not as hoped."""

import resource
from collections.abc import Callable
from functools import partial

import pytest

from disconnect_watch import Watcher
from disconnect_watch.doctor import Finding, Status, kernel
from disconnect_watch.doctor.kernel import kernel_findings


def found(name: str) -> Finding:
    (finding,) = (finding for finding in kernel_findings() if finding.name == name)
    return finding


def test_kernel_that_runs_these_tests_has_no_problem() -> None:
    findings = {finding.name: finding for finding in kernel_findings()}
    assert {"system", "EPOLLRDHUP", "watcher", "a client's leave"} < set(findings)
    assert all(finding.status is not Status.PROBLEM for finding in findings.values()), findings
    assert findings["watcher"].value == "epoll, by a thread"
    assert findings["a client's leave"].value.endswith("from close() to the token")


def test_poller_that_is_blind_behind_unread_bytes_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "Watcher", partial(Watcher, poller="poll"))
    finding = found("watcher")
    assert finding.status is Status.NOTE
    assert finding.value == "poll, by a thread"
    assert "unread bytes" in finding.advice


def test_receive_buffer_that_does_not_grow_so_far_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "_UNBLIND_BYTES", 1 << 30)
    finding = found("SO_RCVLOWAT")
    assert finding.status is Status.NOTE
    assert "tcp_rmem" in finding.advice


def test_slow_bound_on_a_silence_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "_VANISH_BOUND", 1)
    assert found("keepalive").status is Status.NOTE


def test_few_open_files_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 1024))
    finding = found("open files")
    assert finding.status is Status.NOTE
    assert finding.value == "256 of at most 1024"
    assert finding.advice.endswith("ulimit -n 1024")


def refuse(name: str) -> Finding:
    raise PermissionError(1, "Operation not permitted")


def see_nothing(name: str) -> Finding:
    return kernel._as_hoped(name, False, "tells")


@pytest.mark.parametrize("look", [refuse, see_nothing])
@pytest.mark.parametrize("name", ["EPOLLRDHUP", "TCP_INFO"])
def test_what_the_kernel_refuses_is_a_problem_with_advice(
    name: str, look: Callable[[str], Finding], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(kernel._LOOKS, name, look)
    finding = found(name)
    assert finding.status is Status.PROBLEM
    assert "sandbox" in finding.advice
    assert found("watcher").status is Status.OK  # the others are tried all the same
