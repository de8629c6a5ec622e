"""JSON in and out, and Triton's words for what is malformed."""

import pytest

from disconnect_watch.server.documents import decode_object, encode
from disconnect_watch.server.errors import MalformedJSONError, ProtocolError


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        # As captured from Triton.
        (b"{x", "Missing a name for object member. at 1"),
        (b"{", "Missing a name for object member. at 1"),
        (b"", "The document is empty. at 0"),
        (b'{"inputs": x}', "Invalid value. at 11"),
        (b'{"inputs": tru', "Invalid value. at 14"),
        (b'{"inputs": nux}', "Invalid value. at 13"),
        # RapidJSON's words for the rest.
        (b'{"a":1,}', "Missing a name for object member."),
        (b'{"a" 1}', "Missing a colon after a name of object member. at 5"),
        (b'{"a":1} x', "The document root must not be followed by other values. at 8"),
        (b'{"a":"b', "Missing a closing quotation mark in string."),
        (b'{"a":"\\q"}', "Invalid escape character in string."),
        (b'{"a":"\n"}', "Invalid encoding in string. at 6"),
        (b'{"a":"\xff"}', "Invalid encoding in string. at 6"),
        (b'{"a":NaN}', "Invalid value. at 5"),
        # Symptom: msgspec's "Number out of range - at `$[...]`".
        (b'{"a":1e400}', "Number too big to be stored in double. at 5"),
        (b'{"1e400":"\\"-1e400","b":[1,-1e400]}', "Number too big to be stored in double. at 27"),
        (b'{"a":%b}' % (b"9" * 5000), "Number too big to be stored in double. at 5"),
    ],
)
def test_malformed_json_is_told_as_rapidjson_tells_it(body: bytes, complaint: str) -> None:
    with pytest.raises(MalformedJSONError) as caught:
        decode_object(body)
    assert caught.value.status == 500
    assert str(caught.value).startswith(f"failed to parse the request JSON buffer: {complaint}")


def test_the_offset_counts_bytes_and_not_characters() -> None:
    with pytest.raises(MalformedJSONError, match=r"Invalid value\. at 17$"):
        decode_object('{"é": "ü", "b":}'.encode())


@pytest.mark.parametrize("body", [b"[1]", b'"text"', b"1", b"null", b"true"])
def test_a_body_that_is_no_object_is_a_clients_mistake(body: bytes) -> None:
    with pytest.raises(ProtocolError, match="must be an object") as caught:
        decode_object(body)
    assert caught.value.status == 400


def test_deep_nesting_is_refused_and_not_a_crash() -> None:
    with pytest.raises(ProtocolError, match="nesting depth") as caught:
        decode_object(b'{"a":' + b"[" * 200_000)
    assert caught.value.status == 400


def test_keys_come_out_sorted_and_text_as_utf8() -> None:
    assert encode({"b": "é", "a": 1}) == '{"a":1,"b":"é"}'.encode()
