"""Sends what was sent to a real Triton to our server, and compares the answers.

``captures/`` holds requests byte for byte, and what Triton answered with the models of
``models/`` loaded. An answer is the same if its status is, and its body up to the order of
keys, the formatting of floats, and values that name the server, a time or a count.

    python -m tests.triton.conformance

prints a line for each case and the counts of the three kinds; the exit status is 1 if one
differs that is not listed here with its reason.
"""

import gzip
import json
import re
import shutil
import sys
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.command import Process, running
from tests.support.http import Client

HERE = Path(__file__).parent
CAPTURES = HERE / "captures"

#: Why an answer of ours differs.
ON_PURPOSE = {
    "get_root": "a browser is shown what runs; 404 with --strict and --no-live-page",
    "head_live": "the answer to HEAD has no body (RFC 9110 9.3.2)",
    "infer_fails_8": "a request that was cancelled is answered 499; 400 with --strict",
    "infer_bad_gzip": "what can't be decompressed is said to be so, not taken for an empty body",
    "infer_shape_rank": "of two inputs that differ the second is named; in Triton either",
    "bin_no_header_len": "a NUL byte does not end JSON: what lies behind it is said to be too much",
    "infer_no_cl": "a coding of transfers that is none is closed (RFC 9112 6.1)",
}


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back: a status and a body, or the end of the connection (status 0)."""

    status: int
    content_type: str
    body: Any


@dataclass(frozen=True, slots=True)
class Result:
    """One case.

    Attributes:
        kind: ``same``, ``on purpose`` or ``different``.
        why: what differs, or the reason for it.
    """

    name: str
    kind: str
    why: str = ""


def cases() -> list[str]:
    """The names of all, in the order in which they were captured."""
    return [entry["name"] for entry in json.loads((CAPTURES / "INDEX.json").read_text())]


def copy_models(directory: Path, *names: str) -> Path:
    """A repository of some of the models, or of all; those that only wait get one instance."""
    for model in (HERE / "models").iterdir():
        if model.name in names or not names:
            target = directory / model.name
            shutil.copytree(model, target, ignore=shutil.ignore_patterns("__pycache__"))
            config = target / "config.pbtxt"
            config.write_text(config.read_text().replace("count: 8", "count: 1"))
    return directory


@contextmanager
def serving_repository(*options: str) -> Iterator[Process]:
    """The serve command over all models."""
    with tempfile.TemporaryDirectory() as directory:
        copy_models(Path(directory))
        options = ("--exit-on-error", "false", "--allow-client-shm", "true", *options)
        with running("--model-repository", directory, *options, within=120) as server:
            yield server


def replay(name: str, server: Process) -> Result:
    """Send the request of a case, and compare."""
    request = (CAPTURES / f"{name}.req").read_bytes()
    expected = _parse((CAPTURES / f"{name}.resp").read_bytes())
    is_for_metrics = name.startswith("metrics_")
    got = _ask(server.metrics_port if is_for_metrics else server.port, request)
    difference = _difference(expected, got)
    if not difference:
        return Result(name, "same")
    if name in ON_PURPOSE:
        return Result(name, "on purpose", ON_PURPOSE[name])
    return Result(name, "different", difference)


def _difference(expected: Answer, got: Answer) -> str:
    if expected.status != got.status:
        return f"status {got.status}, Triton {expected.status}; {got.body}"
    if expected.body != got.body:
        return f"body {got.body}, Triton {expected.body}"
    # Triton's errors come as text or as JSON, according to where they were found.
    if expected.status == 200 and expected.content_type != got.content_type:
        return f"content type {got.content_type}, Triton {expected.content_type}"
    return ""


def _ask(port: int, request: bytes) -> Answer:
    with Client(port) as client:
        try:
            client.sock.sendall(request)
            if request.startswith(b"HEAD "):
                return _parse(client.read_until(b"\r\n\r\n"))
            while True:
                status, headers, body = client.read_response()
                if status >= 200:
                    return _answer(status, headers, body)
        except (EOFError, ConnectionError):
            return Answer(0, "", None)


def _parse(raw: bytes) -> Answer:
    head, _, body = raw.partition(b"\r\n\r\n")
    if not head:
        return Answer(0, "", None)
    status_line, *lines = head.decode().split("\r\n")
    status = int(status_line.split()[1])
    if status == 100:
        return _parse(body)
    headers = {
        name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)
    }
    if headers.get("transfer-encoding") == "chunked":
        body = _join_chunks(body)
    return _answer(status, headers, body)


def _join_chunks(body: bytes) -> bytes:
    whole = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        whole += body[: int(size, 16)]
        body = body[int(size, 16) + 2 :]
    return whole


def _answer(status: int, headers: dict[str, str], body: bytes) -> Answer:
    coding = headers.get("content-encoding")
    if coding:
        body = gzip.decompress(body) if coding == "gzip" else zlib.decompress(body)
    content_type = headers.get("content-type", "")
    length = headers.get("inference-header-content-length")
    content: Any
    if length is not None:
        content = [_json(body[: int(length)]), body[int(length) :]]
    elif content_type.startswith("text/event-stream"):
        content = [_json(frame.removeprefix(b"data: ")) for frame in body.split(b"\n\n") if frame]
    else:
        content = _json(body)
    return Answer(status, content_type.partition(";")[0], content)


def _json(text: bytes) -> Any:
    try:
        return _without_what_varies(json.loads(text))
    except ValueError:
        return text


def _without_what_varies(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        if "extensions" in value:  # the server's own name, and what it can do
            return sorted(value)
        if key == "response_stats":
            return key  # an entry for each response so far
        return {key: _without_what_varies(each, key) for key, each in value.items()}
    if isinstance(value, list):
        if key == "batch_stats":
            return key
        return [_without_what_varies(each) for each in value]
    if key in ("count", "ns", "last_inference", "inference_count", "execution_count"):
        return key
    if isinstance(value, str):
        # Where a model's file lies, and which of its lines failed in which words.
        value = re.sub(r" \S*/(\w+)/1/model\.py\(", r" \1/1/model.py(", value)
    return value


def main() -> int:
    """Replay all, and print what came of each."""
    with serving_repository() as server:
        results = [replay(name, server) for name in cases()]
    for result in results:
        print(f"{result.kind:<11} {result.name}" + (f": {result.why}" if result.why else ""))
    counts = {
        kind: sum(result.kind == kind for result in results)
        for kind in ("same", "on purpose", "different")
    }
    print(", ".join(f"{count} {kind}" for kind, count in counts.items()))
    return 1 if counts["different"] else 0


if __name__ == "__main__":
    sys.exit(main())
