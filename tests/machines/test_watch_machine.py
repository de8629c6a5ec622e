"""Connections and watches under random use, against a model of the rules in ``dw_watch.h``.

A client may leave while the watcher has not looked yet, so that what follows races
with the news. The model then holds both outcomes for possible until it is told.
"""

import os
import socket
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    precondition,
    rule,
)

from disconnect_watch import CancelToken, Reason, StaleWatchError, Watcher
from disconnect_watch.watcher import MASK_ANY, MASK_GONE, Connection, Event
from tests.support.net import KINDS, LEAVES, Pair, connected, wait_until

pytestmark = pytest.mark.slow

MASKS = {MASK_ANY: set(Reason), MASK_GONE: set(Reason) - {Reason.FIN}}
OWNERS_WORDS = (Reason.FIN, Reason.RESET, Reason.TIMED_OUT, Reason.OWNER_CLOSED)


@dataclass(eq=False)
class ModelWatch:
    """One request's interest; every watch has a token, so that its state can be read."""

    watch_id: int
    token: CancelToken
    mask: int
    cookie: int
    wants_mail: bool
    reason: Reason | None = None
    is_delivered: bool = False


@dataclass(eq=False)
class ModelConnection:
    """What the watcher must know, and what the kernel may still tell it.

    Attributes:
        pending: a leave that the watcher may or may not have heard of by now.
        num_under_way: events that may reach it when the connection is gone.
    """

    pair: Pair
    conn: Connection
    watches: list[ModelWatch] = field(default_factory=list)
    used_ids: set[int] = field(default_factory=set)
    seen: list[Reason] = field(default_factory=list)
    sources: set[str] = field(default_factory=set)
    pending: Reason | None = None
    num_under_way: int = 0
    has_fd: bool = True
    is_blind: bool = False
    has_ended: bool = False

    def reason_for(self, mask: int) -> Reason | None:
        """What a watch armed now fires with: the first word if it may, else the gravest."""
        wanted = [reason for reason in self.seen if reason in MASKS[mask]]
        if not wanted or self.seen[0] in wanted:
            return wanted[0] if wanted else None
        return max(wanted, key=lambda reason: reason.code)


class WatchMachine(RuleBasedStateMachine):
    """Clients come and leave, requests arm and disarm, and every count agrees throughout."""

    poller = "epoll"
    is_loop_driven = False

    connections = Bundle("connections")

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.watcher = self.stack.enter_context(
            Watcher(poller=self.poller, driver="loop" if self.is_loop_driven else "thread")
        )
        self.mailbox = self.watcher.mailbox()
        self.stack.callback(self.mailbox.close)
        self.attached: list[ModelConnection] = []
        self.num_cookies = 0
        self.num_fired = 0
        self.num_second = 0
        self.signals: Counter[Reason] = Counter()
        #: Ends that came as their connection was detached: counted or stale.
        self.maybe_signals: Counter[Reason] = Counter()
        self.maybe_second = 0
        self.maybe_stale = 0

    def teardown(self) -> None:
        for connection in self.attached:
            connection.conn.detach()
        self.stack.close()

    # What the machine does.

    # Few at a time, so that much happens to each.
    @precondition(lambda self: len(self.attached) < 3)
    @rule(target=connections, kind=st.sampled_from(KINDS))
    def connect(self, kind: str) -> ModelConnection:
        pair = self.stack.enter_context(connected(kind))
        connection = ModelConnection(pair, self.watcher.attach(pair.server))
        self.attached.append(connection)
        return connection

    @rule(connection=connections, mask=st.sampled_from(sorted(MASKS)), wants_mail=st.booleans())
    def arm(self, connection: ModelConnection, mask: int, wants_mail: bool) -> None:
        self.num_cookies += 1
        token = CancelToken()
        watch_id = connection.conn.arm(
            token,
            mask=mask,
            mailbox=self.mailbox if wants_mail else None,
            cookie=self.num_cookies,
        )
        assert watch_id not in connection.used_ids
        connection.used_ids.add(watch_id)
        watch = ModelWatch(watch_id, token, mask, self.num_cookies, wants_mail)
        connection.watches.append(watch)
        reason = connection.reason_for(mask)
        if reason:
            self.fire(watch, reason)

    @rule(
        connection=connections,
        way=st.sampled_from(["fin", "half_close", "rst", "fin_behind_data"]),
        settles=st.booleans(),
    )
    def leave(self, connection: ModelConnection, way: str, settles: bool) -> None:
        if connection.has_ended or not connection.has_fd:
            return
        # Two leaves that nobody looked at in between may be told as one.
        self.settle(connection)
        if Reason.FIN in connection.seen and way != "rst":
            return
        how = LEAVES[way]
        is_half = way == "half_close"
        connection.pair.leave(way)
        connection.has_ended = not is_half
        connection.pending = how.reason
        connection.num_under_way += 1
        connection.is_blind = (self.poller, connection.pair.kind) in how.blind
        if settles:
            self.settle(connection)

    @rule(connection=connections)
    def read(self, connection: ModelConnection) -> None:
        """The owner reads what hid the end of stream from a poller that peeks."""
        if connection.is_blind:
            assert connection.pair.server.recv(1000)
            connection.is_blind = False
            connection.num_under_way += 1  # that it is blind no more

    @rule(connection=connections, reason=st.sampled_from(OWNERS_WORDS))
    def lose(self, connection: ModelConnection, reason: Reason) -> None:
        self.settle(connection)
        assert connection.conn.lost(reason) == (not connection.seen)
        self.tell(connection, reason, "owner")

    @precondition(lambda self: any(connection.watches for connection in self.attached))
    @rule(data=st.data())
    def disarm(self, data: st.DataObject) -> None:
        connection = data.draw(st.sampled_from([c for c in self.attached if c.watches]))
        watch = data.draw(st.sampled_from(connection.watches))
        has_fired = connection.conn.disarm(watch.watch_id)
        connection.watches.remove(watch)
        self.close_watch(connection, watch)
        assert has_fired == (watch.reason is not None)
        with pytest.raises(StaleWatchError):
            connection.conn.disarm(watch.watch_id)

    @rule(connection=consumes(connections))
    def detach(self, connection: ModelConnection) -> None:
        connection.conn.detach()
        self.attached.remove(connection)
        for watch in connection.watches:
            self.close_watch(connection, watch)
        self.maybe_stale += connection.num_under_way
        if connection.pending and not connection.is_blind:
            if not connection.seen:
                self.maybe_signals[connection.pending] += 1
            elif "kernel" not in connection.sources:
                self.maybe_second += 1
        connection.pair.close()

    @rule(target=connections, connection=connections, kind=st.sampled_from(KINDS))
    def reuse(self, connection: ModelConnection, kind: str) -> object:
        """The owner closes its socket and tells nobody; another gets the fd number."""
        if not connection.has_fd:
            return multiple()
        self.settle(connection)
        self.maybe_stale += connection.num_under_way
        number = connection.pair.server.detach()
        pair = self.stack.enter_context(connected(kind))
        fd = pair.server.detach()
        os.dup2(fd, number, inheritable=False)  # closes the first one's socket
        os.close(fd)
        pair.server = socket.socket(fileno=number)
        successor = ModelConnection(pair, self.watcher.attach(number))
        self.attached.append(successor)
        connection.has_fd = False
        connection.is_blind = False
        connection.pending = None
        self.tell(connection, Reason.OWNER_CLOSED, "kernel")
        return successor

    @rule()
    def drain(self) -> None:
        self.turn()
        for event in self.mailbox.drain():
            self.deliver(event)

    @rule()
    def settle_all(self) -> None:
        for connection in self.attached:
            self.settle(connection)

    # What the rules have in common.

    def turn(self) -> None:
        if self.is_loop_driven:
            self.watcher.poll()

    def settle(self, connection: ModelConnection) -> None:
        """Wait until the watcher knows what the kernel knows, and have the model know it."""
        reason = connection.pending
        if reason is None:
            return

        def is_told() -> bool:
            self.turn()
            info = connection.conn.info()
            return info.is_blind if connection.is_blind else reason in info.seen

        wait_until(is_told)
        if not connection.is_blind:
            connection.pending = None
            connection.num_under_way = 0
            self.tell(connection, reason, "kernel")

    def tell(self, connection: ModelConnection, reason: Reason, source: str) -> None:
        if not connection.seen:
            self.signals[reason] += 1
        elif source not in connection.sources:
            self.num_second += 1
        connection.sources.add(source)
        connection.seen.append(reason)
        for watch in connection.watches:
            if watch.reason is None and reason in MASKS[watch.mask]:
                self.fire(watch, reason)

    def fire(self, watch: ModelWatch, reason: Reason) -> None:
        watch.reason = reason
        self.num_fired += 1

    def may_fire(self, connection: ModelConnection, watch: ModelWatch) -> bool:
        return (
            watch.reason is None
            and connection.pending is not None
            and not connection.is_blind
            and connection.pending in MASKS[watch.mask]
        )

    def close_watch(self, connection: ModelConnection, watch: ModelWatch) -> None:
        """The watch is over, and what its token says is final."""
        if self.may_fire(connection, watch) and watch.token.cancelled:
            assert connection.pending is not None
            self.fire(watch, connection.pending)
        assert watch.token.reason == watch.reason

    def deliver(self, event: Event) -> None:
        """An event names a live watch that fired and has not been delivered."""
        ((connection, watch),) = [
            (connection, watch)
            for connection in self.attached
            for watch in connection.watches
            if watch.cookie == event.cookie
        ]
        assert watch.wants_mail
        assert not watch.is_delivered
        watch.is_delivered = True
        assert event.watch_id == watch.watch_id
        if self.may_fire(connection, watch):
            assert event.reason is connection.pending
        else:
            assert event.reason is watch.reason

    # What holds at all times.

    @invariant()
    def tokens_agree(self) -> None:
        for connection in self.attached:
            for watch in connection.watches:
                reason = watch.token.reason
                if self.may_fire(connection, watch):
                    assert reason in (None, connection.pending)
                else:
                    assert reason == watch.reason

    @invariant()
    def counts_agree(self) -> None:
        if any(c.pending and not c.is_blind for c in self.attached):
            return
        stats = self.watcher.stats()
        watches = [watch for connection in self.attached for watch in connection.watches]
        assert stats.num_connections == len(self.attached)
        assert stats.num_armed == sum(watch.reason is None for watch in watches)
        assert stats.num_fired == self.num_fired
        assert 0 <= stats.num_second_sources - self.num_second <= self.maybe_second
        for reason in Reason:
            more = stats.num_signals[reason] - self.signals[reason]
            assert 0 <= more <= self.maybe_signals[reason], reason
        assert stats.num_stale_events <= self.maybe_stale

    @invariant()
    def connections_agree(self) -> None:
        for connection in self.attached:
            if connection.pending:
                continue
            info = connection.conn.info()
            assert info.seen == set(connection.seen)
            assert info.reason == (connection.seen[0] if connection.seen else None)

    @invariant()
    def mail_arrives(self) -> None:
        if any(connection.pending for connection in self.attached):
            return
        for event in self.mailbox.drain():
            self.deliver(event)
        for connection in self.attached:
            for watch in connection.watches:
                assert watch.is_delivered == (watch.wants_mail and watch.reason is not None)


class LoopWatchMachine(WatchMachine):
    is_loop_driven = True


class PollWatchMachine(WatchMachine):
    poller = "poll"


BOUNDED = settings(max_examples=40, stateful_step_count=40, deadline=None)


TestEpollThread = WatchMachine.TestCase
TestEpollThread.settings = BOUNDED
TestEpollLoop = LoopWatchMachine.TestCase
TestEpollLoop.settings = BOUNDED
TestPollThread = PollWatchMachine.TestCase
TestPollThread.settings = BOUNDED
