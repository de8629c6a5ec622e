"""What is to be told of requests and was not yet, in the order in which it came about.

The text of each answer comes through here, token by token; of a request that wants only the best
of its answers nothing does before all of them have ended.
"""

from dataclasses import replace
from typing import Any, Literal

from disconnect_watch.engine.best_of import BestOf
from disconnect_watch.engine.outcome import Outcome, RequestOutput, Sampled
from disconnect_watch.engine.request import Request
from disconnect_watch.engine.text_stream import TextStream
from disconnect_watch.engine.tokenizer import Tokenizer

__all__ = ["FinishReason", "Outbox"]

FinishReason = Literal["stop", "length"]


class Outbox:
    """The outputs of live requests, and the outcomes of those that have ended."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # By key: each answer has a text of its own.
        self._texts: dict[str, TextStream] = {}
        self._best_of: dict[str, BestOf] = {}
        # By id, of the answer that is told first: why it ended, and at what.
        self._endings: dict[str, tuple[FinishReason | None, str | int | None]] = {}
        self._outputs: list[RequestOutput] = []

    def __len__(self) -> int:
        return len(self._outputs)

    def is_open(self, key: str) -> bool:
        """Whether that is the key of a sibling of a request which has not ended."""
        return key in self._texts

    def open(self, request: Request) -> None:
        """Expect tokens of a request and its siblings."""
        if request.params.is_best_of:
            self._best_of[request.request_id] = BestOf(request.params.n)
        for sibling in request.siblings:
            self._texts[sibling.key] = TextStream(self._tokenizer, stop=request.params.stop)

    def tell(
        self,
        request: Request,
        sampled: Sampled,
        *,
        finish_reason: FinishReason | None,
        stop_token_id: int | None,
    ) -> bool:
        """Tell a token that was just appended to a request.

        Args:
            finish_reason: why there will be no other; None lets the stop strings decide.
            stop_token_id: the token, if it is one at which the request wanted to stop: its text
                is not told.

        Returns:
            Whether the answer has ended.
        """
        stream = self._texts[request.key]
        text = "" if stop_token_id is not None else stream.feed(sampled.token_id)
        if finish_reason is not None:
            text += stream.flush()
        if stream.stopped_by is not None:
            finish_reason = "stop"
        stop_reason = stream.stopped_by or stop_token_id
        logprobs = None if request.params.logprobs is None else sampled.logprobs
        output = _output(
            request,
            text_delta=text,
            token_ids=(sampled.token_id,),
            logprobs=() if logprobs is None else (logprobs,),
            finish_reason=finish_reason,
            stop_reason=stop_reason,
        )
        if request.params.is_best_of:
            self._best_of[request.request_id].hold(output, sampled)
        else:
            self._outputs.append(output)
        if finish_reason is not None and request.index == 0:
            self._endings[request.request_id] = finish_reason, stop_reason
        return finish_reason is not None

    def close(self, request: Request, outcome: Outcome) -> Outcome:
        """Tell how a request has ended; nothing is told of it any more.

        Text that was held back is told only of one that has finished. Then the last output carries
        the outcome, as returned here: it has ended as the answer that is told first.
        """
        for sibling in request.siblings:
            del self._texts[sibling.key]
        best_of = self._best_of.pop(request.request_id, None)
        ending = self._endings.pop(request.request_id, None)
        if outcome.kind != "finished":
            self._outputs.append(_output(request, outcome=outcome))
            return outcome
        if best_of is not None:
            best = best_of.best()
            self._outputs += best
            ending = best[0].finish_reason, best[0].stop_reason
        if ending is not None:  # none of one whose other tokens are another engine's
            outcome = replace(outcome, finish_reason=ending[0], stop_reason=ending[1])
        # The last thing that was told is the last answer's end.
        self._outputs[-1] = replace(self._outputs[-1], outcome=outcome)
        return outcome

    def take(self) -> list[RequestOutput]:
        """Return what was not taken yet."""
        outputs, self._outputs = self._outputs, []
        return outputs


def _output(request: Request, **fields: Any) -> RequestOutput:
    told: dict[str, Any] = {"text_delta": "", "token_ids": (), "outcome": None, **fields}
    return RequestOutput(
        request_id=request.request_id,
        index=request.index,
        num_prompt_tokens=request.num_prompt_tokens,
        num_generated_tokens=request.num_generated_tokens,
        **told,
    )
