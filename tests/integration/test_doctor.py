"""The doctor serves real applications by real servers, and lets real clients leave them."""

import contextlib
import functools
import json
import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec

import pytest
from fastapi import FastAPI
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from tornado.web import Application
from typer.testing import CliRunner, Result

from disconnect_watch import Watcher, doctor
from disconnect_watch.adapters.uvicorn import HttpTools
from disconnect_watch.cli import app as cli
from disconnect_watch.doctor import (
    ApplicationError,
    Finding,
    Report,
    Status,
    listen_behind_proxy,
    load_application,
)
from disconnect_watch.testing import LeavingClient, Server, Way
from disconnect_watch.watcher import default_watcher
from tests.proxies.programs import behind as behind_program
from tests.support.net import wait_until
from tests.support.tools import path_of


@pytest.fixture(autouse=True)
def own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor adds the working directory to it."""
    monkeypatch.setattr(sys, "path", sys.path.copy())


P = ParamSpec("P")
HERE = __name__
PROTOCOL = "disconnect_watch.adapters.uvicorn:HttpTools"
ROOT = Path(__file__).parents[2]
MISSED = None

#: Half a second is enough to hear of anything; see ``patiently``.
PATIENCE = 0.5
diagnose = partial(doctor.diagnose, patience=PATIENCE, servers=("uvicorn",))


def patiently(test: Callable[P, None]) -> Callable[P, None]:
    """For a test of what is heard of: on a machine that is slow it gets ten times as long."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            test(*args, **kwargs)
        except AssertionError:
            with pytest.MonkeyPatch.context() as patch:
                patch.setitem(diagnose.keywords, "patience", 10 * PATIENCE)
                test(*args, **kwargs)

    return run


class PassOn(BaseHTTPMiddleware):
    async def dispatch(self, request: Request, call_next: Any) -> Response:
        response: Response = await call_next(request)
        return response


class Lock(BaseHTTPMiddleware):
    async def dispatch(self, request: Request, call_next: Any) -> Response:
        if request.headers.get("authorization") != "Bearer x":
            return Response(status_code=401)
        response: Response = await call_next(request)
        return response


class ForgetState:
    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.app({**scope, "state": {}}, receive, send)


started: list[str] = []


@contextlib.asynccontextmanager
async def lifespan(app: Any) -> AsyncIterator[None]:
    started.append("started")
    yield


@contextlib.asynccontextmanager
async def broken_lifespan(app: Any) -> AsyncIterator[None]:
    if app is broken:
        raise OSError("no such model")
    yield


plain = FastAPI(lifespan=lifespan)
behind = FastAPI()
behind.add_middleware(PassOn)
wrapped = CORSMiddleware(behind)
locked = FastAPI()
locked.add_middleware(Lock)
forgetful = ForgetState(FastAPI())
broken = FastAPI(lifespan=broken_lifespan)


async def bare(scope: Any, receive: Any, send: Any) -> None:
    raise AssertionError("no handler of the application is to run")


def make() -> FastAPI:
    return plain


def fail() -> FastAPI:
    raise OSError("no such model")


def give_up() -> FastAPI:
    raise SystemExit("no database")


def wsgi(environ: Any, start_response: Any) -> list[bytes]:
    raise NotImplementedError


tornado = Application([])


def asgi_2(scope: Any) -> Any:
    raise NotImplementedError


class Probing(HttpTools):
    half_close = "probe"
    vanish_after = 5.0


def heard(report: Report, setup: str) -> dict[tuple[str, str], bool]:
    return {
        (str(trial.means), str(trial.way)): trial.seconds is not MISSED
        for trial in report.trials
        if trial.setup.name.startswith(setup)
    }


def finding(report: Report, name: str) -> Finding:
    (found,) = (finding for finding in report.findings if finding.name.startswith(name))
    return found


@patiently
def test_protocol_of_ours_hears_what_uvicorn_alone_does_not() -> None:
    report = diagnose(protocol=PROTOCOL)
    assert report.holds
    assert heard(report, "uvicorn alone") == {
        ("await receive()", "fin"): True,
        ("await receive()", "behind_request"): False,
        ("request.is_disconnected()", "fin"): True,
        ("request.is_disconnected()", "behind_request"): False,
    }
    ours = heard(report, f"uvicorn with {PROTOCOL}")
    assert len(ours) == 6
    assert all(ours.values())
    assert finding(report, "uvicorn alone").status is Status.NOTE
    assert finding(report, f"uvicorn with {PROTOCOL}").status is Status.OK


@patiently
def test_middlewares_are_named_and_what_they_keep_back_is_shown() -> None:
    application = load_application(f"{HERE}:wrapped")
    report = diagnose(application, protocol=PROTOCOL)
    assert report.holds
    assert finding(report, "framework").value == "FastAPI"
    assert finding(report, "middlewares").value == "CORSMiddleware > PassOn"
    # What the note says is what the trial saw.
    assert "is_disconnected() never tells" in finding(report, "BaseHTTPMiddleware").value
    ours = heard(report, f"uvicorn with {PROTOCOL}")
    assert {key for key, is_heard in ours.items() if not is_heard} == {
        ("request.is_disconnected()", "fin"),
        ("request.is_disconnected()", "behind_request"),
    }
    assert "request.is_disconnected()" in finding(report, f"uvicorn with {PROTOCOL}").advice
    assert not [route for route in behind.routes if "doctor" in getattr(route, "path", "")]
    assert_page_shows(report)


def assert_page_shows(report: Report) -> None:
    """The page's run names what this one does, apart from what is installed."""
    page = (ROOT / "docs/doctor.md").read_text()
    (shown,) = re.findall(r"^```\n(kernel\n.*?)^```$", page, re.DOTALL | re.MULTILINE)
    for finding in report.findings:
        if finding.area not in ("installed", "device"):
            line = rf"^  \w+ +{re.escape(finding.name)}"
            assert re.search(line, shown, re.MULTILINE), finding
    for trial in report.trials:
        assert f"             {trial.means}" in shown


@patiently
def test_hypercorn_is_tried_with_an_application_that_it_starts_or_not() -> None:
    application = load_application(f"{HERE}:plain")
    started.clear()
    report = diagnose(application, servers=("hypercorn",))
    alone = heard(report, "hypercorn alone")
    assert alone["await receive()", "fin"]
    assert not alone["await receive()", "behind_request"]
    assert started == []
    diagnose(application, servers=("hypercorn",), lifespan="on")
    assert set(started) == {"started"}


@pytest.mark.parametrize("server", ["uvicorn", "hypercorn"])
@patiently
def test_middleware_of_ours_hears_of_each_leave_and_says_how(server: str) -> None:
    report = diagnose(load_application(f"{HERE}:wrapped"), servers=(server,))
    assert report.holds
    name = f"{server} with disconnect_watch.adapters.asgi"
    # Who polls may be cancelled between two of its looks instead.
    assert all(
        is_heard
        for (means, _), is_heard in heard(report, name).items()
        if means != "request.is_disconnected()"
    )
    assert "is found by" in finding(report, name).value


def test_levels_of_uvicorns_loggers_are_as_before() -> None:
    logger = logging.getLogger("uvicorn.error")
    before = logger.level
    diagnose(load_application(f"{HERE}:plain"), servers=("uvicorn",))
    assert logger.level == before != logging.CRITICAL


@patiently
def test_request_that_a_middleware_answers_is_a_problem_until_it_has_its_header() -> None:
    application = load_application(f"{HERE}:locked")
    report = diagnose(application, protocol=PROTOCOL)
    assert not report.holds
    assert "answered 401" in finding(report, f"uvicorn with {PROTOCOL}").value
    assert "answered 401" in report.as_text()
    assert diagnose(application, protocol=PROTOCOL, headers={"Authorization": "Bearer x"}).holds


def test_middleware_that_replaces_the_state_is_a_problem() -> None:
    report = diagnose(load_application(f"{HERE}:forgetful"), protocol=PROTOCOL)
    assert not report.holds
    assert finding(report, f"uvicorn with {PROTOCOL}").value == "no token reaches the handler"


def test_application_of_no_framework_is_not_run() -> None:
    report = diagnose(load_application(f"{HERE}:bare"), protocol=PROTOCOL)
    assert report.holds
    assert finding(report, "framework").status is Status.NOTE
    assert "function, neither" in finding(report, "framework").value


def test_options_of_the_protocol_change_what_is_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    with Watcher() as watcher:
        monkeypatch.setattr(Probing, "watcher", watcher)
        report = diagnose(protocol=f"{HERE}:Probing")
    unseen = [finding.name for finding in report.findings if finding.area == "not seen"]
    assert "a FIN behind a full receive window" in unseen
    assert not [name for name in unseen if "vanished" in name or "half-close" in name]


def test_start_up_runs_only_if_it_is_asked_for() -> None:
    application = load_application(f"{HERE}:make", is_factory=True)
    started.clear()
    diagnose(application, protocol=PROTOCOL)
    assert started == []
    diagnose(application, protocol=PROTOCOL, lifespan="on")
    assert set(started) == {"started"}
    with pytest.raises(ApplicationError, match=r"cannot serve 'test.*:broken': the server did not"):
        diagnose(load_application(f"{HERE}:broken"), protocol=PROTOCOL, lifespan="on")


@pytest.mark.parametrize(
    ("name", "is_factory", "message"),
    [
        ("nowhere_at_all:app", False, "cannot load 'nowhere_at_all:app': Could not import"),
        (f"{HERE}:nothing", False, 'Attribute "nothing" not found'),
        (f"{HERE}:HERE", False, "cannot serve .*: str is not callable"),
        (f"{HERE}:fail", True, "it raised OSError"),
        (f"{HERE}:give_up", True, r"it raised SystemExit\('no database'\)"),
        (f"{HERE}:make", False, "function does not take .*needs --factory"),
        (f"{HERE}:wsgi", False, "no ASGI application"),
        (f"{HERE}:tornado", False, "Application does not take"),
    ],
)
def test_application_that_cannot_be_loaded_is_said_to_be_so(
    name: str, is_factory: bool, message: str
) -> None:
    with pytest.raises(ApplicationError, match=message):
        load_application(name, is_factory=is_factory)


def test_application_of_the_older_asgi_is_one() -> None:
    assert load_application(f"{HERE}:asgi_2").app is asgi_2


@pytest.mark.parametrize("protocol", [f"{HERE}:make", "auto"])
def test_protocol_that_is_none_is_refused(protocol: str) -> None:
    with pytest.raises(ApplicationError, match=protocol):
        diagnose(protocol=protocol)


REQUEST = b"GET /any HTTP/%s\r\nHost: x\r\nX-Forwarded-For: 10.0.0.1\r\n\r\n"


def behind_proxy(
    *,
    version: bytes = b"1.1",
    leaves: bool = True,
    seconds: float = 20,
    nginx: Path | None = None,
) -> dict[str, Finding]:
    """What the doctor finds behind a proxy whose client leaves, or does not.

    The proxy is an nginx with that directory, or none.
    """
    is_over = threading.Event()

    def visit(url: str) -> None:
        with contextlib.ExitStack() as stack:
            server: Server = url
            if nginx is not None:
                port = int(url.rpartition(":")[2])
                ports = stack.enter_context(behind_program("nginx", port, nginx))
                server = ("127.0.0.1", ports["nginx"])
            client = stack.enter_context(LeavingClient(server))
            client.send(REQUEST % version)
            if leaves:
                # One that leaves sooner is gone before its request begins.
                wait_until(lambda: default_watcher().stats().num_armed)
                client.leave(Way.FIN)
            else:
                is_over.wait(40)

    with ThreadPoolExecutor(1) as pool:
        found = listen_behind_proxy(
            "127.0.0.1", 0, seconds=seconds, announce=lambda url: pool.submit(visit, url)
        )
        is_over.set()
    return {finding.name: finding for finding in found}


def test_leave_that_comes_through_a_proxy_is_found_with_what_it_added() -> None:
    found = behind_proxy()
    assert found["headers"].value == "x-forwarded-for: 10.0.0.1"
    assert {finding.status for finding in found.values()} == {Status.OK}


@pytest.mark.skipif(not path_of("nginx"), reason="nginx is not here: make test-programs")
def test_leave_of_a_client_of_nginx_comes_through(tmp_path: Path) -> None:
    found = behind_proxy(nginx=tmp_path)
    # Its default towards a server.
    assert found["to the server"].value == "HTTP/1.0"
    assert found["headers"].value == "x-forwarded-for: 10.0.0.1"
    assert found["a client's leave"].status is Status.OK


def test_proxy_that_passes_no_leave_on_is_a_problem() -> None:
    found = behind_proxy(version=b"1.0", leaves=False, seconds=0.5)
    assert found["to the server"].status is Status.NOTE
    assert "proxy_http_version" in found["to the server"].advice
    assert found["a client's leave"].status is Status.PROBLEM


def test_proxy_that_nobody_comes_through_is_a_problem() -> None:
    (found,) = listen_behind_proxy("127.0.0.1", 0, seconds=0.01, announce=lambda url: None)
    assert found.status is Status.PROBLEM
    assert "no request came" in found.value


LOCKED = """
print("connected to the database")
from fastapi import FastAPI, Request, Response

app = FastAPI()


@app.middleware("http")
async def lock(request: Request, call_next):
    is_open = request.headers.get("authorization") == "Bearer x"
    return await call_next(request) if is_open else Response(status_code=401)
"""


@pytest.mark.slow
def test_command_reports_on_an_application_of_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "locked.py").write_text(LOCKED)
    done = subprocess.run(
        [sys.executable, "-m", "disconnect_watch.cli", "doctor", "locked:app", "--json"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=150,
    )
    document = json.loads(done.stdout)
    assert not document["holds"]
    assert {trial["status"] for trial in document["trials"]} == {401}
    assert (done.returncode, done.stderr) == (1, "connected to the database\n")


def invoke(*options: str) -> Result:
    return CliRunner().invoke(cli, ["doctor", *options])


def test_command_without_a_problem_ends_with_zero() -> None:
    options = ("--server", "uvicorn", "--header", "Authorization: Bearer x")
    result = invoke(*options, f"{HERE}:locked")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.endswith("no problem\n")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["nowhere_at_all:app"], "cannot load 'nowhere_at_all:app'"),
        (["--header", "no colon"], "cannot send the header 'no colon'"),
        (["--http", f"{HERE}:make"], "no protocol class"),
        (["--listen", "1", "--host", "192.0.2.1"], "cannot listen on 192.0.2.1 port 8000"),
    ],
)
def test_command_that_cannot_be_done_says_why(options: list[str], message: str) -> None:
    result = invoke(*options)
    assert result.exit_code == 2
    assert message in result.stderr
