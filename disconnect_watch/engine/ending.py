"""Whether a token is the last of its answer; stop strings are looked for in its text, elsewhere."""

from collections.abc import Sequence
from typing import Literal

from disconnect_watch.engine.request import Request

__all__ = ["ending"]


def ending(
    request: Request, token_id: int, *, eos_token_ids: Sequence[int], max_model_len: int
) -> tuple[Literal["stop", "length"] | None, int | None]:
    """Look at the token that is about to be appended to a request.

    Returns:
        Why there will be no other, None if there may be; and the token, if it is one at which the
        request wanted to stop.
    """
    params = request.params
    if token_id in params.stop_token_ids:
        return "stop", token_id
    if token_id in eos_token_ids and not params.ignore_eos:
        return "stop", None
    num_tokens = len(request.token_ids) + 1
    if num_tokens - request.num_prompt_tokens >= params.max_tokens or num_tokens >= max_model_len:
        return "length", None
    return None, None
