"""How often somebody may do something."""

import math
import time
from collections.abc import Callable

from disconnect_watch.server.errors import RequestError

__all__ = ["RateLimit", "TooManyError"]

#: Callers whose balance is remembered; there are as many as keys, so this is never reached.
MAX_CALLERS = 10_000


class TooManyError(RequestError):
    """Too often; later it is not.

    Attributes:
        headers: say when.
    """

    status = 429

    def __init__(self, message: str, *, retry_after: float) -> None:
        super().__init__(message)
        self.headers = {"retry-after": str(math.ceil(retry_after))}


class RateLimit:
    """A bucket of tokens for each caller, which fills at a steady rate.

    Args:
        rate: tokens a second.
        burst: tokens in a full bucket.
        clock: seconds.
    """

    def __init__(
        self, rate: float, *, burst: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rate = rate
        self._burst = burst
        self._clock = clock
        self._balances: dict[str, tuple[float, float]] = {}

    def take(self, caller: str, num: int = 1, *, weight: float = 1.0) -> None:
        """Take so many tokens, or none.

        Args:
            weight: of one who may do it so many times as often.

        Raises:
            TooManyError: so many are not there.
        """
        now = self._clock()
        balance, since = self._balances.pop(caller, (self._burst, now))
        balance = min(self._burst, balance + (now - since) * self._rate)
        cost = num / weight
        is_enough = cost <= balance
        # Put back last, so that the first is who was not heard of for longest.
        self._balances[caller] = (balance - cost if is_enough else balance, now)
        if len(self._balances) > MAX_CALLERS:
            del self._balances[next(iter(self._balances))]
        if not is_enough:
            raise TooManyError(
                f"{num} cancels are too many now, at most {self._rate:g} a second are taken",
                retry_after=(cost - balance) / self._rate,
            )
