"""Request ids: 128 random bits each, so that no client can guess or choose another's."""

import os

__all__ = ["new_id"]

NUM_BYTES = 16
#: Ids whose bits are taken from the kernel at once: a system call a request would be felt.
NUM_AT_ONCE = 256

_ready: list[str] = []


def new_id() -> str:
    """A new id, 32 hex digits. Threads: any."""
    try:
        return _ready.pop()
    except IndexError:
        bits = os.urandom(NUM_BYTES * NUM_AT_ONCE).hex()
        size = 2 * NUM_BYTES
        first, *others = (bits[at : at + size] for at in range(0, len(bits), size))
        _ready.extend(others)
        return first


# A child would give out what its parent still has.
os.register_at_fork(after_in_child=_ready.clear)
