"""Cython code that cimports the public declarations and waits without the GIL."""

import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType

import pytest

import disconnect_watch
from disconnect_watch import CancelToken, Reason, Watcher
from tests.native.build import HERE, build_module
from tests.support.net import LEAVES, Pair, wait_until

pytest.importorskip("Cython", reason="the example is compiled with Cython")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    folder = tmp_path_factory.mktemp("native")
    source = folder / "example_cython.c"
    packages = Path(disconnect_watch.__file__).parents[1]
    subprocess.run(
        [
            *(sys.executable, "-m", "cython", "-Werror", f"-I{packages}"),
            *("-o", str(source), str(HERE / "example_cython.pyx")),
        ],
        check=True,
    )
    return build_module("example_cython", folder, source=source)


def test_wait_ends_with_the_client(
    example: ModuleType, watcher: Watcher, poller: str, pair: Pair, leave: str
) -> None:
    how = LEAVES[leave]
    if (poller, pair.kind) in how.blind:
        pytest.skip("unread bytes hide the peer from this poller")
    if how.is_before:
        pair.leave(leave)
    ended: list[tuple[str, int]] = []
    waiting = threading.Thread(
        target=lambda: ended.append(
            example.wait_for_either(watcher, pair.server.fileno(), CancelToken(), 10)
        )
    )
    waiting.start()
    if not how.is_before:
        wait_until(lambda: watcher.stats().num_armed == 1)
        pair.leave(leave)
    waiting.join()
    assert ended == [("client", how.reason.code)]


def test_wait_ends_with_a_token_of_python(
    example: ModuleType, watcher: Watcher, pair: Pair
) -> None:
    token = CancelToken()
    canceller = threading.Thread(target=token.cancel)
    canceller.start()
    ended = example.wait_for_either(watcher, pair.server.fileno(), token, 10)
    canceller.join()
    assert ended == ("token", Reason.ABORTED.code)


@pytest.mark.parametrize("kind", ["unix"])
def test_client_that_closed_is_told_from_one_that_half_closed(
    example: ModuleType, watcher: Watcher, pair: Pair
) -> None:
    pair.client.shutdown(socket.SHUT_WR)
    fd = pair.server.fileno()
    token = CancelToken()
    ended: list[tuple[str, int]] = []
    waiting = threading.Thread(
        target=lambda: ended.append(
            example.wait_for_either(watcher, fd, token, 10, half_close="probe")
        )
    )
    waiting.start()
    wait_until(lambda: watcher.stats().num_signals[Reason.FIN] == 1)
    token.cancel()
    waiting.join()
    assert ended == [("token", Reason.ABORTED.code)]
    pair.client.close()
    ended.append(example.wait_for_either(watcher, fd, CancelToken(), 10, half_close="probe"))
    assert ended[1] == ("client", Reason.RESET.code)


def test_wait_ends_by_itself_and_with_an_exception(
    example: ModuleType, watcher: Watcher, pair: Pair
) -> None:
    with pytest.raises(TimeoutError, match="timed out"):
        example.wait_for_either(watcher, pair.server.fileno(), CancelToken(), 0.001)
    with pytest.raises(TypeError):
        example.wait_for_either(None, 0, CancelToken(), 0)
    assert watcher.stats().num_connections == 0


def test_engines_loop_latches_each_cancel_and_ends_with_the_last(example: ModuleType) -> None:
    tokens = [CancelToken(), CancelToken()]
    latches: list[int] = []
    engine = threading.Thread(target=lambda: latches.append(example.run_batch(tokens)))
    engine.start()
    tokens[0].cancel(Reason.FIN)
    wait_until(lambda: tokens[0].acked > 0)
    assert engine.is_alive()
    tokens[1].cancel(Reason.FIN)
    engine.join()
    assert 0 < tokens[0].acked < tokens[1].acked == latches[0]
