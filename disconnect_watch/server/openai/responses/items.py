"""The items of a response's input: as they are kept and listed, and as a chat has them."""

from collections.abc import Iterable, Sequence
from typing import Any

from disconnect_watch.errors import shown
from disconnect_watch.server.openai.errors import InvalidFieldError

__all__ = ["items_of", "messages_of"]

#: Kinds of parts of a message, and where each has its text.
TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}

#: What a chat template knows of who speaks.
ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}


def items_of(given: str | Sequence[dict[str, Any]], *, request_id: str) -> list[dict[str, Any]]:
    """An input as it is kept: items in full, each with an id of its own.

    Args:
        request_id: the ids are made of it.

    Raises:
        InvalidFieldError: the input is empty, or an item is none that can be taken.
    """
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not given:
        raise InvalidFieldError("input", "input is empty, send a text or at least one item")
    return [
        _item(f"input[{index}]", item, f"{request_id}_{index}") for index, item in enumerate(given)
    ]


def _item(where: str, item: dict[str, Any], number: str) -> dict[str, Any]:
    kind = item.get("type", "message")
    if kind == "message":
        return _message(where, item, f"msg_{number}")
    if kind == "function_call":
        _require_texts(where, item, "call_id", "name", "arguments")
        names = ("type", "call_id", "name", "arguments")
        kept = {name: item[name] for name in names}
        return {**kept, "id": f"fc_{number}", "status": "completed"}
    if kind == "function_call_output":
        _require_texts(where, item, "call_id")
        output = _parts(f"{where}.output", item.get("output"), "input_text")
        text = item["output"] if isinstance(item["output"], str) else output
        return {
            "type": kind,
            "id": f"fco_{number}",
            "call_id": item["call_id"],
            "output": text,
            "status": "completed",
        }
    if kind == "reasoning":
        # Clients send back what another server's model thought; no template shows it again.
        return {"type": kind, "id": f"rs_{number}", "summary": []}
    raise InvalidFieldError(
        "input", f"{where}.type is {shown(kind)}, which this server cannot take, leave it out"
    )


def _message(where: str, item: dict[str, Any], item_id: str) -> dict[str, Any]:
    role = item.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise InvalidFieldError(
            "input", f"{where}.role is {shown(role)}, it must be one of {', '.join(ROLES)}"
        )
    kind = "output_text" if role == "assistant" else "input_text"
    return {
        "type": "message",
        "id": item_id,
        "role": role,
        "status": "completed",
        "content": _parts(f"{where}.content", item.get("content"), kind),
    }


def _parts(where: str, content: Any, kind: str) -> list[dict[str, Any]]:
    """A content as parts of text, which is all that a model here can be shown."""
    if isinstance(content, str):
        return [_part(kind, content)]
    if not isinstance(content, list):
        raise InvalidFieldError(
            "input", f"{where} is {shown(content)}, it must be a text or a list of parts"
        )
    parts = []
    for index, part in enumerate(content):
        name = TEXTS.get(str(part.get("type"))) if isinstance(part, dict) else None
        if name is None or not isinstance(part.get(name), str):
            raise InvalidFieldError(
                "input", f"{where}[{index}] is {shown(part)}, only parts of text can be taken"
            )
        parts.append(_part(kind, part[name]))
    return parts


def _part(kind: str, text: str) -> dict[str, Any]:
    part: dict[str, Any] = {"type": kind, "text": text}
    return part | {"annotations": []} if kind == "output_text" else part


def _require_texts(where: str, item: dict[str, Any], *names: str) -> None:
    for name in names:
        if not isinstance(item.get(name), str):
            raise InvalidFieldError(
                "input", f"{where}.{name} is {shown(item.get(name))}, it must be a text"
            )


def messages_of(instructions: str | None, items: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The chat that kept items are, with instructions before it."""
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    for item in items:
        if item["type"] == "message":
            messages.append({"role": ROLES[item["role"]], "content": _text(item["content"])})
        elif item["type"] == "function_call":
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        elif item["type"] == "function_call_output":
            text = _text(item["output"])
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": text})
    return messages


def _text(content: str | list[dict[str, Any]]) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)
