"""The embedded engine: continuous batching over a paged cache, and requests that can be cancelled.

Needs the ``engine`` extra (torch, safetensors, tokenizers). What computes loads torch when it is
first asked for; the words in which an engine speaks do not, so that a frontend before an engine
of another process goes without it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from disconnect_watch.engine.chat import ChatTemplate
from disconnect_watch.engine.config import EngineConfig
from disconnect_watch.engine.errors import (
    CheckpointError,
    DuplicateRequestError,
    EngineClosedError,
    EngineLostError,
    PromptTooLongError,
    QueueFullError,
)
from disconnect_watch.engine.model_config import ModelConfig
from disconnect_watch.engine.outcome import AbortResult, Outcome, RequestOutput, TokenLogprobs
from disconnect_watch.engine.params import SamplingParams
from disconnect_watch.engine.places import DEFAULT_MODEL
from disconnect_watch.engine.records import EngineStats, StepRecord
from disconnect_watch.engine.request import Request
from disconnect_watch.engine.stream import RequestStream
from disconnect_watch.engine.view import EngineView, RequestView

if TYPE_CHECKING:
    from disconnect_watch.engine.embedder import Embedder
    from disconnect_watch.engine.engine import Engine
    from disconnect_watch.engine.thread import EngineThread

__all__ = [
    "DEFAULT_MODEL",
    "AbortResult",
    "ChatTemplate",
    "CheckpointError",
    "DuplicateRequestError",
    "Embedder",
    "Engine",
    "EngineClosedError",
    "EngineConfig",
    "EngineLostError",
    "EngineStats",
    "EngineThread",
    "EngineView",
    "ModelConfig",
    "Outcome",
    "PromptTooLongError",
    "QueueFullError",
    "Request",
    "RequestOutput",
    "RequestStream",
    "RequestView",
    "SamplingParams",
    "StepRecord",
    "TokenLogprobs",
]

#: Where those are that load torch.
_LATER = {
    "Embedder": "disconnect_watch.engine.embedder",
    "Engine": "disconnect_watch.engine.engine",
    "EngineThread": "disconnect_watch.engine.thread",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_LATER[name]), name)
    return value
