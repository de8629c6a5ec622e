"""C++ code with a scope for each connection, flag and request."""

import threading
from types import ModuleType

import pytest

from disconnect_watch import Reason, Watcher
from disconnect_watch.token import flag_table
from tests.native.build import WARNINGS, build_module
from tests.support.net import Pair, wait_until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    return build_module("example_cpp", tmp_path_factory.mktemp("native"), *WARNINGS)


def test_requests_of_a_client_that_stays_run_to_their_end(
    example: ModuleType, watcher: Watcher, pair: Pair
) -> None:
    num_live = flag_table().stats()[0]
    results = example.serve(watcher, pair.server.fileno(), 3, 50)
    assert results == [(50, 0)] * 3
    assert watcher.stats().num_connections == 0
    assert flag_table().stats()[0] == num_live


def test_request_ends_amid_its_steps_when_the_client_leaves(
    example: ModuleType, watcher: Watcher, pair: Pair
) -> None:
    results: list[tuple[int, int]] = []
    served = threading.Thread(
        target=lambda: results.extend(example.serve(watcher, pair.server.fileno(), 2, -1))
    )
    served.start()
    wait_until(lambda: watcher.stats().num_armed == 1)
    pair.client.close()
    served.join()
    assert [reason for _, reason in results] == [Reason.FIN.code] * 2
    # The first had begun; the one behind it found the client gone.
    assert results[0][0] > 0
    assert results[1][0] == 0
    assert watcher.stats().num_connections == 0


def test_error_of_the_core_becomes_an_exception_and_leaves_nothing(
    example: ModuleType, watcher: Watcher, pair: Pair
) -> None:
    num_live = flag_table().stats()[0]
    with watcher.attach(pair.server), pytest.raises(FileExistsError):
        example.serve(watcher, pair.server.fileno(), 1, 1)
    assert flag_table().stats()[0] == num_live
