"""What each process of a vLLM pays for our plugin, and what its variable may say."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from disconnect_watch.adapters.vllm import options_of
from disconnect_watch.vllm_variable import VARIABLE

ROOT = Path(__file__).parents[2]

SCRIPT = """
import sys
import disconnect_watch
before = set(sys.modules)
from disconnect_watch.vllm_plugin import register
register()
print(*set(sys.modules) - before)
"""


@pytest.mark.parametrize("value", [None, "", "0", "false", "No", "OFF"])
def test_it_loads_nothing_where_it_is_not_asked_for(value: str | None) -> None:
    environment = {name: text for name, text in os.environ.items() if name != VARIABLE}
    if value is not None:
        environment[VARIABLE] = value
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert sorted(done.stdout.split()) == [
        "disconnect_watch.vllm_plugin",
        "disconnect_watch.vllm_variable",
    ]


def test_it_is_an_entry_point_of_vllms_own() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (value,) = project["entry-points"]["vllm.general_plugins"].values()
    assert value == "disconnect_watch.vllm_plugin:register"


@pytest.mark.parametrize("text", ["1", "true", "Yes", "on"])
def test_a_yes_is_the_defaults(text: str) -> None:
    assert options_of(text) == {}


def test_options_are_those_of_the_protocol() -> None:
    assert options_of("half_close=ignore, vanish_after=2.5,unblind=65536") == {
        "half_close": "ignore",
        "vanish_after": 2.5,
        "unblind": 65536,
    }


@pytest.mark.parametrize("text", ["2", "vanish_after=soon", "half_close=probe,unblind", "grace=1"])
def test_what_cannot_be_understood_says_so(text: str) -> None:
    with pytest.raises(ValueError, match=r"cannot read '.*'.*; give 1, or half_close=,"):
        options_of(text)
