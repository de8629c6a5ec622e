"""A cancel token for llama.cpp in this process, by llama-cpp-python.

    with cancel_with(llama, token):
        answer = llama(prompt, max_tokens=100)

llama.cpp asks its abort callback after each node of the graph, so that a prompt ends within
a layer, too. Only what computes on the CPU asks: on a GPU look at the token between two
chunks of a stream as well.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from llama_cpp import Llama, ggml_abort_callback, llama_set_abort_callback

from disconnect_watch.token import CancelToken

__all__ = ["cancel_with"]

#: What ``llama_decode`` returns when the callback ended it (``llama.h``), as llama-cpp-python
#: says it.
_ABORTED = "llama_decode returned 2"


@contextmanager
def cancel_with(llama: Llama, token: CancelToken) -> Iterator[None]:
    """While in the block, what ``llama`` computes ends within a layer once the token fires.

    Its context takes one request at a time, and is as usable as before: what the pass had
    put into the cache is overwritten by the next.

    Raises:
        ClientDisconnected: out of the block, for what was ended, or if it had fired.
    """
    token.raise_if_cancelled()
    # Referenced until it is taken off again: llama.cpp keeps a bare pointer.
    ask = ggml_abort_callback(lambda _: token.cancelled)
    llama_set_abort_callback(llama.ctx, ask, None)
    try:
        yield
    except RuntimeError as error:
        # Another failure says so itself, whether the client is there or not.
        if _ABORTED in str(error):
            token.raise_if_cancelled()
        raise
    finally:
        llama_set_abort_callback(llama.ctx, ggml_abort_callback(), None)
