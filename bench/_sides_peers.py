"""The servers that ``side_by_side`` compares: ours, and those of others that are here."""

import contextlib
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from disconnect_watch.ports import bind
from disconnect_watch.stress import Asking, Profile, exchange_with, parse_target
from disconnect_watch.stress.exchange import Exchange
from disconnect_watch.stress.ledger import counts_of_page
from disconnect_watch.stress.target import Target
from tests.support.asgi_servers import launched, running
from tests.support.command import endless_model
from tests.support.command import running as running_command
from tests.support.real_triton import PROGRAM as TRITON
from tests.support.real_triton import RealTriton, real_triton
from tests.support.venvs import has_python_of
from tests.support.vllm_server import MODEL, vllm_server

__all__ = ["PEERS", "Counts", "Peer", "Served"]

#: Steps that a client asks for, by whether it stays: of the applications.
STAY_STEPS, LEAVE_STEPS = 10, 100


@dataclass(frozen=True, slots=True)
class Counts:
    """What a server says of its work: requests at it now, and units done since its start."""

    num_running: int
    num_units: float


@dataclass(frozen=True, slots=True)
class Served:
    """A peer that runs.

    Attributes:
        target, exchange: what clients ask.
        page: where its counts are; None where ``counts`` needs no page.
        counts: of the page.
        stay_units, leave_units: of work that a client asks for, by what it does.
    """

    target: Target
    exchange: Exchange
    page: Target | None
    counts: Callable[[str], Counts]
    stay_units: float
    leave_units: float


@dataclass(frozen=True, slots=True)
class Peer:
    """One that can be started.

    Attributes:
        is_ours: whether a client's leave goes through us.
        why_not: what is missing here, or nothing.
    """

    name: str
    serve: Callable[[], AbstractContextManager[Served]]
    is_ours: bool = False
    why_not: Callable[[], str] = lambda: ""


def _application(port: int, page: str) -> Served:
    asking = Asking(method="POST", body="stay", leaver_body="leave")
    target, exchange = exchange_with(
        parse_target(f"http://127.0.0.1:{port}/{page}"), asking, Profile.HTTP
    )
    return Served(
        target,
        _Steps(exchange, target),
        target.with_path("/work"),
        _counts_of_work,
        STAY_STEPS,
        LEAVE_STEPS,
    )


class _Steps:
    """The template of a request, its steps in the query."""

    max_pieces = 0
    outlasts = True
    is_http = True

    def __init__(self, exchange: Exchange, target: Target) -> None:
        self._stays = exchange.request(0, leaves=False)
        self._path = (target.path or "").encode()
        self._answer = exchange.answer

    def request(self, index: int, *, leaves: bool) -> bytes:
        steps = LEAVE_STEPS if leaves else STAY_STEPS
        return self._stays.replace(self._path, b"%b?steps=%d" % (self._path, steps), 1)

    def answer(self, index: int) -> Any:
        return self._answer(index)


def _counts_of_work(text: str) -> Counts:
    told = json.loads(text)
    return Counts(told["running"], told["steps"])


def _counts_of_metrics(text: str) -> Counts:
    read = counts_of_page(text)
    assert read is not None
    return Counts((read.num_running or 0) + (read.num_waiting or 0), read.num_tokens or 0)


@contextlib.contextmanager
def _asgi(server: str, page: str, app: str = "app") -> Iterator[Served]:
    with (
        TemporaryDirectory() as folder,
        launched(
            server,
            f"bench._sides_app:{app}",
            is_tls=False,
            events=Path(folder) / "events",
            log=Path(folder) / "log",
        ) as (port, _),
    ):
        yield _application(port, page)


@contextlib.contextmanager
def _aiohttp(mode: str) -> Iterator[Served]:
    with TemporaryDirectory() as folder, bind("127.0.0.1", 0) as sock:
        sock.listen(128)
        words = ["bench._sides_aiohttp", str(sock.fileno()), mode]
        events, log = Path(folder) / "events", Path(folder) / "log"
        with running(words, fds=[sock.fileno()], events=events, log=log):
            yield _application(sock.getsockname()[1], "plain")


def _engine(port: int, metrics_port: int, model: str, stay: int, leave: int) -> Served:
    asking = Asking(model=model, max_tokens=stay, leaver_max_tokens=leave, is_stream=False)
    target, exchange = exchange_with(
        parse_target(f"http://127.0.0.1:{port}/v1/completions"), asking, Profile.OPENAI
    )
    page = Target("127.0.0.1", metrics_port, "/metrics")
    return Served(target, exchange, page, _counts_of_metrics, stay, leave)


@contextlib.contextmanager
def _serve() -> Iterator[Served]:
    with TemporaryDirectory() as folder:
        model = str(endless_model(Path(folder)))
        with running_command("--model", model, "--max-num-seqs", "4") as process:
            yield _engine(process.port, process.metrics_port, "tiny", 128, 2000)


@contextlib.contextmanager
def _vllm(**variables: str) -> Iterator[Served]:
    with TemporaryDirectory() as folder, vllm_server(Path(folder), **variables) as server:
        yield _engine(server.port, server.port, MODEL, 16, 200)


#: Seconds that Triton's model takes, by what the client does.
_STAY_SECONDS, _LEAVE_SECONDS = 0.06, 0.6


@contextlib.contextmanager
def _triton(*, is_behind_gateway: bool = False) -> Iterator[Served]:
    """Its model looks every 20 ms whether its request is cancelled."""
    with contextlib.ExitStack() as stack:
        triton = stack.enter_context(real_triton(Path(stack.enter_context(TemporaryDirectory()))))
        port = triton.http_port
        if is_behind_gateway:
            url = f"grpc://127.0.0.1:{triton.port}"
            gateway = running_command("--triton", url, command="gateway")
            port = stack.enter_context(gateway).port
        asking = Asking(body=_infer_body(_STAY_SECONDS), leaver_body=_infer_body(_LEAVE_SECONDS))
        target, exchange = exchange_with(
            parse_target(f"http://127.0.0.1:{port}/v2/models/slow_poll/infer"), asking
        )
        yield Served(
            target,
            exchange,
            None,
            lambda _: _counts_of_log(triton),
            _STAY_SECONDS,
            _LEAVE_SECONDS,
        )


def _infer_body(seconds: float) -> str:
    inputs = [
        {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["x"]},
        {"name": "delay", "shape": [1], "datatype": "FP32", "data": [seconds]},
    ]
    return json.dumps({"inputs": inputs})


def _counts_of_log(triton: RealTriton) -> Counts:
    ended = triton.events("end", "x")
    return Counts(
        len(triton.events("start", "x")) - len(ended), sum(event["ran"] for event in ended)
    )


def _lacks_vllm() -> str:
    return "" if has_python_of("vllm") else ".ci/vllm makes a venv with it"


def _lacks_triton() -> str:
    return "" if TRITON.exists() else ".ci/triton makes a venv with it"


PEERS: tuple[Peer, ...] = (
    Peer("FastAPI on uvicorn, nobody looks", lambda: _asgi("uvicorn", "plain")),
    Peer("FastAPI on uvicorn, `is_disconnected()`", lambda: _asgi("uvicorn", "poll")),
    Peer("FastAPI on uvicorn, vLLM's decorator", lambda: _asgi("uvicorn", "decorator")),
    Peer("FastAPI on hypercorn, `is_disconnected()`", lambda: _asgi("hypercorn", "poll")),
    Peer("FastAPI on granian, `is_disconnected()`", lambda: _asgi("granian", "poll")),
    Peer("aiohttp, `handler_cancellation`", lambda: _aiohttp("own")),
    Peer("FastAPI on uvicorn, ours", lambda: _asgi("ours", "plain", "ours"), is_ours=True),
    Peer("aiohttp, ours", lambda: _aiohttp("ours"), is_ours=True),
    Peer("`vllm serve`, on a CPU", _vllm, why_not=_lacks_vllm),
    Peer(
        "`vllm serve`, on a CPU, ours",
        lambda: _vllm(DISCONNECT_WATCH_VLLM="1"),
        is_ours=True,
        why_not=_lacks_vllm,
    ),
    Peer("Triton, a model that looks", _triton, why_not=_lacks_triton),
    Peer(
        "Triton behind our gateway",
        lambda: _triton(is_behind_gateway=True),
        is_ours=True,
        why_not=_lacks_triton,
    ),
    Peer("`disconnect-watch serve`", _serve, is_ours=True),
)
