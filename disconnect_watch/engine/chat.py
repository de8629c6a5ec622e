"""From the messages of a chat to a prompt, by the template that came with the model."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from disconnect_watch.engine.errors import CheckpointError
from disconnect_watch.engine.json_file import read_object

__all__ = ["ChatTemplate"]

#: What a template may know of the tokenizer.
TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class ChatTemplate:
    """The templates of one model, by name, and the special tokens that they write.

    They come with a checkpoint, from anywhere, and so run in Jinja's sandbox: they see what they
    are given, and change nothing of it.

    Threads: ``render`` may be called from any thread.
    """

    def __init__(self, templates: Mapping[str, str], *, tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _now
        try:
            self._templates = {
                name: environment.from_string(source) for name, source in templates.items()
            }
        except TemplateError as error:
            raise CheckpointError(f"the chat template is no template: {error}") from error
        self._tokens = dict(tokens)

    @classmethod
    def from_pretrained(cls, path: str | Path) -> "ChatTemplate":
        """Read ``chat_template.jinja``, or the entry of ``tokenizer_config.json``.

        Raises:
            CheckpointError: there is none, or it is no template.
        """
        template = cls.of_directory(path)
        if template is None:
            raise CheckpointError(
                f"{path} has no chat template, give chat_template.jinja or send a plain prompt"
            )
        return template

    @classmethod
    def of_directory(
        cls, path: str | Path, *, file: str | Path | None = None
    ) -> "ChatTemplate | None":
        """As ``from_pretrained``; None where the directory has no template.

        Args:
            file: a template to take for the directory's own default.

        Raises:
            CheckpointError: it is no template, or the file cannot be read.
        """
        path = Path(path)
        config = _object_or_nothing(path / "tokenizer_config.json")
        templates = _templates_of(config.get("chat_template"))
        # Files count more than the entry, as they do for transformers.
        files = [*_files(path), *([] if file is None else [("default", Path(file))])]
        try:
            templates |= {name: each.read_text(encoding="utf-8") for name, each in files}
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"cannot read the chat template: {error}") from error
        if not templates:
            return None
        named = {**_object_or_nothing(path / "special_tokens_map.json"), **config}
        tokens = {name: _text_of(named[name]) for name in TOKENS if named.get(name)}
        return cls(templates, tokens=tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Write a chat as one prompt.

        The special tokens are in it: encode it with ``add_special_tokens=False``.

        Args:
            messages: with "role" and "content", of plain JSON values; a None is left out.
            tools: JSON schemas of functions that the model may call; a template named "tool_use"
                is taken for them if there is one.
            add_generation_prompt: whether the prompt ends where the answer begins.
            variables: more that the template may ask for, such as "enable_thinking".

        Raises:
            ValueError: the template refuses the messages, or they are not plain JSON.
        """
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise ValueError(
                f"there is no default chat template among {', '.join(sorted(self._templates))}"
            )
        present = [
            {key: value for key, value in message.items() if value is not None}
            for message in messages
        ]
        given = {
            **self._tokens,
            **(variables or {}),
            "messages": present,
            "tools": None if tools is None else list(tools),
            "documents": (variables or {}).get("documents"),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            # By way of JSON, so that no object with methods gets in.
            return self._templates[name].render(json.loads(json.dumps(given)))
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            raise ValueError(f"the chat template refused the messages: {error}") from error


class GenerationTag(Extension):
    """``{% generation %}`` marks what the model said, for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return what stands between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes what HTML would not stand."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _files(path: Path) -> list[tuple[str, Path]]:
    more = sorted((path / "additional_chat_templates").glob("*.jinja"))
    files = [(file.stem, file) for file in more]
    main = path / "chat_template.jinja"
    return [*files, ("default", main)] if main.exists() else files


def _templates_of(entry: Any) -> dict[str, str]:
    """One template, or a list of named ones."""
    if entry is None:
        return {}
    if isinstance(entry, str):
        return {"default": entry}
    try:
        return {str(item["name"]): str(item["template"]) for item in entry}
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            "tokenizer_config.json has a chat_template of no known form"
        ) from error


def _text_of(token: Any) -> str:
    """A token is its text, or an object that has it as "content"."""
    return str(token["content"] if isinstance(token, dict) else token)


def _object_or_nothing(file: Path) -> dict[str, Any]:
    return read_object(file) if file.exists() else {}
