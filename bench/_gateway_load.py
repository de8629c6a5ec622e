"""Clients of a Triton's HTTP port, and of the gateway's: they ask the same of both."""

import asyncio
import json
import socket
import time
from collections.abc import Callable
from typing import Any

from tests.support.net import wait_until
from tests.support.real_triton import RealTriton

__all__ = ["LEAVES", "chunk_rate", "infer_seconds", "work_after_leave", "work_when_queued"]

#: Seconds that a model works for a client that leaves, which does so at the second of them.
WORK, STAY = 2.0, 0.2
_INFER = {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 16], "data": [1.0] * 16}]}


def _infer_of(text: str, delay: float) -> dict[str, Any]:
    return {
        "inputs": [
            {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": [text]},
            {"name": "delay", "datatype": "FP32", "shape": [1], "data": [delay]},
        ]
    }


#: By the name of a row: a path, and what makes a body of a text.
LEAVES: dict[str, tuple[str, Callable[[str], dict[str, Any]]]] = {
    "infer": ("slow_poll/infer", lambda text: _infer_of(text, WORK)),
    "generate": ("slow_poll/generate", lambda text: {"text_input": text, "delay": WORK}),
    "generate_stream of one response": (
        "slow_poll/generate_stream",
        lambda text: {"text_input": text, "delay": WORK},
    ),
    "generate_stream before its first chunk": (
        "stream/generate_stream",
        lambda text: {"text_input": text, "n": 1, "gap": WORK},
    ),
    "generate_stream between two chunks": (
        "stream/generate_stream",
        lambda text: {"text_input": text, "n": 100, "gap": WORK / 100},
    ),
}


def work_after_leave(triton: RealTriton, port: int, row: str, text: str) -> float:
    """Milliseconds from a client's close until its model ends, by the model's own log."""
    path, body_of = LEAVES[row]
    with _asked(port, path, body_of(text)):
        wait_until(lambda: triton.events("start", text))
        time.sleep(STAY)
    left = time.time()
    wait_until(lambda: triton.events("end", text))
    return float(triton.events("end", text)[0]["t"] - left) * 1000


def work_when_queued(triton: RealTriton, port: int, text: str) -> float:
    """Milliseconds that a model works for a request whose client left while it was queued."""
    path, first, queued, last = "slow_one/infer", f"{text} first", f"{text} queued", f"{text} last"
    with _asked(port, path, _infer_of(first, 3 * STAY)):
        wait_until(lambda: triton.events("start", first))
        with _asked(port, path, _infer_of(queued, WORK)):
            time.sleep(STAY)
        with _asked(port, path, _infer_of(last, 0.01)):
            wait_until(lambda: triton.events("end", last))
    ended = triton.events("end", queued)
    return float(ended[0]["ran"]) * 1000 if ended else 0.0


async def infer_seconds(port: int, count: int) -> float:
    """Seconds of an infer request with FP32[1,16], of so many one after another."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    request = _request("identity_fp32/infer", _INFER)
    began = time.perf_counter()
    for _ in range(count):
        writer.write(request)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        assert head.startswith(b"http/1.1 200"), head
        length = head.partition(b"content-length:")[2].partition(b"\r\n")[0]
        await reader.readexactly(int(length))
    took = time.perf_counter() - began
    writer.close()
    return took / count


async def chunk_rate(port: int, num_streams: int, num_chunks: int, gap: float) -> float:
    """Chunks a second of so many streams at the same time.

    Args:
        gap: seconds between two chunks of a stream.
    """
    body = {"text_input": "x", "n": num_chunks, "gap": gap}
    request = _request("stream/generate_stream", body)

    async def stream() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        # An event is one line with an empty one behind it.
        for _ in range(num_chunks):
            event = await reader.readuntil(b"\n\n")
            assert b'"text_output"' in event, event
        await reader.readuntil(b"0\r\n\r\n")
        writer.close()

    began = time.perf_counter()
    await asyncio.gather(*(stream() for _ in range(num_streams)))
    return num_streams * num_chunks / (time.perf_counter() - began)


def _asked(port: int, path: str, body: dict[str, Any]) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port))
    sock.sendall(_request(path, body))
    return sock


def _request(path: str, body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = (
        f"POST /v2/models/{path} HTTP/1.1\r\nHost: bench\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content
