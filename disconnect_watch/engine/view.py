"""A look at an engine in the middle of its work: who is where, and what each block is.

Made when somebody asks, between two steps; nobody pays for it otherwise.
"""

from dataclasses import dataclass

from disconnect_watch.engine.outcome import Phase
from disconnect_watch.engine.records import EngineStats

__all__ = ["EngineView", "RequestView"]


@dataclass(frozen=True, slots=True)
class RequestView:
    """One live answer to a request.

    Attributes:
        key: the request's id; of the second and later answers ``"id#1"`` and so on.
        num_computed_tokens: of prompt and answer, those whose keys and values are in the cache.
        max_tokens: the longest that the answer may become.
        num_blocks: that it holds, alone or with others.
    """

    key: str
    phase: Phase
    num_prompt_tokens: int
    num_computed_tokens: int
    num_generated_tokens: int
    max_tokens: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class EngineView:
    """An engine between two steps.

    Attributes:
        requests: those that run, in the order of the batch, then those that wait.
        blocks: of each block its place, one of ``BlockPool.PLACES``, by its number there.
        stats: of the same moment.
    """

    requests: tuple[RequestView, ...]
    blocks: bytes
    stats: EngineStats
