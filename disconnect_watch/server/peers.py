"""Other frontends before the same engines, as one of them sees them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from disconnect_watch.keys import Caller
from disconnect_watch.server.cancel import Cancelled

if TYPE_CHECKING:
    from disconnect_watch.server.frontend import Frontend
    from disconnect_watch.server.metrics import Metrics

__all__ = ["Peers"]


class Peers(Protocol):
    """What a frontend asks the others, since a client may come to any of them.

    Threads: the loop's only.
    """

    def attach(self, frontend: "Frontend", metrics: "Metrics") -> None:
        """Answer the others about this frontend from now on."""

    async def metrics(self) -> bytes:
        """The metrics of all processes together, as text."""

    async def take(self, caller: str, num: int, *, weight: float) -> None:
        """Count cancels by id, wherever they are asked for; see ``RateLimit.take``."""

    async def cancel(
        self, caller: Caller, names: Sequence[str], *, wait: float
    ) -> dict[str, Cancelled]:
        """Cancel what the others know of these, by name; what none knows is not in the answer."""

    async def cancel_all(self, *, wait: float) -> list[Cancelled]:
        """Cancel all that runs in the others."""

    async def cancel_response(self, caller: Caller, response_id: str, *, wait: float) -> None:
        """Cancel a response that another generates, if one does; its end is stored then."""
