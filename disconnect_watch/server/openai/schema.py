"""What requests may have in them: names, types and defaults.

What is not listed is passed over, as other servers of this API do: clients send names of users,
tiers and metadata along. But what is listed and would change the answer is never passed over:
``refuse_unsupported`` names it.
"""

from typing import Annotated, Any, ClassVar, TypeVar

import msgspec

from disconnect_watch.errors import cut, shown
from disconnect_watch.server.openai.errors import InvalidFieldError

__all__ = [
    "ChatRequest",
    "CompletionRequest",
    "EmbeddingRequest",
    "GenerationRequest",
    "StreamOptions",
    "decode_request",
]

#: That a request may take.
Seconds = Annotated[float, msgspec.Meta(ge=0, le=86_400)]

T = TypeVar("T", bound=msgspec.Struct)


class StreamOptions(msgspec.Struct):
    """Of a stream.

    Attributes:
        include_usage: whether a last chunk tells the numbers of tokens.
    """

    include_usage: bool = False


class GenerationRequest(msgspec.Struct, kw_only=True):
    """What both ways to generate have in common.

    Attributes:
        top_k, stop_token_ids, ignore_eos, priority: ours, not OpenAI's; see ``SamplingParams``.
        timeout: seconds that the request may take; ours.
    """

    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    response_format: dict[str, Any] | None = None
    top_k: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    priority: int | None = None
    timeout: Seconds | None = None

    #: Names of fields, and the values of them that change nothing.
    harmless: ClassVar[dict[str, tuple[Any, ...]]] = {
        "presence_penalty": (None, 0),
        "frequency_penalty": (None, 0),
        "logit_bias": (None, {}),
        "response_format": (None, {"type": "text"}),
    }

    @property
    def includes_usage(self) -> bool:
        """Whether the stream is to end with numbers of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    def refuse_unsupported(self) -> None:
        """Refuse what would change the answer and is not done here.

        Raises:
            InvalidFieldError: names the field.
        """
        for name, values in self.harmless.items():
            value = getattr(self, name)
            if value not in values:
                raise InvalidFieldError(
                    name, f"{name} is {shown(value)}, which this server cannot do, leave it out"
                )
        if self.stream_options is not None and not self.stream:
            raise InvalidFieldError("stream_options", "stream_options needs stream to be true")


class CompletionRequest(GenerationRequest, kw_only=True):
    """Of ``/v1/completions``; the prompt is text, a list of texts, tokens, or lists of tokens."""

    prompt: str | list[Any]
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None

    harmless = {**GenerationRequest.harmless, "suffix": (None, "")}


class ChatRequest(GenerationRequest, kw_only=True):
    """Of ``/v1/chat/completions``.

    Attributes:
        chat_template_kwargs: more for the template, such as ``enable_thinking``; ours.
    """

    messages: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    functions: list[Any] | None = None
    function_call: Any = None
    modalities: list[str] | None = None
    audio: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    harmless = {
        **GenerationRequest.harmless,
        "tool_choice": (None, "none", "auto"),
        "functions": (None, []),
        "function_call": (None, "none", "auto"),
        "modalities": (None, ["text"]),
        "audio": (None,),
    }


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    """Of ``/v1/embeddings``; the input is text, a list of texts, tokens, or lists of tokens."""

    model: str
    input: str | list[Any]
    encoding_format: str | None = None
    dimensions: int | None = None
    timeout: Seconds | None = None


def decode_request(kind: type[T], body: bytes) -> T:
    """Read a request body.

    Raises:
        InvalidFieldError: it is no JSON, or a field is missing or of the wrong type.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        message = str(error)
        what, _, path = message.partition(" - at `$")
        param = path.strip("`").strip(".").split("[")[0].split(".")[0]
        if not param and "field `" in what:
            param = what.partition("field `")[2].rstrip("`")
        raise InvalidFieldError(param or "body", f"{param or 'the body'}: {cut(what)}") from None
    except RecursionError:
        raise InvalidFieldError("body", "the body is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidFieldError("body", f"the body is no JSON: {cut(str(error))}") from None
