"""Requests that belong together: a sequence stays with one instance, in its order.

Which of an instance's requests share a batch is all that the strategies ``direct`` and
``oldest`` differ in here: of each sequence at most one, with ``direct`` of as many
sequences as the batch has slots, with ``oldest`` of any that the instance has, the oldest
first.

Source: Triton's model configuration, "Sequence Batcher".
"""

import struct
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from disconnect_watch.backends.infer import Code, InferError, InferTensor
from disconnect_watch.backends.model_config import datatype_of
from disconnect_watch.backends.pending import Pending
from disconnect_watch.backends.validate import prefix_of

__all__ = ["SequenceQueue"]

#: Of one instance, where ``oldest`` does not say how many.
DEFAULT_CANDIDATES = 1024


class _Sequence:
    """One sequence, from its first request on until its last or until it was idle too long."""

    def __init__(self) -> None:
        self.waiting: deque[Pending] = deque()
        self.instance: int | None = None
        self.used_ns = time.monotonic_ns()
        self.has_ended = False


class SequenceQueue:
    """The queue of one model with ``sequence_batching``.

    Args:
        config: complete and checked.

    Threads: the loop's only.
    """

    def __init__(self, config: Any) -> None:
        batching = config.sequence_batching
        self._model = config.name
        self._max_batch_size = max(1, config.max_batch_size)
        self._has_batch = config.max_batch_size > 0
        if batching.WhichOneof("strategy_choice") == "oldest":
            self._capacity = batching.oldest.max_candidate_sequences or DEFAULT_CANDIDATES
        else:
            self._capacity = self._max_batch_size
        self._idle_ns = batching.max_sequence_idle_microseconds * 1000
        self._controls = [
            (control_input.name, control)
            for control_input in batching.control_input
            for control in control_input.control
        ]
        self._sequences: dict[int | str, _Sequence] = {}
        self.is_batching = self._max_batch_size > 1
        self.is_plain = False

    def __len__(self) -> int:
        return sum(len(sequence.waiting) for sequence in self._sequences.values())

    def __iter__(self) -> Iterator[Pending]:
        for sequence in self._sequences.values():
            yield from sequence.waiting

    def push(self, pending: Pending) -> None:
        """Let a request wait for its turn in its sequence.

        Raises:
            InferError: INVALID_ARG, it is of no sequence, or of one that was not begun.
        """
        request = pending.request
        if not request.sequence_id:
            raise InferError(
                Code.INVALID_ARG,
                f"{prefix_of(request)}inference request to model '{self._model}' must specify a "
                "non-zero or non-empty correlation ID",
            )
        sequence = self._sequences.get(request.sequence_id)
        if sequence is None or sequence.has_ended:
            if not request.sequence_start:
                raise InferError(
                    Code.INVALID_ARG,
                    f"{prefix_of(request)}inference request for sequence {request.sequence_id} to "
                    f"model '{self._model}' must specify the START flag on the first request of "
                    "the sequence",
                )
            if sequence is None:
                sequence = self._sequences[request.sequence_id] = _Sequence()
        sequence.waiting.append(pending)
        sequence.has_ended = request.sequence_end
        sequence.used_ns = time.monotonic_ns()

    def remove(self, pending: Pending) -> bool:
        """Take out a request that is not to run; returns whether it waited here."""
        sequence = self._sequences.get(pending.request.sequence_id)
        if sequence is None or pending not in sequence.waiting:
            return False
        sequence.waiting.remove(pending)
        if sequence.has_ended and not sequence.waiting:
            del self._sequences[pending.request.sequence_id]
        return True

    def next_deadline_ns(self) -> int:
        """When a sequence that waits for an instance may get that of one that is idle; 0: never."""
        if all(sequence.instance is not None for sequence in self._sequences.values()):
            return 0
        due = [
            sequence.used_ns + self._idle_ns
            for sequence in self._sequences.values()
            if sequence.instance is not None and not sequence.waiting
        ]
        return min(due, default=0)

    def expire(self, now_ns: int) -> list[Pending]:
        """Forget sequences that were idle too long; no request waits in one of these."""
        idle = [
            name
            for name, sequence in self._sequences.items()
            if not sequence.waiting and now_ns - sequence.used_ns >= self._idle_ns
        ]
        for name in idle:
            del self._sequences[name]
        return []

    def lose(self, instance: int) -> list[Pending]:
        """An instance died, and with it what it knew of its sequences.

        Returns:
            What waits in these, which can't go on.
        """
        lost = [name for name, one in self._sequences.items() if one.instance == instance]
        return [pending for name in lost for pending in self._sequences.pop(name).waiting]

    def take(self, now_ns: int, instance: int) -> tuple[list[Pending], int]:
        """Take the next batch of an instance that is idle; see ``RequestQueue.take``."""
        own = [one for one in self._sequences.values() if one.instance == instance]
        for sequence in self._sequences.values():
            if len(own) >= self._capacity:
                break
            if sequence.instance is None:
                sequence.instance = instance
                own.append(sequence)
        heads = sorted(
            (sequence.waiting[0] for sequence in own if sequence.waiting),
            key=lambda pending: pending.arrived_ns,
        )
        batch: list[Pending] = []
        total = 0
        for pending in heads:
            if batch and pending.key != batch[0].key:
                continue
            if total + pending.batch_size > self._max_batch_size and batch:
                break
            total += pending.batch_size
            batch.append(pending)
            self._dispatch(pending)
        return batch, 0

    def _dispatch(self, pending: Pending) -> None:
        name = pending.request.sequence_id
        sequence = self._sequences[name]
        sequence.waiting.popleft()
        sequence.used_ns = time.monotonic_ns()
        pending.controls = tuple(self._control(*control, pending) for control in self._controls)
        if sequence.has_ended and not sequence.waiting:
            del self._sequences[name]

    def _control(self, name: str, control: Any, pending: Pending) -> InferTensor:
        """What tells the model where in its sequence a request stands."""
        request = pending.request
        shape = (1, 1) if self._has_batch else (1,)
        kind = control.kind
        if kind == control.CONTROL_SEQUENCE_CORRID:
            return InferTensor(name, *_correlation(request.sequence_id, control.data_type, shape))
        if kind == control.CONTROL_SEQUENCE_START:
            is_true = request.sequence_start
        elif kind == control.CONTROL_SEQUENCE_END:
            is_true = request.sequence_end
        else:
            is_true = True  # READY: there is a request in this slot
        if control.fp32_false_true:
            data = struct.pack("<f", control.fp32_false_true[is_true])
            return InferTensor(name, "FP32", shape, data)
        if control.bool_false_true:
            data = struct.pack("<?", control.bool_false_true[is_true])
            return InferTensor(name, "BOOL", shape, data)
        values = control.int32_false_true or (0, 1)
        return InferTensor(name, "INT32", shape, struct.pack("<i", values[is_true]))


#: How a correlation id is packed, by the datatype of its control.
_PACKED = {"UINT64": "<Q", "INT64": "<q", "UINT32": "<I", "INT32": "<i"}


def _correlation(
    sequence_id: int | str, data_type: int, shape: tuple[int, ...]
) -> tuple[str, tuple[int, ...], bytes]:
    datatype = datatype_of(data_type) if data_type else "UINT64"
    if datatype == "BYTES":
        text = str(sequence_id).encode()
        return datatype, shape, struct.pack("<I", len(text)) + text
    code = _PACKED[datatype]
    size_bits = 8 * struct.calcsize(code)
    number = int(sequence_id) % (1 << size_bits)
    return datatype, shape, number.to_bytes(size_bits // 8, "little")
