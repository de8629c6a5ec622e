"""What the routes share: the models, the limits, and who is being served now."""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from disconnect_watch.backends import Backend
from disconnect_watch.backends.engines import EngineTable
from disconnect_watch.backends.models import Models, RemoteModels
from disconnect_watch.backends.statistics import ModelStatistics
from disconnect_watch.engine import Outcome
from disconnect_watch.engine.errors import EngineClosedError, EngineLostError, QueueFullError
from disconnect_watch.keys import Caller, Role
from disconnect_watch.server.access import RequestRecord
from disconnect_watch.server.errors import (
    FailedError,
    ModelNotFoundError,
    OverloadedError,
    ProtocolError,
    ShuttingDownError,
    UnavailableError,
)
from disconnect_watch.server.generation import Generation
from disconnect_watch.server.ledger import RequestLedger
from disconnect_watch.server.live import LiveHub
from disconnect_watch.server.log_settings import LogSettings
from disconnect_watch.server.openai.responses.service import Responses
from disconnect_watch.server.openai.responses.store import ResponseStore
from disconnect_watch.server.options import FrontendOptions
from disconnect_watch.server.overdue import Overdue
from disconnect_watch.server.rate import RateLimit
from disconnect_watch.server.running import Running
from disconnect_watch.server.strict import counted_as_triton
from disconnect_watch.server.v2.shared_memory import SharedMemory
from disconnect_watch.server.v2.trace_settings import TraceSettings
from disconnect_watch.token import CancelToken, Reason

if TYPE_CHECKING:
    from disconnect_watch.backends.embedder import EmbedderBackend
    from disconnect_watch.engine.outcome import Phase
    from disconnect_watch.server.peers import Peers

__all__ = ["Frontend", "FrontendStats"]

#: Seconds that no request takes.
FOREVER = 1e8

#: Cancels by id that a caller may ask for, each second, and at once.
ABORT_RATE = 100.0
ABORT_BURST = 512.0
#: How many times as often a proxy may.
SERVICE_WEIGHT = 10.0


@dataclass(frozen=True, slots=True)
class FrontendStats:
    """A snapshot of a ``Frontend``.

    Attributes:
        num_live: requests that are being generated.
        num_unacked: those of them that are cancelled and whose outcome is not known yet.
        is_draining: whether no more are taken.
        num_overdue: cancels that have had no effect within their bound.
        num_late: cancels that had it, but later than that, since the start.
    """

    num_live: int
    num_unacked: int
    is_draining: bool
    num_overdue: int = 0
    num_late: int = 0


class Frontend:
    """The served models and their running requests.

    Args:
        backends: engines, one a model; the frontend does not close them, nor the rest.
        models: those that take tensors, if any.
        embedder: makes vectors of texts, if any.
        remote: the same, where other servers run them.
        engines: those of a repository, which come and go; ``backends`` join them.
        options: None for the defaults.
        peers: other frontends before the same engines; None where this is the only one.
        store: of responses, closed with ``responses``; None keeps them in memory.

    Threads: the loop's only.
    """

    def __init__(
        self,
        *backends: Backend,
        models: Models | None = None,
        embedder: "EmbedderBackend | None" = None,
        remote: RemoteModels | None = None,
        engines: EngineTable | None = None,
        options: FrontendOptions | None = None,
        store: ResponseStore | None = None,
        peers: "Peers | None" = None,
    ) -> None:
        self.peers = peers
        self.embedder = embedder
        self.backends = EngineTable() if engines is None else engines
        for backend in backends:
            self.backends.add(backend)
        self.models = models if remote is None else remote
        self.remote = remote
        self.options = options or FrontendOptions()
        self.memory = SharedMemory(is_allowed=self.options.allow_client_shm)
        self.log_settings = LogSettings()
        self.trace_settings = TraceSettings()
        #: Of requests that take tensors.
        self._tokens: set[CancelToken] = set()
        #: Seconds since the epoch.
        self.started_at = int(time.time())
        self.ledger = RequestLedger()
        #: For the page that shows what runs.
        self.live = LiveHub(self.backends)
        #: Of ``/v1/responses``; closed by whoever serves.
        self.responses = Responses(self, store)
        #: Of what ran elsewhere than in an engine, by kind and phase.
        self.outcomes: Counter[tuple[str, Phase | None]] = Counter()
        #: Of cancels by id, for each caller.
        self.abort_limit = RateLimit(ABORT_RATE, burst=ABORT_BURST)
        self._live: set[Running] = set()
        self._overdue = Overdue(min(self.options.cancel_bound, FOREVER))
        self._is_draining = False

    def stats(self) -> FrontendStats:
        """How many requests are being generated, and whether more are taken."""
        return FrontendStats(
            num_live=len(self._live) + len(self._tokens),
            num_unacked=sum(token.cancelled for token in self._cancellable()),
            is_draining=self._is_draining,
            num_overdue=self._num_overdue(),
            num_late=self._overdue.num_late,
        )

    @property
    def is_ready(self) -> bool:
        """Whether a request sent now would be served, and cancelled if need be."""
        return (
            not self._is_draining
            and not self._num_overdue()
            and all(backend.is_ready for backend in self.backends.values())
            and (self.models is None or self.models.is_ready(strict=self.options.strict_readiness))
        )

    def find(self, model: str, version: str | None) -> Backend:
        """The backend of a model.

        Raises:
            ModelNotFoundError: in Triton's words.
        """
        backend = self.backends.get(model)
        if backend is None:
            raise ModelNotFoundError(f"Request for unknown model: '{model}' is not found")
        if version not in (None, backend.version):
            raise ModelNotFoundError(
                f"Request for unknown model: '{model}' version {version} is not found"
            )
        return backend

    async def submit(
        self, backend: Backend, generation: Generation, record: RequestRecord
    ) -> Running:
        """``submit_all``, for what has one prompt."""
        (running,) = await self.submit_all(backend, generation, record)
        return running

    async def submit_all(
        self, backend: Backend, generation: Generation, record: RequestRecord
    ) -> list[Running]:
        """Hand a request to its backend, with all its prompts; returns when they are queued.

        Its token is kept at hand for a shutdown until each has ended or was closed.

        Returns:
            What runs for each prompt, in their order.

        Raises:
            RequestError: one of them can't be taken, and none was.
            PartAnswered: only its prompt was wanted here, and that is done.
        """
        self._refuse_while_draining()
        prompts = {
            f"{record.request_id}.{part}" if part else record.request_id: prompt
            for part, prompt in enumerate((generation.prompt, *generation.others))
        }
        time_left = record.time_left(generation.time_limit)
        source = backend if record.part is None else record.part.of(backend)
        try:
            streams = await source.submit_all(
                prompts,
                generation.params,
                cancel=record.token,
                priority=generation.priority,
                time_limit=time_left,
            )
        except QueueFullError as error:
            raise OverloadedError(
                f"{generation.prefix}Exceeds maximum queue size: {error}"
            ) from error
        except EngineLostError as error:
            raise UnavailableError(f"{generation.prefix}{error}") from error
        except EngineClosedError as error:
            raise FailedError(f"{generation.prefix}{error}") from error
        except ValueError as error:
            # The engine's word for a prompt that it can't take.
            raise ProtocolError(f"{generation.prefix}{error}") from error

        def end(running: Running, outcome: Outcome | None) -> None:
            self._live.discard(running)
            record.works.discard(running)
            if outcome is None:
                self._overdue.left(running)
            else:
                record.add_outcome(outcome)
                self._overdue.ended(outcome)
                if outcome.reason is Reason.DEADLINE:
                    # An engine looks at the time itself.
                    self.ledger.signal(record, Reason.DEADLINE)

        def lose(outcome: Outcome) -> None:
            # The engine's own count has it not, and begins again.
            self.outcomes.update([(outcome.kind, outcome.phase)])

        record.admitted_ns = time.monotonic_ns()
        runnings = [
            Running(
                outputs,
                abort=partial(backend.abort, work_id),
                token=record.token,
                prefix=generation.prefix,
                on_first=record.first_output,
                on_end=end,
                on_lost=lose,
                deadline_ns=0 if time_left is None else record.admitted_ns + int(time_left * 1e9),
            )
            for work_id, outputs in zip(prompts, streams, strict=True)
        ]
        self._live.update(runnings)
        record.works.update(runnings)
        if record.part is not None:
            await record.part.finish(streams, runnings)
        return runnings

    async def take_cancels(self, caller: Caller, num: int) -> None:
        """Count cancels by id that a caller asks for.

        Raises:
            TooManyError: they are more than the caller may ask for now.
        """
        weight = SERVICE_WEIGHT if caller.role is Role.SERVICE else 1.0
        if self.peers is None:
            self.abort_limit.take(caller.name, num, weight=weight)
        else:
            await self.peers.take(caller.name, num, weight=weight)

    def model_statistics(self) -> Sequence[ModelStatistics]:
        """Of the models that take tensors, for metrics; counted as Triton does if that is asked.

        What the models of other servers have done, those tell themselves.
        """
        found = self.models.statistics() if self.models is not None and not self.remote else ()
        return [*map(counted_as_triton, found)] if self.options.strict else found

    def begin(self, record: RequestRecord) -> None:
        """Keep the token of a request at hand for a shutdown, until ``end``.

        Raises:
            ShuttingDownError: no more are taken.
        """
        self._refuse_while_draining()
        self._tokens.add(record.token)
        record.admitted_ns = time.monotonic_ns()

    def end(self, record: RequestRecord, outcome: Outcome | None) -> None:
        """The other half of ``begin``; engines count outcomes of their own.

        Args:
            outcome: None of what was refused.
        """
        self._tokens.discard(record.token)
        if outcome is not None:
            record.add_outcome(outcome)
            self._overdue.ended(outcome)
            self.outcomes[outcome.kind, outcome.phase] += 1

    def begin_drain(self) -> None:
        """Take no more requests; those that run go on, but for streams that never end."""
        self._is_draining = True
        self.live.close()

    def cancel_all(self, reason: Reason = Reason.SHUTDOWN) -> int:
        """Set the token of every running request; returns how many were not set before."""
        tokens = set(self._cancellable())
        for record in self.ledger.live():
            if record.token in tokens:
                self.ledger.signal(record, reason)
        return sum(token.cancel(reason) for token in tokens)

    def _num_overdue(self) -> int:
        unheeded = () if self.models is None else self.models.unheeded()
        return self._overdue.num_overdue(tuple(self._live), tuple(self._tokens), unheeded)

    def _cancellable(self) -> Iterator[CancelToken]:
        yield from (running.token for running in self._live)
        yield from self._tokens

    def _refuse_while_draining(self) -> None:
        if self._is_draining:
            raise ShuttingDownError("the server is shutting down")
