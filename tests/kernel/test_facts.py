"""This kernel does what the code relies on; ``docs/kernel-notes.md`` tells each fact.

A failure here is news about the kernel, or about what stands in for one, and no
fault of the code: read the note, then decide what the code must do there.
"""

import dataclasses
import re
from pathlib import Path

import pytest

from tests.kernel import facts
from tests.kernel.facts import FACTS

NOTES = Path(__file__).parents[2] / "docs" / "kernel-notes.md"

#: Those that wait for timers of the kernel.
SLOW = {
    "a-closed-peer-stops-answering-once-its-timer-ends",
    "a-full-window-hides-the-fin",
    "a-user-timeout-takes-a-slow-reader-for-gone",
    "a-vanished-peer-leaves-bytes-unacknowledged",
    "a-vanished-peer-leaves-keepalive-unanswered",
    "back-off-can-be-capped",
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in FACTS]
)
def test_kernel_does_what_the_code_relies_on(name: str) -> None:
    fact = FACTS[name]
    if not fact.is_known_here:
        pytest.skip("needs Linux {}.{}; the code does without here".format(*fact.since))
    assert fact.observe() == fact.expected, fact.says


def test_each_fact_has_its_command_in_the_notes_and_each_command_its_fact() -> None:
    commands = re.findall(r"python -m tests\.kernel\.facts ([a-z0-9-]+)", NOTES.read_text())
    assert sorted(commands) == sorted(FACTS)


def test_command_prints_what_happened_and_succeeds(capsys: pytest.CaptureFixture[str]) -> None:
    assert facts.main(["adding-after-the-end-fires"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^    added after the FIN +RDHUP$", printed, re.MULTILINE)
    assert "EXPECTED" not in printed


def test_command_fails_loudly_where_the_kernel_behaves_otherwise(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "adding-after-the-end-fires"
    other = dataclasses.replace(FACTS[name], expected={"added after the FIN": "silent"})
    monkeypatch.setitem(FACTS, name, other)
    assert facts.main([name]) == 1
    assert "RDHUP  <- EXPECTED silent" in capsys.readouterr().out


def test_fact_of_a_newer_kernel_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "adding-after-the-end-fires"
    newer = dataclasses.replace(FACTS[name], expected={}, since=(99, 1))
    monkeypatch.setitem(FACTS, name, newer)
    assert facts.main([name]) == 0
    assert "needs Linux 99.1" in capsys.readouterr().out


def test_command_refuses_a_fact_that_nobody_knows(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        facts.main(["no-such-fact"])
    assert "no fact 'no-such-fact'" in capsys.readouterr().err
