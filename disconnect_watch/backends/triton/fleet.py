"""Which of several Tritons gets a request, and the cancel of what they have."""

import asyncio
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from disconnect_watch.backends.infer import Code, InferError, InferRequest
from disconnect_watch.backends.sweeper import Sweeper
from disconnect_watch.backends.triton.upstream import Upstream, cancel_call
from disconnect_watch.token import CancelToken

__all__ = ["Fleet"]

#: Sequences whose Triton is known; the one that was idle for longest is forgotten first.
MAX_SEQUENCES = 1 << 16


class Fleet:
    """Tritons that serve the same models.

    A request goes to the one with the fewest that it has not answered, among those that have
    the model ready; of a sequence, to the one that has the sequence.

    Threads: the loop's only.
    """

    def __init__(self, upstreams: Sequence[Upstream]) -> None:
        self.upstreams = tuple(upstreams)
        self._turn = 0
        self._sequences: OrderedDict[tuple[str, int | str], Upstream] = OrderedDict()
        self._live: dict[Any, CancelToken] = {}
        self._sweeper = Sweeper(asyncio.get_running_loop())
        self._sweeper.add(self._cancel_fired)

    def connected(self) -> list[Upstream]:
        """Those that can be asked now.

        Raises:
            InferError: UNAVAILABLE, there is none.
        """
        found = [upstream for upstream in self.upstreams if upstream.is_connected]
        if not found:
            raise self._unreachable()
        return found

    def choose(
        self,
        model: str,
        version: str | None,
        request: InferRequest,
        *,
        tried: Collection[Upstream] = (),
    ) -> Upstream:
        """The Triton for a request.

        Args:
            tried: those that could not be reached for it.

        Raises:
            InferError: UNAVAILABLE, there is none that can be asked, or not for its sequence.
        """
        if not request.sequence_id:
            return self._least(model, version, tried)
        key = (model, request.sequence_id)
        known = None if request.sequence_start else self._sequences.get(key)
        chosen = known or self._least(model, version, tried)
        if not chosen.is_connected or chosen in tried:
            del self._sequences[key]
            raise InferError(
                Code.UNAVAILABLE,
                f"the connection to {chosen.name}, which has sequence {request.sequence_id}, "
                "is lost: begin the sequence again",
            )
        self._sequences.pop(key, None)
        if not request.sequence_end:
            self._sequences[key] = chosen
            if len(self._sequences) > MAX_SEQUENCES:
                self._sequences.popitem(last=False)
        return chosen

    @contextmanager
    def running(self, upstream: Upstream, call: Any, token: CancelToken) -> Iterator[None]:
        """Count a call, and cancel it as soon as the token fires, whoever sleeps then."""
        self._live[call] = token
        upstream.num_outstanding += 1
        try:
            # One that fired before it was among the live has rung for nobody.
            if token.cancelled:
                cancel_call(call)
            yield
        finally:
            del self._live[call]
            upstream.num_outstanding -= 1
            if not call.done():
                call.cancel()

    async def close(self) -> None:
        """Cancel all that runs and close the channels. Idempotent."""
        self._sweeper.remove(self._cancel_fired)
        await asyncio.get_running_loop().run_in_executor(None, self._sweeper.close)
        for call in tuple(self._live):
            cancel_call(call)
        await asyncio.gather(*(upstream.close() for upstream in self.upstreams))

    def _least(self, model: str, version: str | None, tried: Collection[Upstream]) -> Upstream:
        open_ = [one for one in self.upstreams if one.is_connected and one not in tried]
        if not open_:
            raise self._unreachable()
        # Where none has it ready, any can say in Triton's words why not.
        able = [one for one in open_ if one.is_serving(model, version)] or open_
        self._turn += 1
        first = self._turn % len(able)
        return min(able[first:] + able[:first], key=lambda one: one.num_outstanding)

    def _unreachable(self) -> InferError:
        names = ", ".join(upstream.name for upstream in self.upstreams)
        return InferError(
            Code.UNAVAILABLE,
            f"no Triton can be reached, of {names}: the request was not sent, try again later",
        )

    def _cancel_fired(self) -> None:
        for call, token in tuple(self._live.items()):
            if token.cancelled:
                cancel_call(call)
