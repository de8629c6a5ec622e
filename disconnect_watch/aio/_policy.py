"""What a client's leaving means, and what it is worth to find it out.

One frozen value for ``watch``, ``start_server`` and the adapters; made by ``policy``,
which checks it.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from disconnect_watch.watcher import MASK_ANY, MASK_GONE, vanish_ms

__all__ = ["PLAIN", "Grace", "HalfClose", "OnDisconnect", "Policy", "Probe", "grace", "policy"]

HalfClose = Literal["disconnect", "probe", "ignore"]

#: Writes something harmless to a transport whose peer sent a FIN: a peer that closed
#: answers with a reset, one that only shut its sending side takes it.
Probe = Callable[[asyncio.Transport], object]


@dataclass(frozen=True, slots=True)
class Grace:
    """How long work may go on after its client left, in seconds; see ``grace``."""

    seconds: float


OnDisconnect = Literal["cancel"] | Grace


def grace(seconds: float) -> Grace:
    """For ``on_disconnect``: let the work go on for a while after its client left.

    The token fires, and the block or handler is cancelled, when the time is over; if
    it ends by itself before, nothing happens.

    Args:
        seconds: more than 0.

    Raises:
        ValueError: not more than 0.
    """
    if not seconds > 0:
        raise ValueError(f"grace {seconds!r}: must be more than 0 seconds")
    return Grace(seconds)


@dataclass(frozen=True, slots=True)
class Policy:
    """The checked form of the options that ``policy`` takes."""

    half_close: HalfClose
    probe: Probe | None
    vanish_after: float | None
    unblind: int | None
    grace: float
    #: The ways to leave that count by themselves.
    mask: int = field(init=False)
    #: Whether it asks nothing of the connection beyond a watch.
    is_plain: bool = field(init=False)

    def __post_init__(self) -> None:
        # Fields and no properties: a watch reads them for each block.
        mask = MASK_ANY if self.half_close == "disconnect" else MASK_GONE
        asks = self.half_close == "probe" or self.vanish_after is not None or self.unblind
        object.__setattr__(self, "mask", mask)
        object.__setattr__(self, "is_plain", not asks)


#: What nobody asked to be otherwise.
PLAIN = Policy("disconnect", None, None, None, 0.0)


def policy(
    *,
    half_close: HalfClose = "disconnect",
    probe: Probe | None = None,
    vanish_after: float | None = None,
    unblind: int | None = None,
    on_disconnect: OnDisconnect = "cancel",
) -> Policy:
    """Check the options; see ``watch`` for what they mean.

    Raises:
        ValueError: a value that is none of those allowed.
    """
    if half_close not in ("disconnect", "probe", "ignore"):
        raise ValueError(f"half_close {half_close!r}: must be 'disconnect', 'probe' or 'ignore'")
    if probe is not None and half_close != "probe":
        raise ValueError(f"probe with half_close {half_close!r}: must be 'probe' too")
    vanish_ms(vanish_after)
    if unblind is not None and unblind < 1:
        raise ValueError(f"unblind {unblind!r}: must be 1 byte or more, or None")
    if on_disconnect != "cancel" and not isinstance(on_disconnect, Grace):
        raise ValueError(f"on_disconnect {on_disconnect!r}: must be 'cancel' or grace(seconds)")
    seconds = on_disconnect.seconds if isinstance(on_disconnect, Grace) else 0.0
    return Policy(half_close, probe, vanish_after, unblind, seconds)
