"""The step loop under clients that come and leave, with a model that says what must be seen.

What is checked after each operation, and the invariant of cancellation that it stands for:

- who left before a step is not in it, be he waiting or running (out within a step, no slot taken);
- after his flag was set no token of his is told, and one outcome is told of each (silence);
- an abort has its effect when it returns, and says what it found (acked, idempotent, total);
- ids are used again at once, and old cancels harm nobody (id reuse);
- several answers to a request end together (fan-out);
- tokens of those who stay are those that they would get alone (isolation);
- blocks hold what their owners wrote, whoever had them before (ack before free, cache kept);
- every block is in one place, and when all have ended, all are available (baseline).
"""

from collections import Counter
from dataclasses import dataclass, field

from disconnect_watch.engine.config import EngineConfig
from disconnect_watch.engine.core import EngineCore
from disconnect_watch.engine.errors import DuplicateRequestError, QueueFullError
from disconnect_watch.engine.outcome import Outcome, RequestOutput
from disconnect_watch.engine.params import SamplingParams
from disconnect_watch.engine.request import Request
from disconnect_watch.token import CancelToken, Reason
from tests.support.engine import engine_tokenizer
from tests.support.model_runner import VOCAB_SIZE, ModelRunner, next_token

__all__ = ["MAX_MODEL_LEN", "NAMES", "Client", "ModelEngine"]

#: The last one reads like the key of the first one's second answer.
NAMES = (*(f"r{index}" for index in range(7)), "r0#1")
BLOCK_SIZE = 4
MAX_MODEL_LEN = 24
MAX_QUEUE = 12


@dataclass(slots=True)
class Client:
    """One request as the model sees it."""

    name: str
    prompt: list[int]
    max_tokens: int
    num_answers: int
    seed: int
    deadline_ns: int | None
    stop_token_ids: tuple[int, ...] = ()
    token: CancelToken = field(default_factory=CancelToken)
    answers: dict[int, list[int]] = field(default_factory=dict)

    def all_keys(self) -> list[str]:
        return [self.name, *(f"{self.name}#{index}" for index in range(1, self.num_answers))]

    def alone(self, index: int) -> list[int]:
        """The answer that nobody disturbs."""
        tokens = list(self.prompt)
        num_tokens = min(self.max_tokens, MAX_MODEL_LEN - len(self.prompt))
        for _ in range(num_tokens):
            tokens.append(next_token(self.seed + index, tokens))
            if tokens[-1] in self.stop_token_ids:
                break
        return tokens[len(self.prompt) :]


class ModelEngine:
    """An engine, and what it must do; every method checks that it did."""

    def __init__(
        self, *, num_blocks: int, max_num_seqs: int, budget: int, device_steps: int = 1
    ) -> None:
        self.device_steps = device_steps
        self.runner = ModelRunner(block_size=BLOCK_SIZE)
        self.core = EngineCore(
            self.runner,
            engine_tokenizer(),
            config=EngineConfig(
                block_size=BLOCK_SIZE,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max(budget, max_num_seqs),
                max_queue=MAX_QUEUE,
                step_log_size=1,
                arithmetic="triton",
                device_steps=device_steps,
            ),
            num_blocks=num_blocks,
            max_model_len=MAX_MODEL_LEN,
        )
        self.now_ns = 1
        self.core.clock = lambda: self.now_ns
        self.core.on_outcome = self._on_outcome
        self.core.layer_hook = self._between_layers
        self.live: dict[str, Client] = {}
        #: Ended by an abort; their outcome comes out of the next step, though the id is free.
        self.aborted: list[Client] = []
        #: Of requests that have ended, to be set when it is too late.
        self.old_tokens: list[CancelToken] = []
        self.outcomes: Counter[str] = Counter()
        self.num_accepted = 0
        self.num_stale = 0
        self.leaves: dict[int, str] = {}

    def submit(
        self,
        name: str,
        prompt: list[int],
        *,
        max_tokens: int,
        num_answers: int = 1,
        seed: int = 1,
        priority: int = 0,
        time_limit_ns: int | None = None,
        stops_at_every: int | None = None,
        has_left: bool = False,
    ) -> None:
        """A client comes; it may be gone before it is admitted.

        Args:
            stops_at_every: of so many tokens one ends an answer, so that answers end apart.
        """
        deadline_ns = None if time_limit_ns is None else self.now_ns + time_limit_ns
        stop_token_ids = tuple(range(0, VOCAB_SIZE, stops_at_every)) if stops_at_every else ()
        client = Client(name, prompt, max_tokens, num_answers, seed, deadline_ns, stop_token_ids)
        if has_left:
            client.token.cancel(Reason.FIN)
        request = Request(
            name,
            prompt,
            params=SamplingParams(
                max_tokens=max_tokens,
                n=num_answers,
                ignore_eos=True,
                stop_token_ids=stop_token_ids,
            ),
            seed=seed,
            cancel=client.token,
            priority=priority,
            deadline_ns=deadline_ns,
        )
        request.fan_out(num_answers)
        is_full = self.core.stats().num_waiting + num_answers > MAX_QUEUE
        is_taken = any(
            set(client.all_keys()) & set(other.all_keys()) for other in self.live.values()
        )
        try:
            self.core.admit(request)
        except QueueFullError:
            assert is_full
        except DuplicateRequestError:
            assert is_taken
        else:
            assert not is_full
            assert not is_taken
            self.live[name] = client
            self.num_accepted += 1
        self.check()

    def leave(self, name: str) -> None:
        """A client goes, if there is one."""
        if name in self.live:
            self.live[name].token.cancel(Reason.FIN)

    def leave_late(self) -> None:
        """One goes whose request has ended; that is no business of whoever has its id now."""
        if self.old_tokens:
            self.old_tokens.pop().cancel(Reason.FIN)

    def abort(self, name: str) -> None:
        """Someone aborts by id, known or not."""
        num_told = self.outcomes.total()
        result = self.core.abort(name)
        client = self.live.pop(name, None)
        if client is None:
            assert result.outcome in ("already_finished", "already_cancelled", "not_found")
            self.num_stale += result.outcome != "not_found"
        else:
            was_first = not client.token.cancelled
            assert result.outcome == ("cancelled" if was_first else "already_cancelled")
            self.num_stale += not was_first
            assert not set(client.all_keys()) & self.core.block_owners
            assert self.outcomes.total() == num_told + 1
            self.aborted.append(client)
        assert self.core.find(name) is None
        self.check()

    def step(self, leaves: dict[int, str] | None = None, *, lag: int = 0) -> None:
        """One step, within which clients leave: by layer, who.

        Args:
            lag: how late the runner acknowledges.
        """
        self.leaves = dict(leaves or {})
        self.runner.lag = lag
        gone = [client for client in self.live.values() if self._is_gone(client)]
        self.core.step_log.clear()
        outputs = self.core.step()
        for output in outputs:
            self._hear(output)
        assert not self.aborted
        for client in gone:
            assert self.live.get(client.name) is not client, f"{client.name} outlived its leave"
        if self.core.step_log:
            scheduled = set(self.core.step_log[-1].scheduled)
            assert not scheduled & {key for client in gone for key in client.all_keys()}
            for client in self.live.values():
                # Who left within the step and was in it is out; out of the queue it is next.
                assert not client.token.cancelled or not scheduled & set(client.all_keys())
        self.check()

    def check(self) -> None:
        """What holds between any two operations."""
        self.core.check_integrity()
        stats = self.core.stats()
        assert stats.num_blocks == (
            stats.num_blocks_free
            + stats.num_blocks_cached
            + stats.num_blocks_used
            + stats.num_blocks_retained
        )
        assert stats.num_requests == self.num_accepted
        assert sum(stats.outcomes.values()) == self.outcomes.total()
        assert self.outcomes.total() + len(self.live) == self.num_accepted
        assert stats.stale_events.get("abort", 0) == self.num_stale
        keys = {key for client in self.live.values() for key in client.all_keys()}
        assert self.core.block_owners <= keys
        assert stats.num_waiting + stats.num_running <= len(keys)

    def drain(self) -> None:
        """With no more clients, everyone ends in bounded time and leaves nothing behind."""
        num_keys = sum(client.num_answers for client in self.live.values())
        for _ in range((num_keys + 1) * (MAX_MODEL_LEN + 2)):
            if not self.core.has_work:
                break
            self.step()
        assert not self.live
        # The last acknowledgements come with a step, though there is nothing else to do in it.
        self.step()
        stats = self.core.stats()
        assert stats.num_blocks_available == stats.num_blocks
        assert (stats.num_waiting, stats.num_running) == (0, 0)

    def _is_gone(self, client: Client) -> bool:
        is_late = client.deadline_ns is not None and self.now_ns >= client.deadline_ns
        return client.token.cancelled or is_late

    def _between_layers(self, _: int, layer: int) -> None:
        if (name := self.leaves.pop(layer, None)) is not None:
            self.leave(name)

    def _on_outcome(self, _: str, outcome: Outcome) -> None:
        self.outcomes[outcome.kind] += 1

    def _hear(self, output: RequestOutput) -> None:
        aborted = [client for client in self.aborted if client.name == output.request_id]
        client = aborted[0] if aborted else self.live[output.request_id]
        outcome = output.outcome
        if output.token_ids:
            assert not aborted
            # Flags are set before a step or between its layers, so before a token is told.
            assert not self._is_gone(client)
            client.answers.setdefault(output.index, []).extend(output.token_ids)
        if outcome is None:
            return
        if aborted:
            self.aborted.remove(client)
        else:
            del self.live[client.name]
        self.old_tokens.append(client.token)
        del self.old_tokens[:-4]
        answers = client.answers
        assert outcome.num_generated_tokens == sum(map(len, answers.values()))
        for index, tokens in answers.items():
            expected = client.alone(index)
            assert tokens == expected[: len(tokens)], f"{client.name} got another's tokens"
        if outcome.kind == "finished":
            assert sorted(answers) == list(range(client.num_answers))
            assert all(answers[index] == client.alone(index) for index in answers)
        elif outcome.kind == "cancelled":
            assert output.token_ids == ()
            assert aborted or self._is_gone(client)
            assert outcome.num_wasted_tokens <= client.num_answers * self.device_steps
        else:
            assert self.runner.poisoned & {client.seed + i for i in range(client.num_answers)}
