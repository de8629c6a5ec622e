"""The looks of vLLM's scheduler, and what it makes of a step that was given up.

A step that was given up (``_runner``) has computed nothing that counts. Of the requests in it

    who left    is finished as aborted, and its client told so, should anybody listen
    who stays   goes back to where it was, and is planned anew

and in both cases the blocks that the step was to fill leave the prefix cache, which has them by
their content from the moment they are planned. Another request of the same step may have found its
beginning there: it goes back to before the first such block.

Threads: the engine's.
"""

import functools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from disconnect_watch.backends.hooks.vllm._look import Look, flags_of
from disconnect_watch.backends.hooks.vllm._runner import dead_of
from disconnect_watch.remote import RemoteFlag

__all__ = ["install"]

#: Requests that have ended are forgotten when they are more than the others and this.
MAX_OLD = 64


def install() -> None:
    """Wrap what the scheduler does. Idempotent."""
    from vllm.v1.core.sched.scheduler import Scheduler

    if hasattr(Scheduler.schedule, "__wrapped__"):
        return
    for method in (add_request, schedule, finish_requests, update_from_output):
        original = getattr(Scheduler, method.__name__)
        setattr(Scheduler, method.__name__, functools.wraps(original)(_with(method, original)))


def _with(method: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        return method(self, functools.partial(original, self), *args, **kwargs)

    return wrapper


class _Book:
    """What we know of one scheduler's requests.

    Attributes:
        flags: by id.
        step: what is being computed, with the blocks of those in it that ended meanwhile.
        untold: requests that were finished here, and whose clients were not told yet.
    """

    def __init__(self) -> None:
        self.flags: dict[str, list[RemoteFlag]] = {}
        self.step: Any = None
        self.touched: set[int] = set()
        self.untold: list[Any] = []
        self._look: Look | None = None

    def add(self, request_id: str, flags: list[RemoteFlag], known: dict[str, Any]) -> None:
        if len(self.flags) > 2 * len(known) + MAX_OLD:
            self.flags = {id_: own for id_, own in self.flags.items() if id_ in known}
        self.flags[request_id] = flags
        self._look = None

    def fired(self) -> list[str]:
        """Those that were cancelled; each is told once."""
        if self._look is None:
            self._look = Look(self.flags)
        if not self._look.has_fired():
            return []
        fired = self._look.fired()
        for request_id in fired:
            del self.flags[request_id]
        self._look = None
        return fired


def _book_of(scheduler: Any) -> _Book:
    book: _Book | None = getattr(scheduler, "_disconnect_watch", None)
    if book is None:
        book = scheduler._disconnect_watch = _Book()
    return book


def add_request(scheduler: Any, original: Callable[..., Any], request: Any) -> Any:
    result = original(request)
    flags = flags_of(request.sampling_params)
    if flags:
        _book_of(scheduler).add(request.request_id, flags, scheduler.requests)
    return result


def schedule(scheduler: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    book = _book_of(scheduler)
    if fired := book.fired():
        _finish(scheduler, fired)
    book.step = original(*args, **kwargs)
    book.touched.clear()
    return book.step


def finish_requests(
    scheduler: Any, original: Callable[..., Any], request_ids: Any, finished_status: Any
) -> Any:
    book = _book_of(scheduler)
    if book.step is not None and book.step.num_scheduled_tokens:
        # Their blocks are free from now on, and who asks for them later finds none.
        ids = [request_ids] if isinstance(request_ids, str) else request_ids
        ids = list(scheduler.requests if ids is None else ids)
        _touch(scheduler, book, ids)
        return original(ids, finished_status)
    return original(request_ids, finished_status)


def update_from_output(
    scheduler: Any, original: Callable[..., Any], step: Any, output: Any
) -> dict[int, Any]:
    book = _book_of(scheduler)
    dead = dead_of(output)
    if dead is not None:
        _give_up(scheduler, book, step, dead)
        step = replace(step, num_scheduled_tokens={}, total_num_scheduled_tokens=0)
    book.step = None
    outputs: dict[int, Any] = original(step, output)
    if book.untold:
        _tell(book.untold, outputs)
        book.untold = []
    return outputs


def _finish(scheduler: Any, ids: Iterable[str]) -> None:
    from vllm.v1.request import RequestStatus

    _book_of(scheduler).untold += scheduler.finish_requests(ids, RequestStatus.FINISHED_ABORTED)


def _give_up(scheduler: Any, book: _Book, step: Any, dead: Iterable[str]) -> None:
    _touch(scheduler, book, step.num_scheduled_tokens)
    scheduler.kv_cache_manager.evict_blocks(book.touched)
    _finish(scheduler, dead)
    for request_id, num_tokens in step.num_scheduled_tokens.items():
        request = scheduler.requests.get(request_id)
        if request is not None and not request.is_finished():
            request.num_in_flight_tokens -= num_tokens
            request.num_computed_tokens = _num_computed(scheduler, book, request, num_tokens)


def _num_computed(scheduler: Any, book: _Book, request: Any, num_tokens: int) -> int:
    """How many tokens of a request are computed, though ``num_tokens`` were given up."""
    num_computed: int = request.num_computed_tokens - num_tokens
    for manager in _managers(scheduler):
        blocks = manager.req_to_blocks.get(request.request_id, ())
        for index in range(num_computed // manager.block_size):
            if blocks[index].block_id in book.touched:
                num_computed = index * manager.block_size
                break
    return num_computed


def _touch(scheduler: Any, book: _Book, ids: Iterable[str]) -> None:
    """Note the blocks into which the step that runs writes for these requests."""
    for request_id in ids:
        num_tokens = book.step.num_scheduled_tokens.get(request_id)
        request = scheduler.requests.get(request_id)
        if num_tokens is None or request is None or request.is_finished():
            continue
        num_computed = request.num_computed_tokens - num_tokens
        for manager in _managers(scheduler):
            blocks = manager.req_to_blocks.get(request_id, ())
            book.touched.update(
                block.block_id
                for block in blocks[num_computed // manager.block_size :]
                if not block.is_null
            )


def _managers(scheduler: Any) -> Any:
    return scheduler.kv_cache_manager.coordinator.single_type_managers


def _tell(requests: Iterable[Any], outputs: dict[int, Any]) -> None:
    """Tell who waits for these requests that they were aborted."""
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

    for request in requests:
        told = outputs.setdefault(request.client_index, EngineCoreOutputs())
        told.outputs = [
            *told.outputs,
            EngineCoreOutput(
                request_id=request.request_id,
                new_token_ids=[],
                finish_reason=request.get_finished_reason(),
                events=request.take_events(),
                trace_headers=request.trace_headers,
            ),
        ]
