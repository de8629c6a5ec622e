"""What the README shows runs as written."""

import contextlib
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.net import held_port, wait_until

README = Path(__file__).parents[2] / "README.md"
PORT = "8888"


def drop_in_source() -> str:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    (source,) = (block for block in blocks if "asyncio.run(main())" in block)
    return str(source)


def is_listening(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


@pytest.fixture
def drop_in() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The README's server in a process of its own, on another port, listening."""
    source = drop_in_source()
    assert source.count(PORT) == 1
    with (
        held_port() as port,
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", source.replace(PORT, str(port))],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as server,
    ):
        wait_until(lambda: is_listening(port) or server.poll() is not None)
        yield server, port
        server.kill()
        assert server.stderr is not None
        assert not server.stderr.read()


def test_drop_in_example_serves_who_stays_and_stops_for_who_leaves(
    drop_in: tuple[subprocess.Popen[str], int],
) -> None:
    server, port = drop_in
    with socket.create_connection(("127.0.0.1", port), 40) as stays:
        stays.sendall(b"a\n")
        with socket.create_connection(("127.0.0.1", port), 40) as leaves:
            leaves.sendall(b"b\n")
            assert leaves.recv(2) == b"b\n"
            # Not close(): the next word may be there unread, and would make it a reset.
            leaves.shutdown(socket.SHUT_WR)
            assert server.stdout is not None
            assert server.stdout.readline() == "stopped: fin\n"
        answer = b"".join(iter(lambda: stays.recv(4096), b""))
    assert answer == b"a\n" * 300


def test_drop_in_example_fits_on_the_first_screen() -> None:
    assert len([line for line in drop_in_source().splitlines() if line]) <= 20
    assert "make serve" in README.read_text()[:1200]
    assert "make test" in README.read_text()[:1200]
