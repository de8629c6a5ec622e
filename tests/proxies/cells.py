"""Which leaves reach the server behind which proxy: one table.

It holds for the versions of Debian 12 (nginx 1.22, HAProxy 2.6, Caddy 2.6). Where a proxy
says nothing of a leave, the server has no way to know of it.
"""

from dataclasses import dataclass

from tests.proxies.programs import FRONTS

__all__ = ["ANSWERS", "WAYS", "Cell", "all_cells"]

#: How far the answer is when its client leaves.
ANSWERS = {
    "wait": "nothing of the answer sent yet",
    "half": "half of a body of known length sent",
    "stream": "an event stream that goes on",
}

#: What the client does. A close is a FIN, as of a process that was killed.
WAYS = {
    "fin": "close",
    "rst": "reset",
    "half_close": "half-close",
    "pipelined": "close behind a pipelined request",
    "rst_stream": "RST_STREAM",
}
_H1_WAYS = ("fin", "rst", "half_close", "pipelined")
_H2_WAYS = ("fin", "rst", "rst_stream")

#: Who hears of a leave at the next write only: not at all of a half-close, and of nothing
#: while there is nothing to write.
_ONLY_BY_WRITING = ("nginx-ignore", "haproxy", "caddy-flush")

_NEVER = {
    *(
        (front, answer, way)
        for front in _ONLY_BY_WRITING
        for answer in ("wait", "half")
        for way in _H1_WAYS
    ),
    *((front, "stream", "half_close") for front in _ONLY_BY_WRITING),
    # Go's server looks for the FIN by reading one byte ahead, and finds the next request.
    ("caddy", "wait", "pipelined"),
    ("caddy", "half", "pipelined"),
}

#: The FIN of a whole HTTP/2 connection is a half-close of each stream to HAProxy; in some
#: runs an error of the connection.
_MAYBE = {("haproxy-h2", "wait", "fin"), ("haproxy-h2", "half", "fin")}


@dataclass(frozen=True, slots=True)
class Cell:
    """One leave through one front."""

    front: str
    answer: str
    way: str

    def __str__(self) -> str:
        return f"{self.front}-{self.answer}-{self.way}"

    @property
    def is_noticed(self) -> bool:
        """Whether the server must hear of it."""
        return self._key not in _NEVER | _MAYBE

    def accepts(self, reason: str) -> bool:
        """Whether the server may say that; the proxy closes its end by FIN or by a reset."""
        return bool(reason) is self.is_noticed or self._key in _MAYBE

    @property
    def _key(self) -> tuple[str, str, str]:
        return self.front, self.answer, self.way


def all_cells() -> list[Cell]:
    return [
        Cell(key, answer, way)
        for key, front in FRONTS.items()
        for answer in ANSWERS
        for way in (_H2_WAYS if front.is_h2 else _H1_WAYS)
    ]
