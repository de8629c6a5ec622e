"""Python's cycle collector, for a process that does nothing but serve.

It looks through its youngest objects each 700 that were made and not freed, which a few requests
at once are, and now and then through all there are, the modules and models included. What a
request makes is freed by its references; a cycle is the exception, so looks may be rarer.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["rare_collections"]

#: Objects made and not freed, before the youngest are looked through.
THRESHOLD = 10_000


@contextmanager
def rare_collections() -> Iterator[None]:
    """Collect rarely, and what is there by now never; until it is left.

    Threads: of the whole process; not beside another of it.
    """
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(max(THRESHOLD, before[0]) if before[0] else 0, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
