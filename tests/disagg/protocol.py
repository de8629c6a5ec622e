"""The protocol of prefill and decode as a state machine, around the real store.

The actors are a client, a proxy, a prefill node P, whose blocks a real ``RetainedStore`` keeps,
and a decode node D. Between them are messages, of which any may be delivered next, so that all
orders are tried; one may be lost, or delivered twice. At every step a client may leave, a node or
the proxy may crash, and a lease may run out.

What P holds is known here without asking the store. The rules, checked at every step:

- blocks are freed once, and not while P copies from them;
- P copies what the ticket was made for, in the same life of P, and the end of a copy is good only
  if nobody had released it;
- blocks that are held are in the store.

And those of every state that can be reached, checked from there on in ``silence`` and ``calm``.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from disconnect_watch.disagg import (
    Pull,
    ReleaseKind,
    RetainedStore,
    TransferError,
    TransferMeta,
)
from tests.disagg.words import Action, Faults, Held, Kind, Message, Request

__all__ = ["World"]

LEASE_NS = 10


class World:
    """All actors, in one state."""

    def __init__(self, num_requests: int, faults: Faults) -> None:
        self.faults = faults
        self.now = 0
        self.life = 0
        self.requests = [Request() for _ in range(num_requests)]
        self.messages: list[Message] = []
        self.held: list[Held] = []
        self.pulls: dict[int, Pull] = {}
        self.is_clean = True
        self._start_store()

    def _start_store(self) -> None:
        self.store = RetainedStore(
            len(self.requests), LEASE_NS, lambda: self.now, partial(self._on_free, self.life)
        )

    # What may happen next.

    def actions(self) -> Iterator[Action]:
        """Every step that is possible from here."""
        yield from self.own_actions()
        for message in sorted(set(self.messages)):
            yield Action("deliver", message=message)
            if self.faults.lose:
                yield Action("lose", message=message)
            if self.faults.twice and not message.is_second:
                yield Action("twice", message=message)
        if self.faults.leave:
            for number, request in enumerate(self.requests):
                if not request.has_left and request.proxy != "over":
                    yield Action("leave", number)
        if self.faults.crash:
            yield from (Action(f"crash {who}") for who in "XPD")
        if self.faults.lapse and any(not held.is_free for held in self.held):
            yield Action("lapse")

    def own_actions(self) -> Iterator[Action]:
        """Those that an actor takes by itself."""
        for number, request in enumerate(self.requests):
            if request.proxy == "new":
                yield Action("ask", number)
            if request.prefill == "running":
                yield Action("prefilled", number)
            if request.copied >= 0:
                # It looks between two blocks; one that has seen the last is at its end.
                if request.is_told_to_stop:
                    yield Action("stop", number)
                yield Action("copied", number)
            if request.decode == "queued":
                yield Action("pull", number)
                yield Action("reject", number)

    def take(self, action: Action) -> None:
        """Go one step."""
        name, _, who = action.name.partition(" ")
        message = action.message
        if message is not None:
            self.messages.remove(message)
            if name == "twice":
                self.messages.append(Message(message.kind, message.request, message.transfer, True))
            if name == "lose":
                self.faults.lose -= 1
                self.is_clean = False
            else:
                self.faults.twice -= name == "twice"
                self._deliver(message)
        elif name == "crash":
            self.faults.crash -= 1
            self.is_clean = False
            {"X": self._crash_proxy, "P": self._crash_prefill, "D": self._crash_decode}[who]()
        elif name == "lapse":
            self.faults.lapse -= 1
            self.is_clean = False
            self.lapse()
        else:
            request = self.requests[action.request]
            getattr(self, f"_{name}")(action.request, request)

    # The proxy and its client.

    def _ask(self, number: int, request: Request) -> None:
        request.proxy = "prefilling"
        self._send(Kind.PREFILL, number)

    def _leave(self, number: int, request: Request) -> None:
        self.faults.leave -= 1
        request.has_left = True
        if request.proxy != "new":
            self._send(Kind.CANCEL_P, number)
        if request.proxy == "decoding":
            self._send(Kind.CANCEL_D, number)
        request.proxy = "over"

    def _crash_proxy(self) -> None:
        for number, request in enumerate(self.requests):
            # Both nodes watch the connection on which they are asked.
            if request.proxy == "prefilling":
                self._send(Kind.CANCEL_P, number)
            if request.proxy == "decoding":
                self._send(Kind.CANCEL_D, number)
            request.proxy = "over"

    # The prefill node.

    def _prefilled(self, number: int, request: Request) -> None:
        """Also of who was cancelled: it may have been past its last look."""
        request.prefill = "over"
        blocks = (len(self.held),)
        self.held.append(Held(None, number, self.life, is_free=False))  # type: ignore[arg-type]
        transfer = self.store.retain(str(number), blocks, TransferMeta(str(number)))
        self.held[-1].transfer = transfer
        assert transfer.is_tombstoned is self.held[-1].is_free
        self._send(Kind.TICKET, number, blocks[0])

    def _copied(self, number: int, request: Request) -> None:
        pull = self.pulls.pop(number)
        transfer, request.copied = request.copied, -1
        was_released = request.is_told_to_stop
        request.is_told_to_stop = False
        is_good = pull.finish()
        assert is_good is not was_released, "the end of a copy that was released is no good"
        self._send(Kind.BLOCKS if is_good else Kind.REFUSED, number, transfer)

    def _stop(self, number: int, request: Request) -> None:
        pull = self.pulls.pop(number)
        transfer, request.copied = request.copied, -1
        request.is_told_to_stop = False
        pull.abort()
        self._send(Kind.REFUSED, number, transfer)

    def _tell_to_stop(self, life: int, number: int) -> None:
        if life == self.life:
            self.requests[number].is_told_to_stop = True

    def _on_free(self, life: int, blocks: Sequence[int]) -> None:
        held = self.held[blocks[0]]
        assert life == self.life == held.life, "blocks of another life were freed"
        assert not held.is_free, f"blocks of request {held.request} were freed twice"
        assert self.requests[held.request].copied != blocks[0], "blocks were freed under a copy"
        held.is_free = True

    def lapse(self) -> None:
        """The lease of everything runs out."""
        self.now += LEASE_NS
        self.store.reap(self.now)

    def _crash_prefill(self) -> None:
        self.life += 1
        for held in self.held:
            held.is_free = True
        for number, request in enumerate(self.requests):
            if request.prefill == "running":
                request.prefill = "none"
            if request.copied >= 0:
                self._send(Kind.REFUSED, number, request.copied)
            request.copied, request.is_told_to_stop = -1, False
        self.pulls.clear()
        self._start_store()

    # The decode node.

    def _pull(self, number: int, request: Request) -> None:
        request.decode = "pulling"
        self._send(Kind.PULL, number, request.pulled)

    def _reject(self, number: int, request: Request) -> None:
        request.decode = "over"
        self._send(Kind.RELEASE, number, request.pulled)

    def _crash_decode(self) -> None:
        for number, request in enumerate(self.requests):
            if request.decode == "pulling":
                self._send(Kind.HANG_UP, number, request.pulled)
            if request.decode != "none":
                request.decode = "over"

    # Messages.

    def _send(self, kind: Kind, number: int, transfer: int = -1) -> None:
        self.messages.append(Message(kind, number, transfer))

    def _deliver(self, message: Message) -> None:
        number, transfer = message.request, message.transfer
        request = self.requests[number]
        held = self.held[transfer] if transfer >= 0 else None
        match message.kind:
            case Kind.PREFILL:
                if request.prefill == "none":
                    request.prefill = "running"
            case Kind.TICKET:
                if request.proxy == "prefilling":
                    request.proxy = "decoding"
                    self._send(Kind.DECODE, number, transfer)
            case Kind.DECODE:
                if request.decode == "none":
                    request.decode, request.pulled = "queued", transfer
            case Kind.PULL:
                assert held is not None
                self._begin_pull(number, request, transfer, held)
            case Kind.BLOCKS | Kind.REFUSED:
                if request.decode == "pulling" and request.pulled == transfer:
                    request.decode = "over"
            case Kind.RELEASE:
                assert held is not None
                self.store.release(held.transfer.id, str(number), ReleaseKind.IN_BAND)
            case Kind.HANG_UP:
                if request.copied == transfer:
                    self._stop(number, request)
                else:  # the connection that it was on has not asked yet, and will not
                    self._drop_pull(transfer)
                    assert held is not None
                    self.store.release(held.transfer.id, str(number), ReleaseKind.IN_BAND)
            case Kind.CANCEL_P:
                self.store.tombstone(str(number), str(number))
            case Kind.CANCEL_D:
                self._cancel_decode(number, request)

    def _begin_pull(self, number: int, request: Request, transfer: int, held: Held) -> None:
        try:
            pull = self.store.begin_pull(
                held.transfer.id,
                str(number),
                on_release=partial(self._tell_to_stop, self.life, number),
            )
        except TransferError:
            self._send(Kind.REFUSED, number, transfer)
            return
        assert held.life == self.life, "a ticket of an earlier life was served"
        assert pull.blocks == (transfer,), "a ticket was served with the blocks of another"
        assert not held.is_free, "blocks that are free were served"
        assert request.copied < 0, "one ticket was served twice"
        self.pulls[number] = pull
        request.copied = transfer

    def _drop_pull(self, transfer: int) -> None:
        self.messages = [m for m in self.messages if (m.kind, m.transfer) != (Kind.PULL, transfer)]

    def _cancel_decode(self, number: int, request: Request) -> None:
        if request.decode == "queued":
            self._send(Kind.RELEASE, number, request.pulled)
        elif request.decode == "pulling":
            self._send(Kind.HANG_UP, number, request.pulled)
        # Also of who has not come yet.
        request.decode = "over"

    # What holds of a state.

    def check(self) -> None:
        """Blocks that are held are known to the store, and nothing else is."""
        known = sorted(view.id for view in self.store.view())
        held = sorted(each.transfer.id for each in self.held if not each.is_free)
        assert known == held, "blocks are held that the store does not know"

    def key(self) -> tuple[object, ...]:
        """What tells this state from others; which of two requests is which does not."""
        remembered = self.store._ledger.remembered
        views = {view.id: view for view in self.store.view()}
        parts: list[tuple[object, ...]] = []
        for number, request in enumerate(self.requests):
            mine = [place for place, held in enumerate(self.held) if held.request == number]
            name = (str(number), str(number))
            transfers = []
            for place in mine:
                held = self.held[place]
                view = views.get(held.transfer.id)
                transfers.append(
                    (
                        held.is_free,
                        held.life == self.life,
                        view is not None and (str(view.released), view.is_used),
                        remembered.kind_of((str(number), held.transfer.id)) is not None,
                    )
                )
            place_of = {place: index for index, place in enumerate(mine)} | {-1: -1}
            parts.append(
                (
                    request.has_left,
                    request.proxy,
                    request.prefill,
                    request.decode,
                    place_of[request.copied],
                    place_of[request.pulled],
                    request.is_told_to_stop,
                    remembered.kind_of(name) is not None,
                    name in remembered._tombstones,
                    tuple(transfers),
                    tuple(
                        sorted(
                            (m.kind.value, place_of[m.transfer], m.is_second)
                            for m in self.messages
                            if m.request == number
                        )
                    ),
                )
            )
        left = self.faults
        parts.sort(key=repr)
        return (
            self.is_clean,
            (left.crash, left.lose, left.twice, left.leave, left.lapse),
            *parts,
        )

    def silence(self) -> None:
        """Everybody but P is gone, and every message lost: the leases free all of it."""
        self.messages.clear()
        for _ in range(2):
            self.lapse()
            self._run(lambda: [a for a in self.own_actions() if a.name == "stop"])
        left = [held.request for held in self.held if not held.is_free]
        assert not left, f"blocks of requests {left} are held with nobody to free them"

    def calm(self, num_leaving: int) -> None:
        """Nothing goes wrong any more, but so many clients leave: all is freed, by no lease."""
        self.faults = Faults(leave=num_leaving)
        self._run(lambda: [a for a in self.actions() if a.name == "leave"])
        self.faults = Faults()
        self._run(lambda: list(self.actions()))
        left = [held.request for held in self.held if not held.is_free]
        assert not left, f"blocks of requests {left} wait for their lease"
        assert not self.store.stats().num_released[ReleaseKind.LEASE]

    def _run(self, choices: Callable[[], list[Action]]) -> None:
        while actions := choices():
            self.take(actions[0])
