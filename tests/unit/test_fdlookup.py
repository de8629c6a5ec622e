"""An fd by the two ends of its connection, and never a stranger's."""

import os
import socket
from collections.abc import Iterator

import pytest

from disconnect_watch.adapters.fdlookup import FdLookup, SocketFd, address
from tests.support.net import Pair, connected


def ends(sock: socket.socket) -> tuple[object, object]:
    return address(sock.getsockname()), address(sock.getpeername())


def found(lookup: FdLookup, local: object, peer: object) -> SocketFd | None:
    assert local is not None
    assert peer is not None
    return lookup.find(local, peer)  # type: ignore[arg-type]


@pytest.fixture(params=["tcp", "tcp6"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with connected(request.param) as pair:
        yield pair


def test_each_end_of_a_connection_is_told_from_the_other(pair: Pair) -> None:
    lookup = FdLookup()
    for sock in (pair.server, pair.client, pair.server):
        at = found(lookup, *ends(sock))
        assert at is not None
        assert at.fd == sock.fileno()
        assert at.inode == os.fstat(sock.fileno()).st_ino
        assert at.is_current()


def test_a_number_that_is_another_sockets_by_now_is_not_taken_for_the_old_one(pair: Pair) -> None:
    lookup = FdLookup()
    local, peer = ends(pair.server)
    at = found(lookup, local, peer)
    assert at is not None
    pair.server.close()
    with socket.socket() as other:
        assert other.fileno() == at.fd  # the lowest that is free
        assert not at.is_current()
        assert found(lookup, local, peer) is None


def test_a_closed_number_names_nothing(pair: Pair) -> None:
    lookup = FdLookup()
    local, peer = ends(pair.server)
    at = found(lookup, local, peer)
    assert at is not None
    pair.server.close()
    assert not at.is_current()
    assert found(lookup, local, peer) is None


def test_a_connection_of_nobody_here_is_not_found(pair: Pair) -> None:
    local, _ = ends(pair.server)
    assert found(FdLookup(), local, address(("127.0.0.1", 1))) is None


def test_what_was_closed_is_forgotten_at_the_next_look(pair: Pair) -> None:
    lookup = FdLookup()
    for _ in range(50):
        with connected("tcp") as other:
            assert found(lookup, *ends(other.server)) is not None
    assert found(lookup, *ends(pair.server)) is not None
    assert len(lookup._found) < 20


@pytest.mark.parametrize(
    ("end", "host", "port"),
    [
        (("127.0.0.1", "8000"), "127.0.0.1", 8000),
        (["::ffff:127.0.0.1", 8000, 0, 0], "127.0.0.1", 8000),
        (("::1", 8000), "::1", 8000),
    ],
)
def test_an_address_reads_as_a_server_writes_it(end: object, host: str, port: int) -> None:
    assert address(end) == (host, port)


@pytest.mark.parametrize(
    "end",
    [
        None,
        ("127.0.0.1", 0),
        ("/run/socket", None),
        ("testclient", 50000),
        "127.0.0.1:80",
        ("::1",),
    ],
)
def test_what_is_no_end_of_a_connection_is_none(end: object) -> None:
    assert address(end) is None


def test_a_connection_that_was_closed_is_lost_until_its_ends_meet_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lookup = FdLookup()
    with connected("tcp") as pair, connected("tcp") as other:
        local, peer = ends(pair.server)
        others = ends(other.server)
        assert found(lookup, local, peer) is not None
        pair.server.close()
        assert found(lookup, *others) is not None  # which looks again, or does not
        assert found(lookup, local, peer) is None
        assert lookup.has_lost(local, peer)  # type: ignore[arg-type]
        assert not lookup.has_lost(*others)  # type: ignore[arg-type]
        server = os.fstat(other.server.fileno()).st_ino
        back = [((local, peer), SocketFd(other.server.fileno(), server))]
        monkeypatch.setattr("disconnect_watch.adapters.fdlookup._connections", lambda: back)
        assert found(lookup, local, peer) is not None
        assert not lookup.has_lost(local, peer)  # type: ignore[arg-type]


def test_looking_changes_no_socket(pair: Pair) -> None:
    """Python's own way, ``socket(fileno=...)``, would set a default timeout's flag."""
    socket.setdefaulttimeout(5)
    try:
        pair.server.settimeout(None)
        assert found(FdLookup(), *ends(pair.server)) is not None
        assert os.get_blocking(pair.server.fileno())
    finally:
        socket.setdefaulttimeout(None)
