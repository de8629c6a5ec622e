"""The step loop, over any runner; it knows no tensors.

One step is

1. *read* the flags of all waiting and running requests, in one call, and *abort* those that fired
   or whose deadline has passed;
2. *schedule* the rest;
3. *run* the forward. Before each layer the flags of prefill rows are read again, and those that
   fired are dropped there. Their blocks are set apart, not freed: the forward may still hold
   them. If no live row is left, the forward ends at once;
4. *apply* what it computed. The flag is read once more, right before a token is handed out: a
   request whose flag was seen is never heard of again but for its outcome, and at most the
   tokens of this step are wasted: one, or ``device_steps`` where the device loops.

Blocks that a forward might touch are free only when the runner has acknowledged its step.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence

from disconnect_watch.engine.block_pool import BlockEntry, BlockPool
from disconnect_watch.engine.cancel_scan import CancelScan
from disconnect_watch.engine.config import EngineConfig
from disconnect_watch.engine.ending import ending
from disconnect_watch.engine.errors import QueueFullError
from disconnect_watch.engine.guarded import run_guarded
from disconnect_watch.engine.outcome import AbortResult, Drawn, Outcome, RequestOutput, Sampled
from disconnect_watch.engine.records import EngineStats, StepNotes, StepRecord
from disconnect_watch.engine.registry import RequestRegistry
from disconnect_watch.engine.remote import KVLoad
from disconnect_watch.engine.request import Request
from disconnect_watch.engine.schedule import Runner, ScheduledRow
from disconnect_watch.engine.scheduler import Scheduler
from disconnect_watch.engine.tokenizer import Tokenizer
from disconnect_watch.engine.view import EngineView, RequestView
from disconnect_watch.token import Reason

__all__ = ["EngineCore"]

logger = logging.getLogger(__name__)


class EngineCore:
    """Requests, their blocks and the steps, for a runner that does the computing.

    Threads: one at a time may call it, except where a method says "any"; and flags of requests
    may be set by any at any time.

    Attributes:
        max_model_len: tokens that prompt and answer of a request may have together.
        eos_token_ids: tokens that end a generation.
        step_log: records of the last steps, oldest first.
        layer_hook: called with step and layer before the flags are read for that layer; for
            tests that must act in the middle of a forward.
        clock: nanoseconds, by which deadlines pass.
        on_retain: given a request that was to prefill only, and the blocks of its prompt, which are
            held from now on, returns what to name the transfer by; the blocks go back by
            ``release_blocks``. If it raises, they do at once, and nothing is retained.
        on_load: given a load, has it carried out elsewhere, and ``finish_load`` called.
        wake: called when something was left for the engine's thread to settle; any thread.
        is_stalled: whether the last step had nothing to compute, though requests wait for what
            transfers hold.
        arithmetic, missing: see ``EngineStats``.
    """

    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer,
        *,
        config: EngineConfig,
        num_blocks: int,
        max_model_len: int,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        self.config = config
        self.max_model_len = max_model_len
        self.eos_token_ids = tuple(eos_token_ids)
        self.step_log: deque[StepRecord] = deque(maxlen=config.step_log_size)
        self.layer_hook: Callable[[int, int], None] | None = None
        self.clock: Callable[[], int] = time.monotonic_ns
        self.on_retain: Callable[[Request, tuple[int, ...]], object] | None = None
        self.on_load: Callable[[KVLoad], None] | None = None
        self.wake: Callable[[], None] = lambda: None
        self.is_stalled = False
        self.arithmetic = "none"
        self.missing: tuple[str, ...] = ()
        # What other threads have left, see ``settle``.
        self._released: deque[tuple[int, ...]] = deque()
        self._ended_loads: deque[tuple[KVLoad, Exception | None]] = deque()
        self._num_loaded_tokens = 0
        self._num_failed_loads = 0
        self._runner = runner
        self._pool = BlockPool(num_blocks, block_size=config.block_size)
        self._scheduler = Scheduler(
            self._pool,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            enable_prefix_caching=config.enable_prefix_caching,
            device_steps=config.device_steps,
            max_model_len=max_model_len,
        )
        self._scan = CancelScan(self._scheduler.running_flags)
        self._registry = RequestRegistry(self._scheduler, tokenizer, scan=self._scan)
        self._notes = StepNotes()
        self._num_steps = 0
        self._num_preemptions = 0
        self._num_spared_tokens = 0
        self._busy_ns = 0
        self._is_stepping = False

    def admit(self, *requests: Request) -> None:
        """Queue requests that ``make_request`` made, all with all their siblings, or none.

        What is cancelled already is taken all the same, and ends at the next step.

        Raises:
            ValueError: as ``check_fits``.
            DuplicateRequestError: an id is in use.
            QueueFullError: ``max_queue`` requests wait, or would, with all answers of these.
        """
        num_answers = sum(len(request.siblings) for request in requests)
        self.check_fits(num_answers)
        if self._scheduler.num_waiting + num_answers > self.config.max_queue:
            raise QueueFullError(self.config.max_queue)
        self._registry.add(*requests)
        for request in requests:
            if request.remote is not None and not request.is_cancelled:
                # It is known already, so nobody has to wait for it.
                self._emit(request, request.remote.first)

    def check_fits(self, num_answers: int) -> None:
        """Refuse what there is no room for, however little waits. Threads: any.

        Args:
            num_answers: that one request wants, to all its prompts.

        Raises:
            ValueError: the queue never holds so many.
        """
        if num_answers > self.config.max_queue:
            raise ValueError(
                f"{num_answers} answers are wanted, the queue holds {self.config.max_queue}: "
                "lower n or best_of, or send fewer prompts at once"
            )

    def release_blocks(self, blocks: Sequence[int]) -> None:
        """Give back what ``on_retain`` was given, once nothing reads it any more. Threads: any."""
        self._released.append(tuple(blocks))
        self.wake()

    def finish_load(self, load: KVLoad, error: Exception | None = None) -> None:
        """Take note that a load touches its blocks no more. Once for each. Threads: any.

        Args:
            error: why the blocks have not what they should have; None if they have.
        """
        self._ended_loads.append((load, error))
        self.wake()

    def settle(self) -> bool:
        """Carry out what the two above have left; ``step`` does so first.

        Returns:
            Whether that was anything.
        """
        if not self._released and not self._ended_loads:
            return False
        while self._released:
            self._registry.freed_block_ids += self._pool.unhold(self._released.popleft())
        while self._ended_loads:
            load, error = self._ended_loads.popleft()
            # A pull that was told to stop may have returned in its middle, without a word.
            is_filled = error is None and not load.cancel.cancelled
            if is_filled:
                self._num_loaded_tokens += load.request.num_prompt_tokens - (
                    load.first_block * self.config.block_size
                )
            elif not load.cancel.cancelled:
                self._num_failed_loads += 1
                logger.warning(
                    "the prompt of request %s could not be fetched and is computed here: %s",
                    load.request.key,
                    str(error),  # not itself, whose frames would live as long as the record
                )
            self._scheduler.end_load(load, is_filled=is_filled)
        return True

    def find(self, request_id: str) -> Request | None:
        """Return the live request of that id. Threads: any."""
        return self._registry.find(request_id)

    @property
    def on_outcome(self) -> Callable[[str, Outcome], None] | None:
        """Called with id and outcome when a request has ended, once each; its errors are logged."""
        return self._registry.on_outcome

    @on_outcome.setter
    def on_outcome(self, callback: Callable[[str, Outcome], None] | None) -> None:
        self._registry.on_outcome = callback

    @property
    def has_work(self) -> bool:
        """Whether ``step`` has anything to do or to tell."""
        return self._registry.has_work

    @property
    def block_ledger(self) -> dict[int, BlockEntry]:
        """Who holds each block that is neither free nor cached; a copy."""
        return self._pool.ledger()

    @property
    def block_owners(self) -> set[str]:
        """The ids of the requests that hold blocks."""
        return {name for entry in self.block_ledger.values() for name in entry.owners}

    def check_integrity(self) -> None:
        """Verify that the ledger balances and that only live requests own blocks.

        Raises:
            AssertionError: naming what does not add up.
        """
        self._pool.check_integrity()
        strangers = {owner for owner in self.block_owners if owner not in self._registry}
        if strangers:
            raise AssertionError(f"blocks belong to requests that are not alive: {strangers}")

    def stats(self) -> EngineStats:
        """Return the numbers of this moment."""
        counts = self._registry.counts
        return EngineStats(
            num_waiting=self._scheduler.num_waiting,
            num_running=self._scheduler.num_running,
            num_blocks=self._pool.num_blocks,
            num_blocks_used=self._pool.num_used,
            num_blocks_cached=self._pool.num_cached,
            num_blocks_free=self._pool.num_free,
            num_blocks_retained=self._pool.num_retained,
            num_steps=self._num_steps,
            num_preemptions=self._num_preemptions,
            num_requests=counts.num_requests,
            num_prompt_tokens=counts.num_prompt_tokens,
            num_cached_tokens=counts.num_cached_tokens,
            num_generated_tokens=counts.num_generated_tokens,
            num_wasted_tokens=counts.num_wasted_tokens,
            num_spared_tokens=self._num_spared_tokens,
            stale_events=dict(counts.stale_events),
            busy_seconds=self._busy_ns / 1e9,
            outcomes=dict(counts.outcomes),
            arithmetic=self.arithmetic,
            missing=self.missing,
            num_loaded_tokens=self._num_loaded_tokens,
            num_failed_loads=self._num_failed_loads,
            num_blocks_held=self._pool.num_held,
        )

    def view(self) -> EngineView:
        """Return who is where at this moment, and what each block is."""
        return EngineView(
            tuple(
                RequestView(
                    request.key,
                    request.phase,
                    request.num_prompt_tokens,
                    request.num_computed_tokens,
                    request.num_generated_tokens,
                    self._longest_answer(request),
                    len(self._pool.block_ids(request.key)),
                )
                for request in self._scheduler.live_requests()
            ),
            self._pool.places(),
            self.stats(),
        )

    def abort(self, request_id: str) -> AbortResult:
        """Cancel a request now; when this returns, it has given up its blocks.

        They are free then, or as soon as the runner acknowledges the last step that had them;
        one that returns when its forward has ended has done so already.

        Its outcome also comes out of the next ``step``, before anything of another request that
        may have taken the id by then. Any id is fine, known or not.

        Raises:
            RuntimeError: called from within ``step``, whose forward may be using the blocks.
        """
        request = self.find(request_id)
        if request is None:
            return self._registry.abort_result(self._registry.ended_as(request_id), is_first=False)
        return self.finish_abort(request, is_first=request.mark_cancelled(Reason.ABORTED))

    def finish_abort(self, request: Request, *, is_first: bool) -> AbortResult:
        """End a request that was found and marked before, unless a step has done so meanwhile.

        It takes the request, not its id, which may have passed to another one since.

        Args:
            request: marked as cancelled.
            is_first: whether that mark was the first, and so the abort is this caller's.

        Raises:
            RuntimeError: called from within ``step``.
        """
        if self._is_stepping:
            raise RuntimeError(
                f"abort of {request.request_id!r} came from within a step, cancel its token there"
            )
        if request.outcome is None:
            self._cancel(request, self._notes.aborted)
        return self._registry.abort_result(request.outcome, is_first=is_first)

    def cancel_all(self, reason: Reason) -> list[RequestOutput]:
        """Cancel every live request; returns what is to be told."""
        for request in self._registry:
            request.mark_cancelled(reason)
        self._abort_cancelled()
        return self._registry.take_outputs()

    def fail_all(self, error: BaseException) -> list[RequestOutput]:
        """End every live request as failed; returns what is to be told.

        For the owner of an engine whose ``step`` has raised, and so is not to be trusted again.
        """
        for request in self._registry:
            if request.status != "ended":
                self._registry.fail(request, error)
        return self._registry.take_outputs()

    def take_outputs(self) -> list[RequestOutput]:
        """Return what the next ``step`` would return first: outcomes of what was aborted since."""
        return self._registry.take_outputs()

    def step(self) -> list[RequestOutput]:
        """Do one step, as the head of this file says.

        Returns:
            An output a token, at most one a live request or ``device_steps``, and the outcomes of
            requests that were aborted since the step before; empty if there was nothing to do.
        """
        self._acknowledge()
        self.settle()
        self.is_stalled = False
        if not self.has_work:
            return []
        started_ns = time.monotonic_ns()
        self._num_steps += 1
        self._abort_cancelled()
        schedule = self._scheduler.schedule()
        for load in schedule.loads:
            self._begin_load(load)
        self.is_stalled = not schedule.rows and self._pool.num_held > 0
        for request, blocks in schedule.preempted:
            self._num_preemptions += 1
            self._notes.preempted.append(request.key)
            self._registry.freed_block_ids += blocks
        self._runner.layer_tokens.clear()
        if schedule.rows:
            self._pool.launch(self._num_steps, [row.request.key for row in schedule.rows])
            self._is_stepping = True
            try:
                results = run_guarded(
                    self._runner,
                    schedule.rows,
                    step=self._num_steps,
                    layer_check=self._check_layer,
                )
            finally:
                self._is_stepping = False
                self._acknowledge()
            self._apply(schedule.rows, results)
        self._log_step(schedule.rows)
        self._busy_ns += time.monotonic_ns() - started_ns
        return self._registry.take_outputs()

    def _acknowledge(self) -> None:
        if not self._pool.ack(self._runner.acked_step):
            self._registry.counts.stale_events["ack"] += 1

    def _abort_cancelled(self) -> None:
        if not self._scan.has_fired(self.clock):
            return
        for request in list(self._scheduler.live_requests()):
            # A sibling that was found cancelled has taken this one with it.
            if request.is_live and request.is_cancelled:
                self._cancel(request, self._notes.aborted)

    def _cancel(self, request: Request, note: list[str], *, num_wasted_tokens: int = 0) -> None:
        note.append(request.request_id)
        self._num_spared_tokens += sum(
            self._longest_answer(sibling) - sibling.num_generated_tokens
            for sibling in request.siblings
            if sibling.status != "ended"
        )
        self._registry.cancel(
            request, seen_at_ns=time.monotonic_ns(), num_wasted_tokens=num_wasted_tokens
        )
        # An abort may come before the first step; 0 is no step to acknowledge with.
        request.acknowledge(max(self._num_steps, 1))

    def _longest_answer(self, request: Request) -> int:
        """Return how many tokens the answer may have at the most."""
        return min(request.params.max_tokens, self.max_model_len - request.num_prompt_tokens)

    def _check_layer(self, layer: int, rows: Sequence[ScheduledRow]) -> Sequence[ScheduledRow]:
        """Find the rows that must not enter this layer.

        A dead decode row stays as long as another row lives: its one token costs a layer next to
        nothing, while taking it out costs a new batch.
        """
        if self.layer_hook is not None:
            self.layer_hook(self._num_steps, layer)
        if not self._scan.has_running_fired(self.clock):
            return ()
        dead = [row for row in rows if row.phase == "prefill" and row.request.is_cancelled]
        if all(row.request.is_cancelled for row in rows):
            dead = list(rows)
        if dead:
            seen_at_ns = time.monotonic_ns()
            for row in dead:
                row.request.seen_at_ns = seen_at_ns
                self._registry.drop(row.request)
                self._notes.dropped[row.request.key] = layer
        return dead

    def _apply(self, rows: Sequence[ScheduledRow], results: dict[str, Drawn]) -> None:
        for row in rows:
            self._apply_row(row, results)
        for drawn in results.values():
            # Of nobody who is in this step.
            self._registry.ignore(drawn)

    def _apply_row(self, row: ScheduledRow, results: dict[str, Drawn]) -> None:
        request = row.request
        # Of a row that did not come to its last token nothing is drawn, but it was computed.
        drawn: Sequence[Sampled | Exception | None] = results.pop(request.key, ()) or (None,)
        for index, result in enumerate(drawn):
            if request.status == "ended":
                if index == 0:
                    # It went with a sibling.
                    self._registry.ignore(drawn)
                else:
                    # At a stop string, which the device knows nothing of.
                    self._registry.counts.num_wasted_tokens += len(drawn) - index
                return
            if request.is_cancelled:
                withheld = [
                    *drawn[index:],
                    *(token for s in request.siblings for token in results.pop(s.key, ())),
                ]
                num_wasted_tokens = sum(isinstance(token, Sampled) for token in withheld)
                self._cancel(request, self._notes.withheld, num_wasted_tokens=num_wasted_tokens)
                return
            if isinstance(result, Exception):
                self._notes.failed.append(request.request_id)
                self._registry.fail(request, result)
            else:
                # Each token was computed from those before it.
                self._scheduler.advance(request, row.stop + index)
                if result is not None:
                    self._emit(request, result)

    def _emit(self, request: Request, sampled: Sampled) -> None:
        finish_reason, stop_token_id = ending(
            request,
            sampled.token_id,
            eos_token_ids=self.eos_token_ids,
            max_model_len=self.max_model_len,
        )
        if self._registry.emit(
            request, sampled, finish_reason=finish_reason, stop_token_id=stop_token_id
        ):
            self._notes.finished.append(request.key)
        elif request.prefill_only:
            self._registry.hand_over(request, self._retain(request))
            self._notes.finished.append(request.key)

    def _retain(self, request: Request) -> object | None:
        if self.on_retain is None:
            return None
        blocks = self._pool.hold(request.key, request.num_prompt_tokens)
        try:
            return self.on_retain(request, blocks)
        except Exception as error:
            # Whoever decodes has to compute the prompt again; that is slow, and right.
            logger.warning("nothing is retained of request %s: %s", request.key, error)
            self._pool.unhold(blocks)
            return None

    def _begin_load(self, load: KVLoad) -> None:
        if self.on_load is None:
            self.finish_load(load, RuntimeError("nobody carries out loads, set on_load"))
        else:
            self.on_load(load)

    def _log_step(self, rows: Sequence[ScheduledRow]) -> None:
        self.step_log.append(
            self._notes.record(
                step=self._num_steps,
                scheduled={row.request.key: row.num_tokens for row in rows},
                layer_tokens=self._runner.layer_tokens,
                freed_block_ids=self._registry.freed_block_ids,
            )
        )
        self._notes = StepNotes()
        self._registry.freed_block_ids.clear()
