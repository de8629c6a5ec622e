"""How clients of HTTP leave, and what each of them did before."""

from collections.abc import Callable
from dataclasses import dataclass

from disconnect_watch.testing import Way as Leave

__all__ = ["NUM_BODY_BYTES", "WAYS", "Way"]

NUM_BODY_BYTES = 256 << 10
_LEAVES = ("wait", "half", "stream")


def _requests(number: int) -> Callable[[str], bytes]:
    return lambda path: f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode() * number


@dataclass(frozen=True, slots=True)
class Way:
    """What a client does, from its request on.

    Attributes:
        title: what the reader of the table sees.
        leave: the last thing.
        behind: what it sends behind its request, given the path for further requests.
        first: how it half-leaves before.
        num_body_bytes: of its request.
        reads: whether it reads what came of the answer; if not, some of it has come.
        kinds: of answers that it can leave so, see ``work``; "head" is none, of no request.
        is_tls_only: there is no such thing without TLS.
    """

    title: str
    leave: Leave = Leave.FIN
    behind: Callable[[str], bytes] | None = None
    first: Leave | None = None
    num_body_bytes: int = 0
    reads: bool = True
    kinds: tuple[str, ...] = _LEAVES
    is_tls_only: bool = False

    @property
    def is_leave(self) -> bool:
        """Whether a request is left; if not, nobody is to be told."""
        return not set(self.kinds) & {"head", "quick", "last"}


def _stray_line(path: str) -> bytes:
    return b"\r\n"


WAYS: dict[str, Way] = {
    "fin": Way("FIN"),
    "rst": Way("RST", Leave.RST),
    "half_close": Way("half-close", Leave.HALF_CLOSE),
    "half_close_rst": Way("half-close, then RST", Leave.RST, first=Leave.HALF_CLOSE),
    "close_notify": Way("close_notify and FIN", Leave.CLOSE_NOTIFY, is_tls_only=True),
    "fin_crlf": Way("FIN behind a stray CRLF", behind=_stray_line),
    "rst_crlf": Way("RST behind a stray CRLF", Leave.RST, _stray_line),
    "fin_get": Way("FIN behind a pipelined GET", behind=_requests(1)),
    "rst_get": Way("RST behind a pipelined GET", Leave.RST, _requests(1)),
    "fin_40": Way("FIN behind 40 pipelined GETs", behind=_requests(40)),
    "rst_40": Way("RST behind 40 pipelined GETs", Leave.RST, _requests(40)),
    "fin_body": Way("FIN behind 256 KiB of unread body", num_body_bytes=NUM_BODY_BYTES),
    "rst_body": Way("RST behind 256 KiB of unread body", Leave.RST, num_body_bytes=NUM_BODY_BYTES),
    "unread": Way("close with answer bytes unread", reads=False, kinds=("half", "stream")),
    "full_send": Way("close while the send buffer is full", reads=False, kinds=("flood",)),
    "mid_head": Way("FIN inside the request's head", kinds=("head",)),
    "between": Way("FIN between two requests", kinds=("quick",)),
    "last_byte": Way("FIN right after the last byte", kinds=("last",)),
}
