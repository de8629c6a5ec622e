"""The reference that `make reference` builds has what the package promises."""

import re
import subprocess
import sys
from pathlib import Path

import disconnect_watch as dw

ROOT = Path(__file__).parents[2]


def test_reference_has_every_promised_name(tmp_path: Path) -> None:
    dry = subprocess.run(
        ["make", "-n", "reference", "VENV=/nowhere", "-o", "/nowhere/.dev"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    (arguments,) = re.findall(r"-m pdoc (.*)", dry.stdout)
    options = [str(tmp_path) if word == "build/reference" else word for word in arguments.split()]
    done = subprocess.run(
        [sys.executable, "-m", "pdoc", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "disconnect_watch.html").read_text()
    assert [name for name in dw.__all__ if f'id="{name}"' not in page] == []
    uvicorn = (tmp_path / "disconnect_watch/adapters/uvicorn/_httptools.html").read_text()
    assert 'id="HttpTools"' in uvicorn
