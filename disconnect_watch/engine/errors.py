"""What the engine refuses, and why: a wrong checkpoint, or a request that it cannot take."""

from disconnect_watch.errors import ClosedError, DisconnectWatchError

__all__ = [
    "CheckpointError",
    "DuplicateRequestError",
    "EngineClosedError",
    "EngineLostError",
    "PromptTooLongError",
    "QueueFullError",
]


class CheckpointError(DisconnectWatchError, ValueError):
    """The model directory is incomplete, damaged, or of an architecture that is not supported."""


class PromptTooLongError(DisconnectWatchError, ValueError):
    """The prompt leaves no room for one generated token within the context.

    Attributes:
        num_prompt_tokens: length of the refused prompt.
        max_model_len: tokens that prompt and answer may have together.
    """

    def __init__(self, num_prompt_tokens: int, max_model_len: int) -> None:
        super().__init__(
            f"prompt of {num_prompt_tokens} tokens leaves no room to generate in a context of "
            f"{max_model_len} tokens, send at most {max_model_len - 1}"
        )
        self.num_prompt_tokens = num_prompt_tokens
        self.max_model_len = max_model_len


class QueueFullError(DisconnectWatchError, ValueError):
    """As many requests wait as the engine lets wait.

    Attributes:
        max_queue: the limit.
    """

    def __init__(self, max_queue: int) -> None:
        super().__init__(f"{max_queue} requests wait already, try again later")
        self.max_queue = max_queue


class DuplicateRequestError(DisconnectWatchError, ValueError):
    """A request with this id is still alive."""

    def __init__(self, request_id: str) -> None:
        super().__init__(f"request id {request_id!r} is in use by a live request, choose another")
        self.request_id = request_id


class EngineClosedError(ClosedError):
    """The engine is shutting down, was closed, or its thread has died."""


class EngineLostError(EngineClosedError):
    """The engine's process has ended underneath its requests; another takes its place soon."""
