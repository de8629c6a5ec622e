"""What the frontend's benchmark asks, of ours and of Triton: requests as bytes."""

import json
import socket
import struct
from dataclasses import dataclass
from typing import Any

from bench._frontend_models import NUM_CHUNKS

__all__ = ["ASKED", "Asked", "infer_request", "large_request", "leaving_request", "read_reply"]

LARGE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Asked:
    """One kind of request.

    Attributes:
        num_parts: of its answer, each of which is what a sample is of.
        is_for_any: whether its model is one that Triton can load too.
    """

    request: bytes
    num_parts: int = 1
    is_for_any: bool = False


def _post(path: str, body: bytes, **headers: int) -> bytes:
    more = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    # What a Python client library sends, give or take.
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:8000\r\nUser-Agent: load/1\r\nAccept: */*\r\n"
        f"Connection: keep-alive\r\nContent-Type: application/json\r\n{more}"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def infer_request(model: str) -> bytes:
    """FP32[1,16], in JSON."""
    tensor = {
        "name": "X",
        "shape": [1, 16],
        "datatype": "FP32",
        "data": [index / 8 for index in range(16)],
    }
    return _post(f"/v2/models/{model}/infer", json.dumps({"inputs": [tensor]}).encode())


def _stream_request(model: str) -> bytes:
    body = json.dumps({"X": NUM_CHUNKS}).encode()
    return _post(f"/v2/models/{model}/generate_stream", body)


def large_request(model: str) -> bytes:
    """16 MiB of FP32, in binary, to be answered in binary."""
    tensor = {
        "name": "X",
        "shape": [1, LARGE_BYTES // 4],
        "datatype": "FP32",
        "parameters": {"binary_data_size": LARGE_BYTES},
    }
    output = {"name": "Y", "parameters": {"binary_data": True}}
    head = json.dumps({"inputs": [tensor], "outputs": [output]}).encode()
    body = head + struct.pack("<f", 1.5) * (LARGE_BYTES // 4)
    return _post(f"/v2/models/{model}/infer", body, Inference_Header_Content_Length=len(head))


def leaving_request(path: str, name: str, *, seconds: float, first: float) -> bytes:
    """To a model that waits; see ``_frontend_models``."""
    if path.endswith("/infer"):
        document: dict[str, Any] = {
            "inputs": [
                {"name": "NAME", "shape": [1], "datatype": "BYTES", "data": [name]},
                {"name": "SECONDS", "shape": [2], "datatype": "FP32", "data": [seconds, first]},
            ]
        }
    else:
        document = {"NAME": name, "SECONDS": [seconds, first]}
    return _post(path, json.dumps(document).encode())


#: By name; the models are those of ``_frontend_models``.
ASKED = {
    "infer, in the server": Asked(infer_request("identity")),
    "infer, in a worker process": Asked(infer_request("echo"), is_for_any=True),
    "a chunk of a stream, in the server": Asked(_stream_request("counter"), NUM_CHUNKS),
    "a chunk of a stream, in a worker process": Asked(
        _stream_request("chunks"), NUM_CHUNKS, is_for_any=True
    ),
}


def read_reply(sock: socket.socket) -> bytes:
    """One whole reply with its head, of a known length or in chunks.

    Raises:
        EOFError: the server closed first.
    """
    reply = bytearray()
    while b"\r\n\r\n" not in reply:
        reply += _some(sock)
    head, _, body = bytes(reply).partition(b"\r\n\r\n")
    fields = {
        name.strip().lower(): value.strip()
        for name, _, value in (line.partition(b":") for line in head.split(b"\r\n")[1:])
    }
    if fields.get(b"transfer-encoding") == b"chunked":
        while not reply.endswith(b"0\r\n\r\n"):
            reply += _some(sock)
    else:
        size = len(reply) - len(body) + int(fields[b"content-length"])
        while len(reply) < size:
            reply += _some(sock)
    return bytes(reply)


def _some(sock: socket.socket) -> bytes:
    data = sock.recv(1 << 20)
    if not data:
        raise EOFError("the server closed before its reply was complete")
    return data
