"""Which requests there are, whose they are, and how those ended that are over.

A request is found by the id that the server minted, by that of the response that it made, or by
the name that its client gave it in ``X-Request-Id``, which only that client's own requests are
looked for by. Ids are compared whole.
"""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

from disconnect_watch.keys import Caller
from disconnect_watch.server.access import RequestRecord
from disconnect_watch.token import Reason

__all__ = ["AmbiguousNameError", "RequestLedger"]

#: Requests that are over and still known of.
MAX_ENDED = 4096


class AmbiguousNameError(LookupError):
    """Several live requests of a client have the name that it gave."""


class RequestLedger:
    """Live requests, and the last that ended.

    Attributes:
        signals: how often requests were asked to end by other means than their connections; a
            request counts once for each.

    Threads: the loop's only.
    """

    def __init__(self) -> None:
        self._live: dict[str, RequestRecord] = {}
        self._ended: OrderedDict[str, RequestRecord] = OrderedDict()
        # By owner and name: ids, the latest last.
        self._named: dict[tuple[str, str], list[str]] = {}
        self.signals: Counter[Reason] = Counter()

    def begin(self, record: RequestRecord) -> None:
        """Take a request that begins; its owner and name are known by now."""
        self._live[record.request_id] = record
        if record.client_id:
            self._named.setdefault((record.owner, record.client_id), []).append(record.request_id)

    def hand_over(self, record: RequestRecord, to: RequestRecord) -> None:
        """A live request goes on as another record of the same id, owner and name.

        What ends then is only its client's part in it.
        """
        self._live[record.request_id] = to
        to.waiters, record.waiters = record.waiters, []
        to.signals |= record.signals

    def end(self, record: RequestRecord) -> None:
        """A request is over: whoever waits for that is told. One handed over is not."""
        if not self.is_live(record):
            return
        del self._live[record.request_id]
        self._ended[record.request_id] = record
        if len(self._ended) > MAX_ENDED:
            self._forget(self._ended.popitem(last=False)[1])
        for waiter in record.waiters:
            if not waiter.done():
                waiter.set_result(None)
        record.waiters.clear()

    def is_live(self, record: RequestRecord) -> bool:
        """Whether it has begun and is not over."""
        return self._live.get(record.request_id) is record

    def live(self) -> list[RequestRecord]:
        """All that have begun and are not over."""
        return list(self._live.values())

    def find(self, caller: Caller, name: str) -> RequestRecord | None:
        """The request of that id or name, if the caller may know of it.

        Of several with one name it is the live one, else the latest.

        Raises:
            AmbiguousNameError: more than one of them is live.
        """
        # A response of /v1/responses is the request that it was made by.
        request_id = name.removeprefix("resp_")
        record = self._live.get(request_id) or self._ended.get(request_id)
        if record is not None and (caller.is_admin or record.owner == caller.name):
            return record
        ids = self._named.get((caller.name, name), [])
        live = [self._live[request_id] for request_id in ids if request_id in self._live]
        if len(live) > 1:
            raise AmbiguousNameError(f"{len(live)} live requests have this name")
        if live:
            return live[0]
        return self._ended[ids[-1]] if ids else None

    def signal(self, record: RequestRecord, reason: Reason) -> None:
        """Count that a request was asked to end; what comes of it, its outcome tells."""
        if reason not in record.signals:
            record.signals |= {reason}
            self.signals[reason] += 1

    @contextmanager
    def deadline(self, record: RequestRecord, timeout: float | None = None) -> Iterator[None]:
        """Cancel a request when its time is over, for what does not look at the time itself.

        Args:
            timeout: seconds from its beginning, beside the limit that the record has.
        """
        left = record.time_left(timeout)
        if left is None:
            yield
            return

        def expire() -> None:
            if not self.is_live(record):
                return  # What it was handed over to has a deadline of its own.
            self.signal(record, Reason.DEADLINE)
            record.token.cancel(Reason.DEADLINE)

        handle = asyncio.get_running_loop().call_later(left, expire)
        try:
            yield
        finally:
            handle.cancel()

    async def wait_ended(self, record: RequestRecord) -> None:
        """Wait until a request is over."""
        if self.is_live(record):
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            record.waiters.append(waiter)
            await waiter

    def _forget(self, record: RequestRecord) -> None:
        if not record.client_id:
            return
        key = (record.owner, record.client_id)
        self._named[key].remove(record.request_id)
        if not self._named[key]:
            del self._named[key]
