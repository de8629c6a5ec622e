"""Chat templates, held against what transformers makes of the same directory."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from disconnect_watch.engine import ChatTemplate
from disconnect_watch.engine.errors import CheckpointError
from disconnect_watch.engine.tokenizer import Tokenizer
from tests.support.engine import byte_tokenizer

PLAIN = (
    "{{ bos_token }}{% for message in messages %}\n"
    "    {% if message.role == 'tool' %}{% continue %}{% endif %}\n"
    "    [{{ message['role'] }}] {{ message.content | trim }}{{ eos_token }}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
STRICT = (
    "{% if messages[0].role != 'user' %}{{ raise_exception('a chat begins with the user') }}"
    "{% endif %}{% set ns = namespace(last='') %}{% for m in messages %}"
    "{% set ns.last = m.content %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% if m.tool_calls is defined %}!{% endif %}{% endfor %}={{ ns.last }}"
    "{{ strftime_now('%%') }}{% if thinking %}?{% endif %}"
)
TOOLED = (
    "{% if tools %}{{ tools | tojson(indent=2) }}{% for tool in tools %}"
    "{{ tool | tojson }}{% endfor %}{% else %}none{% endif %}{{ messages | length }}"
)
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "  what is <b>'é'</b>? "},
    {"role": "assistant", "content": "a letter", "tool_calls": None},
    {"role": "tool", "content": "skipped"},
    {"role": "user", "content": "and 'ß'?"},
]
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "wörter", "parameters": {"type": "object"}}}
]
TOKENS = {"bos_token": "<s>", "eos_token": "<|end|>"}


def save_with_transformers(path: Path, template: Any, *, as_files: bool) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers
    fast: Any = transformers.PreTrainedTokenizerFast
    tokenizer = fast(tokenizer_object=byte_tokenizer(), chat_template=template, **TOKENS)
    tokenizer.save_pretrained(path, save_jinja_files=as_files)
    return tokenizer


@pytest.mark.parametrize("as_files", [False, True], ids=["entry", "files"])
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no tools", "tools"])
@pytest.mark.parametrize("is_prompt", [False, True], ids=["whole", "prompt"])
@pytest.mark.parametrize(
    "template",
    [PLAIN, STRICT, TOOLED, {"default": PLAIN, "tool_use": TOOLED}],
    ids=["plain", "strict", "tooled", "both"],
)
def test_a_chat_is_written_as_transformers_writes_it(
    tmp_path: Path,
    template: Any,
    is_prompt: bool,
    tools: list[dict[str, Any]] | None,
    as_files: bool,
) -> None:
    theirs = save_with_transformers(tmp_path, template, as_files=as_files)
    options: dict[str, Any] = {"tools": tools, "add_generation_prompt": is_prompt}
    expected = theirs.apply_chat_template(MESSAGES, tokenize=False, thinking=True, **options)
    chat = ChatTemplate.from_pretrained(tmp_path)
    assert chat.render(MESSAGES, variables={"thinking": True}, **options) == expected
    ids = theirs.apply_chat_template(MESSAGES, thinking=True, return_dict=False, **options)
    ours = Tokenizer.from_pretrained(tmp_path).encode(expected, add_special_tokens=False)
    assert ours == ids


def test_messages_that_the_template_refuses_are_the_callers_fault() -> None:
    chat = ChatTemplate({"default": STRICT}, tokens={})
    with pytest.raises(ValueError, match="refused the messages: a chat begins with the user"):
        chat.render([{"role": "assistant", "content": "hm"}])
    with pytest.raises(ValueError, match="refused the messages"):
        chat.render([])


def test_an_object_that_is_no_json_does_not_reach_a_template() -> None:
    chat = ChatTemplate({"default": "{{ messages[0].content.unlink() }}"}, tokens={})
    with pytest.raises(ValueError, match="not JSON serializable"):
        chat.render([{"role": "user", "content": Path("x")}])


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__ }}{{ raise_exception.__globals__['json'] }}",
    ],
)
def test_a_template_cannot_leave_the_sandbox(template: str) -> None:
    chat = ChatTemplate({"default": template}, tokens={})
    with pytest.raises(ValueError, match=r"unsafe|not safe|cannot"):
        chat.render(MESSAGES)


def test_special_tokens_are_read_in_each_of_their_forms(tmp_path: Path) -> None:
    config = {"chat_template": "{{ bos_token }}{{ eos_token }}", "bos_token": {"content": "<a>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": "<x>", "eos_token": "<b>"})
    )
    assert ChatTemplate.from_pretrained(tmp_path).render(MESSAGES) == "<a><b>"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "has no chat template"),
        ('{"chat_template": "{% if %}"}', "is no template"),
        ('{"chat_template": [{"name": "x"}]}', "of no known form"),
        ("[]", "holds a list"),
        ("{", "is no JSON"),
    ],
)
def test_what_is_no_template_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        ChatTemplate.from_pretrained(tmp_path)


def test_a_chat_without_a_default_template_is_refused() -> None:
    chat = ChatTemplate({"tool_use": TOOLED}, tokens={})
    assert chat.render(MESSAGES, tools=TOOLS).endswith("4")
    with pytest.raises(ValueError, match="no default chat template among tool_use"):
        chat.render(MESSAGES)
