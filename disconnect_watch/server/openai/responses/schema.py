"""What a request for a response may have in it.

As in ``openai.schema``, what is not listed is passed over, and what would change the answer and
cannot be done is refused by name.
"""

from typing import Annotated, Any, ClassVar

import msgspec

from disconnect_watch.errors import shown
from disconnect_watch.server.openai.errors import InvalidFieldError
from disconnect_watch.server.openai.schema import ChatRequest, Seconds

__all__ = ["ResponseRequest"]

#: By which logarithms of probabilities are asked for.
LOGPROBS = "message.output_text.logprobs"
#: What else may be included: parts of items that no response here has, so that it changes nothing.
ABSENT = (
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
)

Text = Annotated[str, msgspec.Meta(max_length=512)]
Key = Annotated[str, msgspec.Meta(max_length=64)]


class ResponseRequest(msgspec.Struct, kw_only=True):
    """Of ``POST /v1/responses``; the input is a text or a list of items.

    Attributes:
        store: whether it can be retrieved later; None is true, as OpenAI has it.
        background: answer at once, and generate whether the client stays or not.
        stop, seed, top_k, stop_token_ids, ignore_eos, priority, timeout, chat_template_kwargs:
            ours, as of ``/v1/chat/completions``.
    """

    model: str
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    background: bool | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    metadata: Annotated[dict[Key, Text], msgspec.Meta(max_length=16)] | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    truncation: str | None = None
    conversation: Any = None
    prompt: Any = None
    stop: str | list[str] | None = None
    seed: int | None = None
    top_k: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    priority: int | None = None
    timeout: Seconds | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    #: Names of fields, and the values of them that change nothing.
    harmless: ClassVar[dict[str, tuple[Any, ...]]] = {
        "tool_choice": (None, "none", "auto"),
        "truncation": (None, "disabled"),
        "conversation": (None,),
        "prompt": (None,),
    }

    @property
    def is_stored(self) -> bool:
        return self.store is not False

    @property
    def wants_logprobs(self) -> bool:
        return self.include is not None and LOGPROBS in self.include

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
        form = (self.text or {}).get("format") or {"type": "text"}
        if form != {"type": "text"}:
            raise InvalidFieldError(
                "text", f"text.format is {shown(form)}, which this server cannot do, leave it out"
            )
        if self.background and not self.is_stored:
            raise InvalidFieldError(
                "background", "background needs a response that is stored, leave store out"
            )
        if self.max_output_tokens is not None and self.max_output_tokens < 1:
            raise InvalidFieldError(
                "max_output_tokens",
                f"max_output_tokens is {self.max_output_tokens}, it must be at least 1",
            )
        for name in self.include or ():
            if name != LOGPROBS and name not in ABSENT:
                raise InvalidFieldError(
                    "include",
                    f"include has {shown(name)}, which is not known; {LOGPROBS!r} can be included",
                )
        if self.top_logprobs is not None and not self.wants_logprobs:
            raise InvalidFieldError(
                "top_logprobs", f"top_logprobs needs include to have {LOGPROBS!r}"
            )

    def as_chat(self, messages: list[dict[str, Any]]) -> ChatRequest:
        """The same, asked of a chat that so far has these messages.

        Raises:
            InvalidFieldError: a tool is none that a chat could have.
        """
        return ChatRequest(
            model=self.model,
            messages=messages,
            max_completion_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            stop=self.stop,
            seed=self.seed,
            logprobs=self.wants_logprobs,
            top_logprobs=self.top_logprobs,
            tools=None if self.tools is None else [_as_chat_tool(tool) for tool in self.tools],
            tool_choice=self.tool_choice,
            top_k=self.top_k,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            priority=self.priority,
            timeout=self.timeout,
            chat_template_kwargs=self.chat_template_kwargs,
        )


def _as_chat_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A function, which here lies flat, as templates know it."""
    if tool.get("type") != "function" or not isinstance(tool.get("name"), str):
        raise InvalidFieldError(
            "tools", f"tools has {shown(tool)}, only functions with a name can be shown to a model"
        )
    function = {key: value for key, value in tool.items() if key != "type"}
    return {"type": "function", "function": function}
