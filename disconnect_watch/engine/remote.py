"""A prompt that another engine has computed: its first token, and how to come by its cache.

An engine that only prefills ends a request with its blocks *held*, out of the pool, for whoever
decodes. One that decodes takes such a request with blocks of its own, which a *load* fills beside
the step loop. Both are numbers here: what lies in blocks, and how it travels, is known to who gives
the two functions.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Protocol

from disconnect_watch.engine.outcome import Sampled
from disconnect_watch.token import CancelToken

if TYPE_CHECKING:
    from disconnect_watch.engine.request import Request

__all__ = ["KVLoad", "Pull", "RemotePrefill", "prompt_digest"]


def prompt_digest(token_ids: Sequence[int]) -> str:
    """What two engines compare to know that they mean the same prompt, in hex."""
    return blake2b(array("q", token_ids), digest_size=16).hexdigest()


class Pull(Protocol):
    """Fills blocks from elsewhere."""

    def __call__(
        self, block_ids: tuple[int, ...], *, first_block: int, cancel: CancelToken
    ) -> None:
        """Write keys and values of the prompt; blocks until they are there.

        Threads: any; a loader's. When it returns, with an error too, it touches no block any more.

        Args:
            block_ids: of the whole prompt, in the order of its tokens.
            first_block: index of the first that is to be written; those before it have been found
                in the prefix cache, and are shared.
            cancel: fires when nobody wants it any more.
        """


@dataclass(frozen=True, slots=True)
class RemotePrefill:
    """What a decode engine is told of a prompt that was computed elsewhere.

    Attributes:
        first: the token that follows the prompt, which the other engine has sampled.
        seed: of the random numbers that it was sampled with, and the next will be.
        digest: of the prompt, by ``prompt_digest``: a chat template that tells the time may have
            made another one here. Empty where that cannot be.
        pull: fetches the cache of the prompt; None where there is none to fetch, and it is
            computed again.
        release: called once instead of ``pull`` if that is not going to be. It must neither block
            nor raise.
    """

    first: Sampled
    seed: int
    digest: str = ""
    pull: Pull | None = None
    release: Callable[[], None] = lambda: None


@dataclass(eq=False, slots=True)
class KVLoad:
    """Blocks of one request while they are filled.

    Attributes:
        block_ids, first_block: see ``Pull``; held until the load has ended.
        cancel: fires when the request has left, or has lost its place.
    """

    request: "Request"
    pull: Pull
    block_ids: tuple[int, ...]
    first_block: int
    cancel: CancelToken = field(default_factory=CancelToken)
