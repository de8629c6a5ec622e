"""Flags that another process made, read by their names."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from disconnect_watch import CancelToken
from disconnect_watch.remote import FlagName, RemoteTables, name_of

ROOT = Path(__file__).parents[2]

#: Looks at a flag whenever it is told to, and says what it sees.
LOOKER = """
import sys
from disconnect_watch.remote import FlagName, RemoteTables

flag = RemoteTables().find(FlagName(*map(int, sys.argv[1:])))
for _ in sys.stdin:
    print(flag.cancelled, flush=True)
"""


def test_another_process_sees_the_cancel_and_not_that_of_the_next_tenant() -> None:
    token = CancelToken()
    with subprocess.Popen(
        [sys.executable, "-c", LOOKER, *map(str, name_of(token))],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as looker:
        assert looker.stdin is not None
        assert looker.stdout is not None
        stdout = looker.stdout

        def look() -> str:
            print(file=looker.stdin, flush=True)
            return str(stdout.readline()).strip()

        assert look() == "False"
        token.cancel()
        assert look() == "True"
        slot = token.slot
        del token
        tenant = next_tenant(slot)
        assert look() == "False"
        tenant.cancel()
        assert look() == "False"
        looker.stdin.close()


def next_tenant(slot: int) -> CancelToken:
    """The token that has that slot next; free slots are taken in the order of their release."""
    for _ in range(1 << 20):
        token = CancelToken()
        if token.slot == slot:
            return token
    raise AssertionError(f"nobody got slot {slot}")


def test_a_flag_of_this_process_is_read_in_its_own_table() -> None:
    token = CancelToken()
    flag = RemoteTables().find(name_of(token))
    assert not flag.cancelled
    token.cancel()
    assert flag.cancelled


def test_what_is_no_table_is_refused() -> None:
    tables = RemoteTables()
    with open("/dev/null") as file, pytest.raises(OSError, match="map flag table"):
        open_elsewhere(tables, file.fileno())


def open_elsewhere(tables: RemoteTables, fd: int) -> None:
    """Find a flag by an fd of a process that is not this one."""
    with subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[fd]
    ) as other:
        try:
            tables.find(FlagName(other.pid, fd, 0, 1))
        finally:
            assert other.stdin is not None
            other.stdin.write(b"\n")
            other.stdin.close()


@pytest.mark.parametrize(
    "name", [(1, 2, 3, -1), (1, 2, 3, "4"), (1, 2, 3, True), ("self", "fd", 0, 0)]
)
def test_a_name_that_is_none_is_refused(name: tuple[object, ...]) -> None:
    with pytest.raises(ValueError, match="must be four numbers"):
        RemoteTables().find(FlagName(*name))  # type: ignore[arg-type] # that is the point


def test_a_slot_beyond_the_table_is_refused() -> None:
    name = name_of(CancelToken())
    with pytest.raises(ValueError, match="slots"):
        RemoteTables().find(name._replace(slot=1 << 20))


def test_a_process_that_is_not_there_is_refused() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    with pytest.raises(OSError, match="No such file"):
        RemoteTables().find(FlagName(ended.pid, 3, 0, 1))


def test_a_table_is_opened_once_and_its_fd_is_given_back() -> None:
    token = CancelToken()
    with subprocess.Popen(
        [sys.executable, "-c", "input()"],
        stdin=subprocess.PIPE,
        pass_fds=[token.table.fileno()],
    ) as other:
        tables = RemoteTables()
        name = name_of(token)._replace(pid=other.pid)
        first = tables.find(name)
        num_fds = len(os.listdir("/proc/self/fd"))
        assert tables.find(name).words is first.words
        assert len(os.listdir("/proc/self/fd")) == num_fds
        token.cancel()
        assert first.cancelled
        assert other.stdin is not None
        other.stdin.write(b"\n")
        other.stdin.close()
