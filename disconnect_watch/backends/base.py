"""What the frontend asks of whatever does the work."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from disconnect_watch.token import CancelToken

if TYPE_CHECKING:
    # What runs Python models is a process without the engine, and so without torch.
    from disconnect_watch.engine import (
        AbortResult,
        ChatTemplate,
        EngineStats,
        EngineView,
        Outcome,
        RequestOutput,
        SamplingParams,
    )

__all__ = ["Backend", "OutputStream", "Tensor", "Viewable"]


@dataclass(frozen=True, slots=True)
class Tensor:
    """One input or output as KServe v2 metadata describes it; -1 is any number of elements."""

    name: str
    datatype: str
    shape: tuple[int, ...] = (1,)
    is_optional: bool = False


class OutputStream(Protocol):
    """The outputs of one request, the last of which carries its outcome.

    Whoever has one reads it to its end or closes it.

    Raises:
        EngineClosedError: the work stopped underneath it.
    """

    def __aiter__(self) -> AsyncIterator["RequestOutput"]:
        """It iterates over itself."""

    def __anext__(self) -> Awaitable["RequestOutput"]:
        """Wait for the next output."""

    @property
    def is_over(self) -> bool:
        """Whether the work has its outcome, however much of it was read. Threads: any."""

    def close(self) -> None:
        """Abort the request unless its outcome is known. Idempotent."""


class Backend(Protocol):
    """One served model.

    Threads: everything is called on the loop's thread, but ``stats`` on any, and a
    listener given to ``listen`` on whichever thread decides outcomes.
    """

    @property
    def name(self) -> str:
        """The model's name in URLs."""

    @property
    def version(self) -> str:
        """Its one version, a positive integer in decimal."""

    @property
    def platform(self) -> str:
        """What runs it, as metadata says."""

    @property
    def inputs(self) -> Sequence[Tensor]:
        """What a request may give."""

    @property
    def outputs(self) -> Sequence[Tensor]:
        """What a response has."""

    @property
    def chat_template(self) -> "ChatTemplate | None":
        """How a chat becomes a prompt; None where the model knows none."""

    @property
    def is_ready(self) -> bool:
        """Whether a request sent now would be worked on. Turns false for good if it died."""

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Turn text into token ids. Threads: any.

        Raises:
            ValueError: it is no unicode.
        """

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to the text. Threads: any."""

    async def submit(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: "SamplingParams",
        *,
        cancel: CancelToken,
        priority: int = 0,
        time_limit: float | None = None,
    ) -> OutputStream:
        """Take one request; returns when it is queued, which may be long before its first token.

        A set ``cancel`` ends it from any thread, with no help of the loop.

        Args:
            prompt: text, or token ids.
            priority: the lowest number runs first.
            time_limit: seconds until it is cancelled with reason DEADLINE.

        Raises:
            ValueError: the request can't be taken: see ``engine.errors``.
            EngineClosedError: nothing is taken any more.
        """

    async def submit_all(
        self,
        prompts: Mapping[str, str | Sequence[int]],
        params: "SamplingParams",
        *,
        cancel: CancelToken,
        priority: int = 0,
        time_limit: float | None = None,
    ) -> Sequence[OutputStream]:
        """As ``submit``, for several prompts that are wanted together: takes all, or none.

        Args:
            prompts: by the id of the request that each becomes.

        Returns:
            A stream for each, in their order.

        Raises:
            ValueError, EngineClosedError: as ``submit``, for any of them.
        """

    async def abort(self, request_id: str) -> "AbortResult":
        """Cancel a request by its id; returns when it is out and its blocks are free."""

    def stats(self) -> "EngineStats":
        """Counters and gauges of now."""

    def listen(self, on_outcome: "Callable[[str, Outcome], None]") -> None:
        """Call ``on_outcome`` with id and outcome, once per admitted request that ended."""

    def close(self) -> None:
        """Cancel what is left with reason SHUTDOWN and release everything. Idempotent."""


@runtime_checkable
class Viewable(Protocol):
    """A backend whose engine can be looked into."""

    async def view(self) -> "EngineView":
        """Who is where at the moment, and what each block is."""
