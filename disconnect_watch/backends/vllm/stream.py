"""The outputs of one request to vLLM, until its outcome."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from typing import Any, Literal

from vllm.v1.engine.exceptions import EngineDeadError

from disconnect_watch.engine import Outcome, RequestOutput, TokenLogprobs
from disconnect_watch.engine.errors import EngineClosedError
from disconnect_watch.token import CancelToken, Reason

__all__ = ["VllmStream"]


class VllmStream(AsyncIterator[RequestOutput]):
    """Reads what vLLM has of a request as it comes, whether or not anybody reads here.

    Threads: its loop's only.

    Attributes:
        own: the flag of this request alone, which ends it.
        outcome: once it has one.
        has_ended: set with the outcome.
    """

    def __init__(
        self,
        request_id: str,
        collector: Any,
        *,
        own: CancelToken,
        client: CancelToken,
        num_prompt_tokens: int,
        num_logprobs: int,
        on_end: Callable[["VllmStream", Outcome], None],
        abort: Callable[["VllmStream"], None],
    ) -> None:
        self.request_id = request_id
        self.own = own
        self.outcome: Outcome | None = None
        self.has_ended = asyncio.Event()
        self._client = client
        self._collector = collector
        self._num_prompt = num_prompt_tokens
        self._num_logprobs = num_logprobs
        self._num_cached = 0
        #: By the number of the answer: how many tokens it has.
        self._num_tokens: dict[int, int] = {}
        #: And why it has no more.
        self._endings: dict[int, tuple[str, str | int | None]] = {}
        self._on_end = on_end
        self._abort = abort
        self._outputs: deque[RequestOutput] = deque()
        self._error: Exception | None = None
        self._is_closed = False
        self._has_news = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._read())

    @property
    def is_over(self) -> bool:
        """Whether vLLM is done with it, though not all of it was read. Threads: any."""
        return self.outcome is not None

    @property
    def internal_id(self) -> str:
        """What vLLM calls it."""
        return str(self._collector.request_id)

    async def __anext__(self) -> RequestOutput:
        while not self._outputs:
            if self._error is not None:
                raise self._error
            if self._is_closed or self.outcome is not None:
                raise StopAsyncIteration
            self._has_news.clear()
            await self._has_news.wait()
        return self._outputs.popleft()

    def close(self) -> None:
        """Abort the request unless its outcome is known; what was not read yet is dropped."""
        self._is_closed = True
        self._outputs.clear()
        self._has_news.set()
        if self.outcome is None:
            self.cancel(Reason.ABORTED)

    def cancel(self, reason: Reason) -> bool:
        """Have it end; returns whether this was the first reason to."""
        is_first = self.own.cancel(reason)
        # The engine looks at the flag itself; where it does not, it has to be told.
        self._abort(self)
        return is_first

    async def _read(self) -> None:
        last: Any = None
        try:
            while last is None or not last.finished:
                last = self._collector.get_nowait() or await self._collector.get()
                self._num_cached = last.num_cached_tokens or 0
                for output in self._outputs_of(last):
                    self._put(output)
        except EngineDeadError as error:
            self._error = EngineClosedError(f"vLLM's engine has died: {error}")
            self._end(self._failed("vLLM's engine has died"))
        except Exception as error:
            # Whatever it is, the request has ended by it, and somebody waits for that.
            self._end(self._failed(str(error)))
            self._put(self._empty())
        finally:
            self._collector.close()
            self._has_news.set()

    def _outputs_of(self, output: Any) -> Iterator[RequestOutput]:
        """One for each answer that vLLM tells of; the last has the outcome, if it is known."""
        told = list(output.outputs)
        for part in told:
            self._num_tokens[part.index] = self._num_tokens.get(part.index, 0) + len(part.token_ids)
            if part.finish_reason is not None:
                self._endings[part.index] = part.finish_reason, part.stop_reason
        for part in told[:-1]:
            yield self._output_of(part)
        if output.finished:
            self._end(self._outcome_of())
        if told:
            yield replace(self._output_of(told[-1]), outcome=self.outcome)
        elif output.finished:
            yield self._empty()

    def _output_of(self, part: Any) -> RequestOutput:
        return RequestOutput(
            request_id=self.request_id,
            text_delta=part.text,
            token_ids=tuple(part.token_ids),
            outcome=None,
            num_prompt_tokens=self._num_prompt,
            num_generated_tokens=self._num_tokens[part.index],
            logprobs=tuple(self._logprobs_of(part)),
            index=part.index,
            finish_reason=_finish_reason(part.finish_reason),
            stop_reason=part.stop_reason,
        )

    def _logprobs_of(self, part: Any) -> Iterator[TokenLogprobs]:
        for token_id, found in zip(part.token_ids, part.logprobs or (), strict=False):
            # The sampled one is among them even where it is none of the likeliest.
            likeliest = sorted(found.items(), key=lambda item: item[1].rank)[: self._num_logprobs]
            yield TokenLogprobs(
                token_id,
                found[token_id].logprob,
                tuple((id_, each.logprob) for id_, each in likeliest),
            )

    def _empty(self) -> RequestOutput:
        return RequestOutput(
            request_id=self.request_id,
            text_delta="",
            token_ids=(),
            outcome=self.outcome,
            num_prompt_tokens=self._num_prompt,
            num_generated_tokens=sum(self._num_tokens.values()),
        )

    def _put(self, output: RequestOutput) -> None:
        if not self._is_closed:
            self._outputs.append(output)
            self._has_news.set()

    def _outcome_of(self) -> Outcome:
        reasons = {reason for reason, _ in self._endings.values()}
        if "error" in reasons:
            return self._failed("vLLM ended it by an error")
        if "abort" in reasons:
            return self._cancelled()
        reason, stop_reason = self._endings.get(0, (None, None))
        return Outcome(
            "finished",
            finish_reason=_finish_reason(reason),
            stop_reason=stop_reason,
            **self._numbers(),
        )

    def _cancelled(self) -> Outcome:
        fired = next((flag for flag in (self.own, self._client) if flag.cancelled), None)
        now = time.monotonic_ns()
        return Outcome(
            "cancelled",
            reason=Reason.ABORTED if fired is None else fired.reason,
            phase=self._phase(),
            flag_at_ns=now if fired is None else fired.cancelled_at_ns or now,
            seen_at_ns=now,
            dropped_at_ns=now,
            freed_at_ns=now,
            **self._numbers(),
        )

    def _failed(self, error: str) -> Outcome:
        return Outcome("failed", phase=self._phase(), error=error, **self._numbers())

    def _phase(self) -> Literal["prefill", "decode"]:
        return "decode" if any(self._num_tokens.values()) else "prefill"

    def _numbers(self) -> dict[str, Any]:
        return {
            "num_prompt_tokens": self._num_prompt,
            "num_cached_tokens": self._num_cached,
            "num_generated_tokens": sum(self._num_tokens.values()),
        }

    def _end(self, outcome: Outcome) -> None:
        if self.outcome is None:
            self.outcome = outcome
            self.has_ended.set()
            self._on_end(self, outcome)


def _finish_reason(reason: str | None) -> Literal["stop", "length"] | None:
    if reason in ("stop", "repetition"):
        return "stop"
    return "length" if reason == "length" else None
