"""How the doctor reports, and what it says that no watch can see."""

import json

import pytest

from disconnect_watch.doctor import Finding, Report, Status, Trial
from disconnect_watch.doctor.limits import limit_findings
from disconnect_watch.doctor.patient import Means
from disconnect_watch.doctor.setup import Setup
from disconnect_watch.doctor.trial import TRIAL_AREA, WAYS, trial_findings
from disconnect_watch.testing import Way

ALONE = Setup("uvicorn")
OURS = Setup("uvicorn", "ours")
FINE = Finding("kernel", "system", Status.OK, "Linux")


def trials(
    setup: Setup,
    means: Means,
    *seconds: float | None,
    status: int | None = None,
    has_token: bool = True,
) -> list[Trial]:
    return [
        Trial(setup, means, way, time, status, has_token)
        for way, time in zip(WAYS, seconds, strict=True)
    ]


HEARD = trials(OURS, Means.TOKEN, 0.001, 0.002)


def verdict(found: list[Trial]) -> Finding:
    (finding,) = trial_findings(found)
    assert finding.area == TRIAL_AREA
    return finding


def test_token_that_is_told_of_each_leave_is_as_it_should_be() -> None:
    finding = verdict(HEARD)
    assert finding.status is Status.OK
    assert not finding.advice


def test_means_that_miss_a_leave_are_named_beside_a_token_that_does_not() -> None:
    finding = verdict([*HEARD, *trials(OURS, Means.POLL, 0.1, None)])
    assert finding.status is Status.OK
    assert (
        finding.advice == "not every leave is heard of by request.is_disconnected(): read the token"
    )


def test_token_that_misses_a_leave_is_a_problem() -> None:
    finding = verdict(trials(OURS, Means.TOKEN, 0.001, None))
    assert finding.status is Status.PROBLEM
    assert finding.value == "the token was not told of: FIN behind a pipelined request"


def test_token_that_is_not_there_is_a_problem() -> None:
    finding = verdict(trials(OURS, Means.TOKEN, None, None, has_token=False))
    assert finding.status is Status.PROBLEM
    assert 'scope["state"]' in finding.advice


def test_server_without_us_that_misses_a_leave_is_only_noted() -> None:
    finding = verdict(trials(ALONE, Means.RECEIVE, 0.001, None, has_token=False))
    assert finding.status is Status.NOTE
    assert finding.value == "1 of 2 leaves are heard of"
    assert verdict(trials(ALONE, Means.RECEIVE, 0.1, 0.1)).status is Status.OK


@pytest.mark.parametrize(("status", "value"), [(401, "answered 401"), (0, "no answer came")])
def test_request_that_does_not_reach_its_handler_is_a_problem(status: int, value: str) -> None:
    finding = verdict(trials(ALONE, Means.RECEIVE, None, None, status=status))
    assert finding.status is Status.PROBLEM
    assert value in finding.value
    assert "--header" in finding.advice


def test_report_holds_unless_something_is_a_problem() -> None:
    note = Finding("kernel", "watcher", Status.NOTE, "poll", "do this")
    problem = Finding("kernel", "TCP_INFO", Status.PROBLEM, "refused")
    assert Report((FINE, note)).holds
    assert not Report((FINE, problem)).holds
    assert Report((FINE, note)).as_text().splitlines() == [
        "kernel",
        "  ok       system   Linux",
        "  note     watcher  poll",
        "           -> do this",
        "no problem",
    ]
    assert Report((problem,)).as_text().endswith("1 problem(s)")


def test_report_shows_each_trial_as_a_cell_of_a_table() -> None:
    found = [
        *trials(ALONE, Means.RECEIVE, 0.0012, None),
        *trials(OURS, Means.TOKEN, None, None, status=401)[:1],
        *trials(OURS, Means.TOKEN, None, None, status=0)[1:],
    ]
    report = Report(tuple(trial_findings(found)), tuple(found))
    text = report.as_text()
    assert "await receive()  1.2 ms        never\n" in text
    assert "cancel token     answered 401  no answer\n" in text


def test_report_as_json_has_all_of_it() -> None:
    document = json.loads(json.dumps(Report((FINE,), tuple(HEARD[:1])).as_dict()))
    assert document == {
        "holds": True,
        "findings": [
            {"area": "kernel", "name": "system", "status": "ok", "value": "Linux", "advice": ""}
        ],
        "trials": [
            {
                "setup": "uvicorn with ours",
                "means": "cancel token",
                "way": Way.FIN,
                "seconds": 0.001,
                "status": None,
            }
        ],
    }


@pytest.mark.parametrize(
    ("half_close", "vanish_after", "unblind", "named", "not_named"),
    [
        ("disconnect", None, None, ["vanished", "receive window", "half-closed"], []),
        ("probe", 2.0, 1 << 20, [], ["vanished", "receive window", "half-close"]),
        ("ignore", 2.0, None, ["a FIN (taken for a half-close)", "receive window"], ["vanished"]),
    ],
)
def test_what_cannot_be_seen_follows_the_options(
    half_close: str,
    vanish_after: float | None,
    unblind: int | None,
    named: list[str],
    not_named: list[str],
) -> None:
    found = limit_findings(half_close=half_close, vanish_after=vanish_after, unblind=unblind)
    names = " | ".join(finding.name for finding in found)
    assert all(text in names for text in ["SIGSTOP", "close_notify", "HTTP/2", *named])
    assert not [text for text in not_named if text in names]
    assert all(finding.advice for finding in found)
