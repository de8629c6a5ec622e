"""Two minutes of clients that stay at our own server and leave it, and the page about them."""

import argparse
import subprocess
import sys
from collections.abc import Sequence

from tests.support.command import running

__all__ = ["main"]

#: More than any machine gets through in the time.
_NUM = "10000000"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns that of ``stress``."""
    parser = argparse.ArgumentParser(prog="python -m tests.stress.demo", description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--html", default="stress.html", help="where the page goes")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args(arguments)
    with running() as server:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "disconnect_watch.cli", "stress"),
                f"http://127.0.0.1:{server.port}/v2/models/tiny/generate_stream",
                *("--stay", _NUM, "--leave", _NUM, "--max-seconds", str(given.seconds)),
                *("--concurrency", "16", "--keep-alive", "0.3", "--slow", "0.02", "--same"),
                *("--timeout", "60", "--settle", "60"),
                *("--seed", str(given.seed), "--html", given.html),
            ],
            check=False,
        )
    print(f"the page is {given.html}", file=sys.stderr)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
