"""Request ids: each once, also in a process that was forked."""

import os

from disconnect_watch.server.ids import NUM_AT_ONCE, new_id


def test_no_id_comes_twice() -> None:
    ids = [new_id() for _ in range(2 * NUM_AT_ONCE + 1)]
    assert len(set(ids)) == len(ids)
    assert {len(bytes.fromhex(each)) for each in ids} == {16}


def test_a_forked_child_gives_out_none_that_its_parent_gives() -> None:
    new_id()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writer, new_id().encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        of_child = pipe.read()
    os.waitpid(pid, 0)
    assert len(of_child) == 32
    assert of_child not in [new_id() for _ in range(NUM_AT_ONCE)]
