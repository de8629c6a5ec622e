"""One server, and every proxy in front of it, for all tests of a module."""

import contextlib
import functools
from collections.abc import Callable, Iterator

import pytest

from tests.proxies.programs import FRONTS, behind
from tests.support.tools import path_of
from tests.support.upstream import Upstream, upstream


@pytest.fixture(scope="module")
def server() -> Iterator[Upstream]:
    with upstream() as server:
        yield server


@pytest.fixture(scope="module")
def port_of(
    server: Upstream, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], int]]:
    """The port of a front, by its name; starts each program once."""
    with contextlib.ExitStack() as stack:

        @functools.cache
        def ports_of(name: str) -> dict[str, int]:
            if not path_of(name):
                pytest.skip(f"{name} is not here: make test-programs")
            directory = tmp_path_factory.mktemp(name)
            return stack.enter_context(behind(name, server.port, directory))

        yield lambda key: ports_of(FRONTS[key].program)[key]
