"""The words of the protocol's state machine: messages, steps, faults, and where a request is."""

from dataclasses import dataclass
from enum import StrEnum

from disconnect_watch.disagg import Transfer

__all__ = ["Action", "Faults", "Held", "Kind", "Message", "Request"]


class Kind(StrEnum):
    """What goes between whom."""

    PREFILL = "X>P prefill"
    TICKET = "P>X ticket"
    DECODE = "X>D decode"
    PULL = "D>P pull"
    BLOCKS = "P>D blocks"
    REFUSED = "P>D refused"
    RELEASE = "D>P release"
    HANG_UP = "D>P hang up"
    CANCEL_P = "X>P cancel"
    CANCEL_D = "X>D cancel"


@dataclass(frozen=True, order=True, slots=True)
class Message:
    kind: Kind
    request: int
    #: Number of the transfer that it is about, over all lives of P; -1 for none.
    transfer: int = -1
    is_second: bool = False


@dataclass(frozen=True, slots=True)
class Action:
    """One step: a name, and of what."""

    name: str
    request: int = -1
    message: Message | None = None

    def __str__(self) -> str:
        if self.message is None:
            return f"{self.name} {self.request}" if self.request >= 0 else self.name
        about = self.message.request
        return f"{self.name} {self.message.kind} {about}"


@dataclass(slots=True)
class Faults:
    """How many of each may happen yet, over all requests."""

    crash: int = 0
    lose: int = 0
    twice: int = 0
    leave: int = 0
    lapse: int = 0


@dataclass(slots=True)
class Request:
    """Where one request is, at each of them."""

    has_left: bool = False
    proxy: str = "new"  # new, prefilling, decoding, over
    prefill: str = "none"  # none, running, over
    decode: str = "none"  # none, queued, pulling, over
    #: The transfer that P copies, and that D pulls.
    copied: int = -1
    pulled: int = -1
    is_told_to_stop: bool = False


@dataclass(slots=True)
class Held:
    """A transfer, by what is true of it."""

    transfer: Transfer
    request: int
    life: int
    is_free: bool
