"""What a transfer between a prefill and a decode node is refused for, or ends by."""

from disconnect_watch.errors import DisconnectWatchError

__all__ = [
    "LayoutError",
    "PeerLostError",
    "RetainedFullError",
    "TransferCancelledError",
    "TransferError",
    "TransferUsedError",
    "UnknownTransferError",
]


class TransferError(DisconnectWatchError):
    """Base of all that ends a transfer. After any of them the blocks are not to be used."""


class UnknownTransferError(TransferError, LookupError):
    """No transfer with that id is there for that owner: it ended, is another's, or never was."""


class TransferUsedError(TransferError):
    """A transfer id is good for one pull, and there was one."""


class TransferCancelledError(TransferError):
    """The transfer was cancelled or released before its last byte was there."""


class RetainedFullError(TransferError, MemoryError):
    """The store retains as many blocks as it may. The blocks stay with who offered them."""


class LayoutError(TransferError, ValueError):
    """Blocks of the two nodes do not fit each other, or are not as many."""


class PeerLostError(TransferError, ConnectionError):
    """The other node can't be reached, left, or sent what is no frame of the protocol."""
