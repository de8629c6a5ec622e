"""What an engine takes and gives, as tensors, and what it is called; without the engine itself."""

from pathlib import Path
from urllib.parse import quote

from disconnect_watch.backends.base import Tensor

__all__ = ["INPUTS", "OUTPUTS", "model_name"]

INPUTS = (
    Tensor("text_input", "BYTES"),
    Tensor("max_tokens", "INT32", is_optional=True),
    Tensor("temperature", "FP32", is_optional=True),
    Tensor("top_p", "FP32", is_optional=True),
    Tensor("top_k", "INT32", is_optional=True),
    Tensor("seed", "UINT64", is_optional=True),
    Tensor("ignore_eos", "BOOL", is_optional=True),
    Tensor("stop", "BYTES", (-1,), is_optional=True),
    Tensor("stop_token_ids", "INT32", (-1,), is_optional=True),
    Tensor("logprobs", "INT32", is_optional=True),
    Tensor("n", "INT32", is_optional=True),
    Tensor("best_of", "INT32", is_optional=True),
    Tensor("priority", "INT32", is_optional=True),
    Tensor("time_limit", "FP32", is_optional=True),
)
#: Of ``n`` answers each output has so many elements; ``index`` tells them apart in a stream.
OUTPUTS = (
    Tensor("text_output", "BYTES", (-1,)),
    Tensor("logprobs", "BYTES", (-1,), is_optional=True),
    Tensor("index", "INT32", is_optional=True),
)


def model_name(path: Path, name: str | None) -> str:
    """The name of a model in URLs: that of its directory, where it was given none.

    Percent-encoded where a path needs it, since the frontend takes names as the client wrote them.
    """
    return quote(path.resolve().name if name is None else name, safe="")
