"""Takes each guard out, one at a time, and sees that the named test dies.

    python -m tests.mutants              all
    python -m tests.mutants csrc/dw_conn those of files whose names begin so
    python -m tests.mutants --table      the table of tests/README.md

Works on a copy of the checkout, whose extension must be built. A guard whose test
passes without it is printed as a survivor, and the exit status is 1.
"""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Mutant", "load", "main", "table"]

ROOT = Path(__file__).parents[1]
MUTANTS = Path(__file__).with_name("mutants.toml")
#: A mutant may hang; the tests' own limit is four minutes each.
LIMIT_S = 300
#: What a copy needs not have.
LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv*", "*_cache", ".hypothesis", "__pycache__", "lib.*", "temp.*"
)


@dataclass(frozen=True, slots=True)
class Mutant:
    """One guard and the test that needs it.

    Attributes:
        file: relative to the checkout.
        guard: the function.
        without: what the guard sees to.
        find: stands in the file exactly once.
        replace: takes its place.
        test: ``c PROGRAM FILTER`` or ``py`` and arguments of pytest.
    """

    file: str
    guard: str
    without: str
    find: str
    replace: str
    test: str

    @property
    def is_native(self) -> bool:
        """Whether Python's tests need another extension module."""
        return self.file.startswith("csrc/") or self.file.endswith(".pyx")


def load() -> list[Mutant]:
    """All mutants of ``mutants.toml``, in its order."""
    return [Mutant(**entry) for entry in tomllib.loads(MUTANTS.read_text())["mutant"]]


def table() -> str:
    """The table of tests/README.md."""
    rows = ["| guard | sees to it that | dies without it |", "|---|---|---|"]
    for mutant in load():
        name = mutant.file.removeprefix("disconnect_watch/")
        _, where, *rest = shlex.split(mutant.test)
        test = rest[-1] if rest else where.split("::")[-1]
        where = where.split("::")[0].removeprefix("tests/")
        rows.append(f"| `{name}:{mutant.guard}` | {mutant.without} | `{where}`: `{test}` |")
    return "\n".join(rows) + "\n"


def _run(command: list[str], copy: Path, report: bool = False) -> bool:
    environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return False
    if done.returncode and report:
        print(done.stdout[-2000:], done.stderr[-2000:], file=sys.stderr)
    return done.returncode == 0


def _build(mutant: Mutant, copy: Path) -> bool:
    """Build what the mutant's test runs; False if it does not compile."""
    kind, program, *_ = shlex.split(mutant.test)
    if kind == "c":
        command = ["make", "-s", "-C", "tests/c", f"build/none/{program}"]
    elif mutant.is_native:
        command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    else:
        return True
    return _run(command, copy, report=True)


def _test(mutant: Mutant, copy: Path) -> bool:
    kind, *arguments = shlex.split(mutant.test)
    if kind == "c":
        program, name = arguments
        return _run([f"tests/c/build/none/{program}", name], copy)
    return _run([sys.executable, "-m", "pytest", "-q", "-x", *arguments], copy)


def judge(mutant: Mutant, copy: Path) -> str:
    """What became of the mutant: "killed", or what is wrong with it."""
    path = copy / mutant.file
    original = path.read_text()
    if original.count(mutant.find) != 1:
        return f"its text stands {original.count(mutant.find)} times in the file"
    if not _build(mutant, copy) or not _test(mutant, copy):
        return "its test fails with the guard in place"
    path.write_text(original.replace(mutant.find, mutant.replace))
    try:
        if not _build(mutant, copy):
            return "it does not compile"
        return "SURVIVED" if _test(mutant, copy) else "killed"
    finally:
        path.write_text(original)
        _build(mutant, copy)


def main() -> int:
    """Judge the mutants that were asked for; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", nargs="?", default="", help="how the file's name begins")
    parser.add_argument("--table", action="store_true", help="print the table, run nothing")
    arguments = parser.parse_args()
    if arguments.table:
        print(table(), end="")
        return 0
    num_wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(ROOT, copy, ignore=LEFT_OUT, symlinks=True)
        for mutant in load():
            if not mutant.file.startswith(arguments.file):
                continue
            verdict = judge(mutant, copy)
            num_wrong += verdict != "killed"
            print(f"{verdict}: {mutant.file}:{mutant.guard}: {mutant.without}", flush=True)
    return num_wrong != 0


if __name__ == "__main__":
    sys.exit(main())
