"""An encoder as a backend: a thread that makes vectors, one request after the other."""

import asyncio
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from disconnect_watch.engine import Embedder, Outcome
from disconnect_watch.engine.errors import EngineClosedError, QueueFullError
from disconnect_watch.errors import ClientDisconnected
from disconnect_watch.token import CancelToken

__all__ = ["EmbedderBackend", "Embeddings"]


@dataclass(frozen=True, slots=True)
class Embeddings:
    """What came of one request.

    Attributes:
        vectors: [num_inputs, dim], float32, little-endian; empty unless it finished.
    """

    outcome: Outcome
    vectors: "np.ndarray[Any, Any]"


class EmbedderBackend:
    """Serves one encoder, on its thread, from now until ``close``.

    Args:
        name: of the model, as clients write it.
        max_queue: requests that may wait.

    Threads: the loop's, but ``close``, which may be called from any.
    """

    def __init__(self, embedder: Embedder, *, name: str, max_queue: int = 1024) -> None:
        self.name = name
        self.dim = embedder.dim
        self._embedder = embedder
        self._max_queue = max_queue
        self._num_waiting = 0
        self._executor = ThreadPoolExecutor(1, "disconnect-watch-embedder")
        self._is_closed = False

    @classmethod
    def from_pretrained(cls, path: Path, *, name: str | None = None) -> Self:
        """Load a sentence-transformers directory and serve it.

        Raises:
            CheckpointError: see ``Embedder.from_pretrained``.
        """
        return cls(Embedder.from_pretrained(path), name=name or path.resolve().name)

    async def embed(
        self, inputs: Sequence[str | Sequence[int]], *, cancel: CancelToken
    ) -> Embeddings:
        """Make a vector of each input, a text or token ids.

        A set ``cancel`` ends it: at once while it waits, between two layers when it runs.

        Raises:
            ValueError: an input cannot be taken; see ``Embedder``.
            QueueFullError: ``max_queue`` requests wait.
            EngineClosedError: it was closed.
        """
        if self._is_closed:
            raise EngineClosedError("the encoder takes no requests, it was closed")
        if self._num_waiting >= self._max_queue:
            raise QueueFullError(self._max_queue)
        loop = asyncio.get_running_loop()
        changed = asyncio.Event()
        job = _Job(self._embedder, inputs, cancel)

        def wake(_: object) -> None:
            loop.call_soon_threadsafe(changed.set)

        self._num_waiting += 1
        try:
            future = self._executor.submit(job.run)
            future.add_done_callback(wake)
            cancel.add_callback(wake)
            try:
                await changed.wait()
                if cancel.cancelled and future.cancel():
                    # It never ran, and never will.
                    return job.cancelled("waiting")
                changed.clear()
                while not future.done():
                    await changed.wait()
                    changed.clear()
                return future.result()
            except asyncio.CancelledError:
                future.cancel()
                job.is_abandoned.set()
                raise
            finally:
                cancel.remove_callback(wake)
        finally:
            self._num_waiting -= 1

    def close(self) -> None:
        """Let what runs come to its end, and join the thread. Idempotent."""
        self._is_closed = True
        self._executor.shutdown(cancel_futures=True)


class _Job:
    """One request, on the encoder's thread."""

    def __init__(
        self, embedder: Embedder, inputs: Sequence[str | Sequence[int]], cancel: CancelToken
    ) -> None:
        self._embedder = embedder
        self._inputs = inputs
        self._cancel = cancel
        self._num_tokens = 0
        self.is_abandoned = threading.Event()

    def run(self) -> Embeddings:
        if self._cancel.cancelled or self.is_abandoned.is_set():
            return self.cancelled("waiting")
        token_ids = self._embedder.tokenize(self._inputs)
        self._num_tokens = sum(map(len, token_ids))
        try:
            vectors = self._embedder.embed_tokens(token_ids, cancel=self._cancel)
        except ClientDisconnected:
            return self.cancelled("prefill")
        return Embeddings(
            Outcome("finished", num_prompt_tokens=self._num_tokens),
            vectors.numpy().astype("<f4", copy=False),
        )

    def cancelled(self, phase: Any) -> Embeddings:
        now_ns = time.monotonic_ns()
        outcome = Outcome(
            "cancelled",
            reason=self._cancel.reason,
            phase=phase,
            num_prompt_tokens=self._num_tokens,
            flag_at_ns=self._cancel.cancelled_at_ns or now_ns,
            seen_at_ns=now_ns,
            dropped_at_ns=now_ns,
            freed_at_ns=now_ns,
        )
        return Embeddings(outcome, np.empty((0, 0), "<f4"))
