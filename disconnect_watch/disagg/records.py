"""What is said about retained blocks: values only, of no behaviour."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum

__all__ = [
    "Direction",
    "ReleaseKind",
    "ReleaseOutcome",
    "Released",
    "RetainedStats",
    "Ticket",
    "Transfer",
    "TransferMeta",
    "TransferView",
]


class ReleaseKind(StrEnum):
    """Which of the three ways let blocks go."""

    #: The decode node, through the connector: it has them, or will not want them.
    IN_BAND = "in_band"
    #: The proxy or the client, through the abort API of the prefill node; or this node itself.
    ABORT = "abort"
    #: Nobody was heard of for as long as the lease is.
    LEASE = "lease"


class ReleaseOutcome(StrEnum):
    """What a release has done."""

    RELEASED = "released"
    ALREADY_RELEASED = "already_released"
    #: Nothing of that name is there; a request that comes by it later finds a tombstone.
    NOT_FOUND = "not_found"


class Direction(IntEnum):
    """Which way the bytes go that a pin is for."""

    SEND = 0
    RECEIVE = 1


@dataclass(frozen=True, slots=True)
class TransferMeta:
    """What goes along with a transfer.

    Attributes:
        request_id: of the request whose keys and values these are; one that is not used twice.
        num_tokens: of the prompt, which the blocks hold the first of.
    """

    request_id: str
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Transfer:
    """Blocks that are retained for a decode node.

    Attributes:
        id: what names them, once: incarnation of the node and 128 random bits, in hex.
        owner: whose request it is; nobody else can pull or release it.
        num_blocks: how many blocks.
        lease_ns: for how long they stay when nobody is heard of.
        is_tombstoned: the release was there before the request, so the blocks are free already.
    """

    id: str
    owner: str
    meta: TransferMeta
    num_blocks: int
    lease_ns: int
    is_tombstoned: bool = False


@dataclass(frozen=True, slots=True)
class Ticket:
    """What a decode node is given of a transfer; a secret, like a key.

    Attributes:
        address: of the node that retains it, as a URL whose scheme names the transport.
        lease_ns: as in ``Transfer``.
    """

    address: str
    transfer_id: str
    owner: str
    lease_ns: int


@dataclass(frozen=True, slots=True)
class Released:
    """What a release found.

    Attributes:
        kind: which way it went first; None where nothing was found.
        num_blocks: that this call released.
        is_pinned: a copy under way still keeps them; they are free when it has ended.
    """

    outcome: ReleaseOutcome
    kind: ReleaseKind | None = None
    num_blocks: int = 0
    is_pinned: bool = False


@dataclass(frozen=True, slots=True)
class TransferView:
    """One transfer at the moment.

    Attributes:
        age_ns: since it was retained.
        lease_left_ns: until nobody will have been heard of for too long; negative if overdue.
        num_pins: copies under way, by direction.
        is_used: its one pull has begun.
        released: which way it was let go, if pins alone keep it; None while it is retained.
    """

    id: str
    owner: str
    request_id: str
    num_blocks: int
    age_ns: int
    lease_left_ns: int
    num_pins: tuple[int, int]
    is_used: bool
    released: ReleaseKind | None


@dataclass(frozen=True, slots=True)
class RetainedStats:
    """Gauges of now, and counters since the store was made.

    Attributes:
        num_transfers: that hold blocks.
        num_blocks: that they hold.
        num_pinned_blocks: of these, in transfers that a copy is under way of.
        num_tombstones: releases whose request has not come.
        leases_by_age: seconds, and how many transfers are at most that old; the last is infinity.
        num_released: transfers, by the way in which they were let go.
        block_ns: for how long blocks were held, summed over blocks, up to now.
        stranded_block_ns: of that, for how long nobody wanted them any more: for a lease that ran
            out since its holder was last heard of, for any other release since the release.
    """

    num_transfers: int
    num_blocks: int
    num_pinned_blocks: int
    num_tombstones: int
    leases_by_age: tuple[tuple[float, int], ...]
    num_released: Mapping[ReleaseKind, int]
    block_ns: int
    stranded_block_ns: int
