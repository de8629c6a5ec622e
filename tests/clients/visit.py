"""One client that leaves: what it asked for, what it did, and what the server heard of it."""

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from tests.support.net import wait_until
from tests.support.serve import Client
from tests.support.upstream import Call, Upstream

__all__ = ["CASES", "ENDED", "PATIENCE", "Case", "Visit", "case"]

#: Seconds that clients are told to have patience for: enough for the request to arrive.
PATIENCE = 0.5

#: How a connection ends that is closed while its client may not have read all.
ENDED = ("FIN", "RESET")


class Visit:
    """A client's visit to a server, which it does not wait out.

    Attributes:
        base: the server's URL.
        url: of the answer that the case asks for.
        news: what happened, in order; for the table.
    """

    def __init__(self, server: Upstream, answer: str, *, scheme: str = "http") -> None:
        self._server = server
        self._num_before = len(server.calls)
        self.base = f"{scheme}://127.0.0.1:{server.port}"
        self.url = self.base + server.name(answer)
        self.news: list[str] = []

    def calls(self) -> list[Call]:
        """The requests that have reached the server, pages not counted."""
        calls = self._server.calls[self._num_before :]
        return [call for call in calls if call.path != "/page"]

    def call(self, number: int = 0) -> Call:
        """The request of that number, as soon as the server has it."""
        wait_until(lambda: len(self.calls()) > number)
        return self.calls()[number]

    def is_noticed(self, *reasons: str, number: int = 0) -> None:
        """The server hears of it now, and stops."""
        call = self.call(number)
        wait_until(lambda: call.token.cancelled)
        assert call.reason in (reasons or ("FIN",)), call
        wait_until(lambda: call.outcome == "stopped")
        self.news.append(call.reason)

    def is_unnoticed(self, because: str) -> None:
        """The server works on, since the client keeps the connection.

        What was on its way when another client asked has been seen when that one is answered.
        """
        call = self.call()
        with Client(self._server.port) as other:
            other.post("/page", b"")
            assert other.read_response()[0] == 200
        assert not call.token.cancelled, call
        assert not call.outcome
        self.news.append(f"not at once: {because}")

    def is_answered(self) -> None:
        """The server may finish, and does."""
        call = self.call()
        call.may_finish.set()
        wait_until(lambda: call.outcome)
        assert call.outcome == "whole", call
        self.news.append("the whole answer")

    def then(self, what: str) -> None:
        """What the client does next, for the table."""
        self.news.append(f"then {what}:")


@dataclass(frozen=True, slots=True)
class Case:
    """One way in which one client leaves.

    Attributes:
        act: does it, and says at which point the server hears of it.
        title: what the reader of the table sees.
        answer: what the client asks for.
        scheme: "http" or "https".
        needs: names of what must be here, of ``tests.clients.tools``.
    """

    client: str
    title: str
    act: Callable[[Visit], None] | Callable[[Visit], Coroutine[Any, Any, None]]
    answer: str
    scheme: str
    needs: tuple[str, ...]

    def __str__(self) -> str:
        return self.act.__name__


#: In the order of their definition, which is that of the table.
CASES: list[Case] = []


def case(
    client: str,
    title: str,
    *,
    answer: str = "wait",
    scheme: str = "http",
    needs: tuple[str, ...] = (),
) -> Callable[[Any], Any]:
    """Enters the function into the table."""

    def enter(act: Any) -> Any:
        CASES.append(Case(client, title, act, answer, scheme, needs))
        return act

    return enter
