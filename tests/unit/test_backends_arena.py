"""Shared memory: lent, given back, used again, and kept for as long as somebody looks at it."""

import os
from collections.abc import Iterator

import numpy as np
import pytest

from disconnect_watch.backends.python_model import arena as arena_module
from disconnect_watch.backends.python_model.arena import Arena

MIB = 1 << 20


@pytest.fixture
def sides() -> Iterator[tuple[Arena, Arena]]:
    """The two sides of one memory, as if they were in two processes."""
    with Arena(is_server=True) as server:
        worker = Arena(is_server=False, memfd=server.memfd)
        yield server, worker
    for side in (server, worker):
        side.release()


def resident_pages(arena: Arena) -> int:
    """Pages of the memory that are backed by something."""
    return os.stat(arena.memfd).st_blocks * 512 // arena_module.PAGE_BYTES


def test_what_one_side_puts_the_other_reads(sides: tuple[Arena, Arena]) -> None:
    server, worker = sides
    for own, other in (sides, (worker, server)):
        data = np.arange(100_000, dtype=np.uint8).tobytes()
        offset = own.put(data)
        assert other.borrow(offset, len(data)).tobytes() == data


def test_block_is_used_again_when_its_last_view_is_gone(sides: tuple[Arena, Arena]) -> None:
    server, worker = sides
    first = server.put(bytes(5000))
    array = worker.borrow(first, 5000)
    view = array[10:20].view(np.int8)
    del array
    assert worker.drain_returned() == []
    assert server.put(bytes(5000)) != first
    del view
    assert worker.drain_returned() == [first]
    server.take_back([first])
    assert server.put(bytes(5000)) == first
    assert server.num_used == 2


def test_a_room_is_used_again_when_it_has_no_view_on_both_sides(
    sides: tuple[Arena, Arena],
) -> None:
    server, worker = sides
    room = server.room(9000)
    room[4096:] = 7
    body = room.data
    del room
    # Two tensors of one body, each of which the other side gives back.
    found = [server.find(body[start:]) for start in (4096, 8000)]
    assert all(found)
    arrays = [worker.borrow(at, 1000, block=block) for block, at in filter(None, found)]
    assert [array.tolist() for array in arrays] == [[7] * 1000] * 2
    del body
    assert server.num_used == 1
    while arrays:
        arrays.pop()
        assert server.num_used == 1
        server.take_back(worker.drain_returned())
    assert server.num_used == 0


def test_a_room_stays_while_its_own_side_looks_at_it(sides: tuple[Arena, Arena]) -> None:
    server, _ = sides
    view = server.room(9000).data[:5000]
    found = server.find(view)
    assert found is not None
    server.take_back([found[0]])
    assert server.num_used == 1
    del view
    assert server.num_used == 0


def test_what_lies_elsewhere_is_in_no_room(sides: tuple[Arena, Arena]) -> None:
    server, worker = sides
    assert server.find(b"x" * 5000) is None
    assert server.find(memoryview(b"x" * 5000)) is None
    assert server.find(np.zeros(5000, np.uint8).data) is None
    assert server.find(worker.room(5000).data) is None
    offset = worker.put(b"x" * 5000)
    assert server.find(server.borrow(offset, 5000).data) is None


def test_a_room_outlives_the_arena_and_there_is_no_other(sides: tuple[Arena, Arena]) -> None:
    server, _ = sides
    room = server.room(5000)
    server.release()
    room[:] = 1
    with pytest.raises(MemoryError, match="has ended"):
        server.room(5000)
    del room
    assert server.num_used == 0


def test_rooms_leave_addresses_for_what_has_come(
    sides: tuple[Arena, Arena], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, _ = sides
    monkeypatch.setattr(arena_module, "HALF_BYTES", 4 * MIB)
    rooms = [server.room(MIB) for _ in range(2)]
    with pytest.raises(MemoryError, match="no room for a tensor of"):
        server.room(MIB)
    assert server.put(bytes(MIB)) > 0
    assert len(rooms) == 2


def test_borrowed_memory_outlives_the_arena(sides: tuple[Arena, Arena]) -> None:
    server, worker = sides
    offset = worker.put(b"x" * 5000)
    array = server.borrow(offset, 5000)
    server.release()
    with pytest.raises(MemoryError, match="the process that it is for has ended"):
        server.put(b"y" * 5000)
    assert array.tobytes() == b"x" * 5000


def test_memory_that_is_idle_goes_back_to_the_system_beyond_a_limit(
    sides: tuple[Arena, Arena], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena_module, "MAX_IDLE_BYTES", MIB)
    server, _ = sides
    offsets = [server.put(bytes(MIB)) for _ in range(4)]
    assert resident_pages(server) == 4 * MIB // arena_module.PAGE_BYTES
    server.take_back(offsets)
    assert resident_pages(server) == MIB // arena_module.PAGE_BYTES
    assert sorted(server.put(b"z" * MIB) for _ in range(4)) == sorted(offsets)


def test_arena_without_room_says_so(
    sides: tuple[Arena, Arena], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, _ = sides
    with pytest.raises(MemoryError, match="no room for a tensor of"):
        server.allocate(arena_module.HALF_BYTES + 1)
