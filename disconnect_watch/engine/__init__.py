"""The embedded engine: continuous batching over a paged cache, and requests that can be cancelled.

Needs the ``engine`` extra (torch, safetensors, tokenizers).
"""

from disconnect_watch.engine.chat import ChatTemplate
from disconnect_watch.engine.config import EngineConfig
from disconnect_watch.engine.embedder import Embedder
from disconnect_watch.engine.engine import DEFAULT_MODEL, Engine
from disconnect_watch.engine.errors import (
    CheckpointError,
    DuplicateRequestError,
    EngineClosedError,
    PromptTooLongError,
    QueueFullError,
)
from disconnect_watch.engine.model_config import ModelConfig
from disconnect_watch.engine.outcome import AbortResult, Outcome, RequestOutput, TokenLogprobs
from disconnect_watch.engine.params import SamplingParams
from disconnect_watch.engine.records import EngineStats, StepRecord
from disconnect_watch.engine.request import Request
from disconnect_watch.engine.stream import RequestStream
from disconnect_watch.engine.thread import EngineThread
from disconnect_watch.engine.view import EngineView, RequestView

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
