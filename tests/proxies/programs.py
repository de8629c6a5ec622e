"""Real proxies in front of a server: each program once, with one port for each of its set-ups.

The configurations need no root, keep every file in a directory of their own, and stay in
the foreground, so that the process that was started is the one that is ended.
"""

import contextlib
import os
import re
import socket
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.net import held_port, wait_until
from tests.support.tls import PEM
from tests.support.tools import path_of

__all__ = ["FRONTS", "PROGRAMS", "Front", "Program", "behind", "version_of"]


@dataclass(frozen=True, slots=True)
class Front:
    """One set-up of a proxy.

    Attributes:
        title: what the reader of the table sees.
        settings: those of its server or listener that are not common to all.
        is_h2: it speaks HTTP/2 over TLS to its clients.
        is_buffering: it may keep the first bytes of an answer back.
    """

    program: str
    title: str
    settings: str = ""
    is_h2: bool = False
    is_buffering: bool = False


@dataclass(frozen=True, slots=True)
class Program:
    """How a proxy is told what to do.

    Attributes:
        command: with the path of its configuration put in for ``{config}``.
        config: of the fronts with their ports, and the port of the upstream.
    """

    name: str
    command: tuple[str, ...]
    config: Callable[[dict[Front, int], int, Path], str]


_STREAMING = 'proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;'

FRONTS: dict[str, Front] = {
    "nginx": Front("nginx", "nginx, defaults", is_buffering=True),
    "nginx-streaming": Front(
        "nginx", "nginx, `proxy_http_version 1.1`, `proxy_buffering off`", _STREAMING
    ),
    "nginx-h2": Front("nginx", "nginx, HTTP/2 in front", _STREAMING, is_h2=True),
    "nginx-ignore": Front(
        "nginx",
        "nginx, `proxy_ignore_client_abort on`",
        f"{_STREAMING} proxy_ignore_client_abort on;",
    ),
    "haproxy": Front("haproxy", "HAProxy, defaults"),
    "haproxy-abortonclose": Front(
        "haproxy", "HAProxy, `option abortonclose`", "option abortonclose"
    ),
    "haproxy-h2": Front("haproxy", "HAProxy, HTTP/2 in front", is_h2=True),
    "haproxy-h2-abortonclose": Front(
        "haproxy",
        "HAProxy, HTTP/2 in front, `option abortonclose`",
        "option abortonclose",
        is_h2=True,
    ),
    "caddy": Front("caddy", "Caddy, defaults", is_buffering=True),
    "caddy-flush": Front("caddy", "Caddy, `flush_interval -1`", "flush_interval -1"),
    "caddy-h2": Front("caddy", "Caddy, HTTP/2 in front", is_h2=True, is_buffering=True),
}

_NGINX = """\
daemon off;
{user}
worker_processes 1;
pid {directory}/nginx.pid;
error_log {directory}/error.log;
events {{ worker_connections 256; }}
http {{
    access_log off;
    client_body_temp_path {directory}/body;
    proxy_temp_path {directory}/proxy;
    fastcgi_temp_path {directory}/fastcgi;
    uwsgi_temp_path {directory}/uwsgi;
    scgi_temp_path {directory}/scgi;
    upstream application {{ server 127.0.0.1:{upstream_port}; keepalive 8; }}
    ssl_certificate {pem};
    ssl_certificate_key {pem};
{servers}
}}
"""


def _nginx(ports: dict[Front, int], upstream_port: int, directory: Path) -> str:
    servers = [
        f"server {{ listen 127.0.0.1:{port}{' ssl http2' if front.is_h2 else ''};"
        f" location / {{ proxy_pass http://application; {front.settings} }} }}"
        for front, port in ports.items()
    ]
    user = "user root;" if os.geteuid() == 0 else ""  # else it would look for nobody's files
    return _NGINX.format(
        directory=directory,
        upstream_port=upstream_port,
        user=user,
        pem=PEM,
        servers="\n".join(servers),
    )


_HAPROXY = """\
global
    nbthread 1
defaults
    mode http
    timeout connect 10s
    timeout client 60s
    timeout server 60s
"""


def _haproxy(ports: dict[Front, int], upstream_port: int, directory: Path) -> str:
    listeners = [
        f"listen front{number}\n"
        f"    bind 127.0.0.1:{port}{f' ssl crt {PEM} alpn h2' if front.is_h2 else ''}\n"
        f"    {front.settings}\n"
        f"    server upstream 127.0.0.1:{upstream_port}\n"
        for number, (front, port) in enumerate(ports.items())
    ]
    return _HAPROXY + "".join(listeners)


_CADDY = """\
{{
    admin off
    auto_https off
    skip_install_trust
    default_bind 127.0.0.1
    servers {{
        protocols h1 h2
    }}
    log {{
        output file {directory}/caddy.log
    }}
}}
"""


def _caddy(ports: dict[Front, int], upstream_port: int, directory: Path) -> str:
    sites = [
        f"{'https' if front.is_h2 else 'http'}://localhost:{port} {{\n"
        f"{f'    tls {PEM} {PEM}' if front.is_h2 else ''}\n"
        f"    reverse_proxy 127.0.0.1:{upstream_port} {{\n        {front.settings}\n    }}\n}}\n"
        for front, port in ports.items()
    ]
    return _CADDY.format(directory=directory) + "".join(sites)


PROGRAMS = {
    program.name: program
    for program in (
        Program("nginx", ("-c", "{config}", "-e", "stderr"), _nginx),
        Program("haproxy", ("-db", "-f", "{config}"), _haproxy),
        Program("caddy", ("run", "--adapter", "caddyfile", "--config", "{config}"), _caddy),
    )
}

_VERSION_OPTIONS = {"nginx": "-v", "haproxy": "-v", "caddy": "version"}


def version_of(name: str) -> str:
    """Of a program that is here."""
    done = subprocess.run(
        [path_of(name), _VERSION_OPTIONS[name]], capture_output=True, text=True, check=True
    )
    found = re.search(r"\d+(\.\d+)+", done.stdout or done.stderr)
    assert found is not None, done
    return found.group()


@contextlib.contextmanager
def behind(name: str, upstream_port: int, directory: Path) -> Iterator[dict[str, int]]:
    """A proxy with all its fronts, ready; yields their ports by name."""
    program = PROGRAMS[name]
    fronts = {key: front for key, front in FRONTS.items() if front.program == name}
    config, log = directory / "config", directory / "output"
    with contextlib.ExitStack() as end:
        with contextlib.ExitStack() as held:
            ports = {key: held.enter_context(held_port()) for key in fronts}
            config.write_text(
                program.config(
                    {front: ports[key] for key, front in fronts.items()}, upstream_port, directory
                )
            )
            process = end.enter_context(_running(program, config, log))
            wait_until(lambda: process.poll() is not None or all(map(_listens, ports.values())))
        assert process.poll() is None, f"{name} did not start: {log.read_text()[-2000:]}"
        yield ports


@contextlib.contextmanager
def _running(program: Program, config: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = _launched(program, config, log)
    try:
        yield process
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(40)
        process.kill()  # does nothing where it has ended
        process.wait(40)


def _launched(program: Program, config: Path, log: Path) -> subprocess.Popen[bytes]:
    command = [part.format(config=config) for part in program.command]
    home = dict.fromkeys(("HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME"), str(config.parent))
    with log.open("wb") as output:
        return subprocess.Popen(
            [path_of(program.name), *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **home},
        )


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False
