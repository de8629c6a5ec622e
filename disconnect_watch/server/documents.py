"""JSON in and out: msgspec's speed, RapidJSON's words for what is malformed.

Triton parses with RapidJSON and repeats its message and byte offset to the client, so
programs that match on them keep working.
"""

import json
import math
import re
from itertools import takewhile
from typing import Any

import msgspec

from disconnect_watch.server.errors import MalformedJSONError, ProtocolError

__all__ = ["decode_object", "encode"]

encode = msgspec.json.Encoder(order="sorted").encode
_decode = msgspec.json.Decoder().decode

#: The standard library's message for a mistake, and RapidJSON's.
_MESSAGES = (
    ("Expecting property name", "Missing a name for object member."),
    ("Illegal trailing comma before end of object", "Missing a name for object member."),
    ("Expecting ':' delimiter", "Missing a colon after a name of object member."),
    ("Expecting ',' delimiter", "Missing a comma or closing bracket after a value."),
    ("Extra data", "The document root must not be followed by other values."),
    ("Unterminated string", "Missing a closing quotation mark in string."),
    ("Invalid \\uXXXX", "Incorrect hex digit after \\u escape in string."),
    ("Invalid \\escape", "Invalid escape character in string."),
    ("Invalid control character", "Invalid encoding in string."),
)

_STRING_OR_NUMBER = re.compile(rb'"(?:[^"\\]|\\.)*"|-?\d[\d.eE+-]*')


def decode_object(body: bytes | bytearray | memoryview) -> dict[str, Any]:
    """Parse a request body that must be a JSON object.

    Raises:
        MalformedJSONError: no JSON; says what is wrong, and at which byte.
        ProtocolError: JSON, but no object, or nested too deeply.
    """
    try:
        value = _decode(body)
    except RecursionError:
        raise ProtocolError("JSON nesting depth exceeds maximum allowed limit") from None
    except msgspec.DecodeError as error:
        raise MalformedJSONError(
            f"failed to parse the request JSON buffer: {_locate(bytes(body), str(error))}"
        ) from None
    if not isinstance(value, dict):
        raise ProtocolError(f"request JSON must be an object, got {type(value).__name__}")
    return value


def _locate(body: bytes, fallback: str) -> str:
    if not body.strip():
        return f"The document is empty. at {len(body)}"
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        return f"Invalid encoding in string. at {error.start}"
    try:
        json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        offset = len(text[: error.pos].encode())
        for start, message in _MESSAGES:
            if error.msg.startswith(start):
                return f"{message} at {offset}"
        return f"Invalid value. at {offset + _num_matching(text[error.pos :])}"
    except (ValueError, RecursionError):
        pass
    # What only msgspec refuses: NaN and Infinity, numbers that fit no double.
    if where := re.search(r"\(byte (\d+)\)", fallback):
        return f"Invalid value. at {where[1]}"
    for token in _STRING_OR_NUMBER.finditer(body):
        if not token[0].startswith(b'"') and math.isinf(float(token[0])):
            return f"Number too big to be stored in double. at {token.start()}"
    return fallback


def _num_matching(text: str) -> int:
    """How far RapidJSON reads into a word that is not quite one of JSON's."""
    for word in ("true", "false", "null"):
        if text.startswith(word[0]):
            same = (a == b for a, b in zip(word, text, strict=False))
            return len(list(takewhile(bool, same)))
    return 0


def _refuse_constant(name: str) -> None:
    raise ValueError(name)
