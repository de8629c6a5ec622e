"""``disconnect-watch doctor``."""

import contextlib
import json
import sys
from enum import StrEnum
from typing import Annotated

from disconnect_watch.cli._app import app, fail, typer

__all__ = ["doctor"]


class ServerOption(StrEnum):
    """What the doctor can serve by, see ``doctor.setup.SERVERS``."""

    UVICORN = "uvicorn"
    HYPERCORN = "hypercorn"


@app.command()
def doctor(
    application: Annotated[
        str | None, typer.Argument(help="ASGI application to try, as module:attribute.")
    ] = None,
    *,
    factory: Annotated[bool, typer.Option(help="Call it for the application.")] = False,
    lifespan: Annotated[bool, typer.Option(help="Run its start-up and shutdown.")] = False,
    header: Annotated[
        list[str] | None,
        typer.Option(help="'Name: value' for the trial's requests, once for each."),
    ] = None,
    http: Annotated[
        str | None, typer.Option(help="Protocol of ours, or your own of it, as uvicorn's --http.")
    ] = None,
    server: Annotated[
        list[ServerOption] | None,
        typer.Option(help="To try, once for each; without it those that are installed."),
    ] = None,
    listen: Annotated[
        float | None,
        typer.Option(min=0, help="Seconds to wait for a client that comes through a proxy."),
    ] = None,
    host: Annotated[str, typer.Option(help="To listen on, with --listen.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="To listen on; 0 takes a free one.")
    ] = 8000,
    as_json: Annotated[bool, typer.Option("--json", help="Report as JSON.")] = False,
) -> None:
    """Tell what this machine, and an application on it, notices of clients that leave.

    The application is served on loopback for a moment, with a route of the doctor's own, and
    real clients leave it; none of its own handlers runs. The exit code is 0 if nothing is a
    problem.
    """
    try:
        from disconnect_watch.doctor import (
            ApplicationError,
            diagnose,
            listen_behind_proxy,
            load_application,
        )

        # What the application prints must not come into the report.
        with contextlib.redirect_stdout(sys.stderr):
            loaded = load_application(application, is_factory=factory) if application else None
            proxy = (
                []
                if listen is None
                else listen_behind_proxy(host, port, seconds=listen, announce=_announce_listening)
            )
            report = diagnose(
                loaded,
                protocol=http,
                headers=dict(_header(text) for text in header or ()),
                lifespan="on" if lifespan else "off",
                servers=tuple(option.value for option in server or ServerOption),
                proxy=tuple(proxy),
            )
    except ImportError as error:
        fail(f"{error}; install it with: pip install 'disconnect-watch[server]'")
    except ApplicationError as error:
        fail(str(error))
    except OSError as error:
        fail(error.strerror or str(error))
    print(json.dumps(report.as_dict()) if as_json else report.as_text())
    if not report.holds:
        raise SystemExit(1)


def _announce_listening(url: str) -> None:
    print(
        f"listening on {url}: send a request through the proxy, and leave it (curl -m 1)",
        file=sys.stderr,
        flush=True,
    )


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not name.strip() or not colon:
        fail(f"cannot send the header {text!r}: give 'Name: value'")
    return name.strip(), value.strip()
