"""Sockets, watchers, loops and processes that end in any order, and harm nobody."""

import asyncio
import contextlib
import gc
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from disconnect_watch import (
    CancelToken,
    ClientDisconnected,
    ClosedError,
    Reason,
    StaleWatchError,
    Watcher,
    watch,
)
from disconnect_watch.watcher import default_watcher
from tests.support.loops import LOOP_FACTORIES, LoopRunner
from tests.support.net import Pair, connected, open_fds, streams, wait_until


def test_event_of_a_socket_that_lives_on_in_a_dup_reaches_nobody(kind: str) -> None:
    # The kernel keeps the registration with the open file: its event comes with the old
    # key while the number is another socket's.
    with Watcher(poller="epoll") as watcher, connected(kind) as old, connected(kind) as new:
        fd = old.server.fileno()
        stale, fresh = CancelToken(), CancelToken()
        conn = watcher.attach(fd)
        conn.arm(stale)
        dup = os.dup(fd)
        os.dup2(new.server.fileno(), fd)  # closes the old one
        try:
            with watcher.attach(fd) as reused:
                assert stale.reason is Reason.OWNER_CLOSED
                reused.arm(fresh)
                old.client.close()
                wait_until(lambda: watcher.stats().num_stale_events == 1)
                assert not fresh.cancelled
                new.client.close()
                assert fresh.wait(40)
            conn.detach()
        finally:
            os.close(dup)


def test_client_of_a_dup_ed_socket_is_seen_as_long_as_the_watched_one_is_open(
    watcher: Watcher, pair: Pair
) -> None:
    token = CancelToken()
    with contextlib.ExitStack() as stack:
        dup = stack.enter_context(pair.server.dup())
        with watcher.attach(pair.server) as conn:
            conn.arm(token)
            pair.client.close()
            assert token.wait(40)
            assert token.reason is Reason.FIN
        pair.server.close()
        with watcher.attach(dup) as conn:
            wait_until(lambda: conn.reason is Reason.FIN)


def test_socket_shared_with_a_forked_child_is_seen_once_and_by_its_watcher_alone(
    watcher: Watcher, pair: Pair
) -> None:
    token = CancelToken()
    with watcher.attach(pair.server) as conn:
        conn.arm(token)
        child = os.fork()
        if child == 0:
            signal.pause()
            os._exit(0)
        try:
            pair.client.close()  # ours; the child holds the other copy open
            with connected() as other, watcher.attach(other.server) as witness:
                other.client.close()
                wait_until(lambda: witness.reason)
            assert not token.cancelled
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        assert token.wait(40)
        assert watcher.stats().num_fired == 1


def test_two_watchers_on_one_socket_are_both_told(watcher: Watcher, pair: Pair) -> None:
    tokens = [CancelToken(), CancelToken()]
    with (
        Watcher() as other,
        watcher.attach(pair.server) as first,
        other.attach(pair.server) as second,
    ):
        first.arm(tokens[0])
        second.arm(tokens[1])
        pair.client.close()
        assert [token.wait(40) and token.reason for token in tokens] == [Reason.FIN] * 2


def test_token_is_settled_when_detach_returns(watcher: Watcher) -> None:
    # A client closes while its connection is detached; after that nothing may fire.
    num_fired = 0
    start = threading.Barrier(2)
    clients: list[socket.socket] = []

    def close_all() -> None:
        for _ in range(200):
            start.wait()
            clients.pop().close()

    closer = threading.Thread(target=close_all)
    closer.start()
    settled: list[tuple[CancelToken, bool]] = []
    for _ in range(200):
        server, client = socket.socketpair()
        clients.append(client)
        token = CancelToken()
        conn = watcher.attach(server)
        conn.arm(token)
        start.wait()
        conn.detach()
        settled.append((token, token.cancelled))
        server.close()
    closer.join()
    num_fired = sum(fired for _, fired in settled)
    assert [token.cancelled for token, _ in settled] == [fired for _, fired in settled]
    assert watcher.stats().num_fired == num_fired
    assert watcher.stats().num_connections == 0


def test_watcher_closed_under_load_says_so_and_nothing_else(poller: str) -> None:
    errors: list[BaseException] = []
    watcher = Watcher(poller=poller)
    rounds = threading.Semaphore(0)

    def load() -> None:
        try:
            while True:
                with connected("unix") as pair, watcher.attach(pair.server) as conn:
                    token = CancelToken()
                    mailbox = watcher.mailbox()
                    try:
                        conn.arm(token, mailbox=mailbox)
                        pair.client.close()
                        token.wait(0.001)
                        mailbox.drain()
                    finally:
                        mailbox.close()
                rounds.release()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=load) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(30):
        rounds.acquire()
    watcher.close()
    for thread in threads:
        thread.join()
    assert [type(error) for error in errors] == [ClosedError] * 3


def test_loop_closed_amid_its_watches_leaves_nothing_behind(run: LoopRunner, pair: Pair) -> None:
    before = len(open_fds())
    loop = LOOP_FACTORIES[run.kind]()
    loop.set_exception_handler(lambda *_: None)  # hears of the pending task

    async def block() -> None:
        running = asyncio.get_running_loop()
        async with watch(pair.server):
            running.stop()
            await running.create_future()

    task = loop.create_task(block())
    loop.run_forever()
    assert default_watcher().stats().num_armed == 1
    loop.close()
    pair.client.close()
    wait_until(lambda: default_watcher().stats().num_armed == 0)  # it fired, for nobody
    assert default_watcher().stats().num_connections == 1
    del task, loop
    gc.collect()
    assert default_watcher().stats().num_connections == 0
    assert len(open_fds()) == before - 1  # the client's


@pytest.mark.filterwarnings("ignore:unclosed")
def test_loop_closed_over_a_protocol_without_attributes_leaves_nothing_behind(
    run: LoopRunner, tcp: Pair
) -> None:
    class Slotted(asyncio.Protocol):
        __slots__ = ()

    before = len(open_fds())
    loop = LOOP_FACTORIES[run.kind]()

    async def serve_once() -> None:
        sock = tcp.server.dup()
        transport, _ = await asyncio.get_running_loop().create_connection(Slotted, sock=sock)
        async with watch(transport, pause_reading=False):
            pass

    loop.run_until_complete(serve_once())
    assert default_watcher().stats().num_connections == 1
    loop.close()
    del loop
    gc.collect()
    assert default_watcher().stats().num_connections == 0
    assert len(open_fds()) == before


def test_loops_in_threads_share_one_watcher(run: LoopRunner) -> None:
    reasons: list[Reason] = []

    async def main() -> None:
        async def block(pair: Pair) -> None:
            async with streams(pair) as (_, writer):
                with pytest.raises(ClientDisconnected) as caught:
                    async with watch(writer, watcher=watcher):
                        pair.client.close()
                        await asyncio.get_running_loop().create_future()
                reasons.append(caught.value.reason)

        with contextlib.ExitStack() as stack:
            pairs = [stack.enter_context(connected()) for _ in range(25)]
            await asyncio.gather(*map(block, pairs))

    def serve() -> None:
        with asyncio.Runner(loop_factory=LOOP_FACTORIES[run.kind]) as runner:
            runner.run(main())

    with Watcher() as watcher:
        threads = [threading.Thread(target=serve) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert reasons == [Reason.FIN] * 100
        assert watcher.stats().num_signals[Reason.FIN] == 100


_BEGIN = """
import asyncio, socket, sys, threading
import disconnect_watch as dw
server, client = socket.socketpair()
token = dw.CancelToken()
"""

#: How a program may end while something is watched.
PROGRAMS = {
    "armed": """
conn = dw.attach(server)
conn.arm(token)
""",
    "fired": """
conn = dw.attach(server)
conn.arm(token)
client.close()
token.wait()
server.close()
""",
    "callback": """
token.add_callback(lambda _: None)
conn = dw.attach(server)
conn.arm(token)
client.close()
""",
    "waiting thread": """
conn = dw.attach(server)
conn.arm(token)
threading.Thread(target=token.wait, daemon=True).start()
""",
    "sys.exit in a block": """
async def main():
    async with dw.watch(server):
        sys.exit(0)
with server, client:
    asyncio.run(main())
""",
    "left block": """
async def main():
    reader, writer = await asyncio.open_connection(sock=server)
    try:
        async with dw.watch(writer):
            client.close()
            await asyncio.sleep(60)
    except dw.ClientDisconnected:
        writer.close()
        await writer.wait_closed()
asyncio.run(main())
""",
    "closed watcher": """
watcher = dw.Watcher()
conn = watcher.attach(server)
conn.arm(token)
watcher.close()
""",
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_interpreter_that_ends_amid_watches_says_nothing(program: str, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    # What the program does not close is not what is tested.
    end = "server.close()\nclient.close()\n"
    script.write_text(_BEGIN + PROGRAMS[program] + end)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-X", "dev", str(script)],
        capture_output=True,
        text=True,
        timeout=150,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


_CHILD = """
import multiprocessing, socket, sys
import disconnect_watch as dw

def work(server, parents):
    token = dw.CancelToken()
    if parents is not None:
        try:
            parents.attach(server)
        except dw.ForkedError:
            pass
        else:
            raise AssertionError("the parent's watcher was used")
    with dw.attach(server) as conn:
        conn.arm(token)
        server.send(b"!")
        assert token.wait(40) and token.reason is dw.Reason.FIN, token.reason

def main(method):
    context = multiprocessing.get_context(method)
    server, client = socket.socketpair()
    parents_token = dw.CancelToken()
    conn = dw.attach(server)
    conn.arm(parents_token)
    parents = dw.Watcher() if method == "fork" else None
    child = context.Process(target=work, args=(server, parents))
    child.start()
    assert client.recv(1) == b"!"
    client.shutdown(socket.SHUT_WR)
    child.join()
    assert child.exitcode == 0, child.exitcode
    assert parents_token.wait(40) and parents_token.reason is dw.Reason.FIN
    if parents is not None:
        parents.close()

if __name__ == "__main__":
    main(sys.argv[1])
"""


@pytest.mark.parametrize("method", sorted(multiprocessing.get_all_start_methods()))
def test_child_of_multiprocessing_watches_what_it_was_given(method: str, tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(_CHILD)
    done = subprocess.run(
        [sys.executable, str(script), method],
        capture_output=True,
        text=True,
        timeout=150,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_connection_of_a_closed_watcher_is_detached_without_harm(pair: Pair) -> None:
    watcher = Watcher()
    conn = watcher.attach(pair.server)
    watch_id = conn.arm(CancelToken())
    watcher.close()
    with pytest.raises((ClosedError, StaleWatchError)):
        conn.disarm(watch_id)
    conn.detach()
    with Watcher() as other, other.attach(pair.server):
        pass
