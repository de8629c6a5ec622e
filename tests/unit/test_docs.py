"""What one page of the docs says of another file is there."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTICES = ROOT / "docs/third-party.md"
PAGES = sorted(
    [
        *(
            ROOT / name
            for name in ("README.md", "CHANGELOG.md", "bench/README.md", "tests/README.md")
        ),
        *ROOT.glob("docs/**/*.md"),
    ]
)


def anchors_of(page: Path) -> set[str]:
    """Headings, as GitHub names them in links."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), target
        assert not anchor or anchor in anchors_of(file), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_test_that_a_page_names_is_there(page: Path) -> None:
    for path, name in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", page.read_text()):
        assert (ROOT / path).exists(), path
        assert not name or f"def {name}(" in (ROOT / path).read_text(), f"{path}::{name}"


def test_every_target_that_a_page_names_is_in_the_makefile() -> None:
    known = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        for words in re.findall(r"`(?:\w+=\S+ )*make ([a-z][a-z -]*)", page.read_text()):
            assert set(words.split()) <= known, (page, words)


def test_every_package_that_an_extra_installs_has_its_licence_told() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    table = NOTICES.read_text().partition("| package |")[2]
    told = re.findall(r"^\| ([\w-]+) \| .+ \| (\w+) \|$", table, re.MULTILINE)
    installed = {
        (name, extra)
        for extra, requirements in extras.items()
        if not extra.startswith(("test", "dev"))
        for name in (re.split(r"[\[<>=]", requirement)[0] for requirement in requirements)
        if name != project["name"]
    }
    # An extra that builds on another may ask for more of the same package.
    assert set(told) <= installed
    assert {name for name, _ in told} == {name for name, _ in installed}


def test_what_public_ci_runs_is_in_the_makefile() -> None:
    known = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    workflow = (ROOT / ".ci/github-actions.yml").read_text()
    commands = re.findall(r"- run: (.*)", workflow)
    assert ".ci/run" in commands
    targets = [command.removeprefix("make ") for command in commands if command.startswith("make ")]
    assert targets
    assert set(targets) <= known
