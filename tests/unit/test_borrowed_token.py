"""Flags of another process by their names: read and set as one's own, and never held."""

import subprocess
import sys

import pytest

from disconnect_watch import CancelToken, Reason
from disconnect_watch.token import BorrowedToken, FlagSet, adopt_flag_table, flag_table

#: Run with the fd of this process's table and the name of a flag, by another process.
BORROW = """
import sys
from disconnect_watch.token import BorrowedToken, CancelToken, Reason, adopt_flag_table, flag_table
table, slot, generation = map(int, sys.argv[1:])
adopt_flag_table(table)
lent = BorrowedToken(slot, generation)
assert lent.reason is Reason.FIN
own = CancelToken()
assert own.slot // 1024 != slot // 1024
print(own.slot, own.generation, flush=True)
own.cancel(Reason.DEADLINE)
sys.stdin.read()
"""


def borrowed(token: CancelToken) -> BorrowedToken:
    return BorrowedToken(token.slot, token.generation)


def test_a_borrowed_token_is_the_same_flag() -> None:
    token = CancelToken()
    lent = borrowed(token)
    assert not lent.cancelled
    assert lent.cancel(Reason.FIN) is True
    assert token.reason is Reason.FIN
    assert lent.reason is Reason.FIN
    assert lent.times() == token.times()
    lent.ack(7)
    assert token.acked == 7
    assert lent.cancel(Reason.ABORTED) is False


def test_it_holds_nothing_and_gives_nothing_back() -> None:
    before = flag_table().stats()[0]
    token = CancelToken()
    lent = borrowed(token)
    assert flag_table().stats()[0] == before + 1
    del lent
    assert not token.cancelled
    del token
    assert flag_table().stats()[0] == before


def test_one_that_nobody_holds_any_more_is_cancelled() -> None:
    token = CancelToken()
    lent = borrowed(token)
    del token
    assert lent.cancelled
    assert lent.reason is Reason.OWNER_CLOSED
    assert lent.times() == (0, 0)
    assert lent.cancel(Reason.FIN) is False
    lent.ack(1)


def test_a_set_of_flags_looks_at_borrowed_ones_too() -> None:
    token, flags = CancelToken(), FlagSet()
    flags.add(borrowed(token))
    assert not flags.any_fired()
    token.cancel()
    assert flags.any_fired()


@pytest.mark.parametrize(("slot", "generation"), [(1 << 20, 1), (0, 0)])
def test_what_names_no_flag_is_refused(slot: int, generation: int) -> None:
    with pytest.raises(OSError, match="borrow a flag by its name"):
        BorrowedToken(slot, generation)


def test_a_process_has_one_table() -> None:
    flag_table()
    with pytest.raises(RuntimeError, match="has a flag table"):
        adopt_flag_table(flag_table().fileno())


def test_two_processes_set_each_others_flags_and_what_the_dead_one_held_is_taken_back() -> None:
    token = CancelToken()
    token.cancel(Reason.FIN)
    before = flag_table().stats()[0]
    table = flag_table().fileno()
    with subprocess.Popen(
        [sys.executable, "-c", BORROW, str(table), str(token.slot), str(token.generation)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=(table,),
        text=True,
    ) as other:
        assert other.stdout is not None
        slot, generation = map(int, other.stdout.readline().split())
        theirs = BorrowedToken(slot, generation)
        assert flag_table().stats()[0] == before + 1
        assert theirs.wait(40)
        assert theirs.reason == "deadline"
        other.kill()
    assert flag_table().reclaim() == 0  # it was cancelled before
    assert flag_table().stats()[0] == before
    assert theirs.reason is Reason.OWNER_CLOSED
