"""Real clients of HTTP/2 leave through a proxy that speaks HTTP/1.1 to the server."""

import signal
import ssl
import subprocess
from collections.abc import Callable

import httpx
import pytest

from tests.clients.chromium import browser
from tests.support.net import wait_until
from tests.support.tls import PEM
from tests.support.tools import path_of
from tests.support.upstream import Upstream, body_of

pytestmark = pytest.mark.parametrize("key", ["nginx-h2", "haproxy-h2-abortonclose", "caddy-h2"])


def test_httpx_keeps_the_stream_that_it_breaks_out_of_until_the_client_is_closed(
    key: str, server: Upstream, port_of: Callable[[str], int]
) -> None:
    # It sends no RST_STREAM (encode/httpcore#944), and so nobody can know.
    base = f"https://localhost:{port_of(key)}"
    context = ssl.create_default_context(cafile=str(PEM))
    left, kept = server.name("stream"), server.name("stream")
    with httpx.Client(http2=True, verify=context, timeout=40) as client:
        with client.stream("GET", base + kept) as stays:
            with client.stream("GET", base + left) as leaves:
                assert leaves.http_version == stays.http_version == "HTTP/2"
                assert next(leaves.iter_lines())
            server.wait_for(kept).may_finish.set()
            assert stays.read().endswith(body_of(kept))
        assert not server.wait_for(left).token.cancelled
    wait_until(lambda: server.wait_for(left).outcome == "stopped")
    assert server.wait_for(kept).outcome == "whole"
    server.settle()


@pytest.mark.skipif(not path_of("curl"), reason="curl is not here: make test-programs")
def test_curl_that_is_interrupted_is_noticed(
    key: str, server: Upstream, port_of: Callable[[str], int]
) -> None:
    path = server.name("wait")
    url = f"https://localhost:{port_of(key)}{path}"
    with subprocess.Popen([path_of("curl"), "-s", "--http2", "--cacert", PEM, url]) as curl:
        call = server.wait_for(path)
        curl.send_signal(signal.SIGINT)
        wait_until(lambda: call.outcome == "stopped")
    server.settle()


@pytest.mark.browser
@pytest.mark.skipif(not path_of("chromium"), reason="chromium is not here: make test-programs")
def test_tab_that_aborts_one_fetch_gets_the_whole_of_another(
    key: str, server: Upstream, port_of: Callable[[str], int]
) -> None:
    left, kept = server.name("stream"), server.name("stream")
    with browser("--ignore-certificate-errors") as running:
        tab = running.open_tab(f"https://localhost:{port_of(key)}/page")
        tab.run(f"""
            const controller = new AbortController();
            const kept = fetch("{kept}").then((response) => response.text());
            fetch("{left}", {{signal: controller.signal}}).catch(() => {{}});
            null
        """)
        call, kept_call = server.wait_for(left), server.wait_for(kept)
        tab.run("controller.abort()")
        wait_until(lambda: call.outcome == "stopped")
        kept_call.may_finish.set()
        assert tab.run("kept").endswith(body_of(kept).decode())
        entries = "performance.getEntriesByType('navigation')"
        assert tab.run(f"{entries}[0].nextHopProtocol") == "h2"
    server.settle()
