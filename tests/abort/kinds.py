"""The kinds of requests that are ended, and what each can be doing then."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["KINDS", "PHASES", "Kind"]

#: What a request is doing when that happens: the page's word, and the one in metrics and log.
PHASES = {"queued": "waiting", "prefill": "prefill", "decode": "decode", "finished": "decode"}

_ALL = tuple(PHASES)
_ENDLESS = {"max_tokens": 100_000, "ignore_eos": True}
_ENDLESS_RESPONSE = {"max_output_tokens": 100_000, "ignore_eos": True}
#: Ends by itself, but not before it is held in its decode.
_SHORT_RESPONSE = {
    "model": "tiny",
    "input": "The class",
    "max_output_tokens": 8,
    "ignore_eos": True,
}
_CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "The class"}]}


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of endpoint.

    Attributes:
        work: what does it: the engine, the encoder or a model in a process of its own.
        body: of a request that ends by a cancel alone, where the engine works on it.
        phases: those that there are.
        begins_early: whether a stream's head comes when the request is queued.
        num_prompts: each has an outcome of its own; where one is worked on, the others wait.
        outlives: whether it goes on without its client.
    """

    title: str
    path: str
    work: str = "engine"
    body: Mapping[str, Any] = field(default_factory=dict)
    phases: tuple[str, ...] = _ALL
    is_stream: bool = False
    begins_early: bool = False
    num_prompts: int = 1
    outlives: bool = False


#: A further endpoint is a further entry.
KINDS = {
    "infer": Kind(
        "infer", "/v2/models/held/infer", "process", phases=("queued", "decode", "finished")
    ),
    "generate": Kind(
        "generate", "/v2/models/tiny/generate", body={"text_input": "The class", **_ENDLESS}
    ),
    "generate_stream": Kind(
        "generate_stream",
        "/v2/models/tiny/generate_stream",
        body={"text_input": "The class", **_ENDLESS},
        is_stream=True,
    ),
    "completions": Kind(
        "completions",
        "/v1/completions",
        body={"model": "tiny", "prompt": "The class", **_ENDLESS},
    ),
    "completions_stream": Kind(
        "completions, stream",
        "/v1/completions",
        body={"model": "tiny", "prompt": "The class", "stream": True, **_ENDLESS},
        is_stream=True,
        begins_early=True,
    ),
    "completions_n": Kind(
        "completions, two answers",
        "/v1/completions",
        body={"model": "tiny", "prompt": "The class", "n": 2, **_ENDLESS},
    ),
    "completions_prompts": Kind(
        "completions, two prompts",
        "/v1/completions",
        body={"model": "tiny", "prompt": ["The class", "A list"], **_ENDLESS},
        num_prompts=2,
    ),
    "chat": Kind("chat", "/v1/chat/completions", body={**_CHAT, **_ENDLESS}),
    "chat_stream": Kind(
        "chat, stream",
        "/v1/chat/completions",
        body={**_CHAT, "stream": True, **_ENDLESS},
        is_stream=True,
        begins_early=True,
    ),
    "responses": Kind(
        "responses",
        "/v1/responses",
        body={"model": "tiny", "input": "The class", **_ENDLESS_RESPONSE},
    ),
    "responses_stream": Kind(
        "responses, stream",
        "/v1/responses",
        body={"model": "tiny", "input": "The class", "stream": True, **_ENDLESS_RESPONSE},
        is_stream=True,
        begins_early=True,
    ),
    "responses_background": Kind(
        "responses, background",
        "/v1/responses",
        body={**_SHORT_RESPONSE, "background": True},
        outlives=True,
    ),
    "responses_background_stream": Kind(
        "responses, background, stream",
        "/v1/responses",
        body={**_SHORT_RESPONSE, "background": True, "stream": True},
        is_stream=True,
        begins_early=True,
        outlives=True,
    ),
    "embeddings": Kind(
        "embeddings",
        "/v1/embeddings",
        "encoder",
        {"model": "bert", "input": ["one two three", "two"]},
        phases=("queued", "prefill", "finished"),
    ),
}
