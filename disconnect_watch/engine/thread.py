"""An engine on a thread of its own, for event loops.

The thread owns the engine; loops never call it, but for what it marks as free for any thread.
They leave commands, which the thread carries out between two steps, and what a step
produced crosses to each loop in one ``call_soon_threadsafe``, however many requests it has there.

Cancelling needs no command: a token or a mark on the request is a flag in memory, which the
engine reads between layers and steps. So neither a busy loop nor a long step delays it.
"""

import asyncio
import atexit
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from typing import Any, Self, TypeVar

from disconnect_watch.engine.engine import Engine
from disconnect_watch.engine.errors import EngineClosedError
from disconnect_watch.engine.outcome import AbortResult, Outcome, RequestOutput
from disconnect_watch.engine.params import SamplingParams
from disconnect_watch.engine.records import EngineStats
from disconnect_watch.engine.remote import RemotePrefill
from disconnect_watch.engine.request import Request
from disconnect_watch.engine.stream import RequestStream
from disconnect_watch.engine.view import EngineView
from disconnect_watch.token import CancelToken, Reason

__all__ = ["EngineThread"]

logger = logging.getLogger(__name__)

#: Prompts longer than this many characters are tokenized off the loop: a hop to another thread
#: costs about as much as so many characters.
MAX_INLINE_PROMPT = 4096

#: Seconds between two looks at the flags while all requests wait for transfers.
STALL = 0.001

T = TypeVar("T")

#: A call to be made on a loop.
Delivery = tuple[Callable[..., None], tuple[Any, ...]]


class EngineThread:
    """Serves one engine to any number of event loops.

    Args:
        engine: not to be used by others from now on.
        on_outcome: called on the engine's thread with id and outcome, once per request.

    Threads: ``start``, ``close``, ``stats`` any; the coroutines on any running loop.
    """

    def __init__(
        self, engine: Engine, *, on_outcome: Callable[[str, Outcome], None] | None = None
    ) -> None:
        self.engine = engine
        if on_outcome is not None:
            engine.on_outcome = on_outcome
        # A daemon, lest a forgotten close hang the interpreter's exit; closed by atexit, lest it
        # be killed in the middle of an operation of torch.
        self._thread = threading.Thread(
            target=self._run, name="disconnect-watch-engine", daemon=True
        )
        # Guards the commands and the end of the thread: what is accepted is also carried out.
        self._lock = threading.Lock()
        # Each with whom it answers, also if it fails.
        self._commands: deque[tuple[Callable[[], object], asyncio.Future[Any]]] = deque()
        self._wake = threading.Event()
        engine.wake = self._wake.set
        self._is_accepting = False
        self._is_stopped = True
        self._deadline: float | None = None
        self._streams: dict[str, RequestStream] = {}
        self._deliveries: dict[asyncio.AbstractEventLoop, list[Delivery]] = {}
        self._stats = engine.stats()

    def start(self) -> None:
        """Start the thread; requests are taken from now on. Once only."""
        with self._lock:
            self._is_stopped = False
            self._is_accepting = True
        self._thread.start()
        atexit.register(self.close)

    def close(self, grace: float = 0.0) -> None:
        """Take no more requests, let those that run come to their end, and join the thread.

        Blocks for up to ``grace`` seconds and one step, so a loop calls it through
        ``asyncio.to_thread``. May be called again; the earlier end then counts.

        Args:
            grace: seconds until what is left is cancelled with reason SHUTDOWN.
        """
        deadline = time.monotonic() + grace
        with self._lock:
            self._is_accepting = False
            self._deadline = deadline if self._deadline is None else min(self._deadline, deadline)
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join()
        atexit.unregister(self.close)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_accepting(self) -> bool:
        """Whether requests are taken: started, not closing, not died of an error."""
        return self._is_accepting

    def stats(self) -> EngineStats:
        """Return the numbers as they were after the last step or command. Threads: any."""
        return self._stats

    async def submit(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        cancel: CancelToken | None = None,
        priority: int = 0,
        time_limit: float | None = None,
        prefill_only: bool = False,
        remote: RemotePrefill | None = None,
    ) -> RequestStream:
        """Hand a request to the engine, and return when it is queued.

        For those who must know that it was accepted before its first token is there; ``generate``
        is shorter. If the caller is cancelled meanwhile, so is the request.

        Returns:
            The stream of its outputs, to be read to the end or closed.

        Raises:
            ValueError: see ``Engine.make_request`` and ``Engine.admit``; nothing was queued.
            EngineClosedError: the engine takes no more requests.
        """

        def make() -> list[Request]:
            return [
                self.engine.make_request(
                    prompt,
                    params,
                    request_id=request_id,
                    cancel=cancel,
                    priority=priority,
                    time_limit=time_limit,
                    prefill_only=prefill_only,
                    remote=remote,
                )
            ]

        (stream,) = await self._queue(make, [prompt])
        return stream

    async def submit_all(
        self,
        prompts: Mapping[str, str | Sequence[int]],
        params: SamplingParams | None = None,
        *,
        cancel: CancelToken | None = None,
        priority: int = 0,
        time_limit: float | None = None,
    ) -> list[RequestStream]:
        """As ``submit``, for several prompts that are wanted together: all are queued, or none.

        Args:
            prompts: by the id of the request that each becomes.

        Returns:
            A stream for each, in their order.

        Raises:
            ValueError, EngineClosedError: as ``submit``, for any of them.
        """
        params = params or SamplingParams()
        # Before each of them is tokenized.
        self.engine.check_fits(len(prompts) * params.num_generations)

        def make() -> list[Request]:
            return [
                self.engine.make_request(
                    prompt,
                    params,
                    request_id=request_id,
                    cancel=cancel,
                    priority=priority,
                    time_limit=time_limit,
                )
                for request_id, prompt in prompts.items()
            ]

        return await self._queue(make, prompts.values())

    async def _queue(
        self, make: Callable[[], list[Request]], prompts: Iterable[str | Sequence[int]]
    ) -> list[RequestStream]:
        """Make requests of prompts, and hand them to the engine as one command."""
        loop = asyncio.get_running_loop()
        num_characters = sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
        is_long = num_characters > MAX_INLINE_PROMPT
        requests = await asyncio.to_thread(make) if is_long else make()
        streams = [RequestStream(request, loop=loop) for request in requests]
        answer = self.enqueue(streams, loop=loop)
        try:
            refusal = await answer
        except asyncio.CancelledError:
            for stream in streams:
                stream.close()
            raise
        if refusal is not None:
            raise refusal
        return streams

    def enqueue(
        self, streams: Sequence[RequestStream], *, loop: asyncio.AbstractEventLoop
    ) -> asyncio.Future[ValueError | None]:
        """Hand requests of ``Engine.make_request`` to the engine, and their streams with them.

        Returns:
            Why they were not admitted, none of them; None where they were. The streams may have
            outputs before whoever waits for this goes on.

        Raises:
            EngineClosedError: the engine takes no more requests; the streams hear nothing.

        Threads: that of the loop, which is the streams' too.
        """
        answer: asyncio.Future[ValueError | None] = loop.create_future()
        with self._lock:
            if not self._is_accepting:
                raise EngineClosedError("the engine takes no requests, it was closed or has failed")
            self._commands.append((lambda: self._admit(streams, answer), answer))
        self._wake.set()
        return answer

    async def generate(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        cancel: CancelToken | None = None,
        priority: int = 0,
        time_limit: float | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generate, and yield what each step adds; the last output carries the outcome.

        Closing the generator, or cancelling whoever waits for it, aborts the request. A cancel by
        the token is no error here: it is the outcome of the last output.

        Raises:
            ValueError, EngineClosedError: as ``submit``, before the first output.
        """
        stream = await self.submit(
            request_id, prompt, params, cancel=cancel, priority=priority, time_limit=time_limit
        )
        async with stream:
            async for output in stream:
                yield output

    async def abort(self, request_id: str) -> AbortResult:
        """Cancel a request by its id; returns when it is out and its blocks are free."""
        # The flag first, so that the step that runs now already sees it.
        request = self.engine.find(request_id)
        is_first = request is not None and request.mark_cancelled(Reason.ABORTED)

        def finish() -> AbortResult:
            if request is None:
                return self.engine.abort(request_id)
            return self.engine.finish_abort(request, is_first=is_first)

        loop = asyncio.get_running_loop()
        answer: asyncio.Future[AbortResult] = loop.create_future()
        with self._lock:
            if self._is_stopped:
                # No thread is left that might use the engine.
                return finish()
            self._commands.append((lambda: self._tell(loop, _set_result, answer, finish()), answer))
        self._wake.set()
        return await answer

    async def view(self) -> EngineView:
        """Return who is where between the step that runs now and the next."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[EngineView] = loop.create_future()
        with self._lock:
            if self._is_stopped:
                return self.engine.view()
            self._commands.append(
                (lambda: self._tell(loop, _set_result, answer, self.engine.view()), answer)
            )
        self._wake.set()
        return await answer

    def _run(self) -> None:
        failure: Exception | None = None
        try:
            while self._turn():
                pass
        except Exception as error:
            # A step must not raise; if it does, what it left behind is not to be trusted.
            logger.exception("the engine failed and takes no more requests")
            failure = error
        finally:
            self._stop(failure)

    def _turn(self) -> bool:
        """Carry out commands and do one step; returns False when closed and done."""
        self._wake.clear()
        if self._commands:
            self._run_commands()
            self._publish(self.engine.take_outputs())
        if not self.engine.has_work and self.engine.settle():
            # What transfers gave back counts at once, though no request is there to step.
            self._publish([])
        if not self.engine.has_work:
            if self._deadline is not None:
                return False
            self._wake.wait()
        elif self._deadline is not None and time.monotonic() >= self._deadline:
            self._publish(self.engine.cancel_all(Reason.SHUTDOWN))
        else:
            self._publish(self.engine.step())
            if self.engine.is_stalled:
                # A load that ends wakes this; flags, which do not, are looked at in between.
                self._wake.wait(STALL)
        return True

    def _stop(self, failure: Exception | None) -> None:
        """Carry out what was accepted before the end, and accept nothing after it.

        Whoever hears that the engine failed also finds it not accepting any more. Whatever an
        engine that has failed makes of its own end, nobody waits for it any longer.
        """
        with self._lock:
            self._is_accepting = False
            try:
                self._run_commands()
                if failure is None:
                    self._publish(self.engine.cancel_all(Reason.SHUTDOWN))
                else:
                    self._publish(self.engine.fail_all(failure))
            except Exception as error:
                logger.exception("the engine failed at its end, what is left is ended without it")
                self._end_all(failure or error)
            self._is_stopped = True

    def _end_all(self, failure: Exception) -> None:
        """Tell everybody the end that the engine cannot tell."""
        while self._commands:
            self._refuse(self._commands.popleft()[1], failure)
        for stream in self._streams.values():
            if stream.request.outcome is None:
                self._fail(stream.request, failure)
            self._tell(stream.loop, stream.deliver, _last_output(stream.request))
        self._streams.clear()
        self._deliver()

    def _fail(self, request: Request, failure: Exception) -> None:
        """End a request in the engine's place."""
        outcome = Outcome(
            "failed",
            phase=request.phase,
            num_prompt_tokens=request.num_prompt_tokens,
            num_generated_tokens=sum(s.num_generated_tokens for s in request.siblings),
            error=f"{type(failure).__name__}: {failure}",
        )
        for sibling in request.siblings:
            sibling.outcome = outcome
        if self.engine.on_outcome is not None:
            try:
                self.engine.on_outcome(request.request_id, outcome)
            except Exception:
                logger.exception("on_outcome raised for request %s", request.request_id)

    def _run_commands(self) -> None:
        for _ in range(len(self._commands)):
            command, answer = self._commands.popleft()
            try:
                command()
            except Exception as error:
                self._refuse(answer, error)
                raise

    def _refuse(self, answer: asyncio.Future[Any], error: Exception) -> None:
        self._tell(answer.get_loop(), _set_error, answer, error)

    def _admit(
        self, streams: Sequence[RequestStream], answer: asyncio.Future[ValueError | None]
    ) -> None:
        refusal = None
        # The outcome of an aborted request goes to its own stream, before its id gets a new one.
        self._route(self.engine.take_outputs())
        try:
            self.engine.admit(*(stream.request for stream in streams))
            self._streams |= {stream.request.request_id: stream for stream in streams}
        except ValueError as error:
            refusal = error
        self._tell(answer.get_loop(), _set_result, answer, refusal)

    def _tell(
        self, loop: asyncio.AbstractEventLoop, call: Callable[..., None], *args: object
    ) -> None:
        self._deliveries.setdefault(loop, []).append((call, args))

    def _route(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            stream = self._streams[output.request_id]
            if output.outcome is not None:
                del self._streams[output.request_id]
            self._tell(stream.loop, stream.deliver, output)

    def _publish(self, outputs: list[RequestOutput]) -> None:
        """Send outputs and answers to their loops, after the numbers that go with them."""
        self._route(outputs)
        self._stats = self.engine.stats()
        self._deliver()

    def _deliver(self) -> None:
        for loop, calls in self._deliveries.items():
            try:
                loop.call_soon_threadsafe(_call_all, calls)
            except RuntimeError:
                self._abandon(loop)
        self._deliveries.clear()

    def _abandon(self, loop: asyncio.AbstractEventLoop) -> None:
        """Cancel what a closed loop has left behind."""
        for stream in self._streams.values():
            if stream.loop is loop:
                stream.request.mark_cancelled(Reason.OWNER_CLOSED)


def _call_all(calls: list[Delivery]) -> None:
    for call, args in calls:
        call(*args)


def _last_output(request: Request) -> RequestOutput:
    return RequestOutput(
        request.request_id,
        text_delta="",
        token_ids=(),
        outcome=request.outcome,
        num_prompt_tokens=request.num_prompt_tokens,
        num_generated_tokens=request.num_generated_tokens,
    )


def _set_error(answer: asyncio.Future[T], error: Exception) -> None:
    if not answer.done():
        answer.set_exception(error)


def _set_result(answer: asyncio.Future[T], result: T) -> None:
    if not answer.done():  # whoever asked may have been cancelled
        answer.set_result(result)
