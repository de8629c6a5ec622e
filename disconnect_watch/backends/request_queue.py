"""Requests that wait for an instance: in which order, how many, how long, how many at once.

Source: Triton's model configuration, "Dynamic Batcher", "Queue Policy" and "Priority
Levels", and the answers of the real one to what it refuses.
"""

from collections.abc import Iterator
from typing import Any

from disconnect_watch.backends.infer import Code, InferError
from disconnect_watch.backends.pending import Pending
from disconnect_watch.backends.validate import prefix_of

__all__ = ["RequestQueue", "expired_error"]


class RequestQueue:
    """The queue of one model.

    Args:
        config: complete and checked. Without ``dynamic_batching`` every request is a batch
            of its own and waits for as long as it takes.

    Attributes:
        is_batching: whether requests may share a batch.
        is_plain: whether they are only served in their order, with no say in when.

    Threads: the loop's only.
    """

    def __init__(self, config: Any) -> None:
        batching = config.dynamic_batching
        self.is_batching = config.HasField("dynamic_batching") and config.max_batch_size > 1
        self.is_plain = not config.HasField("dynamic_batching")
        self._max_batch_size = config.max_batch_size
        self._preferred = set(batching.preferred_batch_size)
        self._delay_ns = batching.max_queue_delay_microseconds * 1000
        self._num_levels = batching.priority_levels
        self._default_level = batching.default_priority_level
        default = batching.default_queue_policy
        # A map's entry that is asked for by index would be made.
        self._policies = {
            level: batching.priority_queue_policy.get(level, default)
            for level in range(self._num_levels + 1)
        }
        self._delays = {
            level: policy.timeout_action == policy.DELAY for level, policy in self._policies.items()
        }
        # Dicts, for their order and for taking out what is in the middle.
        self._waiting: dict[int, dict[Pending, None]] = {level: {} for level in self._policies}
        self._delayed: dict[int, dict[Pending, None]] = {level: {} for level in self._policies}
        self._num = 0
        self._num_with_deadline = 0

    def __len__(self) -> int:
        return self._num

    def __iter__(self) -> Iterator[Pending]:
        """All that wait, in their order: by level, those that were put off behind the others."""
        for level, waiting in self._waiting.items():
            yield from waiting
            yield from self._delayed[level]

    def push(self, pending: Pending) -> None:
        """Let a request wait.

        Raises:
            InferError: UNAVAILABLE, as many wait already as may.
        """
        request = pending.request
        level = 0
        if self._num_levels:
            level = request.priority or self._default_level
            level = min(level, self._num_levels)
        policy = self._policies[level]
        queue = self._waiting[level]
        if (
            policy.max_queue_size
            and len(queue) + len(self._delayed[level]) >= policy.max_queue_size
        ):
            raise InferError(Code.UNAVAILABLE, f"{prefix_of(request)}Exceeds maximum queue size")
        pending.level = level
        timeout_us = policy.default_timeout_microseconds
        if policy.allow_timeout_override and request.timeout_us:
            timeout_us = min(timeout_us or request.timeout_us, request.timeout_us)
        if timeout_us:
            pending.deadline_ns = pending.arrived_ns + timeout_us * 1000
            self._num_with_deadline += 1
        queue[pending] = None
        self._num += 1

    def put_back(self, batch: list[Pending]) -> None:
        """Let requests wait again that were taken and have not begun, before all others.

        Only of a queue that is plain.
        """
        self._waiting[0] = {**dict.fromkeys(batch), **self._waiting[0]}
        self._num += len(batch)

    def remove(self, pending: Pending) -> bool:
        """Take out a request that is not to run; returns whether it waited here."""
        for queues in (self._waiting, self._delayed):
            if pending in queues[pending.level]:
                self._take_out(pending)
                return True
        return False

    def _take_out(self, pending: Pending) -> None:
        self._waiting[pending.level].pop(pending, None)
        self._delayed[pending.level].pop(pending, None)
        self._num -= 1
        if pending.deadline_ns:
            self._num_with_deadline -= 1

    def next_deadline_ns(self) -> int:
        """When the first of those that wait has waited too long; 0 for never."""
        if not self._num_with_deadline:
            return 0
        deadlines = [
            pending.deadline_ns
            for waiting in self._waiting.values()
            for pending in waiting
            if pending.deadline_ns
        ]
        return min(deadlines, default=0)

    def expire(self, now_ns: int) -> list[Pending]:
        """Take out those that have waited too long, or put them off, as their policy says.

        Returns:
            Those that are refused.
        """
        refused: list[Pending] = []
        if not self._num_with_deadline:
            return refused
        for level, waiting in self._waiting.items():
            late = [p for p in waiting if p.deadline_ns and p.deadline_ns <= now_ns]
            for pending in late:
                self._take_out(pending)
                if self._delays[level]:
                    pending.deadline_ns = 0
                    self._delayed[level][pending] = None
                    self._num += 1
                else:
                    refused.append(pending)
        return refused

    def lose(self, instance: int) -> list[Pending]:
        """An instance died, of which no request that waits needs to know anything."""
        return []

    def take(self, now_ns: int, instance: int) -> tuple[list[Pending], int]:
        """Take the next batch of an instance that is idle, whichever it is.

        Returns:
            The batch, and 0; or none, and when to ask again if nothing comes before.
        """
        first = next(iter(self), None)
        if first is None:
            return [], 0
        batch, total, wanted = [first], first.batch_size, 0
        if self.is_batching:
            batch, total, wanted = self._gather(first)
            if wanted:
                batch = batch[:wanted]
            elif self._can_grow(batch, total) and self._delay_ns:
                due_ns = min(pending.arrived_ns for pending in batch) + self._delay_ns
                if now_ns < due_ns:
                    return [], due_ns
        for pending in batch:
            self._take_out(pending)
        return batch, 0

    def _gather(self, first: Pending) -> tuple[list[Pending], int, int]:
        """Those that go with the first; and how many of them make a preferred size, or 0."""
        batch: list[Pending] = []
        total = wanted = 0
        for pending in self:
            if pending.key != first.key or total + pending.batch_size > self._max_batch_size:
                break
            batch.append(pending)
            total += pending.batch_size
            if total in self._preferred:
                wanted = len(batch)
        return batch, total, wanted

    def _can_grow(self, batch: list[Pending], total: int) -> bool:
        return total < max(self._preferred, default=self._max_batch_size) and len(batch) == len(
            self
        )


def expired_error(pending: Pending) -> InferError:
    """What the caller of a request that waited too long is told."""
    return InferError(Code.UNAVAILABLE, "Request timeout expired")
