"""Counts the system calls of arm and disarm, with strace.

Run as a module it is what strace looks at: a process that arms and disarms a
number of times between two marks, which are system calls that nothing else makes.
"""

import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from disconnect_watch import CancelToken, Watcher

__all__ = ["arm_command", "count_syscalls"]

#: The same in c/core_cost.c.
MARK_BEGIN = "/bench-begin"
MARK_END = "/bench-end"
REPOSITORY = Path(__file__).parent.parent


def arm_command(num_pairs: int) -> list[str]:
    """What arms and disarms `num_pairs` times between the marks, through Python."""
    return [sys.executable, "-m", "bench._syscalls", str(num_pairs)]


def count_syscalls(command: Sequence[str | Path]) -> int:
    """System calls of all threads of `command` between its marks.

    Raises:
        RuntimeError: the marks did not appear, so nothing was counted.
        FileNotFoundError: strace is not installed.
        subprocess.CalledProcessError: the command failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace"
        subprocess.run(
            ["strace", "-f", "-qq", "-o", trace, *command],
            cwd=REPOSITORY,
            stdout=subprocess.DEVNULL,
            check=True,
        )
        text = trace.read_text()
    between = re.search(rf'^.*"{MARK_BEGIN}".*\n((?:.*\n)*?).*"{MARK_END}"', text, re.MULTILINE)
    if between is None:
        raise RuntimeError(f"strace of {command[0]} shows no marks: did it arm anything")
    return len(between[1].splitlines())


def main() -> None:
    """Arm and disarm as often as the first argument says."""
    num_pairs = int(sys.argv[1])
    ours, theirs = socket.socketpair()
    with ours, theirs, Watcher() as watcher, watcher.attach(ours) as connection:
        token = CancelToken()
        os.access(MARK_BEGIN, os.F_OK)
        for _ in range(num_pairs):
            connection.disarm(connection.arm(token))
        os.access(MARK_END, os.F_OK)


if __name__ == "__main__":
    main()
