"""A cancel token for ``InferenceSession.run`` of ONNX Runtime.

    with cancel_with(token) as options:
        outputs = session.run(None, inputs, options)

ONNX Runtime looks at ``RunOptions.terminate`` before each node of the graph, in the graphs
of loops and branches too. ``run`` holds no GIL while it computes, so that the callback
thread can set it.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from onnxruntime import RunOptions
from onnxruntime.capi.onnxruntime_pybind11_state import Fail

from disconnect_watch.token import CancelToken

__all__ = ["cancel_with"]


@contextmanager
def cancel_with(token: CancelToken, options: RunOptions | None = None) -> Iterator[RunOptions]:
    """Options for the runs of one request, which end before their next node if it fires.

    Args:
        options: those to use, of this request alone; its ``terminate`` remains set.

    Raises:
        ClientDisconnected: out of the block, for a run that was ended, or if it had fired.
    """
    token.raise_if_cancelled()
    if options is None:
        options = RunOptions()

    def terminate(_: CancelToken) -> None:
        options.terminate = True

    token.add_callback(terminate)
    try:
        yield options
    except Fail as error:
        # A run that failed by itself has another message, whether the client is there or not.
        if "terminate flag" in str(error):
            token.raise_if_cancelled()
        raise
    finally:
        token.remove_callback(terminate)
