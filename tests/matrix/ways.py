"""The ways to leave, and what is taken for one and is none: one table."""

from dataclasses import dataclass

from tests.matrix.leaver import GET, LARGE_BODY, NUM_SEGMENTS, SEGMENT

__all__ = ["KINDS", "PIPE_KINDS", "TCP_KINDS", "TLS_KINDS", "WAYS", "Way"]

TLS_KINDS = ("tls12", "tls13")
#: The write end, as a bare fd and as an event loop's transport.
PIPE_KINDS = ("pipe", "pipe_transport")
KINDS = ("tcp", "tcp6", *TLS_KINDS, "unix", *PIPE_KINDS)
TCP_KINDS = ("tcp", "tcp6", *TLS_KINDS)
_SOCKETS = (*TCP_KINDS, "unix")


@dataclass(frozen=True, slots=True)
class Way:
    """What the two ends do, and what that is to be called where it can be seen.

    Attributes:
        title: what the reader of the table sees.
        act: what the client does at last, of ``leaver.ACTS``.
        outcome: "FIN", "RESET", or "silent" where nobody left.
        first: what the client does before; nobody may take it for a leave.
        when: "watched", or before "accept", "attach" or the second "request".
        server: what the server does before: "send", "fill", "shut_rd", "probe".
        unread: bytes, as the client counts them, that lie unread when it left.
        is_window_full: its last bytes and its FIN are still at the client.
        is_client: our end is the one that connected.
        kinds: what it can be done with.
    """

    title: str
    act: str
    outcome: str
    first: str | None = None
    when: str = "watched"
    server: str | None = None
    unread: int = 0
    is_window_full: bool = False
    is_client: bool = False
    kinds: tuple[str, ...] = _SOCKETS


WAYS: dict[str, Way] = {
    "fin": Way("FIN", "fin", "FIN", kinds=KINDS),
    "rst": Way("RST", "rst", "RESET"),
    "fin_1": Way("FIN behind 1 unread byte", "fin_1", "FIN", unread=1),
    "fin_get": Way("FIN behind a pipelined GET", "fin_get", "FIN", unread=len(GET)),
    "rst_get": Way("RST behind a pipelined GET", "rst_get", "RESET", unread=len(GET)),
    "fin_40": Way("FIN behind 40 pipelined requests", "fin_40", "FIN", unread=40 * len(GET)),
    "rst_40": Way("RST behind 40 pipelined requests", "rst_40", "RESET", unread=40 * len(GET)),
    "fin_300k": Way("FIN behind 300 KB of body", "fin_300k", "FIN", unread=len(LARGE_BODY)),
    "rst_300k": Way("RST behind 300 KB of body", "rst_300k", "RESET", unread=len(LARGE_BODY)),
    "fin_window": Way(
        "FIN behind a full receive window",
        "fin_window",
        "FIN",
        unread=1,
        is_window_full=True,
        kinds=TCP_KINDS,
    ),
    "rst_window": Way(
        "RST behind a full receive window", "rst_window", "RESET", unread=1, kinds=TCP_KINDS
    ),
    "half_close": Way("half-close", "half_close", "FIN"),
    "half_close_fin": Way("half-close, then close", "half_close_fin", "FIN"),
    "half_close_rst": Way("half-close, then RST", "half_close_rst", "FIN or RESET"),
    "close_notify_fin": Way(
        "close_notify and FIN", "close_notify_fin", "FIN", unread=1, kinds=TLS_KINDS
    ),
    "fin_unread": Way(
        "close with response bytes unread", "fin_unread", "RESET", server="send", kinds=KINDS
    ),
    "full_send": Way(
        "close while the server's send buffer is full",
        "fin_unread",
        "RESET",
        server="fill",
        kinds=KINDS,
    ),
    "before_accept": Way(
        "FIN before accept", "fin", "FIN", when="accept", kinds=("tcp", "tcp6", "unix")
    ),
    "before_attach": Way("FIN before attach", "fin", "FIN", when="attach", kinds=KINDS),
    "between": Way("FIN between two requests", "fin", "FIN", when="request", kinds=KINDS),
    "killed": Way("process killed", "killed", "FIN", kinds=KINDS),
    "child": Way(
        "closed, but open in a forked child; then that ends",
        "end_child",
        "FIN",
        first="leave_it_to_child",
        kinds=KINDS,
    ),
    "close_notify": Way(
        "close_notify, TCP left open", "close_notify", "silent", unread=1, kinds=TLS_KINDS
    ),
    "shut_rd": Way(
        "own SHUT_RD", "stay", "silent", server="shut_rd", kinds=("tcp", "tcp6", "unix")
    ),
    "urgent": Way("an out-of-band byte", "urgent", "silent", kinds=TCP_KINDS),
    "segments": Way(
        "20 data segments",
        "segments",
        "silent",
        unread=NUM_SEGMENTS * len(SEGMENT),
    ),
    "probes": Way(
        "keep-alive probes", "answer_probe", "silent", server="probe", kinds=("tcp", "tls13")
    ),
    "tickets": Way(
        "TLS session tickets after the handshake",
        "stay",
        "silent",
        unread=1,
        is_client=True,
        kinds=("tls13",),
    ),
    "slow_reader": Way("a client that does not read", "stay", "silent", server="fill", kinds=KINDS),
}
