"""Prefill and decode apart: blocks that one node keeps until another has them, or nobody will.

Needs numpy (the ``engine`` extra).
"""

from disconnect_watch.disagg.connector import Connector, LocalPeer, Peer
from disconnect_watch.disagg.errors import (
    LayoutError,
    PeerLostError,
    RetainedFullError,
    TransferCancelledError,
    TransferError,
    TransferUsedError,
    UnknownTransferError,
)
from disconnect_watch.disagg.kv import KVBlocks, KVLayout, KVMemory
from disconnect_watch.disagg.pins import Pin, Pull
from disconnect_watch.disagg.reaper import Reaper
from disconnect_watch.disagg.records import (
    Direction,
    Released,
    ReleaseKind,
    ReleaseOutcome,
    RetainedStats,
    Ticket,
    Transfer,
    TransferMeta,
    TransferView,
)
from disconnect_watch.disagg.retained import RetainedStore

__all__ = [
    "Connector",
    "Direction",
    "KVBlocks",
    "KVLayout",
    "KVMemory",
    "LayoutError",
    "LocalPeer",
    "Peer",
    "PeerLostError",
    "Pin",
    "Pull",
    "Reaper",
    "ReleaseKind",
    "ReleaseOutcome",
    "Released",
    "RetainedFullError",
    "RetainedStats",
    "RetainedStore",
    "Ticket",
    "Transfer",
    "TransferCancelledError",
    "TransferError",
    "TransferMeta",
    "TransferUsedError",
    "TransferView",
    "UnknownTransferError",
]
